"""A room's record at a unified leader."""

from __future__ import annotations

from dataclasses import dataclass

from kvferry.actors.decode.room import DecodeRoom
from kvferry.engine.contract import Drawn


@dataclass(kw_only=True)
class UnifiedRoom(DecodeRoom):
    """`computed` counts prompt tokens, `chunk` the chunks; `first` is what prefill drew, until decode takes it."""

    computed: int = 0
    chunk: int = 0
    first: Drawn | None = None

    @property
    def remaining(self) -> int:
        return self.prompt_tokens - self.computed
