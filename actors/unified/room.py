"""A room's record at a unified leader."""

from __future__ import annotations

from dataclasses import dataclass

from kvferry.actors.chunks import ChunkedRoom
from kvferry.actors.decode.room import DecodeRoom
from kvferry.engine.contract import Drawn


@dataclass(kw_only=True)
class UnifiedRoom(DecodeRoom, ChunkedRoom):
    """`first` is what prefill drew, until decode takes it."""

    first: Drawn | None = None
