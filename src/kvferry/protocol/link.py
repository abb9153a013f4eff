"""The link session: numbered messages between two incarnations, delivered once and in order, or the session is over.

Sans-IO: every method takes `now_s` (local monotonic seconds); frames to send are collected with `collect`, what
happened with `take_events`. The rules:

* The dialer draws the session id and starts CONNECTING; the listener's session starts OPEN. A path may break and be
  replaced under a session: a Hello with the same id takes it up again, and what is unacknowledged is sent again.
* Acknowledgements are cumulative and ride on Data; alone they wait a quarter of `resend_s`, so that they mostly ride.
* Without progress of the acks for `resend_s` everything unacknowledged is sent again (go-back-N), then after twice
  that time, and so on. A message out of order is dropped: its sender will send it again.
* Senders never wait: more than `window` unacknowledged messages end the session with OVERFLOW.
* Silence of `silence_s` ends it with SILENT. A heartbeat goes out when nothing else did for `heartbeat_s`.
* When both ends dial at once, the lower session id wins: the other end adopts it and keeps what it had queued.
* A frame of another session, or of one that is over, is dropped and counted.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any, ClassVar

import msgspec

from kvferry.protocol.address import Address
from kvferry.protocol.frames import BATCH_BYTES, BATCH_MESSAGES, Ack, Bye, Data, Frame, Hello, NotMe, Welcome
from kvferry.protocol.link_table import TABLE, Ending, LinkEvent, LinkState
from kvferry.protocol.machine import Machine

S, E = LinkState, LinkEvent
_TOLD_TO_THE_PEER = (Ending.CLOSED, Ending.OVERFLOW, Ending.SILENT)
#: The event of a frame of this session, where its kind alone decides.
_PLAIN: dict[type[Frame], LinkEvent] = {
    Welcome: E.WELCOME, NotMe: E.NOT_ME, Data: E.DATA, Ack: E.ACK, Bye: E.BYE,
}  # fmt: skip


@dataclass(frozen=True)
class LinkLimits:
    """Seconds and messages; see the module's rules."""

    heartbeat_s: float
    silence_s: float
    resend_s: float
    window: int


class Up(msgspec.Struct, frozen=True):
    """The session is open."""


class Delivered(msgspec.Struct, frozen=True):
    """The next message from the peer."""

    payload: bytes


class Answered(msgspec.Struct, frozen=True):
    """The peer has answered our `ask`: it was alive after that was called."""


class Lost(msgspec.Struct, frozen=True):
    """The session is over; nothing more comes from it."""

    ending: Ending


SessionEvent = Up | Delivered | Answered | Lost


