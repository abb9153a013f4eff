"""Everything at once, on virtual time: random systems, requests and faults, seed by seed.

`python tests/sim/test_stress.py FIRST END` runs the seeds from FIRST up to END; with one number, that seed alone.
"""

from __future__ import annotations

import asyncio
import os
import sys
import traceback
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any

import msgspec
import pytest

from kvferry.actors.prefill.siblings import GRACE_S
from kvferry.actors.router.router import Router
from kvferry.actors.settings import (
    ClockSettings,
    DecodeSettings,
    FaultSettings,
    LinkSettings,
    PrefillSettings,
    RouterSettings,
    UnifiedSettings,
)
from kvferry.obs.metrics import FrontMetrics
from kvferry.protocol.errors import Cause, KVFerryError, PeerLost, Unavailable
from kvferry.protocol.messages import Address, RequestSpec, Roster, Sampling, Token
from kvferry.protocol.outcome import Outcome
from kvferry.serve.attempts import AttemptPolicy
from kvferry.serve.choices import Choices
from kvferry.serve.front import Front
from kvferry.serve.gateway import FrontInfo
from kvferry.serve.prepare import sample_seed
from kvferry.sim.checkers import Broken, Watcher, Writes, check_idle
from kvferry.sim.loop import VirtualClock, run
from kvferry.sim.network import SimFaults
from kvferry.sim.system import SimOptions, SimSystem
from kvferry.transfer.contract import TransferError
from kvferry.transfer.faulty import FaultyEndpoint

LINKS = LinkSettings(heartbeat_s=0.5, silence_s=3.0, resend_s=0.25)
CLOCKS = ClockSettings(prefill_wait_s=90, transfer_wait_s=90, admission_wait_s=120, no_progress_s=20)
ARRIVALS_S = 6.0
HOSTILE = bool(os.environ.get("HOSTILE"))
FAULTS = [int(n) for n in os.environ.get("FAULTS", "0,1,1,2,3").split(",")]
#: Longer than any request may live: two attempts that run into their clocks, and the recovery time.
PATIENCE_S = 400.0


class Routers:
    """The front's backend: routers in turn, siblings to one; one that is killed ends its calls, as Ray does."""

    def __init__(self, system: SimSystem) -> None:
        self._system = system
        self._turn = 0

    async def submit(self, spec: RequestSpec, attempt: int) -> Outcome:
        self._turn += 1
        count = self._system.options.router.instances
        name = f"router-{(spec.group + attempt if spec.group else self._turn) % count}"
        return await self.ask(name, spec, attempt)

    async def ask(self, name: str, spec: RequestSpec, attempt: int) -> Outcome:
        process = self._system.processes.get(name)
        lost = PeerLost(Cause("peer_lost", "the router is gone", "router", peer=name))
        if process is None or not isinstance(process.actor, Router):
            raise lost
        call = asyncio.ensure_future(process.actor.submit(spec, attempt))
        try:
            await asyncio.wait({call, process.task}, return_when=asyncio.FIRST_COMPLETED)
            if not call.done():
                raise lost
            return call.result()
        finally:
            call.cancel()

    async def roster(self) -> Roster:
        for router in self._system.routers():
            return router.roster
        raise Unavailable(Cause("unavailable", "no router", leg="router"))

    async def status(self) -> dict[str, Any]:
        return {}

    async def room(self, room: int) -> dict[str, Any] | None:
        return None


@dataclass
class Run:
    """One seed's system and what happened to its clients."""

    seed: int
    options: SimOptions
    faults: list[str] = field(default_factory=list)
    ends: Counter[str] = field(default_factory=Counter)
    errors: list[str] = field(default_factory=list)


def system_of(random: Random, seed: int) -> SimOptions:
    """Two routers, and pools that hold a few requests each."""
    unified = UnifiedSettings(
        instances=random.choice([0, 0, 1]), pool_pages=random.randint(16, 40), chunk_tokens=16, batch_tokens=48,
        max_running=random.randint(3, 8),
    )  # fmt: skip
    return SimOptions(
        seed=seed,
        prefill=PrefillSettings(
            instances=random.randint(2, 3), pool_pages=random.randint(16, 40), chunk_tokens=random.choice([16, 32]),
            batch_tokens=random.choice([32, 64]),
        ),
        decode=DecodeSettings(
            instances=random.randint(2, 3), pool_pages=random.randint(15, 30), max_running=random.randint(3, 8)
        ),
        unified=unified,
        router=RouterSettings(
            instances=2, queue_limit=random.choice([2, 128, 128]), breaker_failures=random.randint(1, 3),
            breaker_open_s=random.choice([1.0, 5.0]), breaker_open_max_s=10.0,
            policy=random.choice(["predicted", "power_of_two", "round_robin", "random"]),
        ),
        clocks=CLOCKS,
        links=LINKS if not HOSTILE else msgspec.structs.replace(LINKS, mailbox=random.choice([30, 100, 8192]), window=random.choice([16, 64, 4096])),
        faults=FaultSettings(delay_ms=random.choice([0, 5, 60]), stall_after=random.choice([-1, -1, 3, 20]) if HOSTILE else -1),
        cancel_ends=not HOSTILE or random.random() < 0.5,
    )  # fmt: skip


