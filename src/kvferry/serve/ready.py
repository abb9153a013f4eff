"""Readiness by proof: the service is ready if a handoff through a pair has just gone through.

Clients' handoffs count. When there was none lately, the front makes one of its own, of one token; however many ask,
one is under way at a time. Being slow is not being broken: a probe that only had to wait, because the service is full
or others are served before it, makes nobody unready while there are signs of progress.
"""

from __future__ import annotations

import asyncio

import msgspec

from kvferry.protocol.errors import Cause, DeadlineExceeded, KVFerryError, Overloaded, PeerError, Unavailable
from kvferry.protocol.request import Sampling
from kvferry.serve.front import Front
from kvferry.serve.gateway import ReadyPolicy, limits_of
from kvferry.serve.live import LiveRequest

#: Any id will do: every model has this one.
PROBE_IDS = (0,)
PROBE_SAMPLING = Sampling(max_tokens=1)


class Report(msgspec.Struct, frozen=True):
    """What `/ready` answers. `missing`: what the registry misses, which a service that has a pair can do without.

    `handoff_age_s`: how long ago the last handoff went through. `busy`: ready by signs of progress, without one.
    """

    ready: bool
    missing: tuple[str, ...] = ()
    handoff_age_s: float | None = None
    busy: bool = False
    error: Unavailable | None = None


class Readiness:
    """One per front, on its loop."""

    def __init__(self, front: Front, policy: ReadyPolicy) -> None:
        self._front, self._policy = front, policy
        self._probe: asyncio.Task[Cause | None] | None = None
        self._busy_s: float | None = None  # when a probe last had to wait too long

    async def report(self) -> Report:
        """Whether requests can be served; never raises for what is wrong with the service."""
        front, policy = self._front, self._policy
        missing, unserved = await self._roster()
        if self._within(front.handoff_s, policy.fresh_s):
            return Report(True, missing, self._age_s())
        if unserved is not None:
            return Report(False, missing, self._age_s(), error=unserved)
        if self._within(self._busy_s, policy.fresh_s) and self._progress():
            return Report(True, missing, self._age_s(), busy=True)
        cause = await self._probed()
        if cause is None:
            return Report(True, missing, self._age_s())
        if self._only_waited(cause):
            self._busy_s = front.clock.now_s()
            return Report(True, missing, self._age_s(), busy=True)
        text = f"not ready: {'; '.join(missing) or 'no handoff goes through'}"
        error = Unavailable(Cause("unavailable", text, leg="front", because=cause))
        return Report(False, missing, self._age_s(), error=error)

    async def _roster(self) -> tuple[tuple[str, ...], Unavailable | None]:
        """What the registry misses; and why there can be no handoff at all: no registry, or a role without a rank."""
        missing: tuple[str, ...] = ()
        try:
            roster = await self._front.backend.roster()
            missing = roster.missing
            limits_of(roster)
        except Unavailable as error:
            return missing or (error.cause.message,), error
        return missing, None

    def _within(self, at_s: float | None, duration_s: float) -> bool:
        return at_s is not None and self._front.clock.now_s() - at_s < duration_s

    def _age_s(self) -> float | None:
        handoff_s = self._front.handoff_s
        return None if handoff_s is None else round(self._front.clock.now_s() - handoff_s, 3)

    def _only_waited(self, cause: Cause) -> bool:
        """The service was full, or there was no end to the probe in time though others are served meanwhile."""
        if cause.code == Overloaded.code:
            return self._front.waiting_since_s is None or self._progress()
        return cause.code == DeadlineExceeded.code and self._progress()

    def _progress(self) -> bool:
        """Do clients wait here, and has anything moved for them within `stuck_s`?

        Rooms that commit and tokens of a decode are signs; first tokens are none, they come before the handoff. While
        the oldest client has not waited that long itself, a lack of signs says nothing.
        """
        front, stuck_s = self._front, self._policy.stuck_s
        since_s = front.waiting_since_s
        signs = (front.handoff_s, front.heard_s, since_s)
        return since_s is not None and any(self._within(at_s, stuck_s) for at_s in signs)

    # --- The probe -----------------------------------------------------------------------------------------

    async def _probed(self) -> Cause | None:
        """How the probe that is under way ends, or a new one: None when a handoff went through."""
        if self._probe is None or self._probe.done():
            self._probe = asyncio.ensure_future(self._hand_off())
        return await asyncio.shield(self._probe)  # a caller who leaves takes it from nobody

    async def _hand_off(self) -> Cause | None:
        front = self._front
        live = front.open(PROBE_IDS, PROBE_SAMPLING, probe=True)
        try:
            async with asyncio.timeout(self._policy.limit_s):
                while not (await live.take())[-1].finish_reason:
                    pass
                return await _committed(live)
        except TimeoutError:
            text = f"the probe's handoff took longer than {self._policy.limit_s:g} s"
            cause = Cause(DeadlineExceeded.code, text, "front", room=live.room)
            return live.attempts.final(cause)
        except PeerError as error:
            return error.cause
        except KVFerryError as error:
            return Cause(error.code, str(error), "front", room=live.room)
        finally:
            front.close_request(live)
            if live.submission is not None:
                live.submission.cancel()  # it has its token, but its room may still wait for the commit


async def _committed(live: LiveRequest) -> Cause | None:
    """The token comes from prefill, ahead of its KV: only the room's outcome says that decode has it."""
    if live.submission is None:
        return None
    outcome = await asyncio.shield(live.submission)
    return None if outcome.ok else outcome.cause or Cause("handoff_failed", "the room failed", room=outcome.room)
