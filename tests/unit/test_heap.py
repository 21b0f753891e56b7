"""Collections spare what was loaded."""

from __future__ import annotations

import gc
import weakref

from stridelm.heap import freeze_heap


class Cycle:
    def __init__(self) -> None:
        self.me = self


def test_garbage_goes_and_what_is_left_is_spared() -> None:
    kept = Cycle()
    lost = weakref.ref(Cycle())
    try:
        freeze_heap()
        assert lost() is None
        assert not any(each is kept for each in gc.get_objects())  # of the generations that are collected
        later = Cycle()
        assert any(each is later for each in gc.get_objects())
    finally:
        gc.unfreeze()
        freeze_heap()
