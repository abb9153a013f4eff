"""The clients of a simulated system: what they ask, when they leave, and whether they got what they must get."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random

import msgspec

from kvferry.engine.scripted import ScriptedEngine
from kvferry.protocol.errors import KVFerryError
from kvferry.protocol.messages import Token
from kvferry.protocol.request import Sampling
from kvferry.serve.choices import Choices
from kvferry.serve.prepare import sample_seed
from kvferry.sim.findings import Broken
from kvferry.sim.fronts import FrontProcess, SimFronts

Prompt = tuple[tuple[int, ...], list[Sampling]]


@dataclass(frozen=True)
class Ask:
    """One client: when it comes and to which front, what it asks, and for how long it stays at most."""

    arrives_s: float
    front: str
    prompts: list[Prompt]
    leaves_s: float | None


@dataclass
class Ends:
    """How the clients of one run ended: counts, and the errors that they were told."""

    counts: Counter[str] = field(default_factory=Counter)
    errors: list[str] = field(default_factory=list)


def sampling_of(random: Random, max_tokens: int) -> Sampling:
    looks_back = random.random() < 0.3
    return Sampling(
        max_tokens, temperature=random.choice([0.0, 0.8]), seed=random.getrandbits(63),
        presence_penalty=0.5 if looks_back else 0.0, logprobs=random.choice([-1, -1, 0, 3]),
    )  # fmt: skip


def prompt_of(random: Random, limit: int) -> Prompt:
    """A prompt, which may begin as others do, and the samplings of its answers; at most `limit` tokens in all."""
    start = random.choice([1000, random.randrange(2000, 40_000)])
    ids = tuple(range(start, start + random.randint(1, random.choice([10, 10, min(50, limit - 1)]))))
    most = min(random.choice([2, 6, 6, 40]), limit - len(ids))
    first = sampling_of(random, random.randint(1, most))
    seeds = [sample_seed(first.seed, i) for i in range(random.choice([1, 1, 1, 1, 2, 3]))]
    return ids, [msgspec.structs.replace(first, seed=seed) for seed in seeds]


def ask_of(random: Random, fronts: Sequence[str], limit: int, arrivals_s: float) -> Ask:
    arrives_s, front, leaves_s = random.uniform(0, arrivals_s), random.choice(fronts), None
    if random.random() < 0.15:
        leaves_s = random.choice([0.0, random.uniform(0, 0.2), random.uniform(0, 3)])
    prompts = [prompt_of(random, limit) for _ in range(random.choice([1, 1, 1, 1, 2]))]
    return Ask(arrives_s, front, prompts, leaves_s)


class Clients:
    """They come to the fronts, and *tokens-once* is checked as each ends."""

    def __init__(self, fronts: SimFronts, engine: ScriptedEngine) -> None:
        self._fronts, self._engine = fronts, engine
        self.ends = Ends()

    async def client(self, ask: Ask) -> None:
        """One answer or several, read to the end unless the client leaves."""
        await asyncio.sleep(ask.arrives_s)
        process = self._fronts.processes[ask.front]
        await process.running()
        if process.dead:
            return
        got: dict[int, list[Token]] = {}
        choices = Choices(process.front)
        end = "answered"
        try:
            for ids, samplings in ask.prompts:
                choices.open(ids, samplings)
            await self._read(choices, got, ask.leaves_s)
        except TimeoutError:
            end = "left"
        except KVFerryError as error:
            end = "front killed" if process.dead else error.code
            if not process.dead:
                self.ends.errors.append(f"{error.code}: {error}")
        finally:
            self._close(process, choices)
        self.ends.counts[end] += 1
        wanted = [(ids, sampling) for ids, samplings in ask.prompts for sampling in samplings]
        for index, (ids, sampling) in enumerate(wanted):
            self.check(ids, sampling, got.get(index, []), end == "answered")

    async def _read(self, choices: Choices, got: dict[int, list[Token]], leaves_s: float | None) -> None:
        """Raises TimeoutError when the client leaves: when its time is over, or because chaos says so."""
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(leaves_s) as staying:

            def leave() -> None:
                if not staying.expired():
                    staying.reschedule(loop.time())

            self._fronts.leavers.update((live.spec.request, leave) for live in choices.lives)
            while not choices.over:
                for index, tokens in await choices.take():
                    got.setdefault(index, []).extend(tokens)

    def _close(self, process: FrontProcess, choices: Choices) -> None:
        for live in choices.lives:
            self._fronts.leavers.pop(live.spec.request, None)
        if not process.dead:
            choices.close()

    def check(self, ids: tuple[int, ...], sampling: Sampling, tokens: list[Token], complete: bool) -> None:
        """Each token once and in order, and each the one that an undisturbed computation gives."""
        count = sampling.max_tokens if complete else len(tokens)
        right = self._engine.expected_tokens(ids, count, sampling)
        if [(token.index, token.token_id) for token in tokens] != list(enumerate(right)):
            raise Broken("tokens-once", f"a client got {tokens} for {right}")
        for token in tokens:
            reason = "length" if token.index == sampling.max_tokens - 1 else ""
            logprobs = -1 if token.logprobs is None else len(token.logprobs.top)
            if (token.text, token.finish_reason, logprobs) != (f"<{token.token_id}>", reason, sampling.logprobs):
                raise Broken("tokens-once", f"a client got {token} for {sampling}")

    async def serve_again(self, index: int, front: str) -> None:
        """*service*: when all is healed the service serves, when breakers have closed at the latest."""
        ids, sampling = (index + 1,) * 9, Sampling(3, seed=index)
        try:
            async with asyncio.timeout(60):
                while not await self._served(ids, sampling, self._fronts.processes[front]):
                    await asyncio.sleep(1)
        except TimeoutError:
            raise Broken("service", f"nothing is served for 60 s: {self.ends.errors[-1:]}") from None

    async def _served(self, ids: tuple[int, ...], sampling: Sampling, process: FrontProcess) -> bool:
        choices = Choices(process.front)
        choices.open(ids, [sampling])
        tokens: list[Token] = []
        try:
            while not choices.over:
                tokens += [token for _, part in await choices.take() for token in part]
            self.check(ids, sampling, tokens, True)
            return True
        except KVFerryError as error:
            self.ends.errors.append(f"afterwards: {error}")
            return False
        finally:
            choices.close()
