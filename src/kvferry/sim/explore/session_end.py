"""One process of the session's model: its links, a carrier that takes notes, and a user that checks what it hears."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

from kvferry.actors.link_queue import Link
from kvferry.actors.links import LinkLayer
from kvferry.actors.ports import LostReason
from kvferry.actors.settings import LinkSettings
from kvferry.protocol.address import Address
from kvferry.protocol.link_table import LinkState
from kvferry.protocol.messages import Message, UnknownRoom
from kvferry.sim.explore.fakes import StandingClock
from kvferry.sim.explore.violation import Violation

SETTINGS = LinkSettings(heartbeat_s=1.0, silence_s=10.0, resend_s=0.5, window=4)
OUT, IN = b"out", b"in"
#: Messages of one session are numbered from here.
_NUMBERS = 16


class Turns:
    """The loop of one turn: what is called soon is called at its end."""

    def __init__(self) -> None:
        self.soon: list[Callable[[], object]] = []

    def call_soon(self, call: Callable[..., object], *arguments: Any) -> None:
        self.soon.append(lambda: call(*arguments))


class _Counted:
    """Session ids: who dials whom, and how many dials there were before. No two histories use one for two sessions."""

    def __init__(self, own: int) -> None:
        self.own, self.peer, self._count = own, 0, 0

    def bits(self, count: int) -> int:
        self._count += 1
        return (self.own * 256 + self.peer) * _NUMBERS + self._count


class End:
    """One process: its links, and a user that writes down what it hears."""

    def __init__(self, address: Address) -> None:
        self.address, self.endpoint = address, address.endpoint
        self.ids = _Counted(address.incarnation)
        self.sent: list[tuple[bytes, bytes]] = []  # (path, frame)
        self.links = LinkLayer(
            self, address.name, address.incarnation, SETTINGS, StandingClock(), self.ids,
            None, "", 0,
        )  # fmt: skip
        self.links._queue.handler = self
        #: By peer: messages said in the present session; of those heard in it, the id that their sender gave the
        #: session when it said them, and how many; all ids that earlier sessions have had.
        self.told: dict[int, int] = {}
        self.heard: dict[int, tuple[int, int]] = {}
        self.heard_before: set[int] = set()
        self.up: set[int] = set()

    # --- the carrier ---

    def start(self, handler: Any) -> None:
        """Frames are handed over by the explorer."""

    def connect(self, endpoint: str) -> bytes:
        return OUT

    def send(self, path: bytes, data: bytes) -> None:
        self.sent.append((path, data))

    def disconnect(self, path: bytes) -> None:
        """Frames stay in the network."""

    async def close(self) -> None:
        """Nothing to close."""

    # --- the user ---

    def on_link_up(self, peer: Address) -> None:
        if peer.incarnation in self.up:
            raise Violation("one-session", f"{self.address.name}: a session with {peer.name} opens over another one")
        self.up.add(peer.incarnation)

    def on_link_lost(self, peer: Address, reason: LostReason) -> None:
        """Also for a session that never opened."""
        who = peer.incarnation
        self.up.discard(who)
        self.told.pop(who, None)
        if who in self.heard:
            self.heard_before.add(self.heard.pop(who)[0])

    def on_exited(self, peer: Address) -> None:
        raise AssertionError("nobody watches processes here")

    def on_failure(self, error: Exception) -> None:
        raise error

    def on_message(self, peer: Address, message: Message) -> bool:
        assert isinstance(message, UnknownRoom)
        session, number = divmod(message.room, _NUMBERS)
        who, link = peer.incarnation, self.links._links.get(peer.incarnation)
        known, wanted = self.heard.get(who, (session, 0))
        # Where both have dialled, one has adopted the other's session and kept what it had queued for its own.
        own = link is not None and session in (link.session.session, self._first_dial(who))
        if who not in self.up or not own or session != known or session in self.heard_before:
            raise Violation("no-old-session", f"{self.address.name} hears message {number} of session {session:x}")
        if number != wanted:
            raise Violation("once-in-order", f"{self.address.name} hears message {number}, and {wanted} was next")
        self.heard[who] = session, number + 1
        return True

    def _first_dial(self, peer: int) -> int:
        """The id of the session that this peer opens to us, if it has dialled nobody before."""
        return (peer * 256 + self.address.incarnation) * _NUMBERS + 1

    # --- events ---

    def dial(self, peer: Address) -> None:
        self.ids.peer = peer.incarnation
        self.links.dial(peer)

    def say(self, peer: int) -> None:
        number, session = self.told.get(peer, 0), self.links._links[peer].session.session
        self.told[peer] = number + 1
        self.links.send(peer, UnknownRoom(session * _NUMBERS + number))

    def drop(self, peer: int) -> None:
        self.links.drop(peer)

    def frame(self, path: bytes, data: bytes) -> None:
        self.links.on_bytes(path, data)

    def path_down(self, path: bytes) -> None:
        self.links.on_path_down(path, False)

    def refused(self) -> None:
        self.links.on_path_down(OUT, True)

    def timer(self, peer: int, name: str) -> None:
        link = self.links._links[peer]
        if name == "redial":
            link.redial_at_s = 0.0
        else:
            setattr(link.session, _DEADLINES[name], 0.0)
        self.links._tick(link, 0.0)

    # --- what the model asks ---

    def sessions(self) -> tuple[SessionState, ...]:
        return tuple(
            SessionState(
                peer, link.session.session, link.session.state.name, link.session.unacked, self.told.get(peer, 0),
                _timers(link), link.path,
            )
            for peer, link in self.links._links.items()
        )  # fmt: skip

    def key(self) -> Hashable:
        links = self.links
        rows = []
        for peer, link in links._links.items():
            s = link.session
            armed = s._resend_due_s is not None, s._ack_due_s is not None, link.redial_at_s is not None
            rows.append(
                (peer, s.state.name, s.session, s.peer.incarnation, s._dial, tuple(s._unacked), s._base, s._cursor,
                 s._received, s._ack_waiting, armed, link.path, link.dialled)
            )  # fmt: skip
        heard = tuple(links._dials_heard.items())
        user = tuple(sorted(self.told.items())), tuple(sorted(self.heard.items())), frozenset(self.heard_before)
        return tuple(rows), links._dials, heard, user, frozenset(self.up)


_DEADLINES = {
    "hello": "_hello_due_s", "resend": "_resend_due_s", "ack": "_ack_due_s", "heartbeat": "_heartbeat_at_s",
    "silence": "_silent_at_s",
}  # fmt: skip


class SessionState(NamedTuple):
    peer: int
    session: int
    state: str
    unacked: int
    told: int
    timers: tuple[str, ...]
    path: bytes | None


def _timers(link: Link) -> tuple[str, ...]:
    """Those that are armed."""
    session = link.session
    armed = ["silence"]
    if session.state is LinkState.CONNECTING:
        armed.append("hello")
    else:
        armed.append("heartbeat")
        armed += ["resend"] if session._resend_due_s is not None else []
        armed += ["ack"] if session._ack_due_s is not None else []
    return (*armed, "redial") if link.redial_at_s is not None else tuple(armed)
