"""Where a write may land: in pages and rows that are leased to its room and its process, from pages that are held."""

from __future__ import annotations

from typing import Any

from kvferry.sim.explore.effects import Post
from kvferry.sim.explore.local import Local
from kvferry.sim.explore.violation import Violation

_UNKNOWN: Any = object()


class Landings:
    """Remembers what it has looked at: states differ by much else."""

    def __init__(self) -> None:
        self._known: dict[tuple[Any, ...], Violation | None] = {}

    def check(self, post: Post, writer: int, late: bool, owner: Local, held: dict[int, int] | None) -> None:
        """`writer`: the incarnation; `late`: it has ended for its writer; `owner`: the target. `held`: pages of
        prefill's leader, who gives the numbers to all its ranks; None once it gives out none. Raises Violation.
        """
        at = (post, writer, owner.id, late, None if held is None else tuple(sorted(held.items())))
        found = self._known.get(at, _UNKNOWN)
        if found is _UNKNOWN:
            found = self._known[at] = _problem(post, writer, owner, None if late else held)
        if isinstance(found, Violation):
            raise found


def _problem(post: Post, incarnation: int, owner: Local, held: dict[int, int] | None) -> Violation | None:
    pages, rows = owner.leases
    nobody: tuple[int, frozenset[int]] = (0, frozenset())
    for _, _, target, _ in post.pages:
        room, writers = pages.get(target, nobody)
        if room != post.room or incarnation not in writers:
            text = f"a write of room {post.room:x} can land in page {target}, leased to {pages.get(target)}"
            return Violation("write-in-leased-page", text)
    for row, _ in post.rows:
        room, writers = rows.get(row, nobody)
        if room != post.room or incarnation not in writers:
            text = f"a write of room {post.room:x} can land in row {row}, leased to {rows.get(row)}"
            return Violation("write-in-leased-page", text)
    if held is not None:
        for _, source, _, _ in post.pages:
            if held.get(source) != post.room:
                return Violation("read-from-held-page", f"room {post.room:x} reads page {source}, which it gave back")
    return None
