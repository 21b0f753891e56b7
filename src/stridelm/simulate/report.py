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


def queue_notes(table: CostTable, settings: SimulationSettings) -> list[str]:
    """Of the loads with more streams than the cards run at once."""
    most = settings.cards * limits_of(table, settings).max_num_seqs
    return [
        f"{load.name}: {most} run at once, {load.max_concurrency - most} only wait in the queue; raise cards, or "
        f"max_num_seqs, of which the table's points have {table.most_requests}"
        for load in settings.loads
        if load.max_concurrency is not None and load.max_concurrency > most
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
    notes = [SIMULATED, *queue_notes(table, settings), *DEFINITIONS, OVER_PLAIN, *best_notes(cells)]
    notes += figure_notes(goodput, busy=False)
    return Document(f"stride simulate: {name}", [*about(table, settings), runs], [Table("", columns, rows)], notes)
