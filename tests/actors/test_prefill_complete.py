"""prefill_complete: compute, then allocate, then write. Pools that are too small, on virtual time, with real bytes.

The scene: decode has 15 pages of 8 and serves `JAM`, which leaves no room for a prompt of 13 pages; prefill has 14
pages, so two such prompts can't both be kept.
"""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from kvferry.actors.prefill.kept import KeptPrompts
from kvferry.actors.prefill.room import PrefillRoom
from kvferry.actors.prefill.siblings import GRACE_S
from kvferry.actors.settings import ClockSettings, DecodeSettings, FaultSettings, PrefillSettings, UnifiedSettings
from kvferry.engine.contract import StepPlan, StepResult
from kvferry.memory.ledger import PageLedger
from kvferry.protocol.errors import DeadlineExceeded
from kvferry.protocol.kvpoll import KVPoll
from kvferry.protocol.messages import Destination, OpenDecode, OpenPrefill, PrefillDone
from kvferry.protocol.rank import EARLY, PREFILL_COMPLETE
from kvferry.protocol.receiver import ReceiverState
from kvferry.protocol.sender import SenderState
from kvferry.sim.loop import run
from kvferry.sim.system import SimOptions, SimSystem

JAM = (7, 8, 9)
JAM_TOKENS = 100  # 13 pages in the end, and 2 s of decode steps
ONE, TWO, THREE = (tuple(range(start, start + 100)) for start in (1000, 2000, 3000))
S = SenderState


def scene(**options: Any) -> SimOptions:
    small: dict[str, Any] = {
        "policy": PREFILL_COMPLETE,
        "prefill": PrefillSettings(pool_pages=14, chunk_tokens=32, batch_tokens=64),
        "decode": DecodeSettings(pool_pages=15),
    }
    return SimOptions(**{**small, **options})


def right(system: SimSystem, prompt: tuple[int, ...], count: int) -> list[int]:
    name = next(name for name in system.processes if name.startswith(("prefill", "decode", "unified")))
    return list(system.engine(name).expected_tokens(prompt, count))


class Scene:
    """A client that is served, so that decode is full, and others that wait."""

    def __init__(self, system: SimSystem, client: Any) -> None:
        self.system, self.client = system, client
        self.asked: list[tuple[tuple[int, ...], Any, asyncio.Task[Any]]] = []

    async def jam(self, wait_until: Any) -> None:
        self.ask(JAM, JAM_TOKENS)
        await wait_until(lambda: self.system.decode().running)

    def ask(self, prompt: tuple[int, ...], max_tokens: int = 5) -> Any:
        live = self.client.open(prompt, max_tokens=max_tokens)
        task = asyncio.create_task(self.client.collect(live))
        task.add_done_callback(lambda task: task.cancelled() or task.exception())  # of those whom nobody awaits
        self.asked.append((prompt, live, task))
        return live

    def room(self, live: Any) -> Any:
        """Prefill's record of the request, or None."""
        process = self.system.processes.get("prefill-0")
        rooms = process.actor.leg_rooms() if process is not None else []  # type: ignore[attr-defined]
        return next((room for room in rooms if room.spec.request == live.spec.request), None)

    def state(self, live: Any) -> SenderState | None:
        room = self.room(live)
        return room.machine.state if room is not None and room.opened else None

    async def finish(self, *gone: Any) -> None:
        """Everybody but those who have gone gets the right tokens, and nothing is left."""
        for prompt, live, task in self.asked:
            if live in gone:
                task.cancel()
                continue
            tokens = await task
            assert [t.token_id for t in tokens] == right(self.system, prompt, len(tokens)), prompt[:1]
            assert [t.index for t in tokens] == list(range(live.spec.sampling.max_tokens))
        assert await self.system.settle(GRACE_S + 5), self.system.counts()
        assert not any(counts.cached for counts in self.system.counts().values())


def slow_to_connect(system: SimSystem, delay_s: float) -> None:
    """So that a room can be met between its destination and its pages."""
    endpoint: Any = system.prefill().endpoint
    connect = endpoint.connect

    async def later(descriptor: Any) -> Any:
        await asyncio.sleep(delay_s)
        return await connect(descriptor)

    endpoint.connect = later


# --- the order of the work ---


