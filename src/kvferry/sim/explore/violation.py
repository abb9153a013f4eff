"""What an exploration finds."""

from __future__ import annotations


class Violation(AssertionError):
    """`checker` is the name of the checker that fired."""

    def __init__(self, checker: str, text: str) -> None:
        self.checker, self.text = checker, text
        super().__init__(f"{checker}: {text}")
