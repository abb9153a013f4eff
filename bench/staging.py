"""What staging costs and gains where TP differs: 4 to 1 and 1 to 4 ranks with 8 heads, 128 MiB per request.

Between two processes of this machine, in rounds that take turns:

* staged: as the plan does it. Slices: the same blocks, each token's slice a descriptor of its own. Equal: TP 1 to 1,
  whole pages, nothing to stage.
* gather, scatter, wire: each of the three alone, by one thread: the copies that staging adds, and its pieces into a
  ring without either.
* the copy limit: what a perfect pipeline of the three would reach. Its slowest step, or all three shared out over the
  cores that there are, whichever is slower.
* at once: the three, at the same time and not waiting for each other, until the last has ended.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
from report import arguments, finish, table
from staging_parts import (
    LAYOUTS,
    REQUEST_BYTES,
    SPLIT,
    Copies,
    Ranks,
    blocks_of,
    digest,
    pages_of,
    ring_spans,
    run_target,
    written,
)

from kvferry.transfer.blocks import spans_of
from kvferry.transfer.contract import Peer, WriteOutcome, decode_descriptor
from kvferry.transfer.staging.wire import SCRATCH_BYTES


class Source:
    """The source's process, which also keeps the time."""

    def __init__(self, pipe: Any, transports: str, piece_mib: float) -> None:
        self._pipe, self.ranks = pipe, Ranks("source", transports, piece_mib)
        self.ranks.pool.bytes[:] = np.random.default_rng(1).integers(1, 256, 2 * REQUEST_BYTES, np.uint8)
        self.copies = {layout: Copies(self.ranks, layout, piece_mib) for layout in SPLIT}
        self.peers: dict[tuple[str, int, int], Peer] = {}
        self._piece = int(piece_mib * (1 << 20))
        self.wire: dict[str, int] = {}

    async def ask(self, *command: Any) -> Any:
        """The target does it, and answers."""
        loop = asyncio.get_running_loop()
        self._pipe.send_bytes(json.dumps(command).encode())
        return json.loads(await loop.run_in_executor(None, self._pipe.recv_bytes))

    async def connect(self) -> None:
        for layout, (here, there) in LAYOUTS.items():
            for source in range(here):
                for target in range(there):
                    writer = self.ranks.incarnation(layout, source)
                    descriptor = decode_descriptor(bytes.fromhex(await self.ask("accept", layout, target, writer)))
                    endpoint = self.ranks.endpoints[layout, source]
                    self.peers[layout, source, target] = await endpoint.connect(descriptor)

    async def request(self, layout: str, staged: bool) -> float:
        """All ranks write their parts at once; seconds."""
        here, there = LAYOUTS[layout]
        await self.ask("expect", layout, +1)
        before, begun_s = self.ranks.wire_bytes, time.perf_counter()
        writes = []
        for source in range(here):
            for target in range(there):
                blocks = blocks_of(layout, source, target)
                peer = self.peers[layout, source, target]
                work = blocks if staged else spans_of(blocks)
                writes.append(written(self.ranks.endpoints[layout, source], peer, work))
        results = await asyncio.gather(*writes)
        took_s = time.perf_counter() - begun_s
        await self.ask("expect", layout, -1)
        assert all(result.outcome is WriteOutcome.FLUSHED for result in results), results
        assert sum(result.size_bytes for result in results) == REQUEST_BYTES
        self.wire[f"{layout}, {'staged' if staged else 'slices'}"] = self.ranks.wire_bytes - before
        return took_s

    async def right(self, layout: str, staged: bool) -> bool:
        """After a round on cleared memory: the target has what the source has, and nothing else."""
        await self.ask("clear")
        await self.request(layout, staged)
        here, _ = LAYOUTS[layout]
        held = self.ranks.pool.request(here, pages_of(layout)[0])
        return bool(await self.ask("sum", layout) == [digest(held), 0])

    async def gathered(self, layout: str) -> float:
        return await asyncio.get_running_loop().run_in_executor(None, self.copies[layout].run)

    async def wired(self) -> float:
        """Pieces into a ring, nothing else."""
        await self.ask("expect", "wire", +1)  # over tcp nothing moves without the target
        took_s = await self._wire()
        await self.ask("expect", "wire", -1)
        return took_s

    async def _wire(self) -> float:
        peer: Any = self.peers["wire", 0, 0]
        ours, theirs = len(self.ranks.endpoints["wire", 0].regions), len(peer.descriptor.regions)
        spans = ring_spans(ours, theirs, peer.lent.scratch + SCRATCH_BYTES, self._piece, REQUEST_BYTES // self._piece)
        begun_s = time.perf_counter()
        await written(self.ranks.inner["wire", 0], peer.inner, spans)
        return time.perf_counter() - begun_s

    async def at_once(self, layout: str) -> float:
        await self.ask("expect", "wire", +1)
        begun_s = time.perf_counter()
        scattered = asyncio.create_task(self.ask("scatter", layout))
        await asyncio.gather(self.gathered(layout), self._wire(), scattered)
        took_s = time.perf_counter() - begun_s
        await self.ask("expect", "wire", -1)
        return took_s


async def rounds(source: Source, count: int, slices_every: int) -> dict[str, float]:
    """Medians in GB/s. Slices are slow, so they are measured in every `slices_every`th round only."""
    found: dict[str, list[float]] = defaultdict(list)
    for number in range(count):
        what: dict[str, Callable[[], Awaitable[float]]] = {
            "equal": lambda: source.request("equal", False),
            "wire": source.wired,
        }
        for layout in SPLIT:
            what |= {
                f"{layout}, staged": lambda layout=layout: source.request(layout, True),  # type: ignore[misc]
                f"{layout}, gather": lambda layout=layout: source.gathered(layout),  # type: ignore[misc]
                f"{layout}, scatter": lambda layout=layout: source.ask("scatter", layout),  # type: ignore[misc]
                f"{layout}, at once": lambda layout=layout: source.at_once(layout),  # type: ignore[misc]
            }
            if number % slices_every == 0:
                what[f"{layout}, slices"] = lambda layout=layout: source.request(layout, False)  # type: ignore[misc]
        for name, measure in what.items():
            found[name].append(REQUEST_BYTES / (await measure()) / 1e9)
    return {name: statistics.median(values) for name, values in found.items()}


def limit(gather: float, wire: float, scatter: float, cores: int) -> float:
    """GB/s of a pipeline of three steps, each by one thread, on so many cores."""
    return min(gather, wire, scatter, cores / (1 / gather + 1 / wire + 1 / scatter))


def summary(rates: dict[str, float], wire: dict[str, int], cores: int) -> dict[str, Any]:
    """The worse of both layouts, and the figures behind."""
    layouts = {}
    for layout in SPLIT:
        of = {name: rates[f"{layout}, {name}"] for name in ("staged", "slices", "gather", "scatter", "at once")}
        best = limit(of["gather"], rates["wire"], of["scatter"], cores)
        layouts[layout] = {
            **{f"{name.replace(' ', '_')}_gb_s": round(rate, 3) for name, rate in of.items()},
            "copy_limit_gb_s": round(best, 3),
            "staged_vs_slices": round(of["staged"] / of["slices"], 2),
            "staged_vs_copy_limit": round(of["staged"] / best, 3),
            "staged_vs_at_once": round(of["staged"] / of["at once"], 3),
            "staged_vs_equal_tp": round(of["staged"] / rates["equal"], 3),
            "wire_bytes": wire[f"{layout}, staged"],
            "wire_bytes_vs_equal_tp": round(wire[f"{layout}, staged"] / wire["equal, slices"], 5),
        }
    keys = {"staged_vs_slices": min, "staged_vs_copy_limit": min, "wire_bytes_vs_equal_tp": max}
    return {
        **{key: worst(layouts[layout][key] for layout in layouts) for key, worst in keys.items()},
        "equal_tp_gb_s": round(rates["equal"], 3),
        "wire_alone_gb_s": round(rates["wire"], 3),
        "cores": cores,
        "layouts": layouts,
    }


async def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--rounds", type=int, default=9, help="of everything (%(default)s)")
    parser.add_argument("--transports", default="host", help="host or tcp (%(default)s)")
    parser.add_argument("--piece-mib", type=float, default=4.0, help="of one staged write (%(default)s)")
    options = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=run_target, args=(theirs, options.transports, options.piece_mib))
    process.start()
    source = Source(ours, options.transports, options.piece_mib)
    assert await asyncio.get_running_loop().run_in_executor(None, ours.recv_bytes) == b"ready"
    await source.connect()
    checks = {("equal", False), *((layout, True) for layout in ("equal", *SPLIT))}
    for layout, staged in sorted(checks):
        if not await source.right(layout, staged):
            print(f"{layout}: the target does not have what the source has", file=sys.stderr)
            return 1
    rates = await rounds(source, options.rounds, max(1, options.rounds // 3))
    await source.ask("close")
    await source.ranks.close()
    process.join()
    cores = len(os.sched_getaffinity(0))
    figures = summary(rates, source.wire, cores) | {"transports": options.transports, "piece_mib": options.piece_mib}
    rows = [[name, f"{rate:.2f}"] for name, rate in sorted(rates.items())]
    for layout, found in figures["layouts"].items():
        rows += [[f"{layout}, copy limit on {cores} cores", f"{found['copy_limit_gb_s']:.2f}"]]
    table("128 MiB per request, medians", ("", "GB/s"), rows)
    goals = [["staged_vs_slices", ">= 5"], ["wire_bytes_vs_equal_tp", "<= 1.01"], ["staged_vs_copy_limit", ">= 0.8"]]
    table("the worse of both layouts", ("", "goal", "found"), [[*goal, str(figures[goal[0]])] for goal in goals])
    finish(options.json, figures)
    return 0


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