def test_first_tokens_come_while_decode_is_full_and_answers_are_those_of_early(client_of: Any, wait_until: Any) -> None:
    """Two prompts are computed while decode has no room for either, though prefill can't keep both."""

    async def main() -> None:
        async with SimSystem(scene()) as system:
            play = Scene(system, await client_of(system))
            await play.jam(wait_until)
            lives = [play.ask(ONE), play.ask(TWO)]
            await wait_until(lambda: all(live.stream.next_index for live in lives))
            assert [play.state(live) for live in lives] == [S.KEPT, S.KEPT]
            decode, counts = system.decode(), system.counts()["prefill-0"]
            assert len(decode.waiting) == 2 and len(decode.running) == 1
            assert (counts.cached, counts.free, counts.owned) == (14, 0, 0), "1 page of ONE and all 13 of TWO"
            await play.finish()
            counted = system.prefill().counts
            assert counted["pages displaced"] >= 12
            assert counted["prompt tokens computed again"] >= 92

    run(main())


def test_the_journal_tells_the_order(client_of: Any) -> None:
    async def main() -> None:
        async with SimSystem(SimOptions(policy=PREFILL_COMPLETE, bandwidth_bytes_s=1e5)) as system:
            client = await client_of(system)
            live = client.open(ONE, max_tokens=5)
            await client.collect(live)
            assert await system.settle(5)
            journal = await client.journal(live)
            events = [event["event"] for event in journal["events"]]
            order = ["prepared", "prefill done", "-> PrefillDone", "admitted", "sending", "drained", "committed"]
            places = [events.index(event) for event in order]
            assert places[:5] == sorted(places[:5]) and "computed" not in events
            chunks = [e["detail"]["tokens"] for e in journal["events"] if e["event"] == "prepared"]
            assert chunks == [32, 32, 32, 4]
            states = [row["state"] for row in journal["kvpoll"]]
            assert states == ["BOOTSTRAPPING", "WAITING_FOR_INPUT", "TRANSFERRING", "SUCCESS"]
            assert journal["kv_bytes"] == 100 * 2 * 4 * 4 * 3 * 2

    run(main())


@pytest.mark.parametrize(("prefill_pages", "decode_pages"), [(64, 15), (14, 64), (14, 15), (20, 30)])
def test_everything_finishes_in_pools_that_are_too_small(client_of: Any, prefill_pages: int, decode_pages: int) -> None:
    """Twelve prompts of 1 to 13 pages, all at once; each is computed twice at most."""
    options = scene(
        prefill=PrefillSettings(pool_pages=prefill_pages, chunk_tokens=32, batch_tokens=64),
        decode=DecodeSettings(pool_pages=decode_pages),
    )

    async def main() -> None:
        async with SimSystem(options) as system:
            play = Scene(system, await client_of(system))
            lives = [play.ask(tuple(range(500 * at, 500 * at + 1 + 9 * (at % 12))), 12) for at in range(1, 13)]
            await play.finish()
            prompts = sum(live.attempt == 0 and len(live.spec.prompt_ids) for live in lives)
            counted = system.prefill().counts
            if prefill_pages == 14:
                assert counted["pages displaced"] > 0
            if not any(live.attempt for live in lives):
                assert counted["prompt tokens computed again"] <= prompts

    run(main())


def test_what_is_kept_for_a_decode_that_is_full_never_holds_up_another_decode(client_of: Any, wait_until: Any) -> None:
    """Prefill is full of finished work for decode-0; a request for decode-1 passes at once."""
    options = scene(decode=DecodeSettings(pool_pages=15, instances=2))

    async def main() -> None:
        async with SimSystem(options) as system:
            client = await client_of(system)
            submit = client.backend.submit
            target = {"name": "decode-0"}

            async def directed(spec: Any, attempt: int) -> Any:
                prefer = system.processes[target["name"]].address.incarnation
                return await submit(msgspec.structs.replace(spec, prefer=prefer), attempt)

            client.backend.submit = directed
            play = Scene(system, client)
            await play.jam(wait_until)
            waiting = play.ask(ONE)
            await wait_until(lambda: play.state(waiting) is S.KEPT)
            target["name"] = "decode-1"
            live = play.ask(TWO)
            await asyncio.wait_for(play.asked[-1][2], 1.0)  # of virtual time; decode-0 is full for 2 s
            assert play.state(waiting) is S.KEPT and live.decode.name == "decode-1"
            await play.finish()

    run(main())


