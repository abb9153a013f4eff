"""/v1/completions over HTTP, with the `openai` client and without."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import msgspec
import openai
import pytest

from kvferry.actors.ports import LostReason
from kvferry.cluster.config import load as load_config
from kvferry.engine.loader import PACKAGED_MODEL, load
from kvferry.protocol.errors import Cause
from kvferry.protocol.outcome import Outcome
from kvferry.protocol.request import RequestSpec
from kvferry.serve.deployment import _vocabulary
from kvferry.serve.launcher import base_url

TEXTS = ["The", " capital", "", " is", " Paris.\n“é”"]
BODY: dict[str, Any] = {"model": "m", "prompt": "one two three"}


async def test_a_whole_answer_to_text(served: Any, client: openai.AsyncOpenAI) -> None:
    served.answer_with(TEXTS)
    raw = await client.completions.with_raw_response.create(
        model="m", prompt="one two three", temperature=0.5, top_p=0.9, seed=11, max_tokens=9, stop=["x", "yy"],
        extra_body={"top_k": 4, "stop_token_ids": [2]}, user="someone",
    )  # fmt: skip
    answer = raw.parse()
    (spec,) = served.backend.specs
    assert raw.headers["x-kvferry-room"] == str(served.room)
    assert (answer.id, answer.object, answer.model) == (f"cmpl-{spec.request:016x}", "text_completion", "m")
    assert answer.created > 1_700_000_000
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (4, 5, 9)
    assert json.loads(raw.text)["choices"] == [
        {"text": "".join(TEXTS), "finish_reason": "stop", "index": 0, "logprobs": None}
    ]
    assert spec.prompt_ids == (1, 3, 3, 5)  # the tokenizer's special token first: this is plain text, not a chat
    sampling = spec.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.seed) == (0.5, 0.9, 4, 11)
    assert (sampling.max_tokens, sampling.stop, sampling.stop_token_ids) == (9, ("x", "yy"), (2,))


async def test_token_ids_go_to_the_engine_as_they_are(served: Any, client: openai.AsyncOpenAI) -> None:
    served.answer_with(["x"])
    await client.completions.create(model="m", prompt=[0, 999, 7])
    await client.completions.create(model="m", prompt=[5] * 99 + [999])
    first, second = served.backend.specs
    assert first.prompt_ids == (0, 999, 7) and len(second.prompt_ids) == 100
    assert (first.sampling.max_tokens, first.sampling.temperature) == (16, 1.0)  # OpenAI's, not default_max_tokens


async def test_the_default_length_is_cut_to_what_fits(served: Any, client: openai.AsyncOpenAI) -> None:
    served.answer_with(["x"])
    ranks = served.backend.present.ranks
    served.backend.present = type(served.backend.present)(2, (ranks[0], type(ranks[1])(
        "decode-0", "decode", ranks[1].address, ranks[1].layout, max_total_tokens=105
    )), True)  # fmt: skip
    await client.completions.create(model="m", prompt=[5] * 100)
    assert served.backend.specs[0].sampling.max_tokens == 5


async def test_a_small_prefill_limits_the_answer_too(served: Any, client: openai.AsyncOpenAI) -> None:
    """A later attempt computes all but the last token again, so the router takes at most 40 + 1 tokens here."""
    served.answer_with(["x"])
    prefill, decode = served.backend.present.ranks
    small = msgspec.structs.replace(prefill, max_prompt_tokens=40)
    served.backend.present = type(served.backend.present)(2, (small, decode), True)
    await client.completions.create(model="m", prompt=[5] * 31)
    assert served.backend.specs[0].sampling.max_tokens == 10
    with pytest.raises(openai.BadRequestError, match=r"together 42; the limit is 41, so max_tokens may be at most 10"):
        await client.completions.create(model="m", prompt=[5] * 31, max_tokens=11)


@pytest.mark.parametrize("include_usage", [False, True])
async def test_a_stream(served: Any, client: openai.AsyncOpenAI, include_usage: bool) -> None:
    served.answer_with(TEXTS, "length")
    options: Any = {"stream_options": {"include_usage": True}} if include_usage else {}
    stream = await client.completions.create(model="m", prompt="one two three", stream=True, **options)
    chunks = [chunk async for chunk in stream]
    assert {chunk.id for chunk in chunks} == {f"cmpl-{served.backend.specs[0].request:016x}"}
    assert {chunk.object for chunk in chunks} == {"text_completion"}
    if include_usage:
        last = chunks.pop()
        assert last.choices == [] and last.usage is not None and last.usage.total_tokens == 9
    assert all(chunk.usage is None for chunk in chunks)
    assert [chunk.choices[0].text for chunk in chunks] == [text for text in TEXTS if text]
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None, None, None, "length"]


async def test_the_stream_on_the_wire(served: Any, http: httpx.AsyncClient) -> None:
    served.answer_with(["a", ""])
    response = await http.post("/v1/completions", json=BODY | {"stream": True})
    assert response.status_code == 200 and response.headers["x-kvferry-room"] == str(served.room)
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    *events, done = response.text.removesuffix("\n\n").split("\n\n")
    assert done == "data: [DONE]"
    chunks = [json.loads(event.removeprefix("data: ")) for event in events]
    assert [chunk["choices"] for chunk in chunks] == [
        [{"text": "a", "finish_reason": None, "index": 0, "logprobs": None}],
        [{"text": "", "finish_reason": "stop", "index": 0, "logprobs": None}],
    ]
    assert all(set(chunk) == {"id", "object", "created", "model", "choices"} for chunk in chunks)


async def test_token_ids_on_request(served: Any, client: openai.AsyncOpenAI, http: httpx.AsyncClient) -> None:
    """vLLM's extension, in vLLM's places: both lists in the choice, the prompt's in the first chunk only."""
    served.answer_with(TEXTS)  # ids 100 … 104; the third shows no text
    wanted: Any = {"extra_body": {"return_token_ids": True}}
    whole = (await client.completions.create(model="m", prompt="one two three", **wanted)).model_dump()
    assert whole["choices"][0]["prompt_token_ids"] == [1, 3, 3, 5]
    assert whole["choices"][0]["token_ids"] == [100, 101, 102, 103, 104]
    stream = await client.completions.create(model="m", prompt=[7, 8], stream=True, **wanted)
    choices = [chunk.model_dump()["choices"][0] async for chunk in stream]
    assert [choice.get("prompt_token_ids") for choice in choices] == [[7, 8]] + [None] * 4
    assert [(choice["text"], choice["token_ids"]) for choice in choices] == [
        (text, [100 + i]) for i, text in enumerate(TEXTS)
    ]
    for body in (BODY, BODY | {"stream": True}, BODY | {"return_token_ids": False}):
        assert "token_ids" not in (await http.post("/v1/completions", json=body)).text


