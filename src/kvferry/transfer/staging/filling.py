"""The filling of a slot with a piece, by whoever writes the piece; and what became of it."""

from __future__ import annotations

import logging
from collections.abc import Callable

from kvferry.transfer.driver import describe

_log = logging.getLogger(__name__)


class Filling:
    """`copy` says False when the piece is not wanted any more. Until the call `done` is False and `error` "", and one
    of them changes with it if the slot is filled, or if that fails.
    """

    def __init__(self, copy: Callable[[], bool]) -> None:
        self._copy = copy
        self.done, self.error = False, ""

    def __call__(self) -> bool:
        try:
            self.done = self._copy()
        except Exception as raised:  # noqa: BLE001  (whatever it is, the piece's owner must hear of it)
            self.error = describe(raised)
            _log.exception("a piece was not gathered")
        return self.done