def test_the_first_token_is_final_though_its_page_is_computed_again(client_of: Any, wait_until: Any) -> None:
    """Another forward might draw another token (floats in another order): what the front was told stays."""

    async def main() -> None:
        async with SimSystem(scene()) as system:
            engine: Any = system.engine("prefill-0")
            step, drawn = engine.step, dict[int, int]()

            async def other_tokens(plan: StepPlan) -> StepResult:
                """Whoever is drawn for a second time gets another token."""
                result = await step(plan)
                found = []
                for sequence, one in zip(plan.sequences, result.drawn, strict=True):
                    if one is not None:
                        drawn[sequence.key] = drawn.get(sequence.key, 0) + 1
                        if drawn[sequence.key] > 1:
                            one = msgspec.structs.replace(one, token_id=(one.token_id + 1) % 50_000)
                    found.append(one)
                return StepResult(result.step, tuple(found), result.compute_s)

            engine.step = other_tokens
            play = Scene(system, await client_of(system))
            await play.jam(wait_until)
            play.ask(ONE)
            play.ask(TWO)
            await play.finish()
            assert sorted(drawn.values()) == [1, 1, 2] or sorted(drawn.values()) == [1, 2, 2]

    run(main())


def test_samples_of_one_prompt_share_its_pages(client_of: Any) -> None:
    """Twelve full pages once, and the rest four times; kept by all of them while decode has room for one at a time."""

    async def main() -> None:
        async with SimSystem(scene(prefill=PrefillSettings(pool_pages=17, chunk_tokens=32, batch_tokens=64))) as system:
            client = await client_of(system)
            submit = client.backend.submit

            async def grouped(spec: Any, attempt: int) -> Any:
                return await submit(msgspec.structs.replace(spec, group=4711, samples=4), attempt)

            client.backend.submit = grouped
            play = Scene(system, client)
            for _ in range(4):
                play.ask(ONE)
            await play.finish()
            counted = system.prefill().counts
            assert counted["prompt tokens shared"] == 3 * 96
            assert counted["pages displaced"] == 0, "12 + 4 pages hold all of them"

    run(main())


def test_a_unified_instance_keeps_to_its_own_order(client_of: Any) -> None:
    """Its prefill computes into the pages that its decode runs on: there is nothing to compute into before."""
    options = SimOptions(
        policy=PREFILL_COMPLETE, prefill=PrefillSettings(instances=0), decode=DecodeSettings(instances=0),
        unified=UnifiedSettings(instances=1, chunk_tokens=32, batch_tokens=64, pool_pages=30),
    )  # fmt: skip

    async def main() -> None:
        async with SimSystem(options) as system:
            play = Scene(system, await client_of(system))
            lives = [play.ask(prompt) for prompt in (ONE, TWO, THREE)]
            await play.finish()
            journal = await play.client.journal(lives[0])
            events = [event["event"] for event in journal["events"]]
            assert events.index("admitted") < events.index("computed") < events.index("prefill done")

    run(main())


# --- ends, in every phase ---

PHASES = [S.AWAITING_PAGES, S.COMPUTING_AHEAD, S.KEPT, S.QUEUED, S.COMPUTING, S.FLUSHING]


async def until_phase(play: Scene, wait_until: Any, phase: SenderState) -> Any:
    """ONE goes through all phases but the first, which TWO is in meanwhile; ONE loses pages to TWO while it is kept."""
    slow_to_connect(play.system, 0.05)
    await play.jam(wait_until)
    lives = [play.ask(ONE), play.ask(TWO)]
    subject = lives[1] if phase is S.AWAITING_PAGES else lives[0]
    await wait_until(lambda: play.state(subject) is phase)
    return subject


