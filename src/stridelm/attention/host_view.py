"""What backends that plan on the host read of a step's geometry. On a CPU looking costs nothing; on a GPU it waits for
the device."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from stridelm.types import Geometry


@dataclass(slots=True)
class HostView:
    geometry: Geometry
    counts: list[int]
    """Rows of each span in the batch."""
    starts: list[int]
    reals: list[int]
    ordered: torch.Tensor
    """[N] bool: rows whose ancestors do not lie in storage in order of position."""

    @classmethod
    def of(cls, geometry: Geometry) -> HostView:
        starts, reals = geometry.starts.tolist(), geometry.reals.tolist()
        if geometry.is_chain:
            ordered = torch.zeros_like(geometry.ancestors, dtype=torch.bool)
        else:
            draft_rows = geometry.draft_rows.clamp(min=0)
            in_place = (torch.ones_like(draft_rows) << (draft_rows + 1)) - 1
            ordered = (geometry.ancestors != 0) & (geometry.ancestors != in_place)
        return cls(geometry, list(geometry.bounds), starts, reals, ordered)

    def tables(self, group: str) -> np.ndarray:
        """[R, P] int32 page ids of each span's request; behind its own stands the null page."""
        return self.geometry.tables[group].cpu().numpy()
