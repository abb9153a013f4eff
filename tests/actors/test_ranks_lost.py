"""Ranks that lose each other: the instance ends as one, its rooms with one cause, and pages return on proof alone."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace as replace_settings

from kvferry.actors.settings import DecodeSettings, FaultSettings, LinkSettings, PrefillSettings
from kvferry.memory.ledger import Holding
from kvferry.memory.proof import Quiescent, Quiet
from kvferry.protocol.errors import Cause, HandoffFailed, PeerError
from kvferry.protocol.instance import AbortConfirmed, CancelRoom, WriteChunk, WriteTo
from kvferry.protocol.messages import AbortTransfer, Drained, UnknownRoom
from kvferry.protocol.sender import SenderState
from kvferry.sim.checkers import Watcher
from kvferry.sim.loop import run
from kvferry.sim.system import SimOptions, SimSystem
from kvferry.transfer.contract import Descriptor, TransferError, WriteOutcome, WriteResult
from kvferry.transfer.fake import TCP

PROMPT = tuple(range(300, 400))
PAGES = 13  # 101 tokens in pages of 8
WHY = Cause("aborted", "the test says so")
LINKS = LinkSettings(heartbeat_s=0.5, silence_s=2.0, resend_s=0.25)


def options(delay_ms: float = 400, **more: Any) -> SimOptions:
    """Two ranks on each side, and writes that take their time."""
    return SimOptions(
        prefill=PrefillSettings(chunk_tokens=32, batch_tokens=64, pool_pages=64, pp=2),
        decode=DecodeSettings(pool_pages=64, pp=2),
        links=LINKS,
        faults=FaultSettings(delay_ms=delay_ms),
        **more,
    )


@dataclass
class Proofs:
    """By which proofs decode's pages have come back, and what is wrong with the system meanwhile."""

    system: SimSystem
    names: list[str] = field(default_factory=list)
    watcher: Watcher = field(init=False)

    def __post_init__(self) -> None:
        self.watcher = Watcher(self.system)
        ledger = self.system.decode().ledger
        release = ledger.release

        def noted(holding: Holding, proof: Quiescent) -> None:
            release(holding, proof)
            if isinstance(proof.peers, Quiet) and holding.lease is not None:
                self.names.append(proof.peers.names(holding.lease.writers))

        ledger.release = noted  # type: ignore[method-assign]


def writing(system: SimSystem) -> bool:
    """Both source ranks have writes under way."""
    followers = [f for f in system.followers() if f.role == "prefill"]
    rooms = [*system.prefill().rooms.values(), *(room for f in followers for room in f.rooms.values())]  # type: ignore[attr-defined]
    return len(rooms) == 2 and all(room.sending.open for room in rooms)


def computing(system: SimSystem) -> bool:
    return system.prefill().forward.running


def running(system: SimSystem) -> bool:
    return bool(system.decode().running)


PHASES = {"computing": computing, "writing": writing, "running": running}
RANKS = ["prefill-0", "prefill-0.1", "decode-0", "decode-0.1"]


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("name", RANKS)
def test_a_rank_that_is_killed_takes_its_instance_with_it(
    client_of: Any, wait_until: Any, served_again: Any, name: str, phase: str
) -> None:
    async def main() -> None:
        async with SimSystem(options()) as system:
            client, proofs = await client_of(system), Proofs(system)
            before = {n: process.address.incarnation for n, process in system.processes.items()}
            asked = asyncio.create_task(client.ask(PROMPT, max_tokens=60))
            await wait_until(lambda: PHASES[phase](system))
            system.kill(name)
            if phase == "running" and name.startswith("prefill"):
                assert await asked == list(system.engine().expected_tokens(PROMPT, 60)), "its part is over"
            else:
                with pytest.raises(PeerError) as got:
                    await asked
                text = got.value.cause.text()
                assert name.split(".")[0] in text or f"{before[name]:016x}" in text, "it names the rank that was lost"
            instance = name.split(".")[0]
            await wait_until(lambda: all(n in (name,) or not n.startswith(instance) for n in system.processes))
            system.spawn(name.split("-")[0], name)
            await served_again(system, client)
            proofs.watcher.look()
            after = {n: process.address.incarnation for n, process in system.processes.items()}
            changed = {n for n in before if n in after and before[n] != after[n]}
            assert changed == {instance, f"{instance}.1"}
            if phase == "writing" and name == "prefill-0.1":
                assert proofs.names[0] == "drained and exited", "the leader acks, the kernel knows of the other's end"

    run(main())


