"""A connected target of the `ucx` backend where to post a write is to copy its bytes (CMA), so that a thread copies at
the rate of one core.

Writes are cut into pieces, and two hands take them from the same queue: the driver's thread, and a second one, each
with a lane (an agent) of its own to the target. Writes end in order, whoever copied them. A write may have something
that fills its source first (`gather`): whoever takes it then does that, too, and its bytes are still in the caches.

What the target is told goes by one more agent, `notes`. A write ends with a flush of all that its agent has sent to
that target, and a notification is flushed only when the target has looked: so a write behind one would wait for the
target's next turn, a poll interval, and for ever if it stands still.

`turn` is called by either hand, `write` by anybody, all else on the driver's thread. The lock is held for what they
share, and neither while something is copied nor while somebody is told.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from enum import IntEnum
from threading import Condition
from typing import Any

from kvferry.transfer.contract import Descriptor, Region, Spans, WriteOutcome
from kvferry.transfer.driver import describe
from kvferry.transfer.queued_peer import Deliver
from kvferry.transfer.second_hand import SecondHand
from kvferry.transfer.spans import split
from kvferry.transfer.ucx_agent import Agent, Transport
from kvferry.transfer.ucx_lane import Lane, Post
from kvferry.transfer.ucx_peer import LAST_TURNS, UcxPeer, UcxWrite

_log = logging.getLogger(__name__)

#: Of a piece, at most: a millisecond's work, so that two hands end at much the same time, and some ten times what a
#: handle costs.
_PIECE_BYTES = 4 * 1024 * 1024

#: Turns of `notes` after a notification: the first one sets the connection up.
_FIRST_TURNS, _NEXT_TURNS = 64, 2


class Hand(IntEnum):
    DRIVER = 0
    SECOND = 1


class CopyingPeer(UcxPeer):
    """`make_lane` is called by the second hand, once, when there is work for it; None means that there is no such
    lane. It counts once its connection stands, since a target that stood still meanwhile would hold its first piece
    up. Without a second hand the driver copies all.
    """

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
        second: SecondHand | None,
        make_lane: Callable[[], Lane | None],
    ) -> None:
        super().__init__(descriptor, agent, regions, batch_bytes, now_s, deliver, over)
        self._notes, self._second, self._make_lane = notes, second, make_lane
        self._lanes: list[Lane | None] = [self._lane, None]
        self._opening: Lane | None = None  # the second one
        self._piece_bytes = max(1, min(batch_bytes // (1 if second is None else len(Hand)), _PIECE_BYTES))
        self._lock = Condition()
        self._writes: deque[UcxWrite] = deque()
        self._to_tell: deque[bytes] = deque()
        self._ended: deque[tuple[UcxWrite, WriteOutcome]] = deque()  # whose owners have not been told
        self._telling = self._told = self._tried = False
        self._carrying = 0

    @property
    def busy(self) -> bool:
        return bool(self._writes or self._to_tell)

    @property
    def agents(self) -> tuple[Agent, ...]:
        return (self.agent, self._notes)

    @property
    def driven(self) -> tuple[Agent, ...]:
        """Who carries a notification off, since nobody says that it has left."""
        if self.broken:
            return self.agents
        if not self._carrying:
            return ()
        self._carrying -= 1
        return (self._notes,)

    # --- commands ---

    def write(self, write: UcxWrite) -> None:
        write.pieces = deque(split(write.spans, self._piece_bytes))
        with self._lock:
            if self.gone:
                self._ended.append((write, WriteOutcome.BROKEN))
            else:
                self._writes.append(write)
                self._finish()
        self._tell_ends()

    def notify(self, payload: bytes) -> None:
        if self.broken:
            super().notify(payload)
        else:
            self._to_tell.append(payload)

    def cancel(self, write: UcxWrite) -> None:
        with self._lock:
            write.cancelled = True
            self._finish()
        self._tell_ends()

    # --- turns ---

    def serve(self) -> bool:
        told = bool(self._to_tell)
        try:
            while self._to_tell:
                self._notes.nixl.send_notif(self._descriptor.agent, self._to_tell.popleft())
                self._carrying, self._told = (_NEXT_TURNS if self._told else _FIRST_TURNS), True
        except self._errors as error:
            self._break(describe(error))
        return self.turn(Hand.DRIVER) or told

    def turn(self, hand: Hand) -> bool:
        """Of either hand: see what it has under way, copy a piece. True when anything moved."""
        if hand is Hand.SECOND and self._lanes[hand] is None and not self.broken:
            self._open_second()
        lane = self._lanes[hand]
        if lane is None or self.broken:
            return False
        moved = self._reap_by(lane)
        taken = self._take(lane)
        if taken is not None:
            write, pieces = taken
            posts = self._copy(write, pieces, lane)
            with self._lock:
                self._put_back(write, pieces, posts, lane)
                self._finish()
                self._lock.notify_all()
        if moved or taken:
            self._tell_ends()
        return moved or taken is not None

    def _open_second(self) -> None:
        if self._writes and not self._tried:
            self._tried = True
            self._opening = self._make_lane()
        lane = self._opening
        if lane is None:
            return
        try:
            stands = lane.stands()
        except self._errors as error:
            why = describe(error)
        else:
            if stands:
                self._opening, self._lanes[Hand.SECOND] = None, lane
            return
        # Outside of the handler: the error's traceback may hold the agent.
        _log.info("%s: one hand only for %s: %s", self.agent.name, self._descriptor.agent, why)
        self._opening = None
        lane.close()

    def waits(self, hand: Hand) -> bool:
        """It has something under way that it has to look after."""
        with self._lock:
            if self.broken:
                return False
            opening = hand is Hand.SECOND and self._opening is not None
            return opening or any(self._under_way(self._lanes[hand]))

    def _under_way(self, lane: Lane | None) -> list[tuple[UcxWrite, Any, int]]:
        return [(write, handle, size) for write in self._writes for by, handle, size in write.posted if by is lane]

    def _reap_by(self, lane: Lane) -> bool:
        with self._lock:
            under_way = self._under_way(lane)
        moved = False
        for write, handle, size_bytes in under_way:
            try:
                ended = lane.has_ended(handle)
            except self._errors as error:
                self._break(describe(error))
                return True
            if ended:
                moved = True
                self._release(write, lane, handle, size_bytes, size_bytes)
        return moved

    def _release(self, write: UcxWrite, lane: Lane, handle: Any, size_bytes: int, flushed_bytes: int) -> None:
        lane.release(handle)
        with self._lock:
            write.posted.remove((lane, handle, size_bytes))
            write.flushed_bytes += flushed_bytes
            self._finish()

    def _take(self, lane: Lane) -> tuple[UcxWrite, deque[Spans]] | None:
        """The next piece; all of a write that has to be gathered first."""
        with self._lock:
            if self.broken or self._under_way(lane):
                return None
            for write in self._writes:
                if write.pieces and not write.cancelled:
                    pieces = write.pieces if write.gather is not None else deque([write.pieces.popleft()])
                    if pieces is write.pieces:
                        write.pieces = deque()
                    write.hands += 1
                    if write.first_post_s is None:
                        write.first_post_s = self._now_s()
                    return write, pieces
        return None

    def _copy(self, write: UcxWrite, pieces: deque[Spans], lane: Lane) -> list[Post]:
        """Takes those off `pieces` that it has posted. Whatever goes wrong, the hand goes on, and the write hears."""
        posts: list[Post] = []
        try:
            if write.gather is not None and not (self.broken or write.cancelled):
                gather, write.gather = write.gather, None
                if not gather():  # a cancel that comes meanwhile stands
                    write.cancelled = True
            while pieces and not (self.broken or write.cancelled):
                posts.append(lane.post(pieces.popleft()))
                if posts[-1].handle is not None or posts[-1].error:
                    break
        except Exception as error:  # noqa: BLE001
            _log.exception("%s: a piece was not copied", self.agent.name)
            posts.append(Post(0, 0, None, describe(error)))
        return posts

    def _put_back(self, write: UcxWrite, pieces: deque[Spans], posts: list[Post], lane: Lane) -> None:
        write.hands -= 1
        assert write.pieces is not None
        write.pieces.extendleft(reversed(pieces))
        for post in posts:
            write.descriptors += post.descriptors
            if post.handle is not None:
                write.posted.append((lane, post.handle, post.size_bytes))
            elif not post.error:
                write.flushed_bytes += post.size_bytes
            if post.error:
                self._break(post.error)

    # --- ends ---

    def _finish(self) -> None:
        """With the lock: see which writes have ended. In order, but for cancelled ones. Of a broken target all end with
        its agents, since a handle that is gone may have failed.
        """
        if self.broken:
            return
        for write in [write for write in self._writes if write.cancelled and write.idle]:
            self._writes.remove(write)
            self._ended.append((write, WriteOutcome.CANCELLED if write.pieces else WriteOutcome.FLUSHED))
        while self._writes and self._writes[0].idle and not self._writes[0].pieces:
            self._ended.append((self._writes.popleft(), WriteOutcome.FLUSHED))

    def _tell_ends(self) -> None:
        """In their order, so by one thread at a time; who comes meanwhile leaves it to that one."""
        while True:
            with self._lock:
                if self._telling or not self._ended:
                    return
                self._telling = True
                write, outcome = self._ended.popleft()
            try:
                self._end(write, outcome, self.broken if outcome is WriteOutcome.BROKEN else "")
            finally:
                self._telling = False

    def _break(self, why: str) -> None:
        if not self.broken:
            self.broken = why
            _log.warning("%s: peer %s is broken: %s", self.agent.name, self._descriptor.agent, why)

    def bury(self) -> bool:
        self._settle_lane(self._lane)
        if self._second is not None:
            self._second.ask(self._settle_second)
        with self._lock:
            left = any(not write.idle for write in self._writes)
        self._quiet_turns = 0 if left else self._quiet_turns + 1
        if self._waits and self._quiet_turns <= LAST_TURNS:
            return False
        self.destroy(self.broken)
        return True

    def _settle_second(self) -> None:
        lane = self._lanes[Hand.SECOND] or self._opening
        if lane is not None:
            self._settle_lane(lane)
            lane.agent.notifications()

    def _settle_lane(self, lane: Lane) -> None:
        """Release what has ended of a broken peer's writes, well or not."""
        with self._lock:
            under_way = self._under_way(lane)
        for write, handle, size_bytes in under_way:
            try:
                flushed_bytes = size_bytes if lane.has_ended(handle) else -1
            except self._errors:
                flushed_bytes = 0
            if flushed_bytes >= 0:
                self._release(write, lane, handle, size_bytes, flushed_bytes)

    def destroy(self, why: str) -> None:
        if self.gone:
            return
        with self._lock:
            self.broken = self.broken or why
            while any(write.hands for write in self._writes):  # for a piece
                self._lock.wait()
        self._let_go(self._lane)
        if self._second is not None:  # also of a lane that it may be about to make
            self._second.ask(self._drop_second)
        for agent in self.agents:
            agent.delete()
        with self._lock:
            self.gone = True
            self._ended.extend((write, WriteOutcome.BROKEN) for write in self._writes)
            self._writes.clear()
        self._tell_ends()

    def _drop_second(self) -> None:
        lane = self._lanes[Hand.SECOND] or self._opening
        self._lanes[Hand.SECOND] = self._opening = None
        if lane is not None:
            self._let_go(lane)
            lane.close()

    def _let_go(self, lane: Lane) -> None:
        with self._lock:
            under_way = self._under_way(lane)
        for write, handle, size_bytes in under_way:
            self._release(write, lane, handle, size_bytes, 0)
