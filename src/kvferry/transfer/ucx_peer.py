"""A connected target of the `ucx` backend: the agent that writes to it and nobody else, and its queue of work.

The work is done strictly in order. Only the first write is posted, in pieces, with at most `batch_bytes` under way, so
a cancel is never more than that away from its end. A handle is owned before it is posted and is released when it is
done or has raised, or when the agent goes: releasing one that is under way aborts nothing, and its bytes would be read
after their owner was told that the write had ended. For the same reason nothing here times out.

Where a post copies by itself (CMA), a target is a `CopyingPeer`.

All of it happens on the driver's thread.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from typing import Any

from kvferry.transfer.contract import Descriptor, Region, Spans, WriteOutcome, WriteResult
from kvferry.transfer.driver import describe
from kvferry.transfer.queued_peer import Deliver, QueuedPeer
from kvferry.transfer.spans import by_memory, split
from kvferry.transfer.ucx_agent import Agent, Transport, nixl_errors
from kvferry.transfer.ucx_lane import Lane
from kvferry.transfer.write import Write

#: Handles under way at a time, each with its share of `batch_bytes`: while the target works on one, the next is on its
#: way.
PIECES = 4

#: Turns of an agent after its last handle has ended, before it is deleted.
LAST_TURNS = 16

_log = logging.getLogger(__name__)


class UcxWrite(Write):
    def __init__(self, spans: Spans, on_end: Callable[[WriteResult], None], called_s: float) -> None:
        super().__init__(spans, on_end, called_s)
        self.pieces: deque[Spans] | None = None  # not yet posted; None until the write's first turn
        self.posted: deque[tuple[Lane, Any, int]] = deque()  # (by which lane, handle, bytes), oldest first
        self.gather: Callable[[], bool] | None = None  # fills the source; False: then nothing is posted
        self.hands = 0  # that are at a piece of it

    @property
    def idle(self) -> bool:
        """Nothing of it is under way."""
        return not self.posted and not self.hands


class UcxPeer(QueuedPeer[UcxWrite, Agent]):
    """Once it is `broken` nothing more is posted, and its agent is going, or `gone`."""

    def __init__(
        self,
        descriptor: Descriptor,
        agent: Agent,
        regions: tuple[Region, ...],
        batch_bytes: int,
        now_s: Callable[[], float],
        deliver: Deliver,
        over: Transport,
    ) -> None:
        super().__init__(descriptor, agent, now_s, deliver)
        self._regions = regions
        self._lane = Lane(agent, descriptor, regions)
        self._piece_bytes = max(1, batch_bytes // PIECES)
        self._errors = nixl_errors()
        self._failures: tuple[type[Exception], ...] = (PostFailed, *self._errors)
        self._waits = not over.proofs.revoked
        self.gone = False
        self._quiet_turns = 0

    @property
    def agents(self) -> tuple[Agent, ...]:
        return (self.agent,)

    @property
    def driven(self) -> tuple[Agent, ...]:
        """Those that have to be driven in the next turn."""
        return self.agents

    @property
    def _refuses(self) -> bool:
        return self.gone

    def serve(self) -> bool:
        """One turn: reap, post one piece, end. True when anything moved. Call it while `busy`."""
        try:
            return self._served()
        except self._failures as error:
            why = str(error) if isinstance(error, PostFailed) else describe(error)
        # Outside of the handler: the error's traceback holds handles, and each of them holds the agent.
        _log.warning("%s: peer %s is broken: %s", self.agent.name, self._descriptor.agent, why)
        self.end(why)
        return True

    def _served(self) -> bool:
        first = self._work[0]
        if isinstance(first, bytes):
            self.agent.nixl.send_notif(self._descriptor.agent, first)
            self._work.popleft()
            return True
        if first.pieces is None:
            tables = by_memory(first.spans, self._regions, self._descriptor.regions)
            first.pieces = deque(piece for spans in tables for piece in split(spans, self._piece_bytes))
        moved = self._reap(first)
        if first.pieces and not first.cancelled and len(first.posted) < PIECES:
            self._post(first, first.pieces.popleft())
            moved = True
        if not first.posted and (first.cancelled or not first.pieces):
            self._work.popleft()
            self._end(first, WriteOutcome.CANCELLED if first.pieces else WriteOutcome.FLUSHED)
            return True
        return moved

    def end(self, why: str) -> None:
        """Post nothing more. The agent goes at once where it is what ends the writes; or when they have ended."""
        self.broken = self.broken or why
        if not self.gone:
            self.bury()

    def bury(self) -> bool:
        """Call it every turn once it is broken, until it is True: the agent is gone, and the writes have been told.

        Where our agent's end proves nothing, handles end soon, each by itself: no target's help is needed. One that has
        raised may have left parts of itself behind, which the next turns of the agent end; deleting it before that
        aborts the process (UCX 1.23: an assertion about what is pending at a CMA endpoint). Elsewhere a write whose
        target stands still would never end, and deleting the agent is what ends it.
        """
        for work in self._work:
            if isinstance(work, UcxWrite):
                self._settle(work)
        under_way = any(isinstance(work, UcxWrite) and work.posted for work in self._work)
        self._quiet_turns = 0 if under_way else self._quiet_turns + 1
        if self._waits and self._quiet_turns <= LAST_TURNS:
            return False
        self.destroy(self.broken)
        return True

    def destroy(self, why: str) -> None:
        """Delete the agent, which ends whatever is under way; only then are the writes told."""
        if self.gone:
            return
        self.gone, self.broken = True, self.broken or why
        for work in self._work:
            while isinstance(work, UcxWrite) and work.posted:
                self._lane.release(work.posted.popleft()[1])
        for agent in self.agents:
            agent.delete()
        self._end_all(why)

    def _settle(self, write: UcxWrite) -> None:
        """Release what has ended of a broken peer's write, well or not."""
        for lane, handle, size_bytes in list(write.posted):
            try:
                ended = lane.has_ended(handle)
                write.flushed_bytes += size_bytes if ended else 0
            except self._errors:
                ended = True
            if ended:
                write.posted.remove((lane, handle, size_bytes))
                lane.release(handle)

    def _post(self, write: UcxWrite, piece: Spans) -> None:
        if write.first_post_s is None:
            write.first_post_s = self._now_s()
        post = self._lane.post(piece)
        write.descriptors += post.descriptors
        if post.handle is not None:
            write.posted.append((self._lane, post.handle, post.size_bytes))
        elif not post.error:
            write.flushed_bytes += post.size_bytes
        if post.error:
            raise PostFailed(post.error)

    def _reap(self, write: UcxWrite) -> bool:
        """Release what is done."""
        moved = False
        for lane, handle, size_bytes in list(write.posted):
            if lane.has_ended(handle):
                write.posted.remove((lane, handle, size_bytes))
                lane.release(handle)
                write.flushed_bytes += size_bytes
                moved = True
        return moved


class PostFailed(Exception):
    """With NIXL's error as text."""
