"""`kvferry sim`: many seeds with a progress bar, or one with its trace; what failed, and what was never hit."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from kvferry.sim.required import Coverage, coverage_of
from kvferry.sim.seeds import Report, Sum, run_seed, run_seeds

#: Failing seeds that are told in full.
SHOWN = 10


def run(args: argparse.Namespace) -> int:
    """The command, with the arguments that `kvferry.cli` has parsed. Exit code 1 when a checker has found something, or
    with --require-coverage something was never hit."""
    if args.seed is not None:
        return _one(args.seed, args.trace, args.json)
    seeds = range(args.first, args.first + max(0, args.seeds))
    started_s = time.monotonic()
    total = _run(seeds, args.workers or os.cpu_count() or 1, quiet=args.json)
    elapsed_s = time.monotonic() - started_s
    coverage = coverage_of(total.cells, total.pairs)
    if args.json:
        print(json.dumps(_as_object(total, coverage, elapsed_s)))
    else:
        _tell(total, coverage, elapsed_s)
    return 1 if total.failed or (args.require_coverage and coverage.missing) else 0


def reproduce(seed: int) -> str:
    """The command that runs a seed again."""
    return f"kvferry sim --seed {seed} --trace"


def _one(seed: int, trace: bool, as_json: bool) -> int:
    report = run_seed(seed, trace)
    if as_json:
        print(json.dumps(_report(report) | ({"trace": report.trace} if trace else {})))
    else:
        for line in report.trace if trace else report.faults:
            print(line)
        for violation in report.violations:
            print(f"{violation.checker}: {violation.text}")
        print(f"seed {seed}: {report.rooms} rooms, {report.virtual_s:.1f} s of virtual time, {_verdict(report)}")
    return 1 if report.violations else 0


def _verdict(report: Report) -> str:
    return "FAILED" if report.violations else "no checker has found anything"


def _run(seeds: Sequence[int], workers: int, quiet: bool) -> Sum:
    total, started_s = Sum(), time.monotonic()
    console = Console(stderr=True, quiet=quiet)
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[rate]:.0f} rooms/s"),
               TextColumn("{task.fields[failed]} failed"), TimeRemainingColumn())  # fmt: skip
    with Progress(*columns, console=console, disable=quiet or not console.is_terminal) as progress:
        task = progress.add_task("seeds", total=len(seeds), rate=0.0, failed=0)
        for report in run_seeds(seeds, workers):
            total.add(report)
            if report.violations and len(total.failed) <= SHOWN:
                first = report.violations[0]
                progress.console.print(f"seed {report.seed}: {first.checker}: {first.text}", markup=False)
                progress.console.print(f"  {reproduce(report.seed)}", markup=False)
            rate = total.rooms / max(1e-9, time.monotonic() - started_s)
            progress.update(task, advance=1, rate=rate, failed=len(total.failed))
    return total


def _tell(total: Sum, coverage: Coverage, elapsed_s: float) -> None:
    """Sums, then what was hit how often, the rarest first; what was never hit last, where it is seen."""
    for title, counts in (("cells", coverage.cells), ("faults in states", coverage.pairs)):
        print(f"{title}, the rarest first:")
        for name, count in sorted(counts.items(), key=lambda item: item[1]):
            print(f"{count:9}  {name}")
    clients = ", ".join(f"{count} {end}" for end, count in total.ends.most_common())
    print(f"{total.seeds} seeds, {total.rooms} rooms in {elapsed_s:.1f} s ({total.rooms / elapsed_s:.0f} rooms/s)")
    print(f"clients: {clients}")
    print(f"hit: {coverage.summary}")
    for name in coverage.missing:
        print(f"never hit: {name}")
    for report in total.failed:
        print(f"FAILED: {', '.join(v.checker for v in report.violations)}: {reproduce(report.seed)}")
    sys.stdout.flush()


def _as_object(total: Sum, coverage: Coverage, elapsed_s: float) -> dict[str, Any]:
    return {
        "seeds": total.seeds,
        "rooms": total.rooms,
        "elapsed_s": round(elapsed_s, 3),
        "rooms_per_s": round(total.rooms / elapsed_s, 1),
        "clients": dict(total.ends),
        "failed": [_report(report) for report in total.failed],
        "cells": coverage.cells,
        "faults_in_states": coverage.pairs,
        "never_hit": coverage.missing,
    }


def _report(report: Report) -> dict[str, Any]:
    return {
        "seed": report.seed,
        "rooms": report.rooms,
        "reproduce": reproduce(report.seed),
        "violations": [{"checker": v.checker, "text": v.text} for v in report.violations],
        "faults": report.faults,
    }
