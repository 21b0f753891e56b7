"""Groups of gpu_kernels.py: a mixture of experts, with a shared one, and its products with other tiles."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any
from unittest import mock

import torch
from kernel_sections import Section, Settings, right_table
from rich.table import Table
from timing import graph_us

from stridelm.kernels.expert_pairs import Heights

EXPERTS, EACH, WIDTH, INNER = 128, 8, 2048, 768
EXPERT_BYTES = 3 * WIDTH * INNER * 2
EXPERT_CALLS = 12
"""Calls of a graph. The weights exceed the L2 cache, and each call's rows choose other experts."""
SHARED_SIZES = {"V2-Lite": (64, 6, 2048, 1408, 2816), "GLM-4.5-Air": (128, 8, 4096, 1408, 1408)}
"""Experts, those that a row chooses, width, inner width, and the shared MLP's."""
STAGES = ("router", "sort", "gate and up", "down", "sum")
ROUTINGS = ("uniform", "skewed", "same")
"""Half of the skewed rows choose among an eighth of the experts, and all of the last kind the same."""


def draw(outputs: int, inputs: int) -> torch.Tensor:
    """A weight."""
    return torch.empty(outputs, inputs, dtype=torch.bfloat16, device="cuda").normal_(0.0, inputs**-0.5)


