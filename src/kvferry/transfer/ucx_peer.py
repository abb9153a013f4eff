"""A connected target of the `ucx` backend: the agent that writes to it and nobody else, and its queue of work.

The work is done strictly in order. Only the first write is posted, in pieces, with at most `batch_bytes` under way, so
a cancel is never more than that away from its end. A handle is owned before it is posted and is released when it is
done or has raised, or when the agent goes: releasing one that is under way aborts nothing, and its bytes would be read
after their owner was told that the write had ended. For the same reason nothing here times out.

Where a post copies by itself (CMA), what the target is told goes by an agent of its own, `notes`. A write ends with a
flush of all that its agent has sent to that target, and a notification is flushed only when the target has looked: so
a write behind one would wait for the target's next turn, a poll interval, and for ever if it stands still.

All of it happens on the driver's thread.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np

from kvferry.transfer.contract import Descriptor, Region, Spans, WriteOutcome, WriteResult
from kvferry.transfer.driver import describe
from kvferry.transfer.queued_peer import Deliver, QueuedPeer
from kvferry.transfer.spans import addresses, by_memory, split, total_bytes
from kvferry.transfer.ucx_agent import Agent, Transport, kind_of, nixl_errors
from kvferry.transfer.write import Write

#: Handles under way at a time, each with its share of `batch_bytes`, where the target takes part: while it works on
#: one, the next is on its way. Where a post copies by itself, more of them would only cost what a handle costs.
PIECES = 4

#: Turns of `notes` after a notification: the first one sets the connection up.
_FIRST_TURNS, _NEXT_TURNS = 64, 2

#: Turns of an agent after its last handle has ended, before it is deleted.
_LAST_TURNS = 16

_log = logging.getLogger(__name__)


class UcxWrite(Write):
    def __init__(self, spans: Spans, on_end: Callable[[WriteResult], None], called_s: float) -> None:
        super().__init__(spans, on_end, called_s)
        self.pieces: deque[Spans] | None = None  # not yet posted; None until the write's first turn
        self.posted: deque[tuple[Any, int]] = deque()  # (handle, bytes), oldest first


class UcxPeer(QueuedPeer[UcxWrite, Agent]):
    """Once it is `broken` nothing more is posted, and its agent is going, or `gone`."""

    def __init__(
        self,
        descriptor: Descriptor,
        agent: Agent,
        notes: Agent,
        regions: tuple[Region, ...],
        batch_bytes: int,
        now_s: Callable[[], float],
        deliver: Deliver,
        over: Transport,
    ) -> None:
        super().__init__(descriptor, agent, now_s, deliver)
        self._regions, self._notes = regions, notes
        self._pieces = 1 if over.copies else PIECES
        self._piece_bytes = max(1, batch_bytes // self._pieces)
        self._errors = nixl_errors()
        self._copies, self._waits = over.copies, not over.proofs.revoked
        self.gone = self._told = False
        self._carrying = 0
        self._quiet_turns = 0

    @property
    def agents(self) -> tuple[Agent, ...]:
        return (self.agent,) if self._notes is self.agent else (self.agent, self._notes)

    @property
    def driven(self) -> tuple[Agent, ...]:
        """Those that have to be driven in the next turn. Where a post copies by itself: who carries a notification off,
        since nobody says that it has left.
        """
        if self.broken or not self._copies:
            return self.agents
        if not self._carrying:
            return ()
        self._carrying -= 1
        return (self._notes,)

    @property
    def _refuses(self) -> bool:
        return self.gone

    def serve(self) -> bool:
        """One turn: reap, post one piece, end. True when anything moved. Call it while `busy`."""
        try:
            return self._served()
        except self._errors as error:
            why = describe(error)
        # Outside of the handler: the error's traceback holds handles, and each of them holds the agent.
        _log.warning("%s: peer %s is broken: %s", self.agent.name, self._descriptor.agent, why)
        self.end(why)
        return True

    def _served(self) -> bool:
        first = self._work[0]
        if isinstance(first, bytes):
            self._notes.nixl.send_notif(self._descriptor.agent, first)
            self._carrying, self._told = (_NEXT_TURNS if self._told else _FIRST_TURNS), True
            self._work.popleft()
            return True
        if first.pieces is None:
            tables = by_memory(first.spans, self._regions, self._descriptor.regions)
            first.pieces = deque(piece for spans in tables for piece in split(spans, self._piece_bytes))
        moved = self._reap(first)
        if first.pieces and not first.cancelled and len(first.posted) < self._pieces:
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
        if self._waits and self._quiet_turns <= _LAST_TURNS:
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
                self._release(work.posted.popleft()[0])
        for agent in self.agents:
            agent.delete()
        self._end_all(why)

    def _settle(self, write: UcxWrite) -> None:
        """Release what has ended of a broken peer's write, well or not."""
        for handle, size_bytes in list(write.posted):
            try:
                ended = self.agent.nixl.check_xfer_state(handle) == "DONE"
                write.flushed_bytes += size_bytes if ended else 0
            except self._errors:
                ended = True
            if ended:
                write.posted.remove((handle, size_bytes))
                self._release(handle)

    def _post(self, write: UcxWrite, piece: Spans) -> None:
        size_bytes = total_bytes(piece)
        source = self._descriptors(piece, self._regions, "source")
        target = self._descriptors(piece, self._descriptor.regions, "target")
        handle = self.agent.nixl.initialize_xfer("WRITE", source, target, self._descriptor.agent)
        if write.first_post_s is None:
            write.first_post_s = self._now_s()
        write.posted.append((handle, size_bytes))  # owned before it is posted
        write.descriptors += len(piece)
        if self.agent.nixl.transfer(handle) == "DONE":
            write.posted.pop()
            self._release(handle)
            write.flushed_bytes += size_bytes

    def _descriptors(self, piece: Spans, regions: tuple[Region, ...], side: str) -> Any:
        """Of a piece whose side lies in one kind of memory."""
        rows = np.zeros((len(piece), 3), dtype=np.uint64)  # address, length, device
        rows[:, 0] = addresses(piece, regions, side)
        rows[:, 1] = piece["length"].astype(np.uint64)
        kind = kind_of(regions[piece[f"{side}_region"][0]])
        if kind != "DRAM":
            rows[:, 2] = np.array([max(region.device, 0) for region in regions])[piece[f"{side}_region"]]
        return self.agent.nixl.get_xfer_descs(rows, kind)

    def _reap(self, write: UcxWrite) -> bool:
        """Release what is done."""
        moved = False
        for handle, size_bytes in list(write.posted):
            if self.agent.nixl.check_xfer_state(handle) == "DONE":
                write.posted.remove((handle, size_bytes))
                self._release(handle)
                write.flushed_bytes += size_bytes
                moved = True
        return moved

    def _release(self, handle: Any) -> None:
        try:
            self.agent.nixl.release_xfer_handle(handle)
        except self._errors as error:
            _log.info("%s: a handle was not released: %s", self.agent.name, describe(error))
