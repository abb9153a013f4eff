"""What every bench script prints: a table with the peer beside us, and with `--json` one object on the last line.

Figures are ratios of things measured in one run; a script passes its rows to `table` and its keys to `finish`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.table import Table


def arguments(description: str | None) -> argparse.ArgumentParser:
    """A parser with `--json`; scripts add their own options."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--json", action="store_true", help="end with one JSON object on one line")
    return parser


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print rows of text; the first column names the row, the others are figures."""
    shown = Table(title=title, title_justify="left")
    for at, column in enumerate(columns):
        shown.add_column(column, justify="right" if at else "left")
    for row in rows:
        shown.add_row(*row)
    Console(width=120).print(shown)


def finish(as_json: bool, figures: Mapping[str, object]) -> None:
    """With `--json`, the figures as the last line."""
    if as_json:
        print(json.dumps(figures), flush=True)
