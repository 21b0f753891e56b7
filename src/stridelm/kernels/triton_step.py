"""The operations of a step on a GPU. Each is one launch or a few, and none waits for the device, so that a CUDA graph
can capture them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from stridelm.kernels.aside import set_aside
from stridelm.kernels.commit import commit
from stridelm.kernels.compaction import Pools, compact
from stridelm.kernels.draw import confidence, draw, draw_weighted
from stridelm.kernels.edit import add_bias, forbid_stops, forbid_words, penalise
from stridelm.kernels.following import behind, keep_newest, next_tokens, recall, side_by_side
from stridelm.kernels.layout import lay_out
from stridelm.kernels.lookup import followers
from stridelm.kernels.place import place, sources
from stridelm.kernels.plain_step import keep_leaves, place_live
from stridelm.kernels.sources import choose_sources, learn_sources
from stridelm.kernels.step_ops import Move
from stridelm.kernels.truncate import truncate
from stridelm.kernels.walk import cut_windows, follow, walk


class TritonStepOps:
    lay_out = staticmethod(lay_out)
    place = staticmethod(place)
    place_live = staticmethod(place_live)  # waits for the device, as do the attention backends that it is for
    sources = staticmethod(sources)
    set_aside = staticmethod(set_aside)
    keep_leaves = staticmethod(keep_leaves)
    behind = staticmethod(behind)
    next_tokens = staticmethod(next_tokens)
    side_by_side = staticmethod(side_by_side)
    keep_newest = staticmethod(keep_newest)
    recall = staticmethod(recall)
    commit = staticmethod(commit)
    followers = staticmethod(followers)
    choose_sources = staticmethod(choose_sources)
    learn_sources = staticmethod(learn_sources)
    forbid_words = staticmethod(forbid_words)
    add_bias = staticmethod(add_bias)
    forbid_stops = staticmethod(forbid_stops)
    penalise = staticmethod(penalise)
    truncate = staticmethod(truncate)
    draw = staticmethod(draw)
    draw_weighted = staticmethod(draw_weighted)
    confidence = staticmethod(confidence)
    walk = staticmethod(walk)
    follow = staticmethod(follow)
    cut_windows = staticmethod(cut_windows)

    def mover(self, tensors: Sequence[torch.Tensor]) -> Move:
        return partial(compact, Pools.of(tensors))
