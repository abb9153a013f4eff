"""What checksums cost: the digest against one thread's read bandwidth, and what it adds to a transfer and to a handoff.

A prompt of 1,000 tokens of SmolLM2-135M in float32: 63 pages of 16 tokens, scattered, in 60 regions, 46 MB, in chunks
of 256 tokens, over UCX between two processes of this machine. As in production, each side takes its digests on a thread
of its own, the source's while the bytes are on the wire, the target's when it is told of a chunk.

* digest_vs_read_bandwidth: bytes per second of the digest of prompts that lie scattered in a pool of 470 MB, each of
  them another one, so that caches don't help; against the faster of two plain reads of that pool from end to end by
  one thread, which have the easier way through it. Beside it, where a prompt's pages follow each other.
* digest_vs_scattered_read: the same against a plain read of the same pages in the same order, which fetches ahead as
  the digest does: what one thread gets there at all. Absent where our C was not built.
* added_vs_transfer: all chunks written at once, from the first post to the target's word that it may commit: how much
  longer that takes with checksums. There is nothing to hide them behind but the wire.
* added_vs_handoff: chunks written one by one, as they are computed, from the last one's post to that word: how much
  longer that takes, and the time of all the source's digests, which compete with the next chunk's forward; against the
  handoff, which is the computing of the chunks (by the real engine, one thread) and that last write.
"""

from __future__ import annotations

import asyncio
import ctypes
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from report import arguments, finish, table

from kvferry.engine.contract import Sequence as Tokens
from kvferry.engine.contract import StepPlan
from kvferry.engine.kv_pool import KVPool
from kvferry.protocol.metadata import Notification, Placed, decode_notification, encode_notification
from kvferry.protocol.rank import Slice
from kvferry.transfer.contract import Region, Spans, decode_descriptor, encode_descriptor
from kvferry.transfer.digest import ThreadDigests, digest_of
from kvferry.transfer.feeding import Feeder, feeder
from kvferry.transfer.plan import pair, plan_pages
from kvferry.transfer.spans import addresses, cut, total_bytes
from kvferry.transfer.ucx import UcxEndpoint

