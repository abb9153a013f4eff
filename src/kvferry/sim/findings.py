"""What the checkers have found. A checker that looks on from inside an actor's turn notes it here and lets the turn go
on; who watches raises it in a turn of its own.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

#: The checkers and what each of them promises.
CHECKERS = {
    "leased-writes": "no write touches a page or row that is not leased to the writer's room and incarnation",
    "page-contents": "no forward reads a page that holds another room's words, or another part of the prompt",
    "one-release": "each page is released once, while no write is under way to or from it and no forward names it",
    "conservation": "each page is free, retired or in its owners' block tables: those of a turn, then all of them",
    "rooms-end": "every room ends within the sum of its clocks",
    "tokens-once": "every client gets each right token once and in order, or one error; without a fault no error",
    "baseline": "with no request left nobody keeps anything; pages wait for proof only of a writer that stands still",
    "service": "when all is healed, every router serves again",
    "alive": "no process ends by itself",
    "cells": "no machine is in a cell of its table that is known to be unreachable",
}


class Broken(AssertionError):
    """The system has broken one of its promises: `checker` says which."""

    def __init__(self, checker: str, text: str) -> None:
        assert checker in CHECKERS
        super().__init__(f"{checker}: {text}")
        self.checker, self.text = checker, text


@dataclass
class Findings:
    """In order; a checker that has found something finds more of the same, so only its first counts."""

    found: list[tuple[float, Broken]] = field(default_factory=list)

    def add(self, checker: str, text: str) -> None:
        if all(broken.checker != checker for _, broken in self.found):
            self.found.append((asyncio.get_running_loop().time(), Broken(checker, text)))

    def raise_first(self) -> None:
        if self.found:
            raise self.found[0][1]
