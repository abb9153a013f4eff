"""What the front asks of the rest of the system, and what it must know about it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import msgspec

from kvferry.actors.ports import Clock
from kvferry.engine.token_pieces import TokenPiece
from kvferry.protocol.errors import Cause, Unavailable
from kvferry.protocol.messages import Roster
from kvferry.protocol.outcome import Outcome
from kvferry.protocol.request import RequestSpec
from kvferry.serve.attempts import AttemptPolicy


class Backend(Protocol):
    """The slow path to the routers and the registry (Ray in production).

    * `submit` opens an attempt at a router. The call itself is the attempt's handle: it resolves to the room's
      outcome, and cancelling it aborts the room. A lost router raises a PeerError.
    * `roster` is the registry's present roster.
    * `status` is the object that `kvferry status --json` prints, but for what only the front knows
      (`kvferry.serve.app.status`).
    * `room` is the journal of a room, or None when no router knows the id.
    * `pools` is how far the pools are from what is wanted (`kvferry.actors.pools.Pools.progress`); `scale` asks for
      other numbers of instances, by role, and gives the same. Raises InvalidRequest, or Unavailable.
    """

    async def submit(self, spec: RequestSpec, attempt: int) -> Outcome: ...
    async def roster(self) -> Roster: ...
    async def status(self) -> dict[str, Any]: ...
    async def room(self, room: int) -> dict[str, Any] | None: ...
    async def pools(self) -> dict[str, Any]: ...
    async def scale(self, numbers: Mapping[str, int]) -> dict[str, Any]: ...


class PromptEncoder(Protocol):
    """The model's tokenizer. `render` and `encode` are called on one worker thread, never concurrently.

    * `render` passes a conversation ({"role", "content"} each) through the model's chat template and tokenises it.
      Raises InvalidRequest or ValueError when the template refuses the messages.
    * `encode` tokenises plain text, with the special tokens that the tokenizer adds. Raises InvalidRequest.
    * `piece` says what one token stands for. It is quick, and called on the loop meanwhile.
    """

    def render(self, messages: Sequence[dict[str, str]], /) -> Sequence[int]: ...
    def encode(self, text: str, /) -> Sequence[int]: ...
    def piece(self, token_id: int, /) -> TokenPiece: ...


class ReadyPolicy(msgspec.Struct, frozen=True):
    """What `/ready` believes, in seconds: a handoff of at most `fresh_s`, else one of its own within `limit_s`. While
    clients wait here, the service counts as stuck after `stuck_s` without any sign of progress.
    """

    fresh_s: float = 5.0
    limit_s: float = 5.0
    stuck_s: float = 60.0


class FrontInfo(msgspec.Struct, frozen=True):
    """What the API says about itself, and its own limits. `created` is in seconds since 1970.

    A prompt given as token ids holds ids below `vocab_size`, so with 0 there can be none.
    """

    model: str
    created: int = 0
    default_max_tokens: int = 512
    max_body_bytes: int = 4 * 1024 * 1024
    vocab_size: int = 0
    attempts: AttemptPolicy = AttemptPolicy()
    ready: ReadyPolicy = ReadyPolicy()


class Limits(msgspec.Struct, frozen=True):
    """`prompt_tokens`: what every prefill instance can compute; `total_tokens`: what every decode instance can hold
    and every prefill could compute again but for the last token (`kvferry.memory.admission.refusal`).
    """

    prompt_tokens: int
    total_tokens: int


def limits_of(roster: Roster) -> Limits:
    """The limits that hold at every registered rank that takes rooms, so that they hold for whatever pair the router
    picks.

    Raises Unavailable when a role has no rank.
    """
    ranks = [rank for rank in roster.ranks if not rank.draining]
    prompts = [rank.max_prompt_tokens for rank in ranks if rank.role in ("prefill", "unified")]
    totals = [rank.max_total_tokens for rank in ranks if rank.role in ("decode", "unified")]
    if not prompts or not totals:
        raise Unavailable(Cause("unavailable", f"not ready: {missing_text(roster)}", leg="front"))
    return Limits(min(prompts), min(*totals, min(prompts) + 1))


def missing_text(roster: Roster) -> str:
    return "; ".join(roster.missing) or "a role has no registered instance"


class LimitsCache:
    """Limits change only when instances come and go: asking the registry once a second is enough.

    Across a restart the last known limits stay in use; the router says whether a request can be served now.
    """

    def __init__(self, backend: Backend, clock: Clock, fresh_s: float = 1.0) -> None:
        self._backend, self._clock, self._fresh_s = backend, clock, fresh_s
        self._limits: Limits | None = None
        self._asked_s = 0.0
        self._asking: asyncio.Task[Limits] | None = None

    async def get(self) -> Limits:
        """Raises Unavailable when no limits were ever known, or what the registry's call raises. All who find the
        limits stale wait for one call; one of them that is cancelled takes nothing from the others."""
        now_s = self._clock.now_s()
        if self._limits is not None and now_s - self._asked_s < self._fresh_s:
            return self._limits
        if self._asking is None:
            self._asking = asyncio.create_task(self._ask(now_s))
            self._asking.add_done_callback(self._answered)
        return await asyncio.shield(self._asking)

    async def _ask(self, now_s: float) -> Limits:
        try:
            self._limits = limits_of(await self._backend.roster())
        except Unavailable:
            if self._limits is None:
                raise
        self._asked_s = now_s
        return self._limits

    def _answered(self, asking: asyncio.Task[Limits]) -> None:
        self._asking = None
        if not asking.cancelled():
            asking.exception()  # heard, though all who waited may have gone
