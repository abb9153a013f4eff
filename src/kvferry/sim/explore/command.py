"""`kvferry sim explore`: cover the models completely, and print how far they reach."""

from __future__ import annotations

import json
import time
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from kvferry.sim.explore.diagram import diagram
from kvferry.sim.explore.gathering import GatheringSearch
from kvferry.sim.explore.local import check_news
from kvferry.sim.explore.models import MODELS, Model
from kvferry.sim.explore.search import Found, Search

COLUMNS = ("model", "states", "transitions", "depth", "frontier", "seconds")


def run(name: str | None, small: bool, as_json: bool) -> int:
    """All models, or those of one name. Exit code 0 when each is covered and nothing was violated."""
    check_news()
    console = Console(stderr=as_json)
    models = [model for group, found in MODELS.items() if name in (None, group) for model in found]
    rows = [explore(model, not small, console) for model in models]
    if as_json:
        print(json.dumps({"models": rows}, indent=2))
    else:
        console.print(table(rows))
    return 0 if all(row["frontier"] == 0 and row["violation"] is None for row in rows) else 1


def explore(model: Model, full: bool, console: Console) -> dict[str, Any]:
    """One model, with a line that says how far it is."""
    world = model.world(full)
    search, began_s = model.search(world), time.monotonic()
    console.print(f"[bold]{model.name}[/bold]: {model.title}. Bounds: {model.bounds(full)}.", highlight=False)
    with Live(console=console, auto_refresh=False, transient=True) as live:

        def show(search: Search | GatheringSearch, frontier: int) -> None:
            live.update(_line(search, frontier, time.monotonic() - began_s), refresh=console.is_terminal)

        found = search.run(show)
    row = _row(model, full, found, time.monotonic() - began_s)
    if found.violation is not None:
        row["trace"] = diagram(world, found.trace, found.violation)
        console.print(f"[red]{found.violation}[/red]\n{row['trace']}", highlight=False)
    return row


def _line(search: Search | GatheringSearch, frontier: int, elapsed_s: float) -> Text:
    """The share of known states that have been left by all their events: it is full when the model is covered."""
    done = search.states - frontier
    cells = 30 * done // max(1, search.states)
    bar = "█" * cells + "░" * (30 - cells)
    return Text(f"{bar} {search.states:,} states, {frontier:,} to go on from, depth {search.depth}, {elapsed_s:.0f} s")


def _row(model: Model, full: bool, found: Found, elapsed_s: float) -> dict[str, Any]:
    return {
        "model": model.name, "bounds": model.bounds(full), "states": found.states, "transitions": found.transitions,
        "depth": found.depth, "frontier": found.frontier, "seconds": round(elapsed_s, 1),
        "violation": None if found.violation is None else found.violation.checker,
    }  # fmt: skip


def table(rows: list[dict[str, Any]]) -> Table:
    shown = Table(title="explored", title_justify="left")
    for name in (*COLUMNS, "violation"):
        shown.add_column(name, justify="left" if name in ("model", "violation") else "right")
    for row in rows:
        numbers = [f"{row[name]:,}" for name in COLUMNS[1:]]
        shown.add_row(
            row["model"], *numbers, row["violation"] or "none", style="" if row["violation"] is None else "red"
        )
    return shown
