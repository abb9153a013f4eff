"""How much of a prompt a forward takes, by a table made by hand for pages of 8 tokens."""

from __future__ import annotations

import pytest

from kvferry.actors.chunks import next_chunk


@pytest.mark.parametrize(
    ("remaining", "most", "size"),
    [
        (5, 32, 5),  # the prompt's end may leave a page open
        (32, 32, 32),
        (33, 32, 32),
        (33, 31, 24),  # what is not the end is floored to whole pages
        (9, 8, 8),
        (9, 7, 0),  # not even a page: another forward
        (9, 0, 0),
        (1, 1, 1),
        (1, 0, 0),
        (9, -3, 0),  # running requests alone have used up the forward
        (9, -11, 0),
    ],
)
def test_chunks_end_with_a_page_or_with_the_prompt(remaining: int, most: int, size: int) -> None:
    assert next_chunk(remaining, most, page_size=8) == size
