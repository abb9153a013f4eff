"""What the roles ask of an engine: run one step's plan, hand out its regions."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

import msgspec

from kvferry.protocol.messages import Logprobs
from kvferry.protocol.rank import Layout
from kvferry.protocol.request import Sampling
from kvferry.transfer.contract import Region


class History(msgspec.Struct, frozen=True):
    """The tokens that a request's sampling looks back at: its prompt, and what it has generated in all its attempts."""

    prompt_ids: tuple[int, ...]
    generated_ids: tuple[int, ...] = ()


class Sequence(msgspec.Struct, frozen=True):
    """One sequence's part of a step.

    `token_ids` are fed at positions start .. start + len - 1; their K and V go into `pages` (the sequence's whole
    block table, in order, covering at least start + len tokens), and attention reads all positions below.
    With `sampling`, a token is drawn from the logits of the last fed position; its own `position` with the seed fixes
    the draw. `history` where the sampling looks back (`kvferry.engine.history.looks_back`), the fed tokens included.
    """

    key: int
    token_ids: tuple[int, ...]
    start: int
    pages: tuple[int, ...]
    sampling: Sampling | None = None
    history: History | None = None

    @property
    def position(self) -> int:
        """Of the token that follows the fed ones."""
        return self.start + len(self.token_ids)


class StepPlan(msgspec.Struct, frozen=True):
    """One forward. `step` counts up by one per plan of an engine."""

    step: int
    sequences: tuple[Sequence, ...]


class Drawn(msgspec.Struct, frozen=True):
    """A sampled token. `margin` is the distance that decides it: for greedy the gap between the two best logits (after
    bias and penalties), for a draw the distance of the uniform variate to the nearest edge of the token's interval.
    `logprobs` where the request asked for them.
    """

    token_id: int
    margin: float
    logprobs: Logprobs | None = None


class StepResult(msgspec.Struct, frozen=True):
    """`drawn[i]` belongs to `plan.sequences[i]`; None where nothing was to be sampled.

    `part`: what this rank has worked out of a result that takes all ranks (see `Combine`), and no token is drawn yet.
    """

    step: int
    drawn: tuple[Drawn | None, ...]
    compute_s: float
    part: bytes = b""


#: The leader's result of a forward out of its own and the other ranks' parts, where the engines don't exchange them
#: among themselves.
Combine = Callable[[StepPlan, StepResult, Iterable[bytes]], StepResult]


class RanksLost(RuntimeError):
    """A forward needs other ranks of the instance, and one of them is gone or stands still."""


class EngineLimits(msgspec.Struct, frozen=True):
    """pages: usable pages of the pool (ids 0 .. pages - 1); context_tokens: the model's longest sequence."""

    pages: int
    page_size: int
    context_tokens: int
    vocab_size: int

    @property
    def tokens(self) -> int:
        """The longest sequence that fits, by pool and by model."""
        return min(self.pages * self.page_size, self.context_tokens)


class Engine(Protocol):
    """One model with its pool. `step` runs off the loop; one step at a time.

    `regions()` are the pool's registered areas (K and V of each layer, item = page) followed by the metadata rows.
    `metadata_row(slot)` is a writable view of one row.
    """

    @property
    def layout(self) -> Layout: ...
    @property
    def limits(self) -> EngineLimits: ...
    @property
    def metadata_rows(self) -> int: ...
    def regions(self) -> tuple[Region, ...]: ...
    def metadata_row(self, slot: int) -> memoryview: ...
    async def step(self, plan: StepPlan) -> StepResult: ...
    async def close(self) -> None: ...


class Emission(msgspec.Struct, frozen=True):
    """What one more token makes visible. finish_reason: "" while it goes on, "stop" or "length" on the last."""

    text: str
    finish_reason: str = ""


class TextStream(Protocol):
    """One request's decoded text and its stop rules. Deterministic: the same tokens give the same emissions.

    `push` must not be called after an emission with a finish_reason.
    """

    def push(self, token_id: int) -> Emission: ...


class TextFactory(Protocol):
    """Makes text streams for an engine's tokenizer."""

    def stream(self, sampling: Sampling, before: tuple[int, ...] = ()) -> TextStream:
        """A stream that has taken the tokens `before` (of earlier attempts) already; what they showed is shown."""
        ...


_plans = msgspec.msgpack.Encoder()
_plan_decoder = msgspec.msgpack.Decoder(StepPlan)


def encode_plan(plan: StepPlan) -> bytes:
    """Wire form, for an instance's other ranks."""
    return _plans.encode(plan)


def decode_plan(data: bytes) -> StepPlan:
    """Raises msgspec.DecodeError when `data` is not a plan."""
    return _plan_decoder.decode(data)
