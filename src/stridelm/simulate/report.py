"""The cells of a simulation as a document, in the columns of `stride bench sweep`."""

from __future__ import annotations

from collections.abc import Sequence

from stridelm.bench.serving.cells import Cell
from stridelm.bench.serving.document import Document, Table
from stridelm.bench.serving.report import (
    DEFINITIONS,
    best_notes,
    figure_columns,
    figure_notes,
    figure_texts,
    ratio_columns,
    ratio_texts,
)
from stridelm.simulate.settings import SimulationSettings
from stridelm.simulate.sweep import limits_of
from stridelm.simulate.table import CostTable

SIMULATED = "simulated: nothing was run; steps take what the table says, and what is accepted is drawn at random"
OVER_PLAIN = "over plain: of runs with the same requests, median (range)"


def about(table: CostTable, settings: SimulationSettings) -> list[tuple[str, str]]:
    """What was simulated, by name."""
    limits = limits_of(table, settings)
    routing = f", {settings.routing or 'least-outstanding'}" if settings.cards > 1 else ""
    return [
        ("model", table.model),
        ("device", f"{settings.cards} x {table.hardware}{routing}"),
        (
            "engine",
            f"max_num_seqs {limits.max_num_seqs}, max_num_batched_tokens {limits.max_num_batched_tokens}, "
            f"num_pages {limits.num_pages} of {limits.page_size}, itl_target_ms {limits.itl_target_ms:g}, no prefix "
            "cache",
        ),
    ]


def simulation_document(cells: Sequence[Cell], table: CostTable, settings: SimulationSettings, name: str) -> Document:
    """name: of the table."""
    goodput = any(cell.figures.goodput is not None for cell in cells)
    columns = [("requests", False), ("load", False), ("decoding", False)]
    columns += [*ratio_columns(cells), *figure_columns(goodput, busy=False)]
    rows = [
        [cell.scenario, cell.load, cell.label, *ratio_texts(cell, cells)]
        + figure_texts(cell.figures, goodput, busy=False)
        for cell in cells
    ]
    runs = ("runs", f"{settings.repeats} of each kind, from seed {settings.seed} on")
    notes = [SIMULATED, *DEFINITIONS, OVER_PLAIN, *best_notes(cells), *figure_notes(goodput, busy=False)]
    return Document(f"stride simulate: {name}", [*about(table, settings), runs], [Table("", columns, rows)], notes)