def sampling_of(random: Random, max_tokens: int) -> Sampling:
    penalties = random.random() < 0.3
    return Sampling(
        max_tokens,
        temperature=random.choice([0.0, 0.8]),
        seed=random.getrandbits(63),
        presence_penalty=0.5 if penalties else 0.0,
        repetition_penalty=1.1 if penalties and random.random() < 0.5 else 1.0,
        logprobs=random.choice([-1, -1, 0, 3]),
    )


class Stress:
    """The clients, the faults, and the two fronts."""

    def __init__(self, system: SimSystem, random: Random, record: Run) -> None:
        self.system, self.random, self.record = system, random, record
        self.fronts = [self._front(f"front-{i}") for i in range(2)]
        self.addresses: dict[str, Address] = {}
        self.dead_fronts: set[int] = set()
        self.calm = False
        self.engine = system.engine("prefill-0")
        options = system.options
        pools = [options.prefill.pool_pages, options.decode.pool_pages]
        pools += [options.unified.pool_pages] * bool(options.unified.instances)
        self.limit = min(pools) * options.page_size

    def _front(self, name: str) -> Front:
        network = self.system.network.open(name, LINKS)
        info = FrontInfo("scripted", vocab_size=50_000, attempts=AttemptPolicy(3, 30.0))
        return Front(
            network, Routers(self.system), lambda _: (), VirtualClock(), self.system.network.random, info,  # type: ignore[arg-type]
            FrontMetrics(),
        )  # fmt: skip

    # --- clients ---

    def sizes(self) -> tuple[tuple[int, ...], int]:
        """A prompt, perhaps one that others have too, and max_tokens that fit."""
        random = self.random
        start = random.choice([1000, random.randrange(2000, 40_000)])
        prompt = tuple(range(start, start + random.randint(1, random.choice([10, 60]))))
        return prompt, random.randint(1, min(60, self.limit - len(prompt)))

    async def client(self) -> None:
        """One answer or several, read to the end unless its client leaves."""
        random = self.random
        arrives_s, at, leaves_s = random.uniform(0, ARRIVALS_S), random.randrange(2), None
        if random.random() < 0.25:
            leaves_s = random.choice([0.0, random.uniform(0, 0.2), random.uniform(0, 5)])
        prompts = []
        for _ in range(random.choice([1, 1, 1, 2])):
            prompt, max_tokens = self.sizes()
            first = sampling_of(random, max_tokens)
            samples = random.choice([1, 1, 2, 4])
            prompts.append((prompt, [
                msgspec.structs.replace(first, seed=sample_seed(first.seed, i)) for i in range(samples)
            ]))  # fmt: skip
        await asyncio.sleep(arrives_s)
        if at in self.dead_fronts:
            return
        choices = Choices(self.fronts[at])
        got: dict[int, list[Token]] = {}
        try:
            for prompt, samplings in prompts:
                choices.open(prompt, samplings)
            async with asyncio.timeout(leaves_s):
                while not choices.over:
                    for index, tokens in await choices.take():
                        got.setdefault(index, []).extend(tokens)
            end = "answered"
        except TimeoutError:
            end = "left"
        except KVFerryError as error:
            end = "front lost" if at in self.dead_fronts else error.code
            if at not in self.dead_fronts:
                self.record.errors.append(f"{error.code}: {error}")
        finally:
            if at not in self.dead_fronts:
                choices.close()
        self.record.ends[end] += 1
        wanted = [(prompt, sampling) for prompt, samplings in prompts for sampling in samplings]
        for index, (prompt, sampling) in enumerate(wanted):
            self.check(prompt, sampling, got.get(index, []), end == "answered")

    def check(self, prompt: tuple[int, ...], sampling: Sampling, tokens: list[Token], complete: bool) -> None:
        """Each token once and in order, each the one that an undisturbed computation gives."""
        count = sampling.max_tokens if complete else len(tokens)
        right = self.engine.expected_tokens(prompt, count, sampling)
        ids = tuple(token.token_id for token in tokens)
        if ids != right or [token.index for token in tokens] != list(range(count)):
            raise Broken(f"a client got {ids} for {right}, indices {[token.index for token in tokens]}")
        for token in tokens:
            last = token.index == sampling.max_tokens - 1
            if token.text != f"<{token.token_id}>" or token.finish_reason != ("length" if last else ""):
                raise Broken(f"a client got {token}")
            found = -1 if token.logprobs is None else len(token.logprobs.top)
            if found != sampling.logprobs:
                raise Broken(f"a client got {token}; log-probabilities asked for: {sampling.logprobs}")

    # --- faults ---

    def alive(self) -> list[str]:
        return list(self.system.processes)

    def role(self, name: str) -> str:
        return name.split("-")[0]

    def address(self, name: str) -> Address:
        if name.startswith("front"):
            return self.fronts[int(name[-1])]._network.address
        return self.system.processes[name].address

    async def fault(self) -> None:
        random = self.random
        at_s = random.uniform(0.2, ARRIVALS_S)
        kinds: list[tuple[int, Callable[[], Awaitable[None]]]] = [
            (6, self.kill), (2, self.stop), (3, self.cut), (2, self.break_paths), (2, self.drop), (2, self.noise),
            (1, self.kill_front), (2, self.refuse),
        ]  # fmt: skip
        do = random.choices([kind for _, kind in kinds], [weight for weight, _ in kinds])[0]
        await asyncio.sleep(at_s)
        await do()

    def note(self, text: str) -> None:
        self.record.faults.append(f"{VirtualClock().now_s():.3f} {text}")

    async def kill(self) -> None:
        name = self.random.choice(self.alive())
        away_s = self.random.choice([0.0, self.random.uniform(0, 4)])
        self.note(f"kill {name} for {away_s:.2f} s")
        self.system.kill(name)
        await asyncio.sleep(away_s)
        self.system.spawn(self.role(name), name)

    async def kill_front(self) -> None:
        self.note("kill front-1")
        self.dead_fronts.add(1)
        front = self.fronts[1]
        self.system.network.kill(self.address("front-1"))
        for live in list(front._requests.values()):
            if live.submission is not None:
                live.submission.cancel()  # Ray cancels the calls of a worker that has died
            if live.reopening is not None:
                live.reopening.cancel()
            if live.stream.fail(Cause("unavailable", "front lost")):
                live.wake()

    async def stop(self) -> None:
        name = self.random.choice(self.alive())
        address, for_s = self.address(name), self.random.uniform(0.2, 8)
        self.note(f"stop {name} for {for_s:.2f} s")
        self.system.network.stop(address)
        await asyncio.sleep(for_s)
        self.system.network.resume(address)

    def two(self) -> tuple[str, str]:
        fronts = [f"front-{i}" for i in range(2) if i not in self.dead_fronts]
        a, b = self.random.sample(self.alive() + fronts, 2)
        return a, b

    async def cut(self) -> None:
        names = self.two()
        a, b = map(self.address, names)
        for_s = self.random.uniform(0.2, 10)
        self.note(f"cut {names} for {for_s:.2f} s")
        self.system.network.cut(a, b)
        await asyncio.sleep(for_s)
        self.system.network.heal(a, b)

    async def break_paths(self) -> None:
        names = self.two()
        self.note(f"break the paths of {names}")
        self.system.network.break_paths(*map(self.address, names))

    async def drop(self) -> None:
        a, b = self.two()
        actor = self.fronts[int(a[-1])]._network if a.startswith("front") else self.system.processes[a].actor.network
        self.note(f"drop the link of {a} to {b}")
        actor.drop(self.address(b).incarnation)

    async def noise(self) -> None:
        self.note("noise for 3 s")
        faults = self.system.network.faults
        faults.drop_rate, faults.duplicate_rate, faults.reorder_rate = 0.05, 0.05, 0.05
        faults.latency_s = (0.001, 0.04)
        await asyncio.sleep(3)
        calm = SimFaults()
        faults.drop_rate, faults.duplicate_rate, faults.reorder_rate = 0.0, 0.0, 0.0
        faults.latency_s = calm.latency_s

    async def refuse(self) -> None:
        name = self.random.choice([name for name in self.alive() if name.startswith("prefill")] or ["none"])
        for_s = self.random.uniform(0.1, 4)
        process = self.system.processes.get(name)
        if process is None or process.endpoint is None:
            return
        self.note(f"{name} can't connect for {for_s:.2f} s")
        endpoint = process.endpoint
        connect = endpoint.connect

        async def refused(descriptor: Any) -> Any:
            raise TransferError("the data plane refuses")

        endpoint.connect = refused  # type: ignore[method-assign]
        await asyncio.sleep(for_s)
        endpoint.connect = connect  # type: ignore[method-assign]

    # --- the whole ---

    async def play(self) -> None:
        random = self.random
        clients = [self.client() for _ in range(random.randint(20, 40))]
        faults = [self.fault() for _ in range(random.choice(FAULTS))]
        for front in self.fronts:
            await front.start()
        if HOSTILE:
            self.system.network.faults.exit_notice_s = random.choice([0.001, 0.3, 2.0])
        watcher, writes = Watcher(self.system), Writes(self.system)
        watching = asyncio.ensure_future(watcher.run())
        playing = asyncio.gather(*clients, *faults)
        done, _ = await asyncio.wait({watching, playing}, timeout=PATIENCE_S, return_when=asyncio.FIRST_COMPLETED)
        if not done:
            raise Broken(f"after {PATIENCE_S} s clients still wait: {self.waiting()}")
        for task in done:
            task.result()
        self.check_errors(len(faults))
        if HOSTILE:
            for process in self.system.processes.values():
                if isinstance(process.endpoint, FaultyEndpoint):
                    process.endpoint._stall_after = -1
                    process.endpoint.release_stalled()
        if not await self.system.settle(60):
            raise Broken(f"rooms or pages are left: {self.system.counts()}")
        await self.serve_again()
        await asyncio.sleep(GRACE_S + 2)
        watching.cancel()
        watcher.look()
        for name, process in self.system.processes.items():
            for what in ("retracted", "prompt tokens shared"):
                self.record.ends[what] += process.actor.counts[what]
        for router in self.system.routers():
            self.record.ends["breakers opened"] += router.breakers.opened
        check_idle(self.system)
        self.check_fronts()
        assert writes.copies or self.system.options.unified.instances

    def waiting(self) -> list[str]:
        return [
            f"{live.spec.request:016x} attempt {live.attempt} room {live.room:x} tokens {live.stream.next_index}"
            for front in self.fronts
            for live in front._requests.values()
        ]

    def check_errors(self, faults: int) -> None:
        """Without a fault nobody is refused, except where the queue is short."""
        limited = self.system.options.router.queue_limit < 10
        wrong = [e for e in self.record.errors if not faults and not (limited and e.startswith("overloaded"))]
        if wrong:
            raise Broken(f"without a fault: {wrong}")

    async def serve_again(self) -> None:
        """When all is healed, every router serves."""
        front = self.fronts[0]
        for index in range(self.system.options.router.instances):
            async with asyncio.timeout(60):
                while True:
                    sampling = Sampling(3, seed=index)
                    live = front.open((index + 1,) * 9, sampling)
                    try:
                        tokens: list[Token] = []
                        while not tokens or not tokens[-1].finish_reason:
                            tokens += await live.take()
                        self.check((index + 1,) * 9, sampling, tokens, True)
                        break
                    except KVFerryError as error:
                        self.record.ends[f"after: {error.code}"] += 1
                        self.record.errors.append(f"after: {error}")
                        await asyncio.sleep(1)
                    finally:
                        front.close_request(live)

    def check_fronts(self) -> None:
        for at, front in enumerate(self.fronts):
            if at not in self.dead_fronts and (front._requests or front._left):
                raise Broken(f"front-{at} keeps {self.waiting()} and {len(front._left)} calls")


