"""Writes that land after their room was aborted: on the fake backend in virtual time, and on the real one.

A has a prompt of 40 tokens, B one of 60 and needs 10 pages of 8. While A's 6 pages are quarantined, a pool of 12 has
no place for B, and one of 64 has.
"""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from kvferry.actors.settings import DecodeSettings, FaultSettings
from kvferry.protocol.messages import Token
from kvferry.sim import system as system_module
from kvferry.sim.checkers import Broken, Watcher, check_idle
from kvferry.sim.loop import run
from kvferry.sim.system import SimOptions, SimSystem
from kvferry.transfer import faulty
from kvferry.transfer.contract import OnNotify, Region, WriteHandle, WriteOutcome
from kvferry.transfer.fake import FakeFabric
from kvferry.transfer.faulty import FaultyEndpoint, HeldWrite
from kvferry.transfer.ucx import UcxEndpoint

A, B = tuple(range(300, 340)), tuple(range(500, 560))
TINY, LARGE = 12, 64
A_PAGES = 6  # 40 tokens, and the first of the answer


class UcxFabric(FakeFabric):
    """Makes real endpoints: the same actors, on a real loop, with UCX between their engines' memory."""

    def endpoint(self, regions: tuple[Region, ...], incarnation: int, on_notify: OnNotify, *_: Any, **__: Any) -> Any:
        return UcxEndpoint(
            regions=regions, incarnation=incarnation, on_notify=on_notify, loop=self.loop, now_s=self.loop.time
        )  # fmt: skip


def options(pool_pages: int, delay_ms: float, late_ms: float) -> SimOptions:
    faults = FaultSettings(delay_ms=delay_ms, late_after_abort_ms=late_ms)
    return SimOptions(decode=DecodeSettings(pool_pages=pool_pages), faults=faults)


def endpoint_of(system: SimSystem) -> FaultyEndpoint:
    endpoint = system.processes["prefill-0"].endpoint
    assert isinstance(endpoint, FaultyEndpoint)
    return endpoint


def words_at(system: SimSystem, pages: tuple[int, ...]) -> int:
    """How many words of decode's pages are not 0: what has been written there."""
    return int(np.count_nonzero(system.engine()._pool[:, :, list(pages)]))


async def abort_a(system: SimSystem, client: Any, wait_until: Any) -> tuple[int, tuple[int, ...], WriteHandle]:
    """A's room, its target pages and its write, just after it was aborted with the write held."""
    live = client.open(A, max_tokens=8)
    await wait_until(lambda: any(room.machine.writes_open for room in system.prefill().rooms.values()))
    lanes = endpoint_of(system)._lanes.values()
    write = next(work for lane in lanes for work in lane.items if isinstance(work, HeldWrite))
    (receiving,) = system.decode().rooms.values()
    assert receiving.holding is not None
    pages = receiving.holding.pages
    assert len(pages) == A_PAGES and words_at(system, pages) == 0
    client.front.close_request(live)
    await wait_until(lambda: system.counts()["decode-0"].quarantined == A_PAGES)
    return receiving.room, pages, write


async def ask_b(system: SimSystem, client: Any, a_pages: tuple[int, ...], write: WriteHandle) -> tuple[bool, bool]:
    """B's answer is right. Tells whether it had pages while A's write was under way, and whether any were A's ever."""
    meanwhile = reused = False
    asking: asyncio.Task[list[Token]] = asyncio.create_task(client.collect(client.open(B, max_tokens=16)))
    while not asking.done():
        for room in system.decode().rooms.values():
            if len(room.spec.prompt_ids) == len(B) and room.holding is not None:
                shared = set(room.holding.pages) & set(a_pages)
                assert not shared or write.result is not None, "A's pages were given away before its write had ended"
                reused |= bool(shared)
                meanwhile |= write.result is None
        await asyncio.sleep(0.001)
    assert [token.token_id for token in asking.result()] == list(system.engine().expected_tokens(B, 16))
    return meanwhile, reused


async def play(system: SimSystem, client: Any, wait_until: Any, tiny: bool) -> None:
    """Case 25 from A's opening to the baseline."""
    room, a_pages, write = await abort_a(system, client, wait_until)
    (row,) = (await system.decode().status())["quarantined"]
    assert (row["room"], tuple(row["pages"]), row["writer"]) == (str(room), a_pages, "prefill-0")
    assert row["waits_for"][0] == "drained by rank 0" and row["linked"]
    assert "the front has cancelled the attempt" in row["cause"]
    assert await ask_b(system, client, a_pages, write) == (not tiny, tiny)
    await wait_until(lambda: room not in system.decode().rooms)
    assert write.result is not None and write.result.outcome is WriteOutcome.FLUSHED
    assert (await system.decode().status())["quarantined"] == []
    if not tiny:
        assert words_at(system, a_pages) > 0  # it has landed indeed, after the abort
    await wait_until(system.at_baseline)


@pytest.mark.parametrize("pool_pages", [TINY, LARGE])
def test_case_25_a_write_that_lands_after_the_abort(client_of: Any, wait_until: Any, pool_pages: int) -> None:
    """Case 25: the KV write is delayed by 2 s and lands 2 s after the abort; the checker sees every copy of it."""

    async def main() -> None:
        async with SimSystem(options(pool_pages, 2000, 2000)) as system:
            watcher = Watcher(system)
            watching = asyncio.create_task(watcher.run())
            await play(system, await client_of(system), wait_until, tiny=pool_pages == TINY)
            watching.cancel()
            watcher.look()
            assert watcher.writes.copies >= 3  # A's late one too
            check_idle(system)

    run(main())


@pytest.mark.parametrize("pool_pages", [TINY, LARGE])
async def test_case_25_on_the_real_backend(
    client_of: Any, wait_until: Any, monkeypatch: pytest.MonkeyPatch, pool_pages: int
) -> None:
    """Case 25: with bytes that UCX moves. Time is real, so the delays are shorter, and nothing is said about them."""
    monkeypatch.setattr(system_module, "FakeFabric", UcxFabric)
    async with SimSystem(options(pool_pages, 600, 600)) as system:
        client = await client_of(system)
        await play(system, client, wait_until, tiny=pool_pages == TINY)
        await client.front.close()


class Liar(FaultyEndpoint):
    """Says that a cancelled write has ended, and writes all the same."""

    def cancel(self, handle: WriteHandle) -> None:
        assert isinstance(handle, HeldWrite)
        behind = HeldWrite(handle.peer, handle.work, lambda result: None, False)
        self._end(handle, WriteOutcome.CANCELLED)
        self._write_late(behind)


def test_a_writer_that_lies_is_found(client_of: Any, wait_until: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The scene can fail: with an ack before the end of the write, the write meets B in A's pages."""
    monkeypatch.setattr(faulty, "FaultyEndpoint", Liar)

    async def main() -> None:
        async with SimSystem(options(TINY, 2000, 2000)) as system:
            watcher, client = Watcher(system), await client_of(system)
            await abort_a(system, client, wait_until)
            asking = asyncio.create_task(client.collect(client.open(B, max_tokens=100)))
            await asyncio.sleep(2.5)
            asking.cancel()
            with pytest.raises(Broken, match="lease"):
                watcher.look()

    run(main())
