"""How much one client may have drafted: its drafts are made and verified in the steps that all others share."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from stridelm.params import SamplingParams

if TYPE_CHECKING:
    from stridelm.engine.intake import Intake


class DraftLimits(msgspec.Struct, frozen=True):
    """What a request may ask for. What the server drafts by default is always allowed."""

    max_depth: int
    max_draft_rows: int

    def check(self, intake: Intake, params: SamplingParams) -> None:
        """Raises ValueError for parameters that ask for more."""
        own, own_rows = intake.settled(SamplingParams())
        speculation, rows_by_depth = intake.settled(params)
        depth, rows = speculation.depth or 0, rows_by_depth[-1]
        if depth > (most := max(self.max_depth, own.depth or 0)):
            raise ValueError(f"speculation: depth {depth} is over {most}, this server's max_depth; lower it")
        if rows > (most := max(self.max_draft_rows, own_rows[-1])):
            raise ValueError(
                f"speculation: a draft of {rows} rows is over {most}, this server's max_draft_rows; lower depth, "
                "draft_topk or num_draft_tokens, or give a smaller token_tree"
            )
