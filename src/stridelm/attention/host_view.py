"""A step's geometry for backends that plan on the host. On a CPU reading it costs nothing; on a GPU it waits for the
device."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch

from stridelm.batch import Geometry


@dataclass(slots=True)
class HostView:
    geometry: Geometry
    counts: list[int]
    """Rows of each span in the batch, padding included."""
    starts: list[int]
    reals: list[int]

    @classmethod
    def of(cls, geometry: Geometry) -> HostView:
        firsts = [*geometry.firsts.tolist(), geometry.positions.shape[0]]
        counts = [following - first for first, following in pairwise(firsts)]
        return cls(geometry, counts, geometry.starts.tolist(), geometry.reals.tolist())

    @property
    def ordered(self) -> torch.Tensor:
        """[N] bool: rows whose ancestors do not lie in storage in order of position. Computed on each call: not every
        backend needs it."""
        ancestors = self.geometry.ancestors
        if self.geometry.is_chain:
            return torch.zeros_like(ancestors, dtype=torch.bool)
        draft_rows = self.geometry.draft_rows.clamp(min=0)
        in_place = (torch.ones_like(draft_rows) << (draft_rows + 1)) - 1
        return (ancestors != 0) & (ancestors != in_place)

    def tables(self, group: str) -> np.ndarray:
        """[R, P] int32 page ids of each span's request, padded with the null page."""
        return self.geometry.tables[group].cpu().numpy()