@pytest.mark.parametrize("phase", ["computing", "writing"])
@pytest.mark.parametrize("name", RANKS)
def test_a_rank_that_stands_still_is_given_up_by_the_others_and_writes_nothing_when_it_goes_on(
    client_of: Any, wait_until: Any, served_again: Any, name: str, phase: str
) -> None:
    """SIGSTOP for longer than every heartbeat limit, then SIGCONT. The stopped rank may still write, so decode's pages
    wait for its own word; meanwhile the other rank of its instance has ended and is back.
    """

    async def main() -> None:
        async with SimSystem(options()) as system:
            client, proofs = await client_of(system), Proofs(system)
            asked = asyncio.create_task(client.ask(PROMPT, max_tokens=5))
            await wait_until(lambda: PHASES[phase](system))
            stopped = system.processes[name].address
            system.network.stop(stopped)
            with pytest.raises(PeerError):
                await asked
            await asyncio.sleep(8)
            others = [n for n in RANKS if n.split(".")[0] == name.split(".")[0] and n != name]
            assert all(not getattr(system.processes[n].actor, "rooms", None) for n in others)
            if name.startswith("prefill"):
                assert system.counts()["decode-0"].quarantined == PAGES and not proofs.names
            system.network.resume(stopped)
            await wait_until(lambda: name in system.processes and system.processes[name].address != stopped)
            await served_again(system, client)
            proofs.watcher.look()
            if name.startswith("prefill"):
                assert proofs.names[0] == "drained", "the one that had stood still acks before it ends, too"

    run(main())


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize(
    ("a", "b"),
    [("prefill-0", "prefill-0.1"), ("decode-0", "decode-0.1"), ("prefill-0.1", "decode-0"), ("prefill-0", "decode-0")],
)
def test_a_partition_between_two_ranks_ends_and_everything_comes_back(
    client_of: Any, wait_until: Any, served_again: Any, a: str, b: str, phase: str
) -> None:
    async def main() -> None:
        async with SimSystem(options(delay_ms=1500)) as system:
            client, proofs = await client_of(system), Proofs(system)
            asked = asyncio.create_task(client.ask(PROMPT, max_tokens=400))
            await wait_until(lambda: PHASES[phase](system))
            ends = system.processes[a].address, system.processes[b].address
            system.network.cut(*ends)
            within_prefill = phase == "running" and a.startswith("prefill")
            if within_prefill:
                assert await asked == list(system.engine().expected_tokens(PROMPT, 400)), "prefill's part is over"
            else:
                with pytest.raises(PeerError):
                    await asked
            await asyncio.sleep(6)
            system.network.heal(*ends)
            await served_again(system, client)
            proofs.watcher.look()
            same_instance = a.split(".")[0] == b.split(".")[0]
            assert (system.processes[a].address != ends[0]) == same_instance
            assert (system.processes[b].address != ends[1]) == same_instance

    run(main())


def test_a_follower_that_is_slow_holds_the_forward_and_nothing_else(client_of: Any) -> None:
    """A step counts as done when it is done on every rank: until then no page that it names is handed on."""

    async def main() -> None:
        async with SimSystem(options(delay_ms=0)) as system:
            client = await client_of(system)
            for follower in system.followers():
                follower.engine._cost_s = lambda plan: 0.5  # type: ignore[attr-defined]
            loop = asyncio.get_running_loop()
            began_s = loop.time()
            assert await client.ask(PROMPT, max_tokens=4) == list(system.engine().expected_tokens(PROMPT, 4))
            assert 3.4 < loop.time() - began_s < 4.0, "4 chunks at prefill and 3 steps at decode, half a second each"
            # A request that is stopped in mid-step keeps its pages until the slow rank has done its part, too.
            live = client.open(PROMPT, max_tokens=50)
            tokens = await live.take()
            while len(tokens) < 3:
                tokens += await live.take()
            client.front.close_request(live)
            await asyncio.sleep(0.1)
            assert system.decode().forward.running and system.counts()["decode-0"].owned > 0
            assert await system.settle(2), system.counts()

    run(main())


