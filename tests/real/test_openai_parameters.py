"""The `openai` client against the real server: every parameter has its effect, worked out with plain transformers.

The reference is a greedy loop of its own over the same weights in float32, which changes the logits as the parameter
says. Where its two best logits are a rounding apart it ends, and so does the comparison.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import openai
import pytest
import torch

from kvferry.engine.loader import load

pytestmark = pytest.mark.real

torch.set_num_threads(1)  # the server needs the other cores

MODEL = "smollm2-135m"
ASK: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]
PARIS = "The capital of France is Paris."
SONG = "la la la la la la la la"
TIE = 1e-3
THE, END = 504, 2  # "The", which begins the answer, and the end of a turn, which ends it

Adjust = Callable[[torch.Tensor, list[int]], torch.Tensor]


class Reference:
    """Plain transformers."""

    def __init__(self) -> None:
        loaded = load(MODEL)
        self.model, self.tokenizer = loaded.model, loaded.tokenizer

    @torch.inference_mode()
    def greedy(self, prompt_ids: list[int], count: int, adjust: Adjust = lambda logits, _: logits) -> list[int]:
        """Up to `count` tokens, fewer if a tie comes first. `adjust(logits, ids so far)` gives those to choose by."""
        ids: list[int] = []
        fed, cache = prompt_ids, None
        while len(ids) < count:
            output = self.model(torch.tensor([fed]), cache=cache, use_cache=True, logits_to_keep=1)
            best = adjust(output.logits[0, -1].clone(), ids).topk(2)
            if float(best.values[0] - best.values[1]) < TIE:
                break
            ids.append(int(best.indices[0]))
            fed, cache = ids[-1:], output.cache
        return ids

    @torch.inference_mode()
    def logprobs(self, prompt_ids: list[int], ids: list[int]) -> torch.Tensor:
        """Row i is the distribution that token i was drawn from, as natural logarithms."""
        logits = self.model(torch.tensor([prompt_ids + ids])).logits[0].float()
        return logits[len(prompt_ids) - 1 : -1].log_softmax(-1)


@pytest.fixture(scope="module")
def reference() -> Reference:
    return Reference()


@pytest.fixture
def client(server: Any) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client
    server.wait_baseline()


def chat(client: openai.OpenAI, **fields: Any) -> Any:
    """Greedy unless the fields say otherwise."""
    return client.chat.completions.create(**{"model": MODEL, "messages": ASK, "temperature": 0} | fields)


def complete(client: openai.OpenAI, **fields: Any) -> Any:
    return client.completions.create(**{"model": MODEL, "temperature": 0, "max_tokens": 8} | fields)


def sung(client: openai.OpenAI, **fields: Any) -> tuple[list[int], list[int]]:
    """The ids of the song's prompt and of what follows it."""
    extra = {"return_token_ids": True} | fields.pop("extra_body", {})
    choice = complete(client, prompt=SONG, max_tokens=16, extra_body=extra, **fields).choices[0].model_dump()
    return choice["prompt_token_ids"], choice["token_ids"]


def assert_as(expected: list[int], got: list[int], at_least: int) -> None:
    """Equal up to the reference's first tie, which comes late enough to mean something."""
    assert len(expected) >= at_least
    assert got[: len(expected)] == expected


# --- Length and end --------------------------------------------------------------------------------------------


def test_max_tokens_under_both_names(client: openai.OpenAI) -> None:
    for name in ("max_tokens", "max_completion_tokens"):
        answer = chat(client, **{name: 3})
        assert answer.choices[0].finish_reason == "length" and answer.usage.completion_tokens == 3


def test_stop(client: openai.OpenAI) -> None:
    answer = chat(client, stop=[" Paris", "nothing"])
    assert answer.choices[0].message.content == "The capital of France is"
    assert answer.choices[0].finish_reason == "stop"
    text = complete(client, prompt="One, two, three,", stop=",", max_tokens=20)
    assert "," not in text.choices[0].text and text.choices[0].finish_reason == "stop"
    by_id = chat(client, extra_body={"stop_token_ids": [THE]})
    assert (by_id.choices[0].message.content, by_id.usage.completion_tokens) == ("", 1)


def test_ignore_eos_and_min_tokens(client: openai.OpenAI, reference: Reference) -> None:
    """The answer has 8 tokens, the last of which ends it. `ignore_eos` lets it be made and goes on behind it;
    `min_tokens` keeps it from being made."""
    plain = chat(client, extra_body={"return_token_ids": True})
    prompt, ids = plain.model_dump()["prompt_token_ids"], plain.choices[0].model_dump()["token_ids"]
    assert plain.choices[0].message.content == PARIS and len(ids) == 8 and ids[-1] == END
    wanted = {"max_tokens": 16, "extra_body": {"return_token_ids": True, "ignore_eos": True}}
    on = chat(client, **wanted).choices[0].model_dump()
    assert on["finish_reason"] == "length" and len(on["token_ids"]) == 16
    assert_as(reference.greedy(prompt, 16), on["token_ids"], at_least=10)

    def no_end(logits: torch.Tensor, ids: list[int]) -> torch.Tensor:
        if len(ids) < 14:
            logits[END] = -torch.inf
        return logits

    wanted = {"max_tokens": 16, "extra_body": {"return_token_ids": True, "min_tokens": 14}}
    longer = chat(client, **wanted).choices[0].model_dump()
    assert len(longer["token_ids"]) >= 14 and END not in longer["token_ids"][:14]
    assert_as(reference.greedy(prompt, 14, no_end), longer["token_ids"], at_least=10)