@pytest.mark.parametrize("phase", PHASES)
def test_a_client_may_leave_in_every_phase(client_of: Any, wait_until: Any, phase: SenderState) -> None:
    async def main() -> None:
        async with SimSystem(scene(faults=FaultSettings(delay_ms=60))) as system:
            play = Scene(system, await client_of(system))
            subject = await until_phase(play, wait_until, phase)
            play.client.front.close_request(subject)
            await play.finish(subject)

    run(main())


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("name", ["prefill-0", "decode-0", "router-0"])
def test_every_process_may_die_in_every_phase(client_of: Any, wait_until: Any, phase: SenderState, name: str) -> None:
    """Everybody gets the right tokens from a later attempt, and no page is lost."""

    async def main() -> None:
        async with SimSystem(scene(faults=FaultSettings(delay_ms=60))) as system:
            play = Scene(system, await client_of(system, attempts=3))
            await until_phase(play, wait_until, phase)
            system.kill(name)
            await asyncio.sleep(0.3)
            system.spawn(name.split("-")[0], name)
            await play.finish()

    run(main())


@pytest.mark.parametrize("phase", PHASES)
def test_the_front_may_die_in_every_phase(client_of: Any, wait_until: Any, phase: SenderState) -> None:
    async def main() -> None:
        async with SimSystem(scene(faults=FaultSettings(delay_ms=60))) as system:
            play = Scene(system, await client_of(system))
            await until_phase(play, wait_until, phase)
            system.network.kill(play.client.network.address)
            for _, _, task in play.asked:
                task.cancel()
            assert await system.settle(10), system.counts()
            assert system.prefill().queues() == {"rooms": 0, "waiting": 0, "active": 0, "kept": 0}

    run(main())


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("name", ["prefill-0", "decode-0"])
def test_an_instance_may_leave_in_every_phase(client_of: Any, wait_until: Any, phase: SenderState, name: str) -> None:
    """What it can't finish it hands over, and another instance does."""
    options = scene(faults=FaultSettings(delay_ms=60))

    async def main() -> None:
        async with SimSystem(options) as system:
            play = Scene(system, await client_of(system, attempts=3))
            await until_phase(play, wait_until, phase)
            role = name.split("-")[0]
            system.spawn(role, f"{role}-1")
            leader: Any = system.processes[name].actor
            await leader.drain(0.2)
            await wait_until(lambda: not leader.rooms)
            system.kill(name)
            for prompt, _, task in play.asked:
                tokens = await task
                assert [t.token_id for t in tokens] == right(system, prompt, len(tokens))
            assert await system.settle(10), system.counts()

    run(main())


# --- clocks ---


@pytest.mark.parametrize(
    ("clocks", "cost_s", "faults", "clock"),
    [
        ({"prefill_wait_s": 0.2}, 0.15, {}, "waiting for prefill"),
        ({"admission_wait_s": 0.3}, 0.02, {}, "waiting for admission"),
        ({"transfer_wait_s": 0.5, "admission_wait_s": 9.0}, 0.02, {"stall_after": 1}, "waiting for transfer"),
    ],
)
def test_each_wait_has_its_clock(
    client_of: Any, wait_until: Any, clocks: dict[str, float], cost_s: float, faults: dict[str, int], clock: str
) -> None:
    """Prefill's runs first, then admission's, then the transfer's, whose part is what is computed again as well."""
    options = scene(
        clocks=ClockSettings(**clocks), faults=FaultSettings(**faults),
        cost_s=lambda plan: cost_s if len(plan.sequences[0].token_ids) > 1 else 0.02,
    )  # fmt: skip

    async def main() -> None:
        async with SimSystem(options) as system:
            play = Scene(system, await client_of(system))
            await play.jam(wait_until)
            live = play.ask(ONE)
            with pytest.raises(DeadlineExceeded, match=clock):
                await play.asked[-1][2]
            await play.finish(live)

    run(main())


# --- repeats and strangers ---


