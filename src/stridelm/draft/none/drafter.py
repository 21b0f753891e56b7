"""No draft. Plain decoding is the verification of an empty draft."""

from __future__ import annotations

from stridelm.batch import Draft
from stridelm.draft.base import Drafter, Group, empty_draft


class NoDrafter(Drafter):
    name = "none"

    def propose(self, group: Group) -> Draft:
        return empty_draft(len(group.spans), group.arena)
