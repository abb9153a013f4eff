"""Which tokens of a prompt a plan is for. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from kvferry.transfer.blocks import Ints
from kvferry.transfer.contract import TransferError


class Chunk(msgspec.Struct, frozen=True):
    """Tokens [first_token, end_token) of a prompt of `prompt_tokens`; the first chunk begins where the target's prefix
    ends, the last one ends with the prompt. Both may lie within a page. `own`: of a source rank that has only a part
    of the prompt's tokens, the first one and the one after the last (`cp_range`).

    Raises TransferError for tokens that are not in this order.
    """

    first_token: int
    end_token: int
    prompt_tokens: int
    own: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        first, end = self.first_token, self.end_token
        if not 0 <= first <= end <= self.prompt_tokens:
            raise TransferError(f"tokens {first} to {end} of {self.prompt_tokens}; wanted 0 <= first <= end <= prompt")
        if self.own is not None and not 0 <= self.own[0] <= self.own[1] <= self.prompt_tokens:
            raise TransferError(f"own tokens {self.own} of {self.prompt_tokens}; wanted 0 <= first <= end <= prompt")

    @property
    def last(self) -> bool:
        """What exists once per request goes with it."""
        return self.end_token == self.prompt_tokens

    @property
    def has_end(self) -> bool:
        """The source has the prompt's last token: of ranks that share a prompt out, this one's state is complete."""
        return self.own is None or self.own[1] == self.prompt_tokens

    def pages_in(self, page_size: int) -> slice:
        """Which of a prompt's pages of `page_size` tokens have a token of the chunk: of its page list, these."""
        if self.first_token == self.end_token:
            return slice(0, 0)
        return slice(self.first_token // page_size, -(-self.end_token // page_size))

    def listed(self, side: str, pages: Sequence[int], page_size: int) -> Ints:
        """The prompt's page list, where only the pages that the chunk's tokens lie in are known: -1 before them.

        Raises TransferError when it is another number of pages.
        """
        wanted = self.pages_in(page_size)
        if len(pages) != wanted.stop - wanted.start:
            text = f"tokens {self.first_token} to {self.end_token} lie in {wanted.stop - wanted.start} {side} pages of "
            raise TransferError(f"{text}{page_size} tokens; {len(pages)} are named")
        found = np.full(wanted.stop, -1, dtype=np.int64)
        found[wanted] = pages
        return found

    def clip(self, first: int, end: int) -> tuple[int, int]:
        """Of tokens [first, end), those that the source has; (0, 0) for none."""
        own_first, own_end = self.own or (0, self.prompt_tokens)
        first, end = max(first, own_first), min(end, own_end)
        return (first, end) if first < end else (0, 0)

    def pages_of(self, window: int, source_page: int, target_page: int) -> tuple[int, int]:
        """The tokens that go in pages. A window's first page is sent from its start, where both sides have it."""
        first = self.first_token
        if window:
            start = max(self.prompt_tokens - window, 0)
            first = max(first, start - min(start % source_page, start % target_page))
        return self.clip(first, self.end_token)

    def ring_of(self, window: int) -> tuple[int, int]:
        """The positions that go in rings, all with the last chunk: a prefix at the target has no ring."""
        if not self.last:
            return 0, 0
        return self.clip(max(self.prompt_tokens - window, 0), self.prompt_tokens)


def cp_range(prompt_tokens: int, page_size: int, cp_rank: int, cp_size: int) -> tuple[int, int]:
    """The tokens [first, end) of a prompt that rank `cp_rank` of `cp_size` has: its pages are shared out evenly, in
    order, and the last rank has the last page, so it always has the prompt's last token.

    Raises TransferError for a rank outside the group.
    """
    if not 0 <= cp_rank < cp_size:
        raise TransferError(f"cp_rank is {cp_rank}; allowed: 0 to {cp_size - 1}")
    pages = -(-prompt_tokens // page_size)
    first, end = pages * cp_rank // cp_size, pages * (cp_rank + 1) // cp_size
    return min(first * page_size, prompt_tokens), min(end * page_size, prompt_tokens)