class LinkSession(Machine[LinkState, LinkEvent]):
    """One end of one session. Make it with `dial` or `accept`."""

    TABLE: ClassVar[Any] = TABLE

    def __init__(
        self, state: LinkState, session: int, us: Address, peer: Address, dial: int, limits: LinkLimits, now_s: float
    ) -> None:
        super().__init__(state)
        self.session, self.us, self.peer, self.limits = session, us, peer, limits
        self._dial = dial
        self._control: list[Frame] = []  # frames to send, beside Data and the ack that is due
        self._unacked: deque[bytes] = deque()
        self._base = 0  # number of the first unacknowledged message
        self._cursor = 0  # number of the next message to put into a frame
        self._received = 0  # messages delivered, in order
        self._ack_waiting = 0
        self._ack_after = max(1, min(limits.window // 4, BATCH_MESSAGES))  # received messages
        self._ack_due_s: float | None = None
        self._ask = self._answered = 0
        self._ask_due_s = 0.0
        self._now_s, self._by_us = now_s, False
        self._silent_at_s = now_s + limits.silence_s
        self._heartbeat_at_s = now_s + limits.heartbeat_s
        self._hello_due_s = now_s + limits.resend_s
        self._resend_wait_s = limits.resend_s
        self._resend_due_s: float | None = None

    @classmethod
    def dial(cls, session: int, us: Address, peer: Address, dial: int, limits: LinkLimits, now_s: float) -> LinkSession:
        """The dialer's end: `dial` is the process's count of dials, this one included."""
        link = cls(S.CONNECTING, session, us, peer, dial, limits, now_s)
        link.say_hello(now_s)
        return link

    @classmethod
    def accept(cls, hello: Hello, us: Address, dial: int, limits: LinkLimits, now_s: float) -> LinkSession:
        """The listener's end of the session that `hello` opens; `dial` counts our own dials."""
        link = cls(S.OPEN, hello.session, us, hello.sender, dial, limits, now_s)
        link.commands.append(Up())
        link._welcome()
        return link

    # --- what a local caller does ---------------------------------------------------------------------------

    def send(self, payload: bytes, now_s: float) -> bool:
        """Queue a message. False when the session is over, or is ended by this one with OVERFLOW."""
        if self.state is S.OVER:
            return False
        if len(self._unacked) >= self.limits.window:
            self.end(Ending.OVERFLOW, now_s)
            return False
        self._fire(E.SEND, now_s, {"payload": payload})
        return True

    def end(self, ending: Ending, now_s: float) -> None:
        """End the session from this side; the peer is told, where there is one to tell."""
        self._fire(E.END, now_s, {"ending": ending})

    def say_hello(self, now_s: float) -> None:
        """The path is new: say Hello on it. What was sent before may be lost and follows the peer's Welcome."""
        self._hello_due_s = now_s + self.limits.resend_s
        self._control.append(Hello(self.session, self.us, self.peer.incarnation, self._dial))

    def ask(self, now_s: float) -> None:
        """Have the peer prove that it is alive now: `Answered` follows, asked again at each heartbeat until then."""
        self._ask += 1
        self._put_question(now_s)

    # --- what arrives ---------------------------------------------------------------------------------------

    def receive(self, frame: Frame, now_s: float) -> None:
        """Take in one frame, of whatever session."""
        event = self._event_of(frame)
        if event is not E.STRAY and event is not E.HIGHER_HELLO and event is not E.LOWER_HELLO:
            self._silent_at_s = now_s + self.limits.silence_s
        self._fire(event, now_s, {"frame": frame})

    def tick(self, now_s: float) -> None:
        """Let the timers that are due run out. Call it at `next_tick_s`, or at any other time."""
        if self.state is S.OVER:
            return
        if now_s >= self._silent_at_s:
            self.end(Ending.SILENT, now_s)
            return
        if self.state is S.CONNECTING:
            if now_s >= self._hello_due_s:
                self.say_hello(now_s)
            return
        if self._resend_due_s is not None and now_s >= self._resend_due_s:
            self._cursor, self._resend_due_s = self._base, None
            self._resend_wait_s = min(2 * self._resend_wait_s, max(self.limits.resend_s, self.limits.silence_s / 4))
        if self._ask > self._answered and now_s >= self._ask_due_s:
            self._put_question(now_s)
        if now_s >= self._heartbeat_at_s:
            self._ack_due_s = now_s

    @property
    def next_tick_s(self) -> float | None:
        """When `tick` has something to do next; None when the session is over."""
        if self.state is S.OVER:
            return None
        if self.state is S.CONNECTING:
            return min(self._silent_at_s, self._hello_due_s)
        due_s = self._heartbeat_at_s
        if self._silent_at_s < due_s:
            due_s = self._silent_at_s
        if self._resend_due_s is not None and self._resend_due_s < due_s:
            due_s = self._resend_due_s
        if self._ack_due_s is not None and self._ack_due_s < due_s:
            due_s = self._ack_due_s
        return min(due_s, self._ask_due_s) if self._ask > self._answered else due_s

    # --- what leaves ----------------------------------------------------------------------------------------

    def has_frames(self, now_s: float) -> bool:
        """`collect` would give some."""
        if self._control:
            return True
        if self.state is not S.OPEN:
            return False
        if self._cursor < self._base + len(self._unacked):
            return True
        return self._ack_due_s is not None and now_s >= self._ack_due_s

    def collect(self, now_s: float) -> list[Frame]:
        """The frames to send now, in order."""
        frames, self._control = self._control, []
        if self.state is S.OPEN:
            if self._cursor < self._base + len(self._unacked):
                frames += self._batches(now_s)
            if self._ack_due_s is not None and now_s >= self._ack_due_s:
                frames.append(self._ack())
        if frames:
            self._heartbeat_at_s = now_s + self.limits.heartbeat_s
        return frames

    def take_events(self) -> list[SessionEvent]:
        """What happened since the last call, in order."""
        events = self.commands
        if events:
            self.commands = []
        return events

    @property
    def unacked(self) -> int:
        """Messages queued or sent that the peer has not acknowledged."""
        return len(self._unacked)

    # --- inside ---------------------------------------------------------------------------------------------

    def _fire(self, event: LinkEvent, now_s: float, payload: dict[str, Any]) -> None:
        # Events are collected by take_events, so this does not use `fire`, which hands them out.
        self._now_s = now_s
        self._by_us = event is E.END
        self._apply(event, payload)

    def _event_of(self, frame: Frame) -> LinkEvent:
        kind = type(frame)
        if kind is Data or kind is Ack:
            return _PLAIN[kind] if frame.session == self.session else E.STRAY
        if isinstance(frame, Hello):
            if frame.session == self.session:
                return E.HELLO
            if frame.sender.incarnation != self.peer.incarnation:
                return E.STRAY
            return E.LOWER_HELLO if frame.session < self.session else E.HIGHER_HELLO
        if frame.session != self.session:
            return E.STRAY
        if isinstance(frame, Welcome) and frame.sender.incarnation != self.peer.incarnation:
            return E.NOT_ME
        return _PLAIN[kind]

    def _batches(self, now_s: float) -> list[Frame]:
        frames: list[Frame] = []
        end = self._base + len(self._unacked)
        while (first := self._cursor) < end:
            size_bytes = 0
            payloads: list[bytes] = []
            for at in range(first - self._base, min(end, first + BATCH_MESSAGES) - self._base):
                payload = self._unacked[at]
                size_bytes += len(payload)
                if payloads and size_bytes > BATCH_BYTES:
                    break
                payloads.append(payload)
            frames.append(Data(self.session, first, self._received, tuple(payloads)))
            self._cursor = first + len(payloads)
        if frames:
            self._ack_due_s, self._ack_waiting = None, 0
            if self._resend_due_s is None:
                self._resend_due_s = now_s + self._resend_wait_s
        return frames

    def _ack(self, ask: int = 0, answer: int = 0) -> Ack:
        self._ack_due_s, self._ack_waiting = None, 0
        return Ack(self.session, self._received, ask, answer)

    def _put_question(self, now_s: float) -> None:
        self._ask_due_s = now_s + self.limits.heartbeat_s
        self._control.append(self._ack(ask=self._ask))

    def _welcome(self) -> None:
        self._control.append(Welcome(self.session, self.us, self._dial))

    def _progress(self, ack: int) -> None:
        if not self._base < ack <= self._base + len(self._unacked):
            return  # nothing new, or of messages that were never queued
        for _ in range(ack - self._base):
            self._unacked.popleft()
        self._base = ack
        self._cursor = max(self._cursor, ack)
        self._resend_wait_s = self.limits.resend_s
        self._resend_due_s = self._now_s + self._resend_wait_s if self._cursor > ack else None

    def _rewind(self) -> None:
        self._cursor, self._resend_due_s = self._base, None
        self._resend_wait_s = self.limits.resend_s

    # --- actions of the table -------------------------------------------------------------------------------

    def _open(self, frame: Welcome | Hello) -> None:
        self.peer = frame.sender
        self.commands.append(Up())

    def _open_and_welcome(self, frame: Hello) -> None:
        self._open(frame)
        self._welcome()

    def _adopt(self, frame: Hello) -> None:
        self.session = frame.session
        self._control.clear()
        self._open_and_welcome(frame)

    def _welcome_again(self, frame: Hello) -> None:
        self._welcome()
        self._rewind()

    def _resume(self, frame: Welcome) -> None:
        self._rewind()

    def _data(self, frame: Data) -> None:
        self._progress(frame.ack)
        skip = self._received - frame.seq
        fresh = frame.payloads[skip:] if skip >= 0 else ()
        if not fresh:
            self._ack_due_s = self._now_s  # a repeat or a gap: tell the peer at once where we are
            return
        self.commands += [Delivered(payload) for payload in fresh]
        self._received += len(fresh)
        self._ack_waiting += len(fresh)
        if self._ack_waiting >= self._ack_after:
            self._ack_due_s = self._now_s
        elif self._ack_due_s is None:
            self._ack_due_s = self._now_s + self.limits.resend_s / 4

    def _acknowledged(self, frame: Ack) -> None:
        self._progress(frame.ack)
        if frame.ask:
            self._control.append(self._ack(answer=frame.ask))
        if frame.answer and frame.answer == self._ask > self._answered:
            self._answered = self._ask
            self.commands.append(Answered())

    def _queue(self, payload: bytes) -> None:
        self._unacked.append(payload)

    def _not_there(self, frame: NotMe | Welcome) -> None:
        who = frame.incarnation if isinstance(frame, NotMe) else frame.sender.incarnation
        self._over(Ending.CLOSED if who == self.peer.incarnation else Ending.REPLACED)

    def _told(self, frame: Bye) -> None:
        shared = {Ending.OVERFLOW.value: Ending.OVERFLOW, Ending.SILENT.value: Ending.SILENT}
        self._over(shared.get(frame.reason, Ending.CLOSED))

    def _redialled(self, frame: Hello) -> None:
        self._over(Ending.CLOSED)

    def _end(self, ending: Ending) -> None:
        last_words = self._batches(self._now_s) if ending is Ending.CLOSED else []
        self._over(ending, *last_words)

    def _abandon(self, ending: Ending) -> None:
        self._over(ending)

    def _over(self, ending: Ending, *last_words: Frame) -> None:
        """Drop what is queued. Who ends a session tells a peer that may still be there."""
        ours = ending in _TOLD_TO_THE_PEER and self._by_us
        self._control = [*last_words, Bye(self.session, ending.value)] if ours else []
        self._unacked.clear()
        self.commands.append(Lost(ending))
