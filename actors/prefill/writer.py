"""What every rank of prefill hears from its end of the data plane, the leader and the others."""

from __future__ import annotations

from typing import Any

from kvferry.actors.prefill.data_plane import Connected, WriteEnded
from kvferry.actors.ranks.rank import Rank


class WritingRank(Rank):
    """To be put before the base of a leader or of a follower."""

    def receive(self, item: Any) -> None:
        match item:
            case Connected():
                self._connected(item)
            case WriteEnded():
                self._write_ended(item)
            case _:
                super().receive(item)

    def _connected(self, item: Connected) -> None:
        """The targets of one of its rooms are connected, or can't be."""
        raise NotImplementedError

    def _write_ended(self, item: WriteEnded) -> None:
        """One of this rank's own writes has ended."""
        raise NotImplementedError
