"""Log-probabilities on both routes, streamed and whole: one entry per generated token, in OpenAI's shapes."""

from __future__ import annotations

import math
from typing import Any

import httpx
import openai
import pytest

from kvferry.protocol.messages import Logprobs

ASK: list[Any] = [{"role": "user", "content": "one two three"}]
#: Ids 1 to 5 of the fake tokenizer: "[1]", a special token without text, the two bytes of "é", and "[5]", which ends
#: the answer and whose text a stop string has cut off.
TEXTS = ["[1]", "", "", "é", ""]
KNOWN = [
    Logprobs(-0.5, ((1, -0.5), (8, -1.5))),
    Logprobs(-3.0, ((8, -0.25), (9, -2.0))),
    Logprobs(-0.1, ((3, -0.1), (2, -4.0))),
    Logprobs(-0.2, ((4, -0.2), (9, -math.inf))),
    Logprobs(-1.0, ((8, -0.75), (5, -1.0))),
]
#: (token, bytes) of ids 1 to 5, worked out by hand.
SHOWN = [("[1]", [91, 49, 93]), ("<end>", None), ("�", [0xC3]), ("�", [0xA9]), ("[5]", [91, 53, 93])]


def play(world: Any) -> None:
    world.answer_with(TEXTS, "stop", KNOWN, first_id=1)


def flat(entries: Any) -> list[Any]:
    return [(entry.token, entry.bytes, entry.logprob) for entry in entries]


@pytest.mark.parametrize("stream", [False, True])
async def test_chat(served: Any, client: openai.AsyncOpenAI, stream: bool) -> None:
    """Case 50, the shape: every token once, the first one's and the last one's too."""
    play(served)
    fields: Any = {"model": "m", "messages": ASK, "logprobs": True, "top_logprobs": 2}
    if stream:
        entries, texts = [], []
        async for chunk in await client.chat.completions.create(stream=True, **fields):
            (choice,) = chunk.choices
            texts.append(choice.delta.content)
            if choice.logprobs is not None:
                assert choice.logprobs.content is not None and len(choice.logprobs.content) == 1
                entries += choice.logprobs.content
        assert texts == ["", "[1]", "", "", "é", None]
    else:
        answer = await client.chat.completions.create(**fields)
        assert answer.choices[0].logprobs is not None and answer.choices[0].logprobs.content is not None
        assert answer.choices[0].logprobs.refusal is None
        entries = answer.choices[0].logprobs.content
    assert flat(entries) == [(*shown, known.logprob) for shown, known in zip(SHOWN, KNOWN, strict=True)]
    assert [flat(entry.top_logprobs) for entry in entries] == [
        [("[1]", [91, 49, 93], -0.5), ("[8]", [91, 56, 93], -1.5)],
        [("[8]", [91, 56, 93], -0.25), ("[9]", [91, 57, 93], -2.0)],
        [("�", [0xC3], -0.1), ("<end>", None, -4.0)],
        [("�", [0xA9], -0.2), ("[9]", [91, 57, 93], -9999.0)],  # JSON has no -inf
        [("[8]", [91, 56, 93], -0.75), ("[5]", [91, 53, 93], -1.0)],
    ]
    joined = b"".join(bytes(entry.bytes) for entry in entries if entry.bytes is not None)
    assert joined.decode() == "[1]é[5]"
    assert served.backend.specs[0].sampling.logprobs == 2


@pytest.mark.parametrize("stream", [False, True])
async def test_completions(served: Any, client: openai.AsyncOpenAI, stream: bool) -> None:
    play(served)
    fields: Any = {"model": "m", "prompt": "a", "logprobs": 2}
    tokens: list[Any] = []
    logprobs: list[Any] = []
    tops: list[Any] = []
    offsets: list[Any] = []
    if stream:
        choices = [chunk.choices[0] async for chunk in await client.completions.create(stream=True, **fields)]
    else:
        choices = (await client.completions.create(**fields)).choices
    for choice in choices:
        assert choice.logprobs is not None
        tokens += choice.logprobs.tokens or []
        logprobs += choice.logprobs.token_logprobs or []
        tops += choice.logprobs.top_logprobs or []
        offsets += choice.logprobs.text_offset or []
    assert len(choices) == (5 if stream else 1) and "".join(choice.text for choice in choices) == "[1]é"
    assert tokens == ["[1]", "<end>", "bytes:\\xc3", "bytes:\\xa9", "[5]"]
    assert logprobs == [-0.5, -3.0, -0.1, -0.2, -1.0]
    assert offsets == [0, 3, 3, 3, 4]  # the second half of "é" begins where the character does
    assert tops == [
        {"[1]": -0.5, "[8]": -1.5},
        {"[8]": -0.25, "[9]": -2.0, "<end>": -3.0},  # the chosen token is among them in any case
        {"bytes:\\xc3": -0.1, "<end>": -4.0},
        {"bytes:\\xa9": -0.2, "[9]": -9999.0},
        {"[8]": -0.75, "[5]": -1.0},
    ]


async def test_the_chosen_tokens_only(served: Any, client: openai.AsyncOpenAI) -> None:
    served.answer_with(["a"], "stop", [Logprobs(-0.5)], first_id=8)
    chat = await client.chat.completions.create(model="m", messages=ASK, logprobs=True)
    assert chat.choices[0].logprobs is not None and chat.choices[0].logprobs.content is not None
    assert chat.choices[0].logprobs.content[0].top_logprobs == []
    text = await client.completions.create(model="m", prompt="a", logprobs=0)
    assert text.choices[0].logprobs is not None and text.choices[0].logprobs.top_logprobs == [{"[8]": -0.5}]
    assert [spec.sampling.logprobs for spec in served.backend.specs] == [0, 0]


async def test_nobody_who_did_not_ask_gets_them(served: Any, http: httpx.AsyncClient) -> None:
    play(served)
    for fields in ({}, {"logprobs": False}, {"logprobs": None}):
        body = (await http.post("/v1/chat/completions", json={"model": "m", "messages": ASK} | fields)).json()
        assert body["choices"][0]["logprobs"] is None
    assert [spec.sampling.logprobs for spec in served.backend.specs] == [-1] * 3


async def test_each_choice_has_its_own_offsets(served: Any, client: openai.AsyncOpenAI) -> None:
    play(served)
    answer = await client.completions.create(model="m", prompt=["a", "b"], n=2, logprobs=1)
    for choice in answer.choices:
        assert choice.logprobs is not None and choice.logprobs.text_offset == [0, 3, 3, 3, 4]


async def test_an_entry_that_is_missing_is_our_error_and_not_a_gap(served: Any, http: httpx.AsyncClient) -> None:
    served.answer_with(["a"])
    for stream in (False, True):
        body = {"model": "m", "prompt": "a", "logprobs": 1, "stream": stream}
        response = await http.post("/v1/completions", json=body)
        assert (response.status_code, response.json()["error"]["code"]) == (500, "internal_error")