def test_case_26_both_source_ranks_are_told_of_an_abort_and_both_ack(
    client_of: Any, wait_until: Any, heard_by: Any
) -> None:
    """Case 26: each rank acks by itself, to the owner of the pages; the room hears of both."""

    async def main() -> None:
        async with SimSystem(options()) as system:
            client, proofs = await client_of(system), Proofs(system)
            live = client.open(PROMPT, max_tokens=5)
            asked = asyncio.create_task(client.collect(live))
            await wait_until(lambda: writing(system))
            (room,) = system.decode().rooms.values()
            seen: list[Drained] = heard_by(Drained, system.decode())
            asked.cancel()
            await asyncio.gather(asked, return_exceptions=True)
            assert await system.settle(5), system.counts()
            assert sorted((m.rank, m.complete) for m in seen) == [(0, False), (1, False)]
            assert proofs.names == ["drained"] and room.machine.acks == {0, 1}
            journal = await client.backend.room(room.room)
            assert sorted(e["detail"]["rank"] for e in journal["events"] if e["event"] == "drained") == [0, 1]

    run(main())


@pytest.mark.parametrize("lost", [0, 1])
def test_case_26_an_ack_that_is_lost_is_asked_for_again_of_that_rank(
    client_of: Any, wait_until: Any, lost: int
) -> None:
    """Case 26: one rank's ack goes down with its link. The pages wait; on the next session that rank is asked, and
    answers that it doesn't know the room any more, which counts as drained.
    """

    async def main() -> None:
        async with SimSystem(options()) as system:
            client, proofs = await client_of(system), Proofs(system)
            asked = asyncio.create_task(client.ask(PROMPT, max_tokens=5))
            await wait_until(lambda: writing(system))
            decode, name = system.decode(), "prefill-0.1" if lost else "prefill-0"
            writer, owner = system.processes[name].actor, decode.network.address
            send = writer.network.send

            def drops_the_ack(incarnation: int, message: Any) -> bool:
                if isinstance(message, Drained) and incarnation == owner.incarnation:
                    writer.network.send = send  # type: ignore[method-assign]
                    writer.network.drop(incarnation)
                    return False
                return send(incarnation, message)

            writer.network.send = drops_the_ack  # type: ignore[method-assign]
            (room,) = decode.rooms.values()
            unknown: list[tuple[str, int]] = []
            take = decode._on_message[UnknownRoom]
            decode._on_message[UnknownRoom] = lambda peer, m: (unknown.append((peer.name, m.room)), take(peer, m))[1]
            asked.cancel()
            await asyncio.gather(asked, return_exceptions=True)
            await wait_until(lambda: room.machine.acks == {1 - lost})
            assert system.counts()["decode-0"].quarantined == PAGES
            assert await system.settle(5), system.counts()
            assert (name, room.room) in unknown and proofs.names == ["drained"]

    run(main())


def test_case_26_an_abort_of_a_room_that_is_cleared_is_answered_at_once(client_of: Any) -> None:
    """Case 26: by either rank, the follower having asked its leader."""

    async def main() -> None:
        async with SimSystem(options(delay_ms=0)) as system:
            client = await client_of(system)
            assert len(await client.ask(PROMPT, max_tokens=2)) == 2
            assert await system.settle(5)
            decode, heard = system.decode(), []
            decode._on_message[UnknownRoom] = lambda peer, m: heard.append((peer.name, m.room))
            for name in ("prefill-0", "prefill-0.1"):
                decode.network.send(system.processes[name].address.incarnation, AbortTransfer(77, WHY))
            await asyncio.sleep(0.01)
            assert sorted(heard) == [("prefill-0", 77), ("prefill-0.1", 77)]

    run(main())


