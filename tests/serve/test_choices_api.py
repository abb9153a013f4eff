"""Several answers to one request: `n` on both routes, and lists of prompts."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import openai
import pytest

from kvferry.actors.ports import LostReason
from kvferry.protocol.errors import Cause
from kvferry.protocol.messages import Token
from kvferry.protocol.outcome import Outcome
from kvferry.protocol.request import RequestSpec, Sampling
from kvferry.serve.choices import Choices
from kvferry.serve.prepare import sample_seed

ASK: list[Any] = [{"role": "user", "content": "one two three"}]
CHAT: dict[str, Any] = {"model": "m", "messages": ASK}


def answer_by_prompt(world: Any) -> None:
    """Each request gets one token: its prompt's last id, and which of its prompt's samples it is."""
    seen: dict[tuple[int, ...], int] = {}

    def play(spec: RequestSpec) -> None:
        sample = seen[spec.prompt_ids] = seen.get(spec.prompt_ids, -1) + 1
        world.settle(spec)
        world.from_decode(world.token(spec, 0, f"{spec.prompt_ids[-1]}/{sample}", "stop"))

    world.backend.on_submit = play


async def test_case_4_each_sample_is_a_request_of_its_own(served: Any, client: openai.AsyncOpenAI) -> None:
    """Case 4: chat, n=4, temperature 0.8 and greedy: 4 choices with indexes 0 to 3, each by a request of its own."""
    served.answer_with(["a", "b"])
    for fields in ({"temperature": 0.8, "seed": 7}, {"temperature": 0}, {"temperature": 0.8}):
        served.backend.specs.clear()
        answer = await client.chat.completions.create(model="m", messages=ASK, n=4, **fields)
        assert [(choice.index, choice.message.content) for choice in answer.choices] == [(i, "ab") for i in range(4)]
        assert answer.usage is not None
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (3, 8, 11)
        specs = served.backend.specs
        assert answer.id == f"chatcmpl-{specs[0].request:016x}"
        assert len({spec.request for spec in specs}) == len({spec.sampling.seed for spec in specs}) == 4 or (
            not fields["temperature"]
        )
        assert {spec.samples for spec in specs} == {4} and specs[0].group > 0
        assert len({spec.group for spec in specs}) == 1
        if "seed" in fields:
            assert [spec.sampling.seed for spec in specs] == [sample_seed(7, i) for i in range(4)]
    await served.until(lambda: served.front.requests_live == 0)


def test_seeds_of_samples() -> None:
    """The first is the plain one; a neighbour's seed gives no sample twice; and all are what the wire can carry."""
    seeds = [sample_seed(seed, i) for seed in (0, 7, 8, 2**63 - 1) for i in range(16)]
    assert seeds[::16] == [0, 7, 8, 2**63 - 1] and len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**63 for seed in seeds)


async def test_one_answer_has_no_group(served: Any, client: openai.AsyncOpenAI) -> None:
    served.answer_with(["x"])
    await client.chat.completions.create(model="m", messages=ASK, n=1)
    await client.completions.create(model="m", prompt=["a", "b"])
    assert [(spec.group, spec.samples) for spec in served.backend.specs] == [(0, 1)] * 3


@pytest.mark.parametrize("prompts", [["a", "bb", "ccc"], [[9, 1], [9, 2], [9, 3]]])
async def test_case_5_a_list_of_prompts(served: Any, client: openai.AsyncOpenAI, prompts: Any) -> None:
    """Case 5: 3 prompts, n=2: 6 choices in the order of the prompts, again and again, and nothing is left over."""
    answer_by_prompt(served)
    for turn in range(20):
        answer = await client.completions.create(model="m", prompt=prompts, n=2)
        assert [choice.index for choice in answer.choices] == list(range(6))
        assert [choice.text for choice in answer.choices] == [
            f"{prompt}/{2 * turn + sample}" for prompt in (1, 2, 3) for sample in (0, 1)
        ]
        assert answer.usage is not None
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (6, 6)
        assert answer.usage.prompt_tokens_details is not None
        assert answer.usage.prompt_tokens_details.cached_tokens == 0
    specs = served.backend.specs
    assert len({spec.request for spec in specs}) == 120 and len({spec.group for spec in specs}) == 60
    await served.until(lambda: served.front.requests_live == 0)
    assert served.metrics.live._value.get() == 0
    assert served.metrics.prompt_tokens._value.get() == 120 and served.metrics.generated_tokens._value.get() == 120


async def test_a_prompt_answers_in_a_list_as_it_does_alone(served: Any, client: openai.AsyncOpenAI) -> None:
    served.answer_with(["x"])
    await client.completions.create(model="m", prompt="b", n=2, seed=5, best_of=2)
    await client.completions.create(model="m", prompt=["a", "b"], n=2, seed=5)
    alone, listed = served.backend.specs[:2], served.backend.specs[4:]
    assert [spec.sampling for spec in alone] == [spec.sampling for spec in listed]


