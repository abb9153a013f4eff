"""Everything at once, on virtual time: random systems, requests and faults, seed by seed.

`python tests/sim/test_stress.py FIRST END` runs the seeds from FIRST up to END; with one number, that seed alone.
FAULTS in the environment (as in `FAULTS=3,5,8`) are other numbers of faults to draw from than the suite's.
"""

from __future__ import annotations

import asyncio
import os
import sys
import traceback
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

import msgspec
import pytest

from kvferry.actors.links import LinkLayer
from kvferry.actors.prefill.siblings import GRACE_S
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
from kvferry.protocol.errors import Cause, KVFerryError
from kvferry.protocol.messages import Token
from kvferry.protocol.rank import EARLY, PREFILL_COMPLETE
from kvferry.protocol.request import Sampling
from kvferry.serve.attempts import AttemptPolicy
from kvferry.serve.choices import Choices
from kvferry.serve.front import Front
from kvferry.serve.gateway import FrontInfo
from kvferry.serve.prepare import sample_seed
from kvferry.sim.backend import SimBackend
from kvferry.sim.chaos import Chaos, Weights
from kvferry.sim.checkers import Broken, Watcher, check_idle
from kvferry.sim.loop import VirtualClock, run
from kvferry.sim.system import SimOptions, SimSystem
from kvferry.transfer.fake import HOST, TCP

SEEDS = range(24)
FAULTS = (0, 1, 1, 2, 3)
LINKS = LinkSettings(heartbeat_s=0.5, silence_s=3.0, resend_s=0.25)
CLOCKS = ClockSettings(prefill_wait_s=90, transfer_wait_s=90, admission_wait_s=120, no_progress_s=20)
ARRIVALS_S = 6.0
#: Longer than any request may live: a few attempts that run into their clocks.
PATIENCE_S = 400.0


class FrontProcess:
    """One front, its links, and its end."""

    def __init__(self, system: SimSystem, name: str) -> None:
        self.name, self._network = name, system.network
        self.links: LinkLayer = system.network.open(name, LINKS)
        info = FrontInfo("scripted", vocab_size=50_000, attempts=AttemptPolicy(3, 30.0))
        self.front = Front(
            self.links, SimBackend(system), lambda _: (), VirtualClock(), system.network.random, info,
            FrontMetrics(),
        )  # fmt: skip
        self.dead = False

    def kill(self) -> None:
        """Its links end, its calls are cancelled, and nobody reads on."""
        self.dead = True
        self._network.kill(self.links.address)
        for live in list(self.front._requests.values()):
            live.attempts = AttemptPolicy(1)  # type: ignore[assignment]
            for task in (live.submission, live.reopening):
                if task is not None:
                    task.cancel()
            if live.stream.fail(Cause("unavailable", "the front is dead", "front")):
                live.wake()

    def waiting(self) -> list[str]:
        return [
            f"{live.spec.request:016x} attempt {live.attempt} room {live.room:x} tokens {live.stream.next_index}"
            for live in self.front._requests.values()
        ]


@dataclass
class Record:
    """What happened to the clients of one seed, and why."""

    options: SimOptions
    faults: list[str] = field(default_factory=list)
    ends: Counter[str] = field(default_factory=Counter)
    errors: list[str] = field(default_factory=list)


def options_of(random: Random, seed: int) -> SimOptions:
    """Two routers, and pools that hold a few requests each; some with pools that scale."""
    sizes: dict[str, Any] = {"chunk_tokens": random.choice([16, 32]), "batch_tokens": random.choice([32, 64])}
    tp = random.choice([1, 1, 1, 2])
    return SimOptions(
        seed=seed,
        prefill=PrefillSettings(
            instances=random.randint(2, 3), pool_pages=random.randint(16, 40), pp=random.choice([1, 1, 2]), tp=tp,
            **sizes,
        ),
        decode=DecodeSettings(
            instances=random.randint(2, 3), pool_pages=random.randint(15, 30), max_running=random.randint(3, 8),
            pp=random.choice([1, 1, 2]), tp=tp,
        ),
        unified=UnifiedSettings(
            instances=random.choice([0, 0, 1]), pool_pages=random.randint(16, 40), max_running=random.randint(3, 8),
            **sizes,
        ),
        router=RouterSettings(
            instances=2, queue_limit=random.choice([2, 128, 128]), breaker_failures=random.randint(1, 3),
            breaker_open_s=random.choice([1.0, 5.0]), breaker_open_max_s=10.0,
            policy=random.choice(["predicted", "power_of_two", "round_robin", "random"]),
        ),
        clocks=CLOCKS,
        links=LINKS,
        faults=FaultSettings(delay_ms=random.choice([0, 5, 60])),
        proofs=random.choice([HOST, TCP]),
        keep=random.random() < 0.3,
        drain_s=random.choice([0.0, 0.5, 5.0]),
        start_s=random.choice([0.0, 2.0]),
        policy=random.choice([EARLY, PREFILL_COMPLETE]),
    )  # fmt: skip


