"""Every parameter that is accepted reaches the sampler as it was given; what was not given is neutral."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from kvferry.protocol.errors import InvalidRequest
from kvferry.protocol.request import Sampling
from kvferry.serve.errors import UnsupportedParameter
from kvferry.serve.prepare import check_token_ids, sampling_of
from kvferry.serve.schemas import parse_chat
from kvferry.serve.unified import check_one_text

ASK: list[Any] = [{"role": "user", "content": "one two three"}]
OPENAI: dict[str, Any] = {
    "temperature": 0.5, "top_p": 0.9, "seed": 11, "max_tokens": 9, "stop": ["x", "yy"], "presence_penalty": -1.5,
    "frequency_penalty": 0.25, "logit_bias": {"7": -100, "999": 2.5},
}  # fmt: skip
EXTENSIONS: dict[str, Any] = {
    "top_k": 4, "min_p": 0.125, "repetition_penalty": 1.5, "min_tokens": 3, "ignore_eos": True, "stop_token_ids": [2, 3]
}  # fmt: skip
EXPECTED = Sampling(
    max_tokens=9, temperature=0.5, top_p=0.9, top_k=4, seed=11, stop=("x", "yy"), stop_token_ids=(2, 3), min_p=0.125,
    logit_bias=((7, -100.0), (999, 2.5)), presence_penalty=-1.5, frequency_penalty=0.25, repetition_penalty=1.5,
    min_tokens=3, ignore_eos=True,
)  # fmt: skip


async def test_both_routes(served: Any, client: openai.AsyncOpenAI) -> None:
    served.answer_with(["x"])
    await client.chat.completions.create(model="m", messages=ASK, extra_body=EXTENSIONS, **OPENAI)
    await client.completions.create(model="m", prompt="a", extra_body=EXTENSIONS, **OPENAI)
    assert [spec.sampling for spec in served.backend.specs] == [EXPECTED, EXPECTED]


async def test_what_is_not_given_is_neutral(served: Any, client: openai.AsyncOpenAI) -> None:
    served.answer_with(["x"])
    await client.completions.create(model="m", prompt="a", seed=1)
    assert served.backend.specs[0].sampling == Sampling(max_tokens=16, temperature=1.0, seed=1)


def parse(**fields: Any) -> Any:
    import json

    return parse_chat(json.dumps({"model": "m", "messages": ASK} | fields).encode())


def test_without_a_server_the_same_rules_hold() -> None:
    chat = parse(**OPENAI, **EXTENSIONS)
    check_one_text(chat)
    check_token_ids(chat, 1000)
    assert sampling_of(chat, 9, lambda _: 0) == EXPECTED  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match=r"logit_bias\.999: 999 is not a token id"):
        check_token_ids(chat, 999)
    check_one_text(parse(n=1, logprobs=False, return_token_ids=False))
    for name, value in (("n", 2), ("logprobs", True), ("return_token_ids", True)):
        with pytest.raises(UnsupportedParameter, match=f"{name} is not supported without a server"):
            check_one_text(parse(**{name: value}))
