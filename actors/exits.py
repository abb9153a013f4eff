"""Which processes of this host have ended: proof by the kernel, never by silence.

A pid may be reused, so a pidfd proves nothing until we know whose it is. The rule: the pidfd is opened when a Hello or
a Welcome has told the pid, and a question is put on the link afterwards. Its answer shows that the incarnation was
alive when the pidfd was opened, so the pid was its own, and the pidfd's end is its end. The other proof: no
process has the pid at all.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvferry.actors.carrier import PidWatch
from kvferry.protocol.address import Address

#: The kernel's own upper limit of pids on 64 bits.
PID_MAX = 1 << 22
#: Processes that are watched at once, and ended ones that are remembered: more than a host ever runs for us.
MAX_WATCHED, MAX_ENDED = 4096, 65_536


@dataclass
class _Watched:
    address: Address
    verified: bool = False
    fired: bool = False


class Exits:
    """The watched processes of this host; `on_exited` is called once for each that has provably ended.

    `look_soon` is called when `look_again` may have something to find in a little while. `unwatchable` counts peers of
    this host that the kernel would not let us watch: for them no proof comes.
    """

    def __init__(
        self, watch: PidWatch | None, host: str, on_exited: Callable[[Address], None],
        look_soon: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        self._watch, self._host, self._on_exited, self._look_soon = watch, host, on_exited, look_soon
        self._watched: dict[int, _Watched] = {}
        self._ended: dict[int, None] = {}  # in the order of their ends
        self.unwatchable = 0

    def has_ended(self, incarnation: int) -> bool:
        return incarnation in self._ended

    def is_watched(self, incarnation: int) -> bool:
        """The kernel will tell us when this process ends."""
        return incarnation in self._watched

    def kill(self, incarnation: int) -> bool:
        """End a process that is known to be the one that we hold. True when it was told so, or has ended already."""
        watched = self._watched.get(incarnation)
        if self._watch is None or watched is None or not watched.verified:
            return self.has_ended(incarnation)
        try:
            self._watch.kill(watched.address)
        except OSError:
            self.unwatchable += 1
            return False
        return True

    def observe(self, peer: Address) -> bool:
        """Watch the process that has introduced itself as `peer`. True when a question must be put to it."""
        if self._watch is None or not self._host or peer.host != self._host or peer.incarnation in self._ended:
            return False
        watched = self._watched.get(peer.incarnation)
        if not 0 < peer.pid <= PID_MAX or (watched is None and len(self._watched) >= MAX_WATCHED):
            self.unwatchable += 1
            return False
        if watched is None:
            watched = self._watched[peer.incarnation] = _Watched(peer)
            self._open(watched)
        return peer.incarnation in self._watched and not watched.verified

    def answered(self, incarnation: int) -> None:
        """The peer has answered a question that was put after `observe`."""
        watched = self._watched.get(incarnation)
        if watched is None:
            return
        watched.verified = True
        if watched.fired:  # the answer was on its way when the pidfd fired: it was the peer's
            self._end(watched)

    def look_again(self) -> None:
        """A process that ended before we knew whose pid it had: it was the peer if the pid is free now."""
        for watched in [w for w in self._watched.values() if w.fired]:
            watched.fired = False
            self._open(watched)

    def close(self) -> None:
        if self._watch is not None:
            self._watch.close()
        self._watched.clear()

    def _open(self, watched: _Watched) -> None:
        assert self._watch is not None
        try:
            exists = self._watch.watch(watched.address, lambda: self._fired(watched))
        except OSError:
            # Not a process's pid, or no descriptors left. Without the kernel's word there is no proof, and no more.
            self.unwatchable += 1
            del self._watched[watched.address.incarnation]
            return
        if not exists:
            self._end(watched)

    def _fired(self, watched: _Watched) -> None:
        if watched.verified:
            self._end(watched)
        else:
            watched.fired = True
            self._look_soon()

    def _end(self, watched: _Watched) -> None:
        if self._watched.pop(watched.address.incarnation, None) is not None:
            self._ended[watched.address.incarnation] = None
            if len(self._ended) > MAX_ENDED:
                del self._ended[next(iter(self._ended))]
            self._on_exited(watched.address)
