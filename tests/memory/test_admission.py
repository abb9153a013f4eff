"""What can be served at all: hand-made numbers around each limit."""

from __future__ import annotations

import pytest

from kvferry.memory.admission import Admission, pages_needed, refusal
from kvferry.memory.ledger import PageLedger
from kvferry.memory.proof import NeverGiven, Quiescent, Stepped


@pytest.mark.parametrize(
    ("tokens", "page_size", "pages"),
    [(1, 16, 1), (15, 16, 1), (16, 16, 1), (17, 16, 2), (32, 16, 2), (33, 16, 3), (1, 1, 1), (7, 1, 7), (0, 16, 0)],
)
def test_pages_are_rounded_up(tokens: int, page_size: int, pages: int) -> None:
    assert pages_needed(tokens, page_size) == pages


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "prefill", "decode"),
    [
        (1, 1, 1, 2),
        (100, 28, 128, 128),  # fills decode to the last token
        (100, 29, 128, 129),  # 129 - 1 tokens are what a later attempt must prefill
        (128, 1, 128, 129),
    ],
)
def test_what_fits_exactly_is_admitted(prompt: int, max_tokens: int, prefill: int, decode: int) -> None:
    assert refusal(prompt, max_tokens, prefill, decode) is None


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "prefill", "decode", "param", "words"),
    [
        (0, 5, 128, 128, "messages", ("no tokens", "at least 1")),
        (5, 0, 128, 128, "max_tokens", ("max_tokens is 0", "at least 1")),
        (5, -3, 128, 128, "max_tokens", ("max_tokens is -3", "at least 1")),
        (129, 1, 128, 1000, "messages", ("129 tokens", "at most 128")),
        (100, 29, 1000, 128, "max_tokens", ("100 prompt tokens", "max_tokens 29", "129 tokens", "at most 128")),
        (100, 30, 128, 1000, "max_tokens", ("130 tokens", "at most 129")),
        (129, 1000, 128, 128, "messages", ("129 tokens", "at most 128")),  # the prompt alone can't fit: it is named
    ],
)
def test_what_can_never_fit_is_refused_with_field_value_and_limit(
    prompt: int, max_tokens: int, prefill: int, decode: int, param: str, words: tuple[str, ...]
) -> None:
    cause = refusal(prompt, max_tokens, prefill, decode)
    assert cause is not None and (cause.code, cause.param) == ("invalid_request", param)
    assert all(word in cause.message for word in words), cause.message


def test_a_request_that_runs_alone_gives_up_when_the_pool_has_become_too_small() -> None:
    """A page was retired after it came in. It is retracted like others that find no page; nothing breaks."""
    ledger = PageLedger(3)
    admission = Admission(ledger, page_size=1, max_running=4, receives=False)
    admission.arrive(1, 1, tokens=1, total_tokens=3, now_s=0.0)
    claim = admission.admit()
    assert claim is not None and claim.holding is not None and admission.grow(claim, 1) is None
    bad = ledger.reserve(9, 1)
    assert bad is not None
    ledger.blame(bad.pages)
    ledger.blame(bad.pages)
    ledger.release(bad, Quiescent(bad.id, Stepped(0), NeverGiven()))
    assert admission.grow(claim, 2) is None
    assert admission.grow(claim, 3) is claim