class ExpertLayer:
    """A mixture's weights, and the launches of a step over them."""

    def __init__(self) -> None:
        self.gate_up, self.down = draw(EXPERTS * 2 * INNER, WIDTH), draw(EXPERTS * WIDTH, INNER)
        self.router = draw(EXPERTS, WIDTH)

    def calls(
        self, rows: int, routing: str, heights: Heights | None = None
    ) -> tuple[dict[str, list[Callable[[], object]]], float]:
        """Each stage's calls and those of all stages together, and the mean number of experts that a call reads.
        heights: of tiles, but for "all"; None: as chosen."""
        made = [self._launches(rows, routing, heights) for _ in range(EXPERT_CALLS)]
        read = sum(experts for _, experts in made) / len(made)
        return {name: [launches[name] for launches, _ in made] for name in (*STAGES, "all")}, read

    def _launches(
        self, rows: int, routing: str, heights: Heights | None
    ) -> tuple[dict[str, Callable[[], object]], int]:
        from stridelm.kernels.expert_pairs import several_heights, tile_pairs
        from stridelm.kernels.experts import expert_parts, multiply
        from stridelm.kernels.ops import Routing
        from stridelm.kernels.sums_in_parts import scores
        from stridelm.kernels.triton_router import combine, route

        chooses = Routing(num_experts=EXPERTS, num_experts_per_tok=EACH, norm_topk_prob=True)
        x = torch.randn(rows, WIDTH, device="cuda").bfloat16()
        logits = torch.randn(rows, EXPERTS, device="cuda")
        if routing == "skewed":
            logits[: rows // 2, : EXPERTS // 8] += 100
        if routing == "same":
            logits[:] = logits[0].clone()
        chosen, weights = route(logits, chooses)
        sort = partial(tile_pairs, chosen, EXPERTS, several_heights if heights is None else lambda *_: heights)
        order = sort()
        inner = x.new_empty(order.places, INNER)
        parts = x.new_empty(rows, EACH, WIDTH)
        flat = parts.view(-1, WIDTH)

        def together() -> object:
            route(scores(x, self.router, None), chooses)
            return combine(expert_parts(x, chosen, self.gate_up, self.down, "silu"), weights)

        launches: dict[str, Callable[[], object]] = {
            "router": lambda: route(scores(x, self.router, None), chooses),
            "sort": sort,
            "gate and up": lambda: multiply(x, self.gate_up, order, EACH, inner, "silu"),
            "down": lambda: multiply(inner, self.down, order, EACH, flat, None),
            "sum": lambda: combine(parts, weights),
            "all": together,
        }
        return launches, len(chosen.unique())


def experts(settings: Settings) -> Section:
    from stridelm.kernels.expert_pairs import MAX_UNSORTED_ROWS

    layer, found = ExpertLayer(), []
    for rows in settings.expert_rows:
        for routing in ROUTINGS:
            calls, read = layer.calls(rows, routing)
            pairs = rows * EACH
            # Rows are read once, each pair's gated row is written and read, and so is its part of the sum.
            moved = read * EXPERT_BYTES + 2 * (rows * WIDTH * 2 + pairs * 2 * (INNER + WIDTH))
            bytes_us = moved / settings.bandwidth / 1e6
            flops_us = 6 * pairs * WIDTH * INNER / settings.tflops / 1e6
            sorts = rows > MAX_UNSORTED_ROWS
            us = {name: graph_us(calls[name], settings.replays) for name in calls if sorts or name != "sort"}
            found.append(
                {
                    "rows": rows,
                    "routing": routing,
                    "experts_read": read,
                    "us": us,
                    "bytes_floor_us": bytes_us,
                    "flops_floor_us": flops_us,
                    "of_floor": max(bytes_us, flops_us) / us["all"],
                }
            )
    return Section([experts_table(found)], found)


def experts_table(found: list[dict[str, Any]]) -> Table:
    names = (*STAGES, "all")
    table = right_table(
        "experts", "rows", "routing", "read", *(f"{name} us" for name in names), "bytes", "flops", "of floor"
    )
    for row in found:
        table.add_row(
            str(row["rows"]),
            row["routing"],
            f"{row['experts_read']:.0f}",
            *(f"{row['us'][name]:.1f}" if name in row["us"] else "-" for name in names),
            f"{row['bytes_floor_us']:.1f}",
            f"{row['flops_floor_us']:.1f}",
            f"{row['of_floor']:.0%}",
        )
    return table


def shared_experts(settings: Settings) -> Section:
    found = [timed for name in SHARED_SIZES for timed in _beside_shared(name, settings)]
    table = right_table("experts and a shared MLP, us", "sizes", "rows", "apart", "in the same launches", "ratio")
    for row in found:
        apart, together = row["apart_us"], row["together_us"]
        table.add_row(row["sizes"], str(row["rows"]), f"{apart:.1f}", f"{together:.1f}", f"{apart / together:.2f}x")
    return Section([table], found)


def _beside_shared(name: str, settings: Settings) -> Iterator[dict[str, Any]]:
    from stridelm.kernels.experts import expert_parts
    from stridelm.kernels.products import product
    from stridelm.kernels.shared_experts import MAX_ROWS, expert_parts_and_shared

    number, each, width, inner, shared = SHARED_SIZES[name]

    experts = draw(number * 2 * inner, width), draw(number * width, inner)
    weights = [(draw(2 * shared, width), draw(width, shared)) for _ in range(EXPERT_CALLS)]
    for rows in (count for count in settings.expert_rows if count <= MAX_ROWS):
        steps = [
            (
                torch.randn(rows, width, device="cuda").bfloat16(),
                torch.rand(rows, number, device="cuda").topk(each).indices,
                *own,
            )
            for own in weights
        ]

        def apart(x: torch.Tensor, chosen: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor) -> object:
            return expert_parts(x, chosen, *experts, "silu"), product(product(x, gate_up, None, "silu"), down, None)

        def together(x: torch.Tensor, chosen: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor) -> object:
            return expert_parts_and_shared(x, chosen, *experts, x, gate_up, down, "silu")

        timed = {
            way.__name__ + "_us": graph_us([partial(way, *step) for step in steps], settings.replays)
            for way in (apart, together)
        }
        yield {"sizes": name, "rows": rows, **timed}


def expert_tiles(settings: Settings) -> Section:
    layer = ExpertLayer()
    found = [trial for rows in settings.expert_rows for trial in tried_tiles(layer, rows)]
    return Section([expert_tiles_table(found)], found)


def tried_tiles(layer: ExpertLayer, rows: int) -> list[dict[str, Any]]:
    """Both products of one number of rows, timed with the default choice and with tiles of one height of every other
    plausible form."""
    from triton.runtime.errors import OutOfResources

    from stridelm.kernels import expert_pairs, experts
    from stridelm.kernels.experts import PairTile
    from stridelm.kernels.products import tile_height

    mean = tile_height(-(-rows * EACH // EXPERTS))
    heights = sorted({16, mean, max(16, mean // 2), min(128, mean * 2)})
    unsorted = (rows,) if rows <= 16 else ()
    found = []
    for stage in ("gate and up", "down"):
        forms: list[tuple[int, int, PairTile | None]] = [(expert_pairs.MAX_UNSORTED_ROWS, 0, None)]
        for limit, height in itertools.product((0, *unsorted), heights):
            for outputs, inputs, stages in itertools.product((32, 64, 128), (64, 128), (2, 3, 4, 6)):
                warps = 8 if outputs * height >= 128 * 128 else 4
                forms.append((limit, height, PairTile(outputs, inputs, warps, stages, stages)))
        for limit, height, tile in forms:
            if limit and height > 16:
                continue  # unsorted tiles have 16 rows
            with ExitStack() as patches:
                patches.enter_context(mock.patch.object(expert_pairs, "MAX_UNSORTED_ROWS", limit))
                if tile is not None:
                    patches.enter_context(mock.patch.object(experts, "choose_tile", return_value=tile))
                try:
                    only = None if tile is None else Heights(height, 1)
                    us = graph_us(layer.calls(rows, "uniform", only)[0][stage], 2)
                except (RuntimeError, OutOfResources):  # too much shared memory
                    continue
            name = "as chosen" if tile is None else f"{(height, *tile[:4])}{' unsorted' if limit else ''}"
            found.append({"rows": rows, "stage": stage, "form": name, "us": us})
    return found


def expert_tiles_table(
    found: list[dict[str, Any]], title: str = "experts: (pairs, outputs, inputs, warps, stages)"
) -> Table:
    table = right_table(title, "rows", "product", "as chosen", "best five")
    for rows, stage in dict.fromkeys((trial["rows"], trial["stage"]) for trial in found):
        trials = [trial for trial in found if (trial["rows"], trial["stage"]) == (rows, stage)]
        trials.sort(key=lambda trial: trial["us"])
        chosen = next(trial["us"] for trial in trials if trial["form"] == "as chosen")
        best = ", ".join(f"{trial['form']}: {trial['us']:.1f}" for trial in trials[:5])
        table.add_row(str(rows), stage, f"{chosen:.1f}", best)
    return table