# --- What is drawn ---------------------------------------------------------------------------------------------


def test_logit_bias_bans_and_forces(client: openai.OpenAI, reference: Reference) -> None:
    wanted: dict[str, Any] = {"max_tokens": 4, "extra_body": {"return_token_ids": True}}
    banned = chat(client, logit_bias={str(THE): -100}, **wanted)
    prompt, ids = banned.model_dump()["prompt_token_ids"], banned.choices[0].model_dump()["token_ids"]

    def ban(logits: torch.Tensor, _: list[int]) -> torch.Tensor:
        logits[THE] -= 100
        return logits

    assert ids[0] != THE
    assert_as(reference.greedy(prompt, 4, ban), ids, at_least=2)
    (la,) = reference.tokenizer.encode(" la")
    forced = chat(client, logit_bias={str(la): 100}, **wanted)
    assert forced.choices[0].model_dump()["token_ids"] == [la] * 4


def penalised(name: str, value: float, prompt: list[int]) -> Adjust:
    """OpenAI's presence and frequency penalties look at what was generated; the repetition penalty (Keskar et al.,
    2019, CTRL) at the prompt as well, and pushes towards less likely whatever the logit's sign."""

    def adjust(logits: torch.Tensor, ids: list[int]) -> torch.Tensor:
        if name == "repetition_penalty":
            seen = torch.tensor(sorted({*prompt, *ids}))
            old = logits[seen]
            logits[seen] = torch.where(old > 0, old / value, old * value)
        for token_id, count in Counter(ids).items():
            if name == "presence_penalty":
                logits[token_id] -= value
            if name == "frequency_penalty":
                logits[token_id] -= value * count
        return logits

    return adjust


@pytest.mark.parametrize(
    ("name", "value"), [("presence_penalty", 2.0), ("frequency_penalty", 0.5), ("repetition_penalty", 1.3)]
)
def test_penalties_change_a_repetition(client: openai.OpenAI, reference: Reference, name: str, value: float) -> None:
    prompt, plain = sung(client)
    extension = name == "repetition_penalty"
    _, changed = sung(client, **({"extra_body": {name: value}} if extension else {name: value}))
    assert changed != plain
    assert_as(reference.greedy(prompt, 16, penalised(name, value, prompt)), changed, at_least=8)


def test_filters_that_leave_one_token_are_greedy(client: openai.OpenAI) -> None:
    for fields in ({"top_p": 1e-6}, {"extra_body": {"top_k": 1}}, {"extra_body": {"min_p": 1.0}}):
        answer = chat(client, temperature=2.0, seed=3, **fields)
        assert answer.choices[0].message.content == PARIS


def test_a_seed_repeats_an_answer(client: openai.OpenAI) -> None:
    def ask(**fields: Any) -> str:
        text: str = complete(client, prompt="Once upon a time", temperature=1.5, **fields).choices[0].text
        return text

    assert ask(seed=5) == ask(seed=5) != ask(seed=6)
    assert len({ask() for _ in range(3)}) > 1


# --- Several answers -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_case_4_four_samples(client: openai.OpenAI, stream: bool) -> None:
    """Case 4: n=4 greedy is four times the same; at 0.8 the samples differ, and the first is the plain answer."""

    def ask(**fields: Any) -> list[str]:
        if not stream:
            whole = chat(client, max_tokens=24, **fields)
            assert [choice.index for choice in whole.choices] == list(range(fields.get("n", 1)))
            return [choice.message.content for choice in whole.choices]
        ends, usages = Counter[int](), 0
        shown: dict[int, str] = {}
        for chunk in chat(client, max_tokens=24, stream=True, stream_options={"include_usage": True}, **fields):
            for choice in chunk.choices:
                shown[choice.index] = shown.get(choice.index, "") + (choice.delta.content or "")
                ends[choice.index] += choice.finish_reason is not None
            usages += chunk.usage is not None
        assert usages == 1 and dict(ends) == dict.fromkeys(range(fields.get("n", 1)), 1)
        return [shown[index] for index in sorted(shown)]

    assert ask(n=4) == [PARIS] * 4
    hot: dict[str, Any] = {"temperature": 0.8, "seed": 7, "messages": [{"role": "user", "content": "Tell me a story."}]}
    samples = ask(n=4, **hot)
    assert len(samples) == 4 and len(set(samples)) > 1
    assert samples[:1] == ask(**hot)


