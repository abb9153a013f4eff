"""What the storm calls right, a tie, wrong and lost: a table made by hand."""

from __future__ import annotations

import answers
import faults
import pytest


@pytest.mark.parametrize(
    ("ids", "text", "finish", "error", "verdict"),
    [
        ([7, 8, 9], "abc", "length", "", ""),
        ([7, 8, 9], "abd", "length", "", "wrong"),  # the right tokens with other text
        ([7, 5, 6], "axy", "length", "", "tie"),  # the second token was a tie, so what follows may be anything
        ([7, 8, 6], "abx", "length", "", "wrong"),  # the third was none
        ([5, 8, 9], "xbc", "length", "", "wrong"),
        ([7, 8], "ab", "length", "", "lost"),
        ([7, 8, 9, 9], "abcc", "length", "", "lost"),
        ([7, 8, 9], "abc", "stop", "", "lost"),
        ([7, 8, 9], "abc", "length", "HTTP 502", "lost"),
        ([], "", "", "HTTP 503", "lost"),
    ],
)
def test_the_judge(ids: list[int], text: str, finish: str, error: str, verdict: str) -> None:
    right = answers.Answer([7, 8, 9], [0.5, 0.0009, 0.0011], "abc", "length")
    assert faults.judge(answers.Answer(ids, [], text, finish, error), right) == verdict


def test_an_event_becomes_ids_gaps_and_text() -> None:
    answer = answers.Answer()
    best = [{"a": -0.25, "b": -1.75, "c": -9.0}, {"a": -0.5, "d": -0.5}]
    choice = {"text": "xy", "token_ids": [4, 2], "finish_reason": None, "logprobs": {"top_logprobs": best}}
    answers.take(answer, {"choices": [choice]})
    answers.take(
        answer, {"choices": [choice | {"text": "z", "token_ids": [3], "finish_reason": "length", "logprobs": None}]}
    )
    assert (answer.token_ids, answer.text, answer.finish_reason) == ([4, 2, 3], "xyz", "length")
    assert answer.gaps == [1.5, 0.0]
    answers.take(answer, {"error": {"message": "no"}})
    assert answer.error == "no"
