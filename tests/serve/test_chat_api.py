"""The API over HTTP, with the `openai` client and without."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import pytest

from kvferry.actors.ports import LostReason
from kvferry.protocol.errors import Cause
from kvferry.protocol.outcome import Outcome
from kvferry.protocol.request import RequestSpec

ASK: list[Any] = [{"role": "user", "content": "one two three"}]
BODY: dict[str, Any] = {"model": "m", "messages": ASK}
TEXTS = ["The", " capital", "", " is", " Paris.\n“é”"]


def error_of(response: httpx.Response) -> dict[str, Any]:
    body = response.json()
    assert set(body["error"]) == {"message", "type", "param", "code"}
    return dict(body["error"])


async def test_a_whole_answer(served: Any, client: openai.AsyncOpenAI) -> None:
    served.answer_with(TEXTS)
    raw = await client.chat.completions.with_raw_response.create(
        model="m", messages=ASK, temperature=0.5, top_p=0.9, seed=11, max_tokens=9, stop=["x", "yy"],
        extra_body={"top_k": 4, "stop_token_ids": [2]}, user="someone",
    )  # fmt: skip
    answer = raw.parse()
    (spec,) = served.backend.specs
    assert raw.headers["x-kvferry-room"] == str(served.room)
    assert answer.id == f"chatcmpl-{spec.request:016x}" and answer.object == "chat.completion" and answer.model == "m"
    assert answer.choices[0].message.content == "".join(TEXTS) and answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (3, 5, 8)
    assert spec.prompt_ids == (3, 3, 5)
    sampling = spec.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.seed) == (0.5, 0.9, 4, 11)
    assert (sampling.max_tokens, sampling.stop, sampling.stop_token_ids) == (9, ("x", "yy"), (2,))


@pytest.mark.parametrize("include_usage", [False, True])
async def test_a_stream(served: Any, client: openai.AsyncOpenAI, include_usage: bool) -> None:
    served.answer_with(TEXTS, "length")
    options: Any = {"stream_options": {"include_usage": True}} if include_usage else {}
    chunks = [chunk async for chunk in await client.chat.completions.create(
        model="m", messages=ASK, stream=True, **options,
    )]  # fmt: skip
    assert {chunk.id for chunk in chunks} == {f"chatcmpl-{served.backend.specs[0].request:016x}"}
    if include_usage:
        last = chunks.pop()
        assert last.choices == [] and last.usage is not None and last.usage.total_tokens == 8
    assert all(chunk.usage is None for chunk in chunks)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "".join(TEXTS)
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]


async def test_the_stream_on_the_wire(served: Any, http: httpx.AsyncClient) -> None:
    served.answer_with(["a", "b"])
    response = await http.post(
        "/v1/chat/completions", json=BODY | {"stream": True, "stream_options": {"include_usage": True}}
    )
    assert response.status_code == 200
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    *events, done = response.text.removesuffix("\n\n").split("\n\n")
    assert done == "data: [DONE]"
    chunks = [json.loads(event.removeprefix("data: ")) for event in events]
    assert [chunk["choices"] for chunk in chunks] == [
        [{"delta": {"role": "assistant", "content": ""}, "finish_reason": None, "index": 0, "logprobs": None}],
        [{"delta": {"content": "a"}, "finish_reason": None, "index": 0, "logprobs": None}],
        [{"delta": {"content": "b"}, "finish_reason": None, "index": 0, "logprobs": None}],
        [{"delta": {}, "finish_reason": "stop", "index": 0, "logprobs": None}],
        [],
    ]
    assert [chunk["usage"] for chunk in chunks] == [None] * 4 + [
        {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5, "prompt_tokens_details": {"cached_tokens": 0}}
    ]
    response = await http.post("/v1/chat/completions", json=BODY | {"stream": True})
    assert "usage" not in response.text


async def test_one_token_that_ends_at_prefill(served: Any, client: openai.AsyncOpenAI) -> None:
    served.backend.on_submit = lambda spec: served.from_prefill(served.token(spec, 0, "Yes", "length"))
    answer = await client.chat.completions.create(model="m", messages=ASK, max_tokens=1)
    assert answer.choices[0].message.content == "Yes" and answer.choices[0].finish_reason == "length"
    assert answer.usage is not None and answer.usage.completion_tokens == 1
    assert served.backend.cancelled == 0


async def test_defaults(served: Any, client: openai.AsyncOpenAI) -> None:
    served.answer_with(["x"])
    await client.chat.completions.create(model="m", messages=ASK)
    long: list[Any] = [{"role": "user", "content": "word " * 100}]
    served.backend.present = type(served.backend.present)(2, served.backend.present.ranks, True)
    await client.chat.completions.create(model="m", messages=long)
    first, second = served.backend.specs
    assert (first.sampling.temperature, first.sampling.top_p, first.sampling.top_k) == (1.0, 1.0, 0)
    assert first.sampling.seed != second.sampling.seed
    assert first.sampling.max_tokens == second.sampling.max_tokens == 20  # default_max_tokens; 60 would fit


async def test_token_ids_on_request(served: Any, client: openai.AsyncOpenAI, http: httpx.AsyncClient) -> None:
    """vLLM's extension, in vLLM's places: the prompt's ids beside the choices, once; a choice's own ids in it."""
    served.answer_with(TEXTS)  # ids 100 … 104; the third shows no text
    wanted: Any = {"extra_body": {"return_token_ids": True}}
    whole = (await client.chat.completions.create(model="m", messages=ASK, **wanted)).model_dump()
    assert whole["prompt_token_ids"] == [3, 3, 5]
    assert whole["choices"][0]["token_ids"] == [100, 101, 102, 103, 104]
    stream = await client.chat.completions.create(model="m", messages=ASK, stream=True, **wanted)
    chunks = [chunk.model_dump() async for chunk in stream]
    assert [chunk.get("prompt_token_ids") for chunk in chunks] == [[3, 3, 5]] + [None] * 6
    parts = [(chunk["choices"][0]["delta"]["content"], chunk["choices"][0]["token_ids"]) for chunk in chunks]
    texts = [(text, [100 + i]) for i, text in enumerate(TEXTS)]
    assert parts == [("", []), *texts, (None, [])]
    served.answer_with(["a", ""])
    stream = await client.chat.completions.create(model="m", messages=ASK, stream=True, **wanted)
    last = [chunk.model_dump() async for chunk in stream][-1]["choices"][0]
    assert (last["finish_reason"], last["token_ids"]) == ("stop", [101])
    for body in (BODY, BODY | {"stream": True}, BODY | {"return_token_ids": False}):
        assert "token_ids" not in (await http.post("/v1/chat/completions", json=body)).text


# --- Errors ----------------------------------------------------------------------------------------------------


async def test_limits_name_the_numbers(served: Any, client: openai.AsyncOpenAI) -> None:
    def words(count: int) -> list[Any]:
        return [{"role": "user", "content": "w " * count}]

    for count, max_tokens, numbers in ((160, None, "160 tokens.* 159"), (100, 61, "61 .*100 tokens.*161.*160.*60")):
        with pytest.raises(openai.BadRequestError) as caught:
            await client.chat.completions.create(model="m", messages=words(count), max_tokens=max_tokens)
        assert caught.value.code == "context_length_exceeded"
        assert re.search(numbers, caught.value.message)
    assert served.backend.specs == []
    served.answer_with(["x"])
    await client.chat.completions.create(model="m", messages=words(100), max_tokens=60)


async def test_errors_before_the_first_token_have_their_own_status(
    served: Any, client: openai.AsyncOpenAI, http: httpx.AsyncClient
) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        await client.chat.completions.create(model="gpt-9", messages=ASK)
    assert missing.value.code == "model_not_found" and missing.value.param == "model"
    cases = {
        "overloaded": (429, "8"), "unavailable": (503, "8"), "handoff_failed": (502, None),
        "deadline_exceeded": (504, None), "invalid_request": (400, None),
    }  # fmt: skip
    for code, (status, retry_after) in cases.items():
        cause = Cause(code, "no", leg="decode", room=77, because=Cause("x", "the pool is full"))
        served.backend.on_submit = lambda spec, cause=cause: served.settle(
            spec, Outcome(77, False, cause, retry_after_s=7.2)
        )
        for stream in (False, True):
            response = await http.post("/v1/chat/completions", json=BODY | {"stream": stream})
            assert (response.status_code, response.headers.get("retry-after")) == (status, retry_after)
            assert response.headers["x-kvferry-room"] == "77"
            assert error_of(response)["code"] == code
            assert "no (room 77, leg decode); because the pool is full" in error_of(response)["message"]


async def test_losing_decode_in_mid_stream_is_an_error_event_and_no_done(
    served: Any, client: openai.AsyncOpenAI, http: httpx.AsyncClient
) -> None:
    def play(spec: RequestSpec) -> None:
        served.settle(spec)
        served.from_decode(*(served.token(spec, i) for i in range(3)))
        asyncio.get_running_loop().call_later(0.02, served.front.on_link_lost, served.decode, LostReason.REFUSED)

    served.backend.on_submit = play
    texts = []
    with pytest.raises(openai.APIError, match="decode-0 is lost"):
        async for chunk in await client.chat.completions.create(model="m", messages=ASK, stream=True):
            texts.append(chunk.choices[0].delta.content)
    assert texts == ["", " t0", " t1", " t2"]
    response = await http.post("/v1/chat/completions", json=BODY | {"stream": True})
    assert response.status_code == 200 and "[DONE]" not in response.text
    last = json.loads(response.text.removesuffix("\n\n").rpartition("data: ")[2])
    assert last["error"]["code"] == "peer_lost" and str(served.room) in last["error"]["message"]
    response = await http.post("/v1/chat/completions", json=BODY)  # a whole answer still has its status to give
    assert response.status_code == 502 and error_of(response)["code"] == "peer_lost"


@pytest.mark.parametrize(
    ("method", "path", "content", "status", "code"),
    [
        ("GET", "/v1/nothing", "", 404, "not_found"),
        ("GET", "/v1/chat/completions", "", 405, "method_not_allowed"),
        ("POST", "/v1/models", "", 405, "method_not_allowed"),
        ("POST", "/v1/chat/completions", "{", 400, "invalid_request"),
        ("POST", "/v1/chat/completions", "[]", 400, "invalid_request"),
        ("POST", "/v1/chat/completions", "\xff", 400, "invalid_request"),
        ("POST", "/v1/chat/completions", "[" * 9000, 400, "invalid_request"),
        ("POST", "/v1/chat/completions", " " * 20_001, 413, "body_too_large"),
        ("GET", "/v1/models/other", "", 404, "not_found"),
        ("GET", "/rooms/5", "", 404, "not_found"),
        ("GET", "/rooms/x", "", 404, "not_found"),
        ("GET", "/rooms/" + "9" * 30, "", 404, "not_found"),
    ],
)
async def test_every_refusal_is_openai_shaped(
    http: httpx.AsyncClient, method: str, path: str, content: str, status: int, code: str
) -> None:
    headers = {"content-type": "application/json"}
    response = await http.request(method, path, content=content.encode("latin-1"), headers=headers)
    error = error_of(response)
    assert (response.status_code, error["code"], error["type"]) == (status, code, "invalid_request_error")
    if status == 405:
        assert response.headers["allow"]


async def test_bodies_without_a_length_are_bounded_too_and_must_be_called_json(http: httpx.AsyncClient) -> None:
    async def parts() -> AsyncIterator[bytes]:
        for _ in range(30):
            yield b" " * 1000

    headers = {"content-type": "application/json; charset=utf-8"}
    response = await http.post("/v1/chat/completions", content=parts(), headers=headers)
    assert response.status_code == 413 and "20000" in error_of(response)["message"]
    response = await http.post("/v1/chat/completions", content=json.dumps(BODY), headers={"content-type": "text/plain"})
    assert response.status_code == 415 and "text/plain" in error_of(response)["message"]


async def test_the_template_and_our_own_errors(
    served: Any, http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = BODY | {"messages": [{"role": "user", "content": "refuse"}]}
    response = await http.post("/v1/chat/completions", json=refused)
    assert response.status_code == 400 and "roles must alternate" in error_of(response)["message"]

    def broken(*_: Any) -> None:
        raise RuntimeError("secret detail")

    monkeypatch.setattr(served.front, "open", broken)
    response = await http.post("/v1/chat/completions", json=BODY)
    assert response.status_code == 500 and error_of(response)["code"] == "internal_error"
    assert "secret" not in response.text


# --- Clients that leave ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
async def test_leaving_before_the_first_token_aborts_the_room(served: Any, stream: bool) -> None:
    async with httpx.AsyncClient(base_url=served.url, trust_env=False) as client:
        call = asyncio.ensure_future(client.post("/v1/chat/completions", json=BODY | {"stream": stream}))
        await served.until(lambda: len(served.backend.outcomes) == 1)
        call.cancel()
        await asyncio.wait({call})
    await served.until(lambda: served.backend.cancelled == 1)
    counted = served.metrics.requests.labels("499", "cancelled")._value
    await served.until(lambda: counted.get() == 1)
    assert served.metrics.live._value.get() == 0


@pytest.mark.parametrize("stream", [False, True])
async def test_leaving_in_mid_answer_stops_both_leaders(served: Any, stream: bool) -> None:
    def play(spec: RequestSpec) -> None:
        served.from_prefill(served.token(spec, 0))
        served.settle(spec)

    served.backend.on_submit = play
    async with httpx.AsyncClient(base_url=served.url, trust_env=False) as client:
        if stream:
            async with client.stream("POST", "/v1/chat/completions", json=BODY | {"stream": True}) as response:
                assert response.status_code == 200
        else:
            call = asyncio.ensure_future(client.post("/v1/chat/completions", json=BODY))
            await served.until(lambda: len(served.backend.outcomes) == 1)
            await asyncio.sleep(0.02)
            call.cancel()
            await asyncio.wait({call})
    await served.until(lambda: len(served.network.stops()) == 2)
    assert {incarnation for incarnation, _ in served.network.stops()} == {6, 7}
    assert served.backend.cancelled == 0