# --- Errors ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "status", "code", "param", "words"),
    [
        ({"prompt": [3, 1000]}, 400, "invalid_request", "prompt[1]", ["prompt[1]: 1000 ", "without 1000"]),
        ({"prompt": [3, 4, -1]}, 400, "invalid_request", "prompt[2]", ["prompt[2]: -1 ", "allowed: 0"]),
        ({"prompt": [2**70]}, 400, "invalid_request", "prompt[0]", [str(2**70), "1000"]),
        ({"prompt": ""}, 400, "invalid_request", "prompt", ['""']),
        ({"prompt": []}, 400, "invalid_request", "prompt", ["[]"]),
        ({"prompt": [[3], [4, 1000]]}, 400, "invalid_request", "prompt[1][1]", ["prompt[1][1]: 1000 ", "without 1000"]),
        ({"prompt": ["a", "b " * 160]}, 400, "context_length_exceeded", "prompt[1]", ["161", "159"]),
        ({"logit_bias": {"1000": 1}}, 400, "invalid_request", "logit_bias.1000", ["1000", "without 1000"]),
        ({"min_tokens": 17}, 400, "invalid_request", "min_tokens", ["17", "max_tokens, which is 16 here"]),
        ({"prompt": [1] * 160}, 400, "context_length_exceeded", "prompt", ["160", "159"]),
        ({"max_tokens": 157}, 400, "context_length_exceeded", "max_tokens", ["157", "4 tokens", "161", "160", "156"]),
        ({"messages": []}, 400, "unknown_parameter", "messages", ["unknown field"]),
        ({"model": "gpt-9"}, 404, "model_not_found", "model", ["gpt-9"]),
    ],
)
async def test_refused(
    served: Any, http: httpx.AsyncClient, fields: dict[str, Any], status: int, code: str, param: str, words: list[str]
) -> None:
    response = await http.post("/v1/completions", json=BODY | fields)
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["param"]) == (status, code, param)
    assert error["type"] == "invalid_request_error"
    for word in words:
        assert word in error["message"]
    assert served.backend.specs == []