def sampling_of(random: Random, max_tokens: int) -> Sampling:
    looks_back = random.random() < 0.3
    return Sampling(
        max_tokens, temperature=random.choice([0.0, 0.8]), seed=random.getrandbits(63),
        presence_penalty=0.5 if looks_back else 0.0, logprobs=random.choice([-1, -1, 0, 3]),
    )  # fmt: skip


class Stress:
    """Two fronts, their clients, and the faults. One draws from the seed all that happens, before it happens."""

    def __init__(self, system: SimSystem, random: Random, record: Record, faults: Sequence[int]) -> None:
        self.system, self.random, self.record = system, random, record
        self.fronts = [FrontProcess(system, f"front-{i}") for i in range(2)]
        weights = Weights(scale=8 if system.options.keep else 0)
        self.chaos = Chaos(system, Random(random.random()), {f.name: f.links for f in self.fronts}, weights)
        self.record.faults = self.chaos.log
        self.faults = random.choice(faults)
        self.engine = system.engine("prefill-0")
        roles = (system.options.prefill, system.options.decode, system.options.unified)
        self.limit = min(role.pool_pages for role in roles) * system.options.page_size

    # --- clients ---

    def prompt(self) -> tuple[tuple[int, ...], list[Sampling]]:
        """A prompt, which may begin as others do, and the samplings of its answers."""
        random = self.random
        start = random.choice([1000, random.randrange(2000, 40_000)])
        ids = tuple(range(start, start + random.randint(1, random.choice([10, 60]))))
        first = sampling_of(random, random.randint(1, min(60, self.limit - len(ids))))
        seeds = [sample_seed(first.seed, i) for i in range(random.choice([1, 1, 2, 4]))]
        return ids, [msgspec.structs.replace(first, seed=seed) for seed in seeds]

    async def client(self) -> None:
        """One answer or several, read to the end unless its client leaves."""
        random = self.random
        arrives_s, process, leaves_s = random.uniform(0, ARRIVALS_S), random.choice(self.fronts), None
        if random.random() < 0.25:
            leaves_s = random.choice([0.0, random.uniform(0, 0.2), random.uniform(0, 5)])
        prompts = [self.prompt() for _ in range(random.choice([1, 1, 1, 2]))]
        await asyncio.sleep(arrives_s)
        if process.dead:
            return
        choices, got = Choices(process.front), dict[int, list[Token]]()
        end = "answered"
        try:
            for ids, samplings in prompts:
                choices.open(ids, samplings)
            async with asyncio.timeout(leaves_s):
                while not choices.over:
                    for index, tokens in await choices.take():
                        got.setdefault(index, []).extend(tokens)
        except TimeoutError:
            end = "left"
        except KVFerryError as error:
            end = "front killed" if process.dead else error.code
            if not process.dead:
                self.record.errors.append(f"{error.code}: {error}")
        finally:
            if not process.dead:
                choices.close()
        self.record.ends[end] += 1
        wanted = [(ids, sampling) for ids, samplings in prompts for sampling in samplings]
        for index, (ids, sampling) in enumerate(wanted):
            self.check(ids, sampling, got.get(index, []), end == "answered")

    def check(self, ids: tuple[int, ...], sampling: Sampling, tokens: list[Token], complete: bool) -> None:
        """Each token once and in order, and each the one that an undisturbed computation gives."""
        count = sampling.max_tokens if complete else len(tokens)
        right = self.engine.expected_tokens(ids, count, sampling)
        if [(token.index, token.token_id) for token in tokens] != list(enumerate(right)):
            raise Broken(f"a client got {tokens} for {right}")
        for token in tokens:
            reason = "length" if token.index == sampling.max_tokens - 1 else ""
            logprobs = -1 if token.logprobs is None else len(token.logprobs.top)
            if (token.text, token.finish_reason, logprobs) != (f"<{token.token_id}>", reason, sampling.logprobs):
                raise Broken(f"a client got {token} for {sampling}")

    # --- the whole ---

    async def fault(self, at_s: float, kills_front: bool) -> None:
        await asyncio.sleep(at_s)
        if kills_front:
            self.chaos.log.append("kill front-1")
            self.fronts[1].kill()
        else:
            await self.chaos.fault()

    async def play(self) -> None:
        random = self.random
        for process in self.fronts:
            await process.front.start()
        watcher = Watcher(self.system)
        watching = asyncio.ensure_future(watcher.run())
        clients = [self.client() for _ in range(random.randint(20, 40))]
        faults = [self.fault(random.uniform(0.2, ARRIVALS_S), random.random() < 0.05) for _ in range(self.faults)]
        playing = asyncio.gather(*clients, *faults)
        done, _ = await asyncio.wait({watching, playing}, timeout=PATIENCE_S, return_when=asyncio.FIRST_COMPLETED)
        if not done:
            raise Broken(f"clients still wait: {[front.waiting() for front in self.fronts]}")
        for task in done:
            task.result()
        self.check_errors()
        if self.system.options.keep and not (await self.system.scaled(router=2))["done"]:
            raise Broken(f"the pools are not what is wanted: {self.system.pools.progress()}")
        if not await self.system.settle(60):
            raise Broken(f"rooms or pages are left: {self.system.counts()}")
        for index in range(4):  # at every router, at least once
            await self.serve_again(index)
        await asyncio.sleep(GRACE_S + 2)
        watching.cancel()
        watcher.look()
        check_idle(self.system)
        self.check_fronts()
        assert watcher.writes.copies or self.system.options.unified.instances

    def check_errors(self) -> None:
        """Without a fault nobody is refused, except where the queue is short."""
        short = self.system.options.router.queue_limit == 2
        wrong = [error for error in self.record.errors if not (short and error.startswith("overloaded"))]
        if wrong and not self.chaos.log:
            raise Broken(f"without a fault: {wrong}")

    async def serve_again(self, index: int) -> None:
        """When all is healed the service serves, when breakers have closed at the latest."""
        ids, sampling, front = (index + 1,) * 9, Sampling(3, seed=index), self.fronts[0].front
        async with asyncio.timeout(60):
            while True:
                choices = Choices(front)
                choices.open(ids, [sampling])
                tokens: list[Token] = []
                try:
                    while not choices.over:
                        tokens += [token for _, part in await choices.take() for token in part]
                    return self.check(ids, sampling, tokens, True)
                except KVFerryError as error:
                    self.record.errors.append(f"afterwards: {error}")
                    await asyncio.sleep(1)
                finally:
                    choices.close()

    def check_fronts(self) -> None:
        for process in self.fronts:
            if not process.dead and (process.front._requests or process.front._left):
                raise Broken(f"{process.name} keeps {process.waiting()} and {len(process.front._left)} calls")