def test_case_7_a_room_is_claimed_once_and_a_destination_counts_once(client_of: Any, wait_until: Any) -> None:
    """Case 7: while a room is kept it is opened a second time at both legs, prefill's word is repeated, and a second
    destination follows the first: the room is served as if nothing had happened.
    """

    async def main() -> None:
        async with SimSystem(scene(router=SimOptions().router)) as system:
            play = Scene(system, await client_of(system))
            slow_to_connect(system, 0.05)
            await play.jam(wait_until)
            live = play.ask(ONE)
            await wait_until(lambda: play.state(live) is S.KEPT)
            room, prefill, decode = play.room(live), system.prefill(), system.decode()
            stranger = system.network.open("stranger", system.options.links).address
            for leader, message in (
                (prefill, OpenPrefill(room.room, 0, room.spec, room.peer)),
                (decode, OpenDecode(room.room, 0, room.spec, prefill.network.address)),
            ):
                leader._on_message[type(message)](stranger, message)  # type: ignore[operator]
                assert leader.counts["rooms refused"] == 1 and leader.rooms[room.room].router != stranger
            await wait_until(lambda: decode.rooms[room.room].machine.state is ReceiverState.QUEUED)
            decode._prefill_done(room.router, PrefillDone(room.room, 0))
            assert len(decode.waiting) == 1
            await wait_until(lambda: play.state(live) is S.QUEUED)
            first = room.destination
            prefill._destination(room.peer, msgspec.structs.replace(first, pages=tuple(reversed(first.pages))))
            prefill._destination(stranger, first)
            assert room.destination is first and prefill.counts["destinations from a stranger"] == 1
            await play.finish()

    run(main())


def test_a_destination_that_nobody_asked_for_changes_nothing(client_of: Any, wait_until: Any) -> None:
    async def main() -> None:
        async with SimSystem(scene()) as system:
            play = Scene(system, await client_of(system))
            live = play.ask(ONE)
            await wait_until(lambda: play.state(live) is S.COMPUTING_AHEAD)
            room = play.room(live)
            system.prefill()._destination(room.peer, Destination(room.room, (0,), 0, 0, b"", 0, (0,)))
            assert room.destination is None and play.state(live) is S.COMPUTING_AHEAD
            await play.finish()

    run(main())


# --- what the router is told ---


def test_loads_count_what_is_to_do_and_what_will_be_taken(client_of: Any, wait_until: Any) -> None:
    """Finished work is no work for prefill, displaced or not, until its destination comes; and decode's pages that
    rooms will need whose prompts are still computed are not free, though nobody waits for them yet.
    """

    async def main() -> None:
        async with SimSystem(scene()) as system:
            play = Scene(system, await client_of(system))
            slow_to_connect(system, 0.05)
            prefill, decode = system.prefill(), system.decode()
            one = play.ask(ONE)
            coming = lambda: [r for r in decode.leg_rooms() if r.opened]  # noqa: E731
            await wait_until(lambda: play.state(one) is S.COMPUTING_AHEAD and coming())
            load = decode.load()
            assert (load.waiting, load.running, load.free_pages, load.free_places) == (0, 0, 15 - 13, 31)
            await play.asked[0][2]
            await wait_until(lambda: not decode.rooms)
            await play.jam(wait_until)
            two, three = play.ask(TWO), play.ask(THREE)
            await wait_until(lambda: len(coming()) == 3)
            load = decode.load()
            assert (load.waiting, load.running, load.free_pages, load.free_places) == (1, 1, 15 - 1 - 13, 30)
            assert decode.waiting == [], "THREE will wait for a place, but does not yet"
            await wait_until(lambda: play.state(three) is S.KEPT)
            assert play.state(two) is S.KEPT and play.room(two).remaining == 92
            assert prefill.load().queued_tokens == 0 and decode.load().waiting == 2
            await wait_until(lambda: play.state(two) is S.QUEUED)
            assert prefill.load().queued_tokens == 92
            await play.finish()

    run(main())


# --- next attempts ---


@pytest.mark.parametrize("policy", [EARLY, PREFILL_COMPLETE])
def test_case_37_a_retracted_request_is_computed_again_and_waits_for_no_second_push(
    client_of: Any, heard_by: Any, policy: str
) -> None:
    """Case 37: a transfer is sent once. A request that decode gives up and takes again comes back as another room,
    whose prompt and tokens prefill computes, and whose KV goes to pages that are handed out anew.
    """

    async def main() -> None:
        async with SimSystem(SimOptions(policy=policy, decode=DecodeSettings(pool_pages=15))) as system:
            client = await client_of(system, attempts=1)
            destinations: list[Destination] = heard_by(Destination, system.prefill())
            prompts = [tuple(range(100 * at, 100 * at + 20)) for at in range(1, 5)]
            lives = [client.open(prompt, max_tokens=60) for prompt in prompts]
            answers = await asyncio.gather(*map(client.collect, lives))
            for prompt, tokens in zip(prompts, answers, strict=True):
                assert [t.token_id for t in tokens] == right(system, prompt, 60)
            again = [live for live in lives if live.attempt > 0]
            assert again and len(destinations) == 4 + sum(live.attempt for live in lives)
            assert len({destination.room for destination in destinations}) == len(destinations)
            for live in again:
                journal = await client.journal(live)
                assert journal["prompt_tokens"] == 20 + len(live.spec.frozen_ids) > 20
                computed = [e for e in journal["events"] if e["event"] in ("computed", "prepared")]
                assert sum(e["detail"]["tokens"] for e in computed) >= journal["prompt_tokens"]
            assert await system.settle(10)

    run(main())