REFUSALS: Counter[str] = Counter()


def spy() -> None:
    from kvferry.protocol.machine import Machine, REFUSED

    plain = Machine._apply

    def noted(self, event, payload):
        if self.TABLE[self.state][event] is REFUSED:
            REFUSALS[f"{type(self).__name__} {self.state.name} {event.name}"] += 1
        plain(self, event, payload)

    Machine._apply = noted


def stress(seed: int) -> Run:
    random = Random(seed)
    record = Run(seed, system_of(random, seed))

    async def main() -> None:
        async with SimSystem(record.options) as system:
            await Stress(system, random, record).play()

    try:
        run(main())
    except BaseException as error:
        error.add_note(f"seed {seed}: {record.options}\nfaults: {record.faults}\nends: {dict(record.ends)}")
        raise
    return record


@pytest.mark.parametrize("seed", range(24))
def test_everything_at_once(seed: int) -> None:
    stress(seed)


if __name__ == "__main__":
    first, *more = map(int, sys.argv[1:])
    seeds = range(first, more[0]) if more else [first]
    ends: Counter[str] = Counter()
    failed = 0
    spy()
    for one in seeds:
        try:
            record = stress(one)
            ends.update(record.ends)
            if record.errors:
                print(f"seed {one}: {record.faults}: {record.errors}", flush=True)
        except Exception:
            failed += 1
            print(f"SEED {one} FAILED\n{traceback.format_exc()}", flush=True)
    print(REFUSALS)
    print(f"{len(seeds)} seeds, {failed} failed; {dict(ends)}")