TOKENS, CHUNK, PAGE = 1000, 256, 16
PAGES, POOL = -(-TOKENS // PAGE), 640
PAUSE_S = 0.03
SOURCE, TARGET = 1, 2
COMMIT = b"commit"
#: Rates.
SCATTERED, SCATTERED_READ = "digest, scattered pages", "read, scattered pages"
WHOLE = "read, numpy", "read, torch"
#: A short piece for libc, whose addresses and sizes are still few beside its bytes.
READ_BYTES = 256
#: The other process.
TARGET_CODE = """
import asyncio, sys
sys.path[:0] = {path!r}
from checksum import target
asyncio.run(target({transports!r}))
"""


def pool_of_kv() -> KVPool:
    every = Slice(first_layer=0, layers=30, first_head=0, heads=3)
    return KVPool(part=every, pages=POOL, page_size=PAGE, head_dim=64, dtype=torch.float32, metadata_rows=4)


class Site:
    """A pool with an end of the data plane."""

    def __init__(self, incarnation: int, transports: str, hear: Callable[[bytes], None]) -> None:
        self.pool = pool_of_kv()
        self.regions = self.pool.regions()
        self.endpoint = UcxEndpoint(
            regions=self.regions, incarnation=incarnation, on_notify=lambda _, payload: hear(payload),
            loop=asyncio.get_running_loop(), now_s=time.monotonic, transports=transports, poll_busy_ms=0.1,
        )  # fmt: skip
        self.digests = ThreadDigests(self.regions)
        self.endpoint.expect(+1)

    async def close(self) -> None:
        await self.endpoint.close()
        await self.digests.close()


def chunks(site: Site) -> list[Spans]:
    """The writes of the prompt: pages scattered on either side, the same in both processes."""
    random = np.random.default_rng(5)
    source, target = random.permutation(POOL)[:PAGES], random.permutation(POOL)[:PAGES]
    pairing, step = pair(site.regions, site.regions), CHUNK // PAGE
    return [plan_pages(pairing, source[at : at + step], target[at : at + step]) for at in range(0, PAGES, step)]


async def target(transports: str) -> None:
    """Says `COMMIT` when all is written and, where the source has sent digests, found as it was."""
    heard: asyncio.Queue[bytes] = asyncio.Queue()
    site = Site(TARGET, transports, heard.put_nowait)
    print(encode_descriptor(await site.endpoint.accept(SOURCE)).hex(), flush=True)
    peer = await site.endpoint.connect(decode_descriptor(bytes.fromhex(sys.stdin.readline())))
    parts = chunks(site)
    checks: dict[int, asyncio.Task[int]] = {}
    told: dict[int, int] = {}
    while payload := await heard.get():
        news = decode_notification(payload)
        if not isinstance(news, Notification):
            break
        for placed in news.placed:
            if placed.chunk not in checks:
                told[placed.chunk] = placed.digest
                checks[placed.chunk] = asyncio.create_task(site.digests.of(parts[placed.chunk], "target"))
        if news.last:
            if {chunk: await check for chunk, check in checks.items()} != told:
                raise AssertionError("a digest differs")
            checks, told = {}, {}
            site.endpoint.notify(peer, COMMIT)
    await site.close()


class Transfers:
    """The source's side, and its process."""

    def __init__(self, process: Any, site: Site, peer: Any, back: asyncio.Queue[bytes]) -> None:
        self.process, self.site, self.peer, self._back = process, site, peer, back
        self.parts = chunks(site)

    @staticmethod
    async def opened(transports: str) -> Transfers:
        code = TARGET_CODE.format(path=sys.path, transports=transports)
        pipes = {"stdin": asyncio.subprocess.PIPE, "stdout": asyncio.subprocess.PIPE, "limit": 2**24}
        process: Any = await asyncio.create_subprocess_exec(sys.executable, "-c", code, **pipes)
        back: asyncio.Queue[bytes] = asyncio.Queue()
        site = Site(SOURCE, transports, back.put_nowait)
        for region in (*site.pool.k, *site.pool.v):
            region.normal_()
        descriptor = decode_descriptor(bytes.fromhex((await process.stdout.readline()).decode()))
        process.stdin.write(encode_descriptor(await site.endpoint.accept(TARGET)).hex().encode() + b"\n")
        return Transfers(process, site, await site.endpoint.connect(descriptor), back)

    async def one(self, checksum: bool, pause_s: float) -> float:
        """Seconds until the target may commit: from the first chunk's post, or with a pause between chunks from the
        last one's."""
        placed: list[Placed] = []
        begun_s, open_writes = time.perf_counter(), []
        for number, part in enumerate(self.parts):
            begun_s = time.perf_counter() if pause_s else begun_s
            open_writes.append(asyncio.create_task(self._write(number, part, checksum, placed)))
            if pause_s and number < len(self.parts) - 1:
                await open_writes[-1]
                await asyncio.sleep(pause_s)
        await asyncio.gather(*open_writes)
        self._say(tuple(placed), True)
        assert await self._back.get() == COMMIT
        return time.perf_counter() - begun_s

    async def _write(self, number: int, part: Spans, checksum: bool, placed: list[Placed]) -> None:
        ended: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.site.endpoint.write(self.peer, part, ended.set_result)
        if not checksum:
            await ended
            return
        digest = await self.site.digests.of(part, "source")
        await ended
        placed.append(Placed(number, number * CHUNK, CHUNK, False, digest))
        if number < len(self.parts) - 1:
            self._say((placed[-1],), False)

    def _say(self, placed: tuple[Placed, ...], last: bool) -> None:
        self.site.endpoint.notify(self.peer, encode_notification(Notification(1, 0, SOURCE, placed, last)))

    async def medians_s(self, rounds: int, pause_s: float) -> tuple[float, float]:
        """(without, with) checksums, in turn."""
        times: tuple[list[float], list[float]] = ([], [])
        for _ in range(rounds):
            for checksum in (False, True):
                times[checksum].append(await self.one(checksum, pause_s))
        return statistics.median(times[0]), statistics.median(times[1])

    async def close(self) -> None:
        self.site.endpoint.notify(self.peer, b"")
        self.site.endpoint.notify(self.peer, b"end")
        await asyncio.sleep(0.2)
        self.process.stdin.close()
        if self.process.returncode is None:
            self.process.terminate()
        await self.process.wait()
        await self.site.close()


def fastest_s(do: Callable[[], object], rounds: int) -> float:
    times = []
    for _ in range(rounds):
        begun_s = time.perf_counter()
        do()
        times.append(time.perf_counter() - begun_s)
    return min(times)


def plain_read(feed: Feeder, regions: Sequence[Region], spans: Spans) -> Callable[[], None]:
    """Reads the spans in their order: libc copies them, `READ_BYTES` at a time, into one place that the first cache
    holds. No way that was tried is more than a tenth faster, a loop of our own with vector instructions among them.
    """
    pieces, memcpy = cut(spans, READ_BYTES), ctypes.cast(ctypes.CDLL(None).memcpy, ctypes.c_void_p)
    place = ctypes.create_string_buffer(READ_BYTES)
    start, size = addresses(pieces, regions, "source"), np.ascontiguousarray(pieces["length"])
    return lambda: feed(start, size, memcpy, ctypes.cast(place, ctypes.c_void_p))


def rates(rounds: int) -> dict[str, float]:
    """GB/s by one thread over a pool, each the best of so many. Nothing else runs in the process."""
    kv = pool_of_kv()
    regions = kv.regions()
    pools = [pool.normal_().view(-1).view(torch.int64) for pool in (*kv.k, *kv.v)]
    arrays, size = [pool.numpy() for pool in pools], sum(pool.nbytes for pool in pools)
    random, pairing = np.random.default_rng(9), pair(regions, regions)
    lots = random.permutation(POOL)[: POOL // PAGES * PAGES].reshape(-1, PAGES)  # no page is in two prompts
    runs = np.arange(len(lots) * PAGES).reshape(lots.shape)

    def over(prompts: Any, reader: Callable[[Spans], Callable[[], object]]) -> float:
        plans = [plan_pages(pairing, pages, pages) for pages in prompts]
        taken_s = min(fastest_s(read, 1) for _ in range(rounds) for read in map(reader, plans))
        return total_bytes(plans[0]) / taken_s / 1e9

    def digest(spans: Spans) -> Callable[[], int]:
        return partial(digest_of, spans, regions, "source")

    feed = feeder()
    scattered = {} if feed is None else {SCATTERED_READ: over(lots, partial(plain_read, feed, regions))}
    return {
        SCATTERED: over(lots, digest),
        "digest, pages in a row": over(runs, digest),
        **scattered,
        WHOLE[0]: size / fastest_s(lambda: [array.max() for array in arrays], rounds) / 1e9,
        WHOLE[1]: size / fastest_s(lambda: [pool.sum() for pool in pools], rounds) / 1e9,
    }


async def compute_s() -> float:
    """Computing the prompt's chunks by the real engine."""
    from kvferry.engine.loader import load
    from kvferry.engine.torch_engine import TorchEngine

    loaded = load("smollm2-135m", "float32")
    engine = TorchEngine(loaded, pages=128, page_size=PAGE, metadata_rows=1, threads=1, now_s=time.perf_counter)
    ids = tuple(np.random.default_rng(1).integers(0, 40_000, TOKENS).tolist())
    taken_s = 0.0
    for step, at in enumerate(range(0, TOKENS, CHUNK)):
        part = ids[at : at + CHUNK]
        taken_s += (await engine.step(StepPlan(step, (Tokens(1, part, at, tuple(range(PAGES))),)))).compute_s
    await engine.close()
    return taken_s


def shown(figures: dict[str, float], rates: Sequence[Sequence[str]]) -> None:
    table("one thread, a pool of 470 MB", ("", "GB/s"), rates)
    rows = [
        ["all chunks at once", *(f"{figures[f'transfer_{which}_ms']:.2f}" for which in ("plain", "checked"))],
        ["the last chunk of a handoff", *(f"{figures[f'last_{which}_ms']:.2f}" for which in ("plain", "checked"))],
    ]
    table("to the word of commit, medians, ms", ("", "without", "with checksums"), rows)
    rows = [
        ["digest against the faster read", f"{figures['digest_vs_read_bandwidth']:.2f}", "at least 0.5"],
        ["added to the transfer alone", f"{figures['added_vs_transfer']:.1%}", ""],
        ["added to the handoff", f"{figures['added_vs_handoff']:.2%}", "below 2 %"],
    ]
    if "digest_vs_scattered_read" in figures:
        rows.insert(1, ["digest against a read of its pages", f"{figures['digest_vs_scattered_read']:.2f}", ""])
    table(f"checksums, a prompt of {TOKENS} tokens", ("", "measured", "goal"), rows)


async def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--rounds", type=int, default=31, help="transfers of each kind (%(default)s)")
    parser.add_argument("--transports", default="host", help="as transfer.transports (%(default)s)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    measured = rates(5)
    computed_s = await compute_s()
    transfers = await Transfers.opened(options.transports)
    digest_gb_s, read_gb_s = measured[SCATTERED], max(measured[name] for name in WHOLE)
    digest_s = sum(map(total_bytes, transfers.parts)) / digest_gb_s / 1e9
    await transfers.medians_s(3, 0.0)
    plain_s, checked_s = await transfers.medians_s(options.rounds, 0.0)
    last_plain_s, last_checked_s = await transfers.medians_s(options.rounds, PAUSE_S)
    await transfers.close()
    added_s = last_checked_s - last_plain_s + digest_s
    figures = {
        "digest_gb_s": digest_gb_s, "read_gb_s": read_gb_s,
        "digest_vs_read_bandwidth": digest_gb_s / read_gb_s,
        "transfer_plain_ms": 1e3 * plain_s, "transfer_checked_ms": 1e3 * checked_s,
        "last_plain_ms": 1e3 * last_plain_s, "last_checked_ms": 1e3 * last_checked_s,
        "compute_ms": 1e3 * computed_s,
        "added_vs_transfer": checked_s / plain_s - 1,
        "added_vs_handoff": added_s / (computed_s + last_plain_s),
    }  # fmt: skip
    if SCATTERED_READ in measured:
        figures["digest_vs_scattered_read"] = digest_gb_s / measured[SCATTERED_READ]
    shown(figures, [[name, f"{rate:.1f}"] for name, rate in measured.items()])
    finish(options.json, figures)
    return 0


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