def test_kvpoll_of_both_ends_while_a_prompt_is_kept(client_of: Any, wait_until: Any) -> None:
    async def main() -> None:
        async with SimSystem(scene()) as system:
            play = Scene(system, await client_of(system))
            await play.jam(wait_until)
            live = play.ask(ONE)
            await wait_until(lambda: play.state(live) is S.KEPT)
            room = play.room(live)
            assert room.machine.kvpoll is KVPoll.BOOTSTRAPPING and room.holding is None
            assert system.decode().rooms[room.room].machine.kvpoll is KVPoll.BOOTSTRAPPING
            await play.finish()

    run(main())


# --- who gives way ---


class Prompts:
    """Prompts of three pages each in a pool of twelve, all kept."""

    def __init__(self, count: int) -> None:
        self.ledger = PageLedger(12, 12)
        self.kept = KeptPrompts(self.ledger, 8)
        self.rooms = [self.room(number) for number in range(1, count + 1)]
        for room in self.rooms:
            room.holding = self.ledger.reserve(room.room, 3, 1)
            self.kept.keep(room, 0)

    @staticmethod
    def room(number: int) -> Any:
        from types import SimpleNamespace

        spec = SimpleNamespace(was_admitted=False)
        return SimpleNamespace(room=number, spec=spec, destination=None, computed=24, holding=None)

    def left(self) -> list[int]:
        return [len(self.kept.pages(room)) for room in self.rooms]


def test_the_prompt_that_is_needed_latest_gives_way_from_its_end() -> None:
    prompts = Prompts(4)
    new, lost = prompts.room(9), []
    pages = prompts.kept.pages(prompts.rooms[3])
    for _ in range(3):
        lost.append(prompts.kept.give_way(new, 2, 0))
    assert lost == [2, 1, 2] and prompts.left() == [3, 3, 1, 0] and prompts.ledger.free == 5
    assert [room.computed for room in prompts.rooms] == [24, 24, 8, 0]
    assert set(pages) <= set(prompts.ledger._free)
    assert prompts.ledger.free_rows == 12, "what is kept has no row"


def test_a_retracted_request_and_one_with_a_destination_give_way_last() -> None:
    prompts = Prompts(4)
    third, fourth = prompts.rooms[2:]
    third.destination, fourth.spec.was_admitted = object(), True
    new = prompts.room(9)
    while prompts.kept.give_way(new, 3, 0):
        pass
    assert prompts.left() == [0, 0, 3, 0], "those with a destination stand before a new one"
    new.destination = object()
    assert prompts.kept.give_way(third, 3, 0) == 0, "nobody gives way to itself"
    assert prompts.kept.give_way(new, 3, 0) == 3 and prompts.left() == [0, 0, 0, 0]
    order = Prompts(4)
    order.rooms[3].spec.was_admitted = True
    order.kept.give_way(new, 3, 0)
    assert order.left() == [3, 3, 0, 3]


def test_a_page_that_another_holding_has_is_lost_but_not_free() -> None:
    prompts = Prompts(2)
    pages = prompts.kept.pages(prompts.rooms[1])
    reader = prompts.ledger.reserve(77, 1, 0, shared=pages[:2])
    assert reader is not None
    assert prompts.kept.give_way(prompts.room(9), 3, 0) == 3
    assert prompts.ledger.free == 12 - 3 - 3
    prompts.ledger.audit({1: prompts.kept.pages(prompts.rooms[0]), 77: reader.pages})


def test_types_of_the_stand_ins() -> None:
    """They have the fields of the rooms that they stand for."""
    names = vars(Prompts.room(1)).keys()
    assert names <= {*PrefillRoom.__dataclass_fields__}