def test_a_follower_does_not_deny_a_room_that_may_be_on_its_way_to_it(client_of: Any, wait_until: Any) -> None:
    """Decode aborts while the leader's order for the follower is held up on their link. A denial would free pages that
    the order has the follower write to: it waits for the leader's word, which comes behind the order.
    """

    async def main() -> None:
        async with SimSystem(options(delay_ms=0)) as system:
            client, proofs = await client_of(system), Proofs(system)
            (follower,) = [f for f in system.followers() if f.role == "prefill"]
            held: list[tuple[Any, Any]] = []
            handlers = dict(follower._on_message)

            def hold(peer: Any, message: Any) -> None:
                held.append((peer, message))

            for kind in (WriteTo, AbortConfirmed):
                follower._on_message[kind] = hold
            asked = asyncio.create_task(client.ask(PROMPT, max_tokens=5))
            await wait_until(lambda: bool(held))
            (room,) = system.decode().rooms.values()
            asked.cancel()
            await asyncio.gather(asked, return_exceptions=True)
            await wait_until(lambda: len(held) == 2)
            assert follower.asking == {room.room: {system.decode().network.address.incarnation}}
            await asyncio.sleep(3)
            assert system.counts()["decode-0"].quarantined == PAGES and room.machine.acks == {0}
            follower._on_message.update(handlers)
            for peer, message in held:
                follower._on_message[type(message)](peer, message)
            assert await system.settle(5)
            assert proofs.names == ["drained"] and not follower.rooms and not follower.asking

    run(main())


class _Ended:
    """A data plane that has not heard yet that its target has ended: it connects, and every write breaks."""

    def __init__(self, inner: Any) -> None:
        inner.connect, inner.write = self.connect, self.write
        inner.notify, inner.cancel = lambda peer, payload: None, lambda handle: None

    async def connect(self, descriptor: Descriptor) -> Any:
        return SimpleNamespace(descriptor=descriptor)

    def write(self, peer: Any, work: Any, on_end: Any) -> Any:
        asyncio.get_running_loop().call_soon(on_end, WriteResult(WriteOutcome.BROKEN, 0, None, "gone"))
        return SimpleNamespace(result=None)


def test_a_follower_that_is_told_to_write_to_a_decode_that_has_ended_lets_go_of_the_room(
    client_of: Any, wait_until: Any
) -> None:
    """The kernel says once that decode has ended; the leader's orders come later. What they have it write breaks, and
    nobody is left who could ask for it.
    """

    async def main() -> None:
        async with SimSystem(options(delay_ms=0)) as system:
            client = await client_of(system)
            assert len(await client.ask(PROMPT, max_tokens=1)) == 1
            (follower,) = [f for f in system.followers() if f.role == "prefill"]
            held: list[tuple[Any, Any]] = []
            handlers = dict(follower._on_message)
            for kind in (WriteTo, WriteChunk, CancelRoom):
                follower._on_message[kind] = lambda peer, message: held.append((peer, message))
            asked = asyncio.create_task(client.ask(PROMPT, max_tokens=5))
            await wait_until(
                lambda: any(isinstance(message, WriteChunk) and message.first == 96 for _, message in held)
            )
            exits: list[Any] = []
            heard = follower.peer_exited
            follower.peer_exited = lambda peer: (exits.append(peer), heard(peer))[1]  # type: ignore[method-assign]
            system.kill("decode-0")
            await wait_until(lambda: bool(exits))
            _Ended(follower.endpoint)
            follower._on_message.update(handlers)
            for peer, message in held:
                if not isinstance(message, CancelRoom):  # it comes, too, but later
                    follower._on_message[type(message)](peer, message)
            await wait_until(lambda: [r.machine.state for r in follower.rooms.values()] == [SenderState.BROKEN])
            await asyncio.gather(asked, return_exceptions=True)
            assert await system.settle(20), system.counts()
            assert not follower.rooms

    run(main())


