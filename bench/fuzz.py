"""Damaged bytes for everything that reads bytes from elsewhere: nothing may crash, remain or grow.

Each decoder must answer or refuse in its one way; the production actors, on virtual time, must go on, hold what they
held before, and serve the next request. Equal seeds give equal frames: `--seed S --only N` repeats the N-th one alone.
"""

from __future__ import annotations

import asyncio
import gc
import inspect
import logging
import os
import sys
import time
import traceback
from dataclasses import asdict, dataclass, field
from itertools import accumulate
from pathlib import Path
from random import Random
from typing import Any

from fuzz_actors import QUIET_S, Stage
from fuzz_decoders import Target, decoders
from fuzz_mutator import Mutator
from report import arguments, finish, table
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from kvferry.sim.loop import run

#: Frames between two moments in which the actors take what has come, and are looked at.
TURN = 256
#: When memory is first looked at: caches and pools are filled by then.
WARM_PART = 0.1
MOST_FINDINGS = 20


@dataclass
class Report:
    frames: int
    seed: int
    wall_s: float = 0.0
    by_target: dict[str, int] = field(default_factory=dict)
    findings: list[str] = field(default_factory=list)
    states_before: dict[str, int] = field(default_factory=dict)
    states_after: dict[str, int] = field(default_factory=dict)
    refused: dict[str, int] = field(default_factory=dict)
    rss_before_bytes: int = 0
    rss_after_bytes: int = 0
    tokens_after: int = 0

    @property
    def good(self) -> bool:
        return not self.findings and self.states_before == self.states_after and self.tokens_after == 4


def rss_bytes() -> int:
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Fuzz:
    """`only`: feed nothing but the frame of that number."""

    def __init__(self, frames: int, seed: int, only: int | None = None, progress: Progress | None = None) -> None:
        self.report, self._only, self._progress = Report(frames, seed), only, progress

    async def run(self) -> Report:
        started_s = time.perf_counter()
        asyncio.get_running_loop().set_exception_handler(self._escaped)
        async with Stage(self.report.seed) as stage:
            await stage.request()  # whose links stay
            self.report.states_before = stage.states()
            await self._feed([*decoders(), *stage.targets()], stage)
            await asyncio.sleep(QUIET_S)
            self.report.refused = dict(stage.refused())
            self.report.tokens_after = 0 if stage.crashed() else await stage.request()
            self.report.states_after = stage.states()
            self.report.rss_after_bytes = rss_bytes()
        self.report.wall_s = time.perf_counter() - started_s
        return self.report

    async def _feed(self, targets: list[Target], stage: Stage) -> None:
        report, mutator, draw = self.report, Mutator(self.report.seed), Random(self.report.seed)
        weights = list(accumulate(target.weight for target in targets))
        task = self._progress.add_task("frames", total=report.frames) if self._progress else None
        for number in range(report.frames):
            target = draw.choices(targets, cum_weights=weights)[0]
            data = mutator.damaged(target.corpus)
            if self._only is None or number == self._only:
                await self._give(target, data, number)
            if number % TURN == 0 or number == self._only:
                await asyncio.sleep(0.05)
                for what in stage.crashed():
                    self._found(f"by frame {number}: {what}")
                if self._progress and task is not None:
                    self._progress.update(task, completed=number + 1)
                if len(report.findings) >= MOST_FINDINGS or stage.crashed():
                    return
            if number == int(report.frames * WARM_PART):
                report.rss_before_bytes = rss_bytes()

    async def _give(self, target: Target, data: bytes, number: int) -> None:
        self.report.by_target[target.name] = self.report.by_target.get(target.name, 0) + 1
        try:
            taken = target.take(data)
            if inspect.isawaitable(taken):
                await taken
        except Exception as error:  # noqa: BLE001 - that is what is looked for
            where = traceback.extract_tb(error.__traceback__)[-1]
            text = f"{type(error).__name__}: {error}"[:200]
            shown = data[:64].hex() + ("…" if len(data) > 64 else "")
            self._found(f"frame {number}, {target.name}: {text} at {where.filename}:{where.lineno}; {shown}")

    def _escaped(self, _: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        self._found(f"in a callback of the loop: {context.get('exception') or context['message']!r}")

    def _found(self, text: str) -> None:
        if text not in self.report.findings:
            self.report.findings.append(text)


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--frames", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", type=int, metavar="N", help="the N-th frame alone")
    options = parser.parse_args()
    logging.disable(logging.CRITICAL)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(file=sys.stderr)) as progress:
        report = run(Fuzz(options.frames, options.seed, options.only, progress).run())
    show(report)
    finish(options.json, asdict(report) | {"good": report.good})
    return 0 if report.good else 1


def show(report: Report) -> None:
    mib = 1 << 20
    rows = [[name, str(count)] for name, count in report.by_target.items()]
    memory = f"{report.rss_before_bytes / mib:.1f}, {report.rss_after_bytes / mib:.1f}"
    rows += [["", ""], ["memory, MiB: warm, at the end", memory]]
    for name, count in report.states_before.items():
        rows.append([f"{name}: before, after", f"{count}, {report.states_after.get(name)}"])
    rows += [["findings", str(len(report.findings))], ["seconds", f"{report.wall_s:.0f}"]]
    table(f"{report.frames} damaged frames, seed {report.seed}", ("", "frames"), rows)
    for finding in report.findings:
        print(finding)


if __name__ == "__main__":
    sys.exit(main())
