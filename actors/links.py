"""The links of one process: `kvferry.actors.ports.Network` over a carrier.

It owns the sessions, by incarnation, and decides what a session can't: which session a frame belongs to, when a
broken path is dialled again, and what the kernel knows of a peer. One alarm, set for the next deadline, serves all
sessions: an idle process sleeps from heartbeat to heartbeat.

A path that breaks does not end a session: the path is dialled again, and *refused* does, unless the peer lives on
this host. Then the pidfd has a heartbeat's time to say that it has exited.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import Counter

from kvferry.actors.alarm import Alarm
from kvferry.actors.carrier import Carrier, Path, PidWatch
from kvferry.actors.complaints import Complaints
from kvferry.actors.exits import Exits
from kvferry.actors.link_queue import Exited, Failure, Link, LinkQueue
from kvferry.actors.ports import Clock, LinkHandler, Random
from kvferry.actors.settings import LinkSettings
from kvferry.protocol.address import Address
from kvferry.protocol.errors import IllegalEvent
from kvferry.protocol.frames import Ack, Data, Frame, Hello, NotMe, Welcome, decode_frame, encode_frame
from kvferry.protocol.link import Answered, Delivered, LinkLimits, LinkSession, Lost, Up
from kvferry.protocol.link_table import Ending, LinkState
from kvferry.protocol.messages import BadFrame, Message, encode

log = logging.getLogger("kvferry.links")

#: Sessions of this process at once. Only members of the cluster can open any, and no cluster has so many processes.
MAX_LINKS = 4096
#: Incarnations whose count of dials is remembered, to tell a late Hello from a new one.
DIALS_KEPT = 4096


class LinkLayer:
    """See `kvferry.actors.ports.Network`. `counts` tells what was dropped, and why."""

    def __init__(
        self, carrier: Carrier, name: str, incarnation: int, settings: LinkSettings,
        clock: Clock, random: Random, pid_watch: PidWatch | None, host: str, pid: int,
    ) -> None:  # fmt: skip
        self.counts: Counter[str] = Counter()
        self._name, self._complain = name, Complaints(log, self.counts, clock.now_s)
        self._carrier, self._settings, self._clock, self._random = carrier, settings, clock, random
        self._limits = LinkLimits(settings.heartbeat_s, settings.silence_s, settings.resend_s, settings.window)
        self._address = Address(name, carrier.endpoint, incarnation, host, pid)
        self._exits = Exits(pid_watch, host, self._peer_exited, self._look_soon)
        self._links: dict[int, Link] = {}
        self._by_session: dict[int, Link] = {}
        self._by_path: dict[Path, Link] = {}
        self._dials = 0
        self._dials_heard: dict[int, int] = {}
        self._queue = LinkQueue(self.counts, self._complain, self._mailbox_full)
        self._dirty: dict[int, Link] = {}
        self._alarm = Alarm(clock, self._run_timers)
        self._closed = False

    # --- Network --------------------------------------------------------------------------------------------

    @property
    def address(self) -> Address:
        return self._address

    async def start(self, handler: LinkHandler) -> None:
        """Take frames from now on. Raises IllegalEvent when called twice or after `close`."""
        if self._queue.handler is not None or self._closed:
            raise IllegalEvent(f"links of {self._address.name}: start is called once, before close")
        self._queue.handler = handler
        self._carrier.start(self)

    def dial(self, address: Address) -> None:
        if self._queue.handler is None or self._closed:
            raise IllegalEvent(f"dial: the links of {self._address.name} are not started, or are closed")
        if address.incarnation == self._address.incarnation:
            raise IllegalEvent(f"dial: {address.name} is this process itself")
        if address.incarnation in self._links:
            return
        if self._exits.has_ended(address.incarnation):
            self._queue.put(Lost(Ending.EXITED), address, None)
            return
        self._dials += 1
        session_id, now_s = self._random.bits(64), self._clock.now_s()
        link = Link(LinkSession.dial(session_id, self._address, address, self._dials, self._limits, now_s))
        self._add(link)
        self._connect(link, now_s)
        self._touch(link)

    def send(self, incarnation: int, message: Message) -> bool:
        """Raises BadFrame when the message is over the size limit."""
        link = self._links.get(incarnation)
        if link is None:
            return False
        if not link.session.send(encode(message), self._clock.now_s()):
            self._after(link)
            return False
        self._touch(link)
        return True

    def is_up(self, incarnation: int) -> bool:
        link = self._links.get(incarnation)
        return link is not None and link.session.state is LinkState.OPEN

    def session_of(self, incarnation: int) -> int:
        return self._links[incarnation].session.session if self.is_up(incarnation) else 0

    def drop(self, incarnation: int) -> None:
        link = self._links.get(incarnation)
        if link is not None:
            link.dropped = True
            self._end(link, Ending.CLOSED)

    def kill(self, incarnation: int) -> bool:
        return self._exits.kill(incarnation)

    async def close(self) -> None:
        """End every session (CLOSED, told to the peers and to the handler) and free the sockets. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._alarm.close()
        for link in list(self._links.values()):
            link.dropped = True
            self._end(link, Ending.CLOSED)
        self._exits.close()
        try:
            self._queue.drain()
        finally:
            await self._carrier.close()

    # --- CarrierHandler -------------------------------------------------------------------------------------

    def on_bytes(self, path: Path, data: bytes) -> None:
        if self._closed:
            return
        try:
            frame = decode_frame(data)
        except BadFrame as error:
            self._complain.about("undecodable_frame", "%s: dropped a frame: %.200r", self._name, str(error))
            return
        if isinstance(frame, Hello):
            self._hello(path, frame)
        else:
            self._route(path, frame)

    def on_path_down(self, path: Path, refused: bool) -> None:
        link = self._by_path.pop(path, None)
        if link is None or self._closed:
            return
        self.counts["path_refused" if refused else "path_down"] += 1
        now_s = self._clock.now_s()
        if link.dialled == path:
            link.dialled = None
        if link.path == path:
            link.path = link.dialled
        if link.path is not None:
            return
        if refused and self._exits.is_watched(link.peer.incarnation):
            link.refused_at_s = now_s + self._settings.heartbeat_s
        elif refused:
            self._end(link, Ending.REFUSED)
        else:
            self._redial(link, now_s)
        self._plan(link)

    # --- frames ---------------------------------------------------------------------------------------------

    def _hello(self, path: Path, hello: Hello) -> None:
        us, peer, now_s = self._address.incarnation, hello.sender.incarnation, self._clock.now_s()
        if hello.expects != us:
            self._answer(path, NotMe(hello.session, us))
            return
        link, holder = self._links.get(peer), self._by_session.get(hello.session)
        if peer == us or self._exits.has_ended(peer) or (holder is not None and holder is not link):
            self.counts["impossible_hello"] += 1
            return
        if link is not None and link.session.session == hello.session:
            self._use(link, path)
            self._receive(link, hello, now_s)
            return
        if hello.dial <= self._dials_heard.get(peer, 0):
            self.counts["late_hello"] += 1
            self._answer(path, NotMe(hello.session, us))
            return
        if link is not None:
            before = link.session.session
            self._receive(link, hello, now_s)
            if link.session.state is LinkState.CONNECTING:
                return  # both ends dial, and ours wins
            if link.session.state is LinkState.OPEN:
                self._by_session[hello.session] = self._by_session.pop(before)
                self._use(link, path)
                self._heard_dial(peer, hello.dial)
                return
        if len(self._links) >= MAX_LINKS:
            self._complain.about("too_many_links", "%s: %d links are open; no more are taken", self._name, MAX_LINKS)
            return
        self._accept(path, hello, now_s)

    def _accept(self, path: Path, hello: Hello, now_s: float) -> None:
        self._heard_dial(hello.sender.incarnation, hello.dial)
        link = Link(LinkSession.accept(hello, self._address, self._dials, self._limits, now_s))
        self._add(link)
        self._use(link, path)
        self._after(link)

    def _route(self, path: Path, frame: Frame) -> None:
        link = self._by_session.get(frame.session)
        if link is None:
            self.counts["stray_frame"] += 1
            if isinstance(frame, Welcome | Data | Ack):
                self._answer(path, NotMe(frame.session, self._address.incarnation))
            return
        if link.path is None:
            self._use(link, path)
        if isinstance(frame, Welcome) and frame.sender.incarnation == link.peer.incarnation:
            self._heard_dial(frame.sender.incarnation, frame.dial)
        self._receive(link, frame, self._clock.now_s())

    def _receive(self, link: Link, frame: Frame, now_s: float) -> None:
        link.session.receive(frame, now_s)
        self._after(link)

    def _answer(self, path: Path, frame: Frame) -> None:
        self._carrier.send(path, encode_frame(frame))

    def _heard_dial(self, incarnation: int, dial: int) -> None:
        known = self._dials_heard.pop(incarnation, 0)
        self._dials_heard[incarnation] = max(known, dial)
        if len(self._dials_heard) > DIALS_KEPT:
            del self._dials_heard[next(iter(self._dials_heard))]

    # --- sessions and paths ---------------------------------------------------------------------------------

    def _add(self, link: Link) -> None:
        self._links[link.peer.incarnation] = link
        self._by_session[link.session.session] = link

    def _connect(self, link: Link, now_s: float) -> None:
        link.dialled = self._carrier.connect(link.peer.endpoint)
        link.dialled_at_s, link.redial_at_s = now_s, None
        self._use(link, link.dialled)

    def _use(self, link: Link, path: Path) -> None:
        before = link.path
        if before is not None and before not in (path, link.dialled):
            self._by_path.pop(before, None)
            self._carrier.disconnect(before)
        link.path, link.refused_at_s, link.redial_at_s = path, None, None
        self._by_path[path] = link

    def _redial(self, link: Link, now_s: float) -> None:
        """Dial again: at once the first time, and then not more often than `resend_s`."""
        at_s = link.dialled_at_s + self._settings.resend_s
        if now_s < at_s:
            link.redial_at_s = at_s
            return
        self._connect(link, now_s)
        link.session.say_hello(now_s)
        self._touch(link)

    def _end(self, link: Link, ending: Ending) -> None:
        link.session.end(ending, self._clock.now_s())
        self._after(link)

    def _after(self, link: Link) -> None:
        """Queue what the session has to tell, and let go of it when it is over. What it has to send leaves at the end
        of this turn; if that is nothing, its timers are all that may have changed.
        """
        session = link.session
        for event in session.take_events():
            if type(event) is Delivered:
                self._queue.put(event, session.peer, link)
                continue
            if isinstance(event, Answered):
                self._exits.answered(link.peer.incarnation)
                continue
            self._queue.put(event, link.peer, link)
            if isinstance(event, Up) and self._exits.observe(link.peer):
                link.session.ask(self._clock.now_s())
            if isinstance(event, Lost):
                self._forget(link)
        if session.state is LinkState.OVER:
            return
        if session.has_frames(self._clock.now_s()):
            self._touch(link)
        else:
            self._plan(link)

    def _forget(self, link: Link) -> None:
        self._transmit(link)
        del self._links[link.peer.incarnation]
        del self._by_session[link.session.session]
        self._dirty.pop(id(link), None)
        for path in dict.fromkeys((link.path, link.dialled)):
            if path is not None:
                self._by_path.pop(path, None)
                self._carrier.disconnect(path)

    def _peer_exited(self, peer: Address) -> None:
        link = self._links.get(peer.incarnation)
        if link is not None:
            self._end(link, Ending.EXITED)
        self._queue.put(Exited(), peer, None)

    # --- sending --------------------------------------------------------------------------------------------

    def _touch(self, link: Link) -> None:
        """Send what the session has, at the end of this turn of the loop: so one frame takes what one turn says."""
        if not self._dirty:
            asyncio.get_running_loop().call_soon(self._flush)
        self._dirty[id(link)] = link

    def _flush(self) -> None:
        dirty, self._dirty = self._dirty, {}
        for link in dirty.values():
            self._transmit(link)
            self._plan(link)

    def _transmit(self, link: Link) -> None:
        if link.path is not None:
            for frame in link.session.collect(self._clock.now_s()):
                self._carrier.send(link.path, encode_frame(frame))

    def _mailbox_full(self, link: Link) -> None:
        link.dropped = True
        self._end(link, Ending.OVERFLOW)

    # --- timers ---------------------------------------------------------------------------------------------

    def _plan(self, link: Link) -> None:
        """Have the link's next deadline met. One that has moved away is found to have moved when its time comes."""
        link.due_s = link.next_deadline_s()
        self._alarm.by(link.due_s)

    def _look_soon(self) -> None:
        self._alarm.by(self._clock.now_s() + self._settings.resend_s / 4)

    def _run_timers(self) -> None:
        now_s = self._clock.now_s()
        self._exits.look_again()
        for link in [link for link in self._links.values() if link.due_s <= now_s]:
            link.due_s = math.inf  # until it is planned again, when what it has to say is sent
            try:
                self._tick(link, now_s)
            except Exception as error:  # noqa: BLE001 - the actor's to raise; the timers of the others go on
                self._queue.put(Failure(error), link.peer, link)
        self._alarm.by(min((link.due_s for link in self._links.values()), default=math.inf))

    def _tick(self, link: Link, now_s: float) -> None:
        if link.refused_at_s is not None and now_s >= link.refused_at_s:
            self._end(link, Ending.REFUSED)
            return
        if link.redial_at_s is not None and now_s >= link.redial_at_s:
            self._redial(link, now_s)
        link.session.tick(now_s)
        self._after(link)