async def test_defaults_are_fitted_to_each_prompt(served: Any, client: openai.AsyncOpenAI) -> None:
    served.answer_with(["x"])
    await client.completions.create(model="m", prompt=[[5] * 150, [5]])
    assert [spec.sampling.max_tokens for spec in served.backend.specs] == [10, 16]


async def test_token_ids_of_several_choices(served: Any, client: openai.AsyncOpenAI) -> None:
    """In vLLM's places: each completion choice has its prompt's ids; a chat has them once, beside the choices."""
    served.answer_with(["a", "b"])
    wanted: Any = {"extra_body": {"return_token_ids": True}, "n": 2}
    whole = (await client.completions.create(model="m", prompt=[[7], [8, 9]], **wanted)).model_dump()
    assert [choice["prompt_token_ids"] for choice in whole["choices"]] == [[7], [7], [8, 9], [8, 9]]
    stream = await client.completions.create(model="m", prompt=[[7], [8, 9]], stream=True, **wanted)
    first: dict[int, Any] = {}
    async for chunk in stream:
        choice = chunk.model_dump()["choices"][0]
        first.setdefault(choice["index"], choice.get("prompt_token_ids"))
        assert first[choice["index"]] and ("prompt_token_ids" in choice) == (choice["text"] == "a")
    assert first == {0: [7], 1: [7], 2: [8, 9], 3: [8, 9]}
    stream = await client.chat.completions.create(model="m", messages=ASK, stream=True, **wanted)
    chunks = [chunk.model_dump() async for chunk in stream]
    assert [chunk.get("prompt_token_ids") for chunk in chunks] == [[3, 3, 5]] + [None] * (len(chunks) - 1)


# --- Streams ---------------------------------------------------------------------------------------------------


async def test_choices_are_interleaved_in_one_stream(served: Any, http: httpx.AsyncClient) -> None:
    """Chunks carry the index of their choice, each choice ends on its own, and the usage comes once, at the end."""
    specs: list[RequestSpec] = []

    def play(spec: RequestSpec) -> None:
        specs.append(spec)
        if len(specs) == 3:
            for each in specs:
                served.settle(each)
            a, b, c = specs
            served.from_decode(*(served.token(spec, 0, name) for spec, name in ((c, "c"), (a, "a"), (b, "b"))))
            served.from_decode(served.token(b, 1, "B", "length"), served.token(a, 1, "A"))
            served.from_decode(served.token(a, 2, "!", "stop"))
            served.from_decode(served.token(c, 1, "C", "stop"))

    served.backend.on_submit = play
    body = CHAT | {"n": 3, "stream": True, "stream_options": {"include_usage": True}}
    response = await http.post("/v1/chat/completions", json=body)
    assert response.text.count("data: [DONE]") == 1 and response.text.endswith("data: [DONE]\n\n")
    assert response.headers["x-kvferry-room"] == ", ".join([str(served.room)] * 3)
    chunks = [json.loads(event.removeprefix("data: ")) for event in response.text.split("\n\n")[:-2]]
    assert {chunk["id"] for chunk in chunks} == {f"chatcmpl-{specs[0].request:016x}"}
    *chunks, last = chunks
    assert last["choices"] == [] and last["usage"]["completion_tokens"] == 7 and last["usage"]["prompt_tokens"] == 3
    shown: dict[int, list[Any]] = {0: [], 1: [], 2: []}
    for chunk in chunks:
        (choice,) = chunk["choices"]
        assert chunk["usage"] is None
        shown[choice["index"]].append(choice["finish_reason"] or choice["delta"].get("content"))
    assert shown == {0: ["", "a", "A", "!", "stop"], 1: ["", "b", "B", "length"], 2: ["", "c", "C", "stop"]}
    await served.until(lambda: served.metrics.requests.labels("200", "length")._value.get() == 1)


async def test_what_came_in_one_batch_is_taken_together(world: Any) -> None:
    choices = Choices(world.front)
    choices.open((1,), [Sampling(5), Sampling(5)])
    choices.open((2,), [Sampling(5)])
    await world.until(lambda: len(world.backend.specs) == 3)
    taking = asyncio.ensure_future(choices.take())
    await asyncio.sleep(0)
    a, b, c = world.backend.specs
    world.from_decode(world.token(c, 0), world.token(a, 0), world.token(c, 1, finish="stop"))
    assert indices(await taking) == [(0, [0]), (2, [0, 1])]
    world.from_decode(world.token(b, 1), world.token(a, 1, finish="stop"))
    assert indices(await choices.take()) == [(0, [1])]
    world.from_decode(world.token(b, 0, finish=""), world.token(b, 2, finish="length"))
    assert indices(await choices.take()) == [(1, [0, 1, 2])]
    assert choices.over and choices.finish_reason == "length"
    assert (choices.prompt_tokens, choices.completion_tokens) == (2, 7)
    choices.close()