async def test_a_text_without_tokens_is_refused(served: Any, http: httpx.AsyncClient, monkeypatch: Any) -> None:
    monkeypatch.setattr(served.front.encoder, "encode", lambda _: [])
    response = await http.post("/v1/completions", json=BODY | {"prompt": " "})
    assert response.status_code == 400 and response.json()["error"]["message"] == "prompt: the prompt has no tokens"


async def test_errors_of_the_handoff(served: Any, client: openai.AsyncOpenAI, http: httpx.AsyncClient) -> None:
    served.backend.on_submit = lambda spec: served.settle(
        spec, Outcome(77, False, Cause("overloaded", "no", room=77), retry_after_s=7.2)
    )
    response = await http.post("/v1/completions", json=BODY | {"stream": True})
    assert (response.status_code, response.headers["retry-after"]) == (429, "8")
    assert response.headers["x-kvferry-room"] == "77"

    def play(spec: RequestSpec) -> None:
        served.settle(spec)
        served.from_decode(served.token(spec, 0))
        asyncio.get_running_loop().call_later(0.02, served.front.on_link_lost, served.decode, LostReason.REFUSED)

    served.backend.on_submit = play
    texts = []
    with pytest.raises(openai.APIError, match="decode-0 is lost"):
        async for chunk in await client.completions.create(model="m", prompt=[1], stream=True):
            texts.append(chunk.choices[0].text)
    assert texts == [" t0"]


async def test_leaving_before_the_first_token_aborts_the_room(served: Any, http: httpx.AsyncClient) -> None:
    call = asyncio.ensure_future(http.post("/v1/completions", json=BODY))
    await served.until(lambda: len(served.backend.outcomes) == 1)
    call.cancel()
    await asyncio.wait({call})
    await served.until(lambda: served.backend.cancelled == 1)
    assert served.metrics.live._value.get() == 0


# --- What the deployment gives the front -----------------------------------------------------------------------


def test_the_limit_of_token_ids_is_the_models_embedding() -> None:
    tokenizer, vocab_size = _vocabulary(PACKAGED_MODEL)
    loaded = load(PACKAGED_MODEL)
    assert vocab_size == loaded.model.get_input_embeddings().weight.shape[0]
    text = "The capital of France is"
    assert list(tokenizer.encode(text)) == loaded.tokenizer.encode(text)


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:8123"),
        ("0.0.0.0", "http://127.0.0.1:8123"),
        ("::1", "http://[::1]:8123"),
        ("::", "http://[::1]:8123"),
        ("localhost", "http://localhost:8123"),
    ],
)
def test_the_base_url_can_be_called(host: str, url: str) -> None:
    assert base_url(load_config(None, {"http.host": host, "http.port": 8123})) == url