def stress(seed: int, faults: Sequence[int] = FAULTS) -> Record:
    random = Random(seed)
    record = Record(options_of(random, seed))

    async def main() -> None:
        async with SimSystem(record.options) as system:
            await Stress(system, random, record, faults).play()

    try:
        run(main())
    except BaseException as error:
        error.add_note(f"seed {seed}: {record.options}\nfaults: {record.faults}\nends: {dict(record.ends)}")
        raise
    return record


@pytest.mark.parametrize("seed", SEEDS)
def test_everything_at_once(seed: int) -> None:
    """Clients get their tokens or one error; pages are conserved at every moment; at the end nothing is left over."""
    stress(seed)


def many(seeds: Sequence[int], faults: Sequence[int]) -> None:
    """One line for each seed with errors or a failure, and the sums."""
    ends: Counter[str] = Counter()
    for seed in seeds:
        try:
            record = stress(seed, faults)
        except Exception:  # noqa: BLE001 - told, and the other seeds follow
            ends["SEEDS FAILED"] += 1
            print(f"SEED {seed} FAILED\n{traceback.format_exc()}", flush=True)
            continue
        ends += record.ends
        if record.errors:
            print(f"seed {seed}: {record.faults}: {record.errors}", flush=True)
    print(f"{len(seeds)} seeds: {dict(ends)}")


if __name__ == "__main__":
    begin = int(sys.argv[1])
    until = int(sys.argv[2]) if len(sys.argv) > 2 else begin + 1
    many(range(begin, until), [int(n) for n in os.environ["FAULTS"].split(",")] if "FAULTS" in os.environ else FAULTS)