def indices(parts: list[tuple[int, list[Token]]]) -> list[tuple[int, list[int]]]:
    return [(index, [token.index for token in tokens]) for index, tokens in parts]


async def test_tokens_before_a_failure_are_given_once_even_if_others_never_pause(world: Any) -> None:
    choices = Choices(world.front)
    choices.open((1,), [Sampling(9), Sampling(9)])
    await world.until(lambda: len(world.backend.specs) == 2)
    a, b = world.backend.specs
    world.from_decode(world.token(a, 0), world.token(b, 0))
    world.settle(a, Outcome(world.room, False, Cause("handoff_failed", "no")))
    world.from_decode(world.token(b, 1))
    assert indices(await choices.take()) == [(0, [0]), (1, [0, 1])]
    choices.lives[0].stream.fail(Cause("handoff_failed", "too slow"))
    world.from_decode(world.token(b, 2))
    assert indices(await choices.take()) == [(1, [2])]
    world.from_decode(world.token(b, 3))
    with pytest.raises(Exception, match="too slow"):
        await choices.take()
    choices.close()


# --- One choice fails ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
async def test_a_failure_before_the_first_token_is_the_answers_status(
    served: Any, http: httpx.AsyncClient, stream: bool
) -> None:
    def play(spec: RequestSpec) -> None:
        if spec is served.backend.specs[2]:
            served.settle(spec, Outcome(0, False, Cause("overloaded", "full", leg="router"), retry_after_s=3.0))

    served.backend.on_submit = play
    response = await http.post("/v1/chat/completions", json=CHAT | {"n": 4, "stream": stream})
    assert (response.status_code, response.headers["retry-after"]) == (429, "3")
    assert response.json()["error"]["code"] == "overloaded"
    await served.until(lambda: served.backend.cancelled == 3)
    await served.until(lambda: served.front.requests_live == 0)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_failure_in_mid_answer_ends_all_choices(served: Any, http: httpx.AsyncClient, stream: bool) -> None:
    """The client is told in the one way the API has: by an error in place of the whole answer, or an error event."""

    def play(spec: RequestSpec) -> None:
        served.from_prefill(served.token(spec, 0))
        if len(served.backend.specs) == 3 and spec is served.backend.specs[1]:
            lost = Outcome(77, False, Cause("peer_lost", "decode is gone", room=77))
            asyncio.get_running_loop().call_later(0.02, served.settle, spec, lost)

    served.backend.on_submit = play
    response = await http.post("/v1/completions", json={"model": "m", "prompt": [1], "n": 3, "stream": stream})
    if stream:
        *chunks, error = [json.loads(event.removeprefix("data: ")) for event in response.text.split("\n\n")[:-1]]
        assert sorted(chunk["choices"][0]["index"] for chunk in chunks) == [0, 1, 2]
        assert response.status_code == 200 and "[DONE]" not in response.text
    else:
        error = response.json()
        assert response.status_code == 502
    assert error["error"]["code"] == "peer_lost" and "decode is gone" in error["error"]["message"]
    await served.until(lambda: served.backend.cancelled == 2)
    await served.until(lambda: served.front.requests_live == 0)


async def test_losing_one_choices_decode_stops_the_others(served: Any, client: openai.AsyncOpenAI) -> None:
    def play(spec: RequestSpec) -> None:
        served.settle(spec)
        if spec is served.backend.specs[0]:
            served.from_decode(served.token(spec, 0))
            asyncio.get_running_loop().call_later(0.02, served.front.on_link_lost, served.decode, LostReason.REFUSED)
        else:
            served.from_prefill(served.token(spec, 0))

    served.backend.on_submit = play
    with pytest.raises(openai.APIError, match="decode-0 is lost"):
        async for _ in await client.chat.completions.create(model="m", messages=ASK, n=2, stream=True):
            pass
    await served.until(lambda: served.front.requests_live == 0)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_aborts_every_choice(served: Any, stream: bool) -> None:
    async with httpx.AsyncClient(base_url=served.url, trust_env=False) as client:
        body = {"model": "m", "prompt": ["a", "b"], "n": 2, "stream": stream}
        call = asyncio.ensure_future(client.post("/v1/completions", json=body))
        await served.until(lambda: len(served.backend.outcomes) == 4)
        call.cancel()
        await asyncio.wait({call})
    await served.until(lambda: served.backend.cancelled == 4)
    await served.until(lambda: served.front.requests_live == 0)