def test_a_follower_whose_leader_is_gone_denies_what_it_does_not_know(client_of: Any, wait_until: Any) -> None:
    """Nothing can be on its way any more."""

    async def main() -> None:
        async with SimSystem(options(delay_ms=0)) as system:
            client = await client_of(system)
            assert len(await client.ask(PROMPT, max_tokens=1)) == 1
            (follower,) = [f for f in system.followers() if f.role == "prefill"]
            heard: list[int] = []
            system.decode()._on_message[UnknownRoom] = lambda _, m: heard.append(m.room)
            system.kill("prefill-0")
            await wait_until(lambda: bool(follower.ending))
            follower._abort_transfer(system.decode().network.address, AbortTransfer(99, WHY))
            await asyncio.sleep(0.01)
            assert heard == [99]

    run(main())


def test_a_follower_that_can_not_connect_fails_its_rooms_with_its_reason(client_of: Any) -> None:
    async def main() -> None:
        async with SimSystem(options(delay_ms=0)) as system:
            client = await client_of(system)
            (follower,) = [f for f in system.followers() if f.role == "prefill"]
            connect = follower.endpoint.connect

            async def refused(_: Any) -> Any:
                raise TransferError("the data plane refuses")

            follower.endpoint.connect = refused  # type: ignore[method-assign]
            with pytest.raises(HandoffFailed, match=r"the data plane refuses .*leg prefill, rank 1"):
                await client.ask(PROMPT, max_tokens=5)
            assert await system.settle(5), system.counts()
            follower.endpoint.connect = connect  # type: ignore[method-assign]
            assert await client.ask(PROMPT, max_tokens=3) == list(system.engine().expected_tokens(PROMPT, 3))

    run(main())


def test_an_instance_is_registered_once_all_its_ranks_have_joined(wait_until: Any) -> None:
    async def main() -> None:
        async with SimSystem(options()) as system:
            leader = system.prefill()
            assert [m.address.name for m in leader.info.members] == ["prefill-0", "prefill-0.1"]
            system.kill("prefill-0.1")
            await wait_until(lambda: "prefill-0" not in system.processes)
            await wait_until(lambda: "prefill-0" in system.processes)
            await asyncio.sleep(3)
            names = {rank.address.name for rank in system.router.roster.ranks if rank.role == "prefill"}
            assert not names and system.router.roster.missing == ("prefill: 0 of 1 instances are complete",)
            system.spawn("prefill", "prefill-0.1")
            await wait_until(lambda: system.ready)

    run(main())


@pytest.mark.parametrize("fault", ["kill", "stop", "cut"])
@pytest.mark.parametrize("name", ["prefill-0", "prefill-0.1"])
def test_over_tcp_a_writer_is_shut_out_at_every_rank_that_it_writes_to(
    client_of: Any, wait_until: Any, served_again: Any, name: str, fault: str
) -> None:
    """Two stages write to three: the first rank of prefill has something for two of them. Its silence proves nothing,
    and its end neither: its pages come back when both ranks here have destroyed its agents.
    """
    more = replace(options(delay_ms=1500), proofs=TCP, decode=replace_settings(options().decode, pp=3))

    async def main() -> None:
        async with SimSystem(more) as system:
            client, proofs = await client_of(system), Proofs(system)
            asked = asyncio.create_task(client.ask(PROMPT, max_tokens=5))
            await wait_until(lambda: bool(system.prefill().rooms) and system.prefill().forward.done > 1)
            (room,) = system.decode().rooms.values()
            assert room.routes == {0: (0, 1), 1: (2,)}
            lost, owner = system.processes[name].address, system.decode().network.address
            if fault == "kill":
                system.kill(name)
            elif fault == "stop":
                system.network.stop(lost)
            else:
                system.network.cut(lost, owner)
            with pytest.raises(PeerError):
                await asked
            await wait_until(lambda: "revoked" in " ".join(proofs.names))
            assert room.closed >= {pair for pair in room.pairs if pair[0] == lost.incarnation}
            assert system.counts()["decode-0"].at_baseline
            if fault == "kill":
                await wait_until(lambda: not any(n.startswith("prefill") for n in system.processes))
                system.spawn("prefill", name)
            elif fault == "stop":
                system.network.resume(lost)
                await wait_until(lambda: name in system.processes and system.processes[name].address != lost)
            else:
                system.network.heal(lost, owner)
            await served_again(system, client)
            proofs.watcher.look()

    run(main())