def test_case_5_a_list_of_prompts(client: openai.OpenAI, server: Any) -> None:
    """Case 5: three prompts, n=2: six choices in order, each what its prompt gives alone, again and again; then every
    page is free. (200 times over is on virtual time.)"""
    prompts = ["The capital of France is", "One, two, three,", "la la la la"]
    alone = [complete(client, prompt=prompt, max_tokens=4).choices[0].text for prompt in prompts]
    for _ in range(4):
        answer = complete(client, prompt=prompts, n=2, max_tokens=4)
        assert [choice.index for choice in answer.choices] == list(range(6))
        assert [choice.text for choice in answer.choices] == [text for text in alone for _ in range(2)]
        assert answer.usage.completion_tokens == 24
    server.wait_baseline()


def test_prompts_as_lists_of_token_ids(client: openai.OpenAI, reference: Reference) -> None:
    ids = [reference.tokenizer.encode(text) for text in ("The capital of France is", "la la la la")]
    texts = [complete(client, prompt=prompt).choices[0].text for prompt in ids]
    assert [choice.text for choice in complete(client, prompt=ids).choices] == texts


# --- What is shown ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_case_50_logprobs(client: openai.OpenAI, reference: Reference, stream: bool) -> None:
    """Case 50: max_tokens=5 gives five entries, the first token's among them, equal to plain transformers'."""
    fields: dict[str, Any] = {
        "max_tokens": 5, "logprobs": True, "top_logprobs": 3, "extra_body": {"return_token_ids": True}
    }  # fmt: skip
    entries: list[Any] = []
    prompt: list[int] = []
    ids: list[int] = []
    for part in chat(client, stream=True, **fields) if stream else [chat(client, **fields)]:
        body = part.model_dump()
        prompt += body.get("prompt_token_ids") or []
        for choice in body["choices"]:
            ids += choice["token_ids"]
            entries += (choice["logprobs"] or {"content": []})["content"]
    assert len(entries) == len(ids) == 5
    for row, token_id, entry in zip(reference.logprobs(prompt, ids), ids, entries, strict=True):
        assert entry["token"] == reference.tokenizer.decode([token_id])
        assert bytes(entry["bytes"]).decode() == entry["token"]
        assert entry["logprob"] == pytest.approx(float(row[token_id]), abs=1e-3)
        best = row.topk(3)
        assert [top["token"] for top in entry["top_logprobs"]] == [
            reference.tokenizer.decode([int(index)]) for index in best.indices
        ]
        assert [top["logprob"] for top in entry["top_logprobs"]] == pytest.approx(best.values.tolist(), abs=1e-3)


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_of_completions(client: openai.OpenAI, reference: Reference, stream: bool) -> None:
    """Those of the model itself, whatever the temperature and the penalties by which the token was drawn."""
    fields: dict[str, Any] = {
        "prompt": "The capital of France is", "max_tokens": 5, "logprobs": 2, "temperature": 1.5, "seed": 4,
        "presence_penalty": 1.0, "extra_body": {"return_token_ids": True},
    }  # fmt: skip
    parts = list(complete(client, stream=True, **fields)) if stream else [complete(client, **fields)]
    choices = [choice for part in parts for choice in part.model_dump()["choices"]]
    ids = [token_id for choice in choices for token_id in choice["token_ids"]]
    tokens, logprobs, tops, offsets = (
        [value for choice in choices for value in choice["logprobs"][name]]
        for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    )
    rows = reference.logprobs(choices[0]["prompt_token_ids"], ids)
    assert len(tokens) == len(ids) == 5 and "".join(tokens) == "".join(choice["text"] for choice in choices)
    assert offsets == [len("".join(tokens[:at])) for at in range(5)]
    assert logprobs == pytest.approx([float(row[i]) for row, i in zip(rows, ids, strict=True)], abs=1e-3)
    for row, token, top in zip(rows, tokens, tops, strict=True):
        best = row.topk(2)
        names = [reference.tokenizer.decode([int(index)]) for index in best.indices]
        assert set(top) == {*names, token}
        assert [top[name] for name in names] == pytest.approx(best.values.tolist(), abs=1e-3)


def test_usage(client: openai.OpenAI) -> None:
    usage = chat(client, n=2).usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (37, 16, 53)
    assert usage.prompt_tokens_details.cached_tokens == 0


# --- What is refused -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_tokens", [0, 1, 5])
def test_case_49_echo_and_prompt_logprobs(client: openai.OpenAI, max_tokens: int) -> None:
    """Case 49: 400 that says so, and the next request is answered."""
    for fields in ({"echo": True, "logprobs": 1}, {"extra_body": {"prompt_logprobs": 2}}):
        with pytest.raises(openai.BadRequestError, match=r"(echo|prompt_logprobs) is not supported"):
            complete(client, prompt="a", **fields | {"max_tokens": max_tokens})
    assert chat(client).choices[0].message.content == PARIS


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"n": 17}, "n"),
        ({"logit_bias": {"49152": 1}}, "logit_bias.49152"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"extra_body": {"min_tokens": 9}, "max_tokens": 8}, "min_tokens"),
        ({"stream": True, "stream_options": {"continuous_usage_stats": True}}, "stream_options.continuous_usage_stats"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
    ],
)
def test_refusals_name_the_parameter(client: openai.OpenAI, fields: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        chat(client, **fields)
    assert caught.value.param == param
