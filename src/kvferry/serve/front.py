"""The front: opens attempts, owns the token links, and is the only truth about what a client has.

An attempt ends when the last token has come, when its room or the decode that streams it is lost, or when the
client leaves. Losing prefill ends nothing here: the room decides what that means. After a loss the request goes on
in its next attempt, from the tokens that the client has; so it does when decode has retracted it, which is no failure.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator

from kvferry.actors.ports import Clock, LostReason, Network, Random
from kvferry.obs.metrics import FrontMetrics
from kvferry.protocol.address import Address
from kvferry.protocol.errors import Cause, PeerError
from kvferry.protocol.messages import Message, Retracted, Stop, Token, TokenBatch
from kvferry.protocol.outcome import Outcome
from kvferry.protocol.request import RequestSpec, Sampling
from kvferry.serve.gateway import Backend, FrontInfo, LimitsCache, PromptEncoder
from kvferry.serve.live import LiveRequest
from kvferry.serve.stream import Verdict

#: Losses that are remembered. One is of interest only to requests that were opened before it.
REMEMBERED_LOSSES = 4096

logger = logging.getLogger("kvferry.front")


class Front:
    """A LinkHandler. All methods are called on one loop; the caller starts and closes it."""

    def __init__(
        self,
        network: Network,
        backend: Backend,
        encoder: PromptEncoder,
        clock: Clock,
        random: Random,
        info: FrontInfo,
        metrics: FrontMetrics,
    ) -> None:
        self.backend, self.encoder, self.clock, self.info, self.metrics = backend, encoder, clock, info, metrics
        self.random = random
        self.limits = LimitsCache(backend, clock)
        self._network = network
        self._requests: dict[int, LiveRequest] = {}
        self._lost: dict[int, int] = {}  # incarnation -> serial of its last loss
        self._serial = 0
        self._left: set[asyncio.Future[Outcome]] = set()  # attempts that were retracted before their room ended
        self._closing = False
        self.handoff_s: float | None = None  # when the last room ended with a commit
        self.heard_s: float | None = None  # when a decode last sent a token that was next

    @property
    def requests_live(self) -> int:
        """Requests whose client still waits or reads. One that is closed may stay in the books a little longer."""
        return sum(1 for _ in self._held_by_clients())

    @property
    def waiting_since_s(self) -> float | None:
        """When the oldest of them was opened."""
        return min((live.opened_s for live in self._held_by_clients()), default=None)

    def _held_by_clients(self) -> Iterator[LiveRequest]:
        return (live for live in self._requests.values() if not live.closed and not live.probe)

    async def start(self) -> None:
        await self._network.start(self)

    async def close(self) -> None:
        """Fail what is live, abort its rooms, close the links."""
        self._closing = True
        pending = [live.submission for live in self._requests.values() if live.submission is not None]
        pending += self._left
        for live in list(self._requests.values()):
            self._fail(live, Cause("unavailable", "the server is shutting down", leg="front"))
        for submission in pending:
            submission.cancel()  # also of finished requests, whose rooms have not ended
        await asyncio.gather(*pending, return_exceptions=True)
        await self._network.close()

    # --- A request's life ----------------------------------------------------------------------------------

    def open(
        self,
        prompt_ids: tuple[int, ...],
        sampling: Sampling,
        group: int = 0,
        samples: int = 1,
        news: asyncio.Event | None = None,
        probe: bool = False,
    ) -> LiveRequest:
        """Open a request and its first attempt. The caller must `close` it with `close_request`. `group` and `samples`
        are those of the RequestSpec, `news` is the LiveRequest's. A `probe` is our own: no client's request in the
        metrics or the status.
        """
        request = self.new_id()
        while request in self._requests:
            request = self.new_id()
        spec = RequestSpec(request, prompt_ids, sampling, self._network.address, group=group, samples=samples)
        live = LiveRequest(spec, self.clock.now_s(), self.info.attempts, news)
        live.probe = probe
        self._requests[request] = live
        self.metrics.live.inc(not probe)
        self._submit(live)
        return live

    def new_id(self) -> int:
        """63 random bits, for a request or a group; never 0."""
        while not (number := self.random.bits(63)):
            pass
        return number

    def _submit(self, live: LiveRequest) -> None:
        """Open the request's current attempt."""
        self._serial += 1
        live.serial = self._serial
        live.submission = asyncio.ensure_future(self.backend.submit(live.spec, live.attempt))
        live.submission.add_done_callback(lambda task: self._submission_ended(live, task))

    def close_request(self, live: LiveRequest) -> None:
        """The client needs nothing more: a request that is not over is aborted. Safe to call twice."""
        if not live.closed:
            live.closed = True
            self.metrics.live.dec(not live.probe)
            if not live.stream.over:
                live.stream.fail(Cause("cancelled", "the client has gone", leg="front"))
                self._abandon(live)
            if live.reopening is not None:
                live.reopening.cancel()
        self._forget(live)

    def _submission_ended(self, live: LiveRequest, task: asyncio.Future[Outcome]) -> None:
        if task is not live.submission:
            if not task.cancelled():
                task.exception()  # an earlier attempt's, which we have left: its end is no news, but it is heard
        elif task.cancelled():
            # Ours (then the stream is over), or the loop is being torn down.
            self._fail(live, Cause("handoff_failed", "the attempt was cancelled", leg="router"))
        elif (error := task.exception()) is not None:
            self._router_failed(live, error)
        else:
            self._outcome_came(live, task.result())
        self._forget(live)

    def _outcome_came(self, live: LiveRequest, outcome: Outcome) -> None:
        live.outcome_came(outcome)
        if outcome.ok:
            self.handoff_s = self.clock.now_s()
        if live.stream.over:
            return
        if not outcome.ok and live.decode is not None:
            # A batch of decode's is proof that it has committed, whatever its room could still be told.
            return
        if not outcome.ok:
            cause = outcome.cause or Cause("handoff_failed", "the room failed without a cause", room=outcome.room)
            live.retry_after_s = outcome.retry_after_s
            self._fail(live, cause)
        elif outcome.decode is not None and self._was_lost(live, outcome.decode, outcome.front_link):
            self._decode_lost(live, outcome.decode, "was lost before the handoff's outcome came")

    def _router_failed(self, live: LiveRequest, error: BaseException) -> None:
        """A lost router takes its rooms along, but a request that decode streams needs neither."""
        if live.stream.over or live.decode is not None:
            return
        if isinstance(error, PeerError):
            live.retry_after_s = getattr(error, "retry_after_s", 0.0)
            self._fail(live, error.cause)
            return
        logger.error("submit failed for request %d", live.spec.request, exc_info=error)
        self._fail(live, Cause("handoff_failed", f"{type(error).__name__}: {error}", leg="router"))

    def _fail(self, live: LiveRequest, cause: Cause) -> None:
        """An attempt has failed: open the next one, or tell the client."""
        if live.stream.over:
            self._forget(live)
            return
        delay_s = live.attempts.failed(cause, live.stream.next_index, self.clock.now_s())
        if delay_s is None or self._closing:
            self._end(live, live.attempts.final(cause))
            return
        logger.info("request %016x: attempt %d failed: %s", live.spec.request, live.attempt, cause.text())
        self.metrics.attempts_failed.labels(cause.code).inc()
        self._abandon(live)
        live.begin_next()
        live.reopening = asyncio.ensure_future(self._reopen(live, delay_s))

    async def _reopen(self, live: LiveRequest, delay_s: float) -> None:
        await self.clock.sleep(delay_s)
        if not live.stream.over:
            self._submit(live)

    def _end(self, live: LiveRequest, cause: Cause) -> None:
        if live.stream.fail(cause):
            self._abandon(live)
            live.wake()
        self._forget(live)

    def _abandon(self, live: LiveRequest) -> None:
        """Abort the room if it still runs, and tell every leader that we know of to stop."""
        if live.submission is not None:
            live.submission.cancel()
        for incarnation in live.leaders:
            self._network.send(incarnation, Stop(live.spec.request, live.attempt, live.room))

    def _forget(self, live: LiveRequest) -> None:
        """Drop the record when nobody needs it. A finished one stays until its room has ended, so that decode's
        repeat of the last token is taken for what it is."""
        if live.closed and (live.submission is None or live.submission.done()):
            self._requests.pop(live.spec.request, None)

    # --- Links ---------------------------------------------------------------------------------------------

    def on_link_up(self, peer: Address) -> None:
        """Leaders dial us; `on_link_lost` is what matters."""

    def on_message(self, peer: Address, message: Message) -> bool:
        """Takes TokenBatch and Retracted; anything else is not for a front, and is counted. Never full: what a
        request may hold is bounded by its max_tokens."""
        if isinstance(message, TokenBatch):
            self._batch_came(peer, message)
        elif isinstance(message, Retracted):
            self._retracted(peer, message)
        else:
            self.metrics.tokens_dropped.labels("not_a_batch").inc()
        return True

    def on_link_lost(self, peer: Address, reason: LostReason) -> None:
        self._peer_lost(peer, f"is lost: link {reason.value}")

    def on_exited(self, peer: Address) -> None:
        self._peer_lost(peer, "is lost: its process has ended")

    def on_failure(self, error: Exception) -> None:
        raise error  # the loop's handler logs it

    def _batch_came(self, peer: Address, batch: TokenBatch) -> None:
        unwanted: set[tuple[int, int, int]] = set()
        for token in batch.tokens:
            live = self._requests.get(token.request)
            verdict = self._offer(live, peer, batch.leg, token) if live is not None else Verdict.STALE
            if verdict in (Verdict.STALE, Verdict.BEYOND):
                unwanted.add((token.request, token.attempt, token.room))
            if verdict not in (Verdict.TAKEN, Verdict.HELD):
                reason = "unknown_request" if live is None else verdict.value
                self.metrics.tokens_dropped.labels(reason).inc()
        for request, attempt, room in sorted(unwanted):
            self._network.send(peer.incarnation, Stop(request, attempt, room))

    def _offer(self, live: LiveRequest, peer: Address, leg: str, token: Token) -> Verdict:
        verdict = live.stream.offer(token)
        if verdict is not Verdict.STALE:
            live.sender_seen(peer, leg, token.room)
        if verdict is Verdict.TAKEN:
            live.wake()
            if leg == "decode":
                self.heard_s = self.clock.now_s()
        return verdict

    def _retracted(self, peer: Address, message: Retracted) -> None:
        """Decode needs the pages for older requests: the next attempt is opened at once, and should go there again.

        It goes on from what the client has. That is all that decode has sent, since the link keeps its order; so
        `next_index` is for the log. The room has ended in success, and its call resolves to that by itself.
        """
        live = self._requests.get(message.request)
        if live is None or live.attempt != message.attempt or live.stream.over:
            self.metrics.tokens_dropped.labels("unknown_request" if live is None else Verdict.STALE.value).inc()
            return
        logger.info(
            "request %016x: attempt %d retracted by %s at token %d",
            message.request, message.attempt, peer.name, message.next_index,
        )  # fmt: skip
        self.metrics.retractions.inc()
        live.attempts.retracted()
        if live.submission is not None and not live.submission.done():
            self._left.add(live.submission)
            live.submission.add_done_callback(self._left.discard)
        live.begin_next(prefer=peer.incarnation)
        self._submit(live)

    def _peer_lost(self, peer: Address, what: str) -> None:
        self._serial += 1
        self._lost.pop(peer.incarnation, None)
        self._lost[peer.incarnation] = self._serial
        if len(self._lost) > REMEMBERED_LOSSES:
            del self._lost[next(iter(self._lost))]
        for live in list(self._requests.values()):
            if live.decode is not None and live.decode.incarnation == peer.incarnation:
                self._decode_lost(live, peer, what)

    def _was_lost(self, live: LiveRequest, peer: Address, link: int) -> bool:
        """Has `peer` been lost since the request was opened, or not come back since, or come back by another session
        than `link`, over which it has opened the room?

        A leader answers `Opened` only over an open link to us, so a decode that an outcome names was linked; if
        that link broke meanwhile, decode dropped the request, even if the link is up again by now.
        """
        if link and link != self._network.session_of(peer.incarnation):
            return True
        serial = self._lost.get(peer.incarnation)
        return serial is not None and (serial > live.serial or not self._network.is_up(peer.incarnation))

    def _decode_lost(self, live: LiveRequest, peer: Address, what: str) -> None:
        elapsed_s = self.clock.now_s() - live.opened_s
        message = f"decode instance {peer.name} {what}"
        cause = Cause(
            "peer_lost", message, leg="decode", peer=peer.name, room=live.room,
            state=f"{live.stream.next_index} tokens sent", elapsed_s=elapsed_s,
        )  # fmt: skip
        self._fail(live, cause)
