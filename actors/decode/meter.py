"""What decode measures for its `Load`."""

from __future__ import annotations

from kvferry.actors.load import Recent
from kvferry.memory.ledger import PageLedger
from kvferry.protocol.messages import Load


class Meter:
    """`stepped` after each step, `left` when a request that ran gives its place back: the seconds that it took."""

    def __init__(self) -> None:
        self._steps, self._places = Recent(), Recent()

    def stepped(self, compute_s: float) -> None:
        self._steps.add(1, compute_s)

    def left(self, place_s: float) -> None:
        self._places.add(1, place_s)

    def load(self, waiting: int, running: int, places: int, ledger: PageLedger) -> Load:
        """`running` requests hold one of the batch's `places`."""
        return Load(
            "decode", waiting=waiting, running=running, free_pages=ledger.free, total_pages=ledger.total,
            step_s=self._steps.mean_s, free_places=places - running, place_s=self._places.mean_s,
        )  # fmt: skip
