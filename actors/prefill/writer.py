"""What every rank of prefill hears from its end of the data plane, and of the decodes that it writes to: the leader and
the others.
"""

from __future__ import annotations

from typing import Any

from kvferry.actors.ports import LostReason
from kvferry.actors.prefill.data_plane import Connected, WriteEnded
from kvferry.actors.ranks.rank import Rank
from kvferry.protocol.address import Address
from kvferry.protocol.sender import SenderEvent


class WritingRank(Rank):
    """To be put before the base of a leader or of a follower."""

    def receive_other(self, item: Any) -> None:
        match item:
            case Connected():
                self._connected(item)
            case WriteEnded():
                self._write_ended(item)
            case _:
                super().receive_other(item)

    def link_lost(self, peer: Address, reason: LostReason) -> None:
        super().link_lost(peer, reason)
        self.decode_lost(peer, reason)
        if reason.ended:  # who could ask for broken rooms; the kernel says so once, maybe before we had any
            self._decode_ended(peer)

    def peer_exited(self, peer: Address) -> None:
        self._decode_ended(peer)
        self.forget_decode(peer.incarnation)

    def _decode_ended(self, peer: Address) -> None:
        self.fail_rooms_of(peer, SenderEvent.DECODE_EXITED, f"process {peer.pid} of {peer.name} has ended")

    def _connected(self, item: Connected) -> None:
        """The targets of one of its rooms are connected, or can't be."""
        raise NotImplementedError

    def _write_ended(self, item: WriteEnded) -> None:
        """One of this rank's own writes has ended."""
        raise NotImplementedError

    def decode_lost(self, peer: Address, reason: LostReason) -> None:
        """The link to a decode's leader is over; nothing is known of the process."""
        raise NotImplementedError

    def forget_decode(self, incarnation: int) -> None:
        """That process has ended: let go of its end of the data plane."""
        raise NotImplementedError

    def fail_rooms_of(self, decode: Address, event: SenderEvent, text: str) -> None:
        """An event that ends every room of that decode, with its cause."""
        raise NotImplementedError
