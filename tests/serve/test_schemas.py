"""What a request may hold: each refusal names the field, the value and the limit."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvferry.protocol.errors import InvalidRequest
from kvferry.serve.schemas import ChatRequest, parse_chat, parse_completion

GOOD: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


def parse(**fields: Any) -> ChatRequest:
    return parse_chat(json.dumps(GOOD | fields).encode())


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"temperature": 2.1}, "temperature", ["2.1", "2.0"]),
        ({"temperature": -1}, "temperature", ["-1", "0.0"]),
        ({"temperature": "hot"}, "temperature", ['"hot"']),
        ({"temperature": True}, "temperature", ["true"]),
        ({"top_p": 0}, "top_p", ["0", "0.0"]),
        ({"top_p": 1.5}, "top_p", ["1.5", "1.0"]),
        ({"top_k": -2}, "top_k", ["-2", "-1"]),
        ({"top_k": 1.5}, "top_k", ["1.5"]),
        ({"seed": -1}, "seed", ["-1", "0"]),
        ({"seed": 2**63}, "seed", [str(2**63)]),
        ({"max_tokens": 0}, "max_tokens", ["0", "1"]),
        ({"max_completion_tokens": "5"}, "max_completion_tokens", ['"5"']),
        ({"max_tokens": 5, "max_completion_tokens": 6}, "max_tokens", ["5", "6", "differ"]),
        ({"stop": ""}, "stop", ['""', "1"]),
        ({"stop": ["a", ""]}, "stop[1]", ['""']),
        ({"stop": ["a"] * 17}, "stop", ["16"]),
        ({"stop": 5}, "stop", ["5"]),
        ({"stop_token_ids": [-1]}, "stop_token_ids[0]", ["-1", "0"]),
        ({"stream": "yes"}, "stream", ['"yes"']),
        ({"stream_options": {"include_usage": True}}, "stream_options", ["stream: true"]),
        ({"stream": True, "stream_options": {"usage": 1}}, "stream_options.usage", ["unknown field"]),
        ({"stream": True, "stream_options": {"continuous_usage_stats": True}},
         "stream_options.continuous_usage_stats", ["not supported"]),
        ({"stream": True, "stream_options": {"include_obfuscation": True}},
         "stream_options.include_obfuscation", ["not supported"]),
        ({"n": 17}, "n", ["17", "16"]),
        ({"n": 0}, "n", ["0", "1"]),
        ({"n": 1.5}, "n", ["1.5", "int"]),
        ({"best_of": 2}, "best_of", ["2", "not supported"]),
        ({"top_logprobs": 3}, "top_logprobs", ["3", "needs logprobs: true"]),
        ({"top_logprobs": 3, "logprobs": False}, "top_logprobs", ["3", "needs logprobs: true"]),
        ({"top_logprobs": 21, "logprobs": True}, "top_logprobs", ["21", "20"]),
        ({"top_logprobs": -1, "logprobs": True}, "top_logprobs", ["-1", "0"]),
        ({"logprobs": 0}, "logprobs", ["0", "bool"]),
        ({"min_p": 1.1}, "min_p", ["1.1", "1.0"]),
        ({"presence_penalty": -2.1}, "presence_penalty", ["-2.1", "-2.0"]),
        ({"frequency_penalty": 2.1}, "frequency_penalty", ["2.1", "2.0"]),
        ({"frequency_penalty": "high"}, "frequency_penalty", ['"high"', "float"]),
        ({"repetition_penalty": 0}, "repetition_penalty", ["0", "0.01"]),
        ({"repetition_penalty": 101}, "repetition_penalty", ["101", "100"]),
        ({"min_tokens": -1}, "min_tokens", ["-1", "0"]),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens", ["5", "over max_tokens (4)"]),
        ({"min_tokens": 5, "max_completion_tokens": 4}, "min_tokens", ["5", "over max_completion_tokens (4)"]),
        ({"ignore_eos": 1}, "ignore_eos", ["1", "bool"]),
        ({"logit_bias": [1]}, "logit_bias", ["[1]", "object"]),
        ({"logit_bias": {"the": 1}}, "logit_bias.the", ["not a token id"]),
        ({"logit_bias": {"-1": 1}}, "logit_bias.-1", ["not a token id"]),
        ({"logit_bias": {"07": 1}}, "logit_bias.07", ["not a token id", "leading zeros"]),
        ({"logit_bias": {"²": 1}}, "logit_bias.²", ["not a token id"]),
        ({"logit_bias": {"7": 100.5}}, "logit_bias.7", ["100.5", "-100 to 100"]),
        ({"logit_bias": {"7": True}}, "logit_bias.7", ["true", "-100 to 100"]),
        ({"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias", ["1025", "1024"]),
        ({"tools": [{"type": "function"}]}, "tools", ["not supported"]),
        ({"response_format": {"type": "json_object"}}, "response_format", ["json_object", "not supported"]),
        ({"prompt_logprobs": 2}, "prompt_logprobs", ["2", "not supported"]),
        ({"echo": True}, "echo", ["true", "not supported"]),
        ({"skip_special_tokens": False}, "skip_special_tokens", ["false", "not supported"]),
        ({"temprature": 1}, "temprature", ["unknown field", "did you mean temperature?"]),
        ({"bootstrap_room": 7}, "bootstrap_room", ["unknown field"]),
        ({"model": None}, "model", ["null"]),
        ({"messages": []}, "messages", ["[]", "1"]),
        ({"messages": "hi"}, "messages", ['"hi"']),
        ({"messages": ["hi"]}, "messages[0]", ['"hi"']),
        ({"messages": [{"role": "user"}]}, "messages[0].content", ["required"]),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content", ["null"]),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role", ['"tool"', "system, user, assistant"]),
        ({"messages": [{"role": "user", "content": "x", "name": "a"}]}, "messages[0].name", ["not supported"]),
        ({"messages": [{"role": "user", "content": "x", "rol": "a"}]}, "messages[0].rol", ["did you mean role?"]),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "text": "x"}]}]},
            "messages[0].content[0].type", ['"image_url"', "only parts of type text"],
        ),
    ],
)  # fmt: skip
def test_refused(fields: dict[str, Any], param: str, words: list[str]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse(**fields)
    assert caught.value.param == param
    assert param in str(caught.value)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"prompt": ""}, "prompt", ['""', "1"]),
        ({"prompt": []}, "prompt", ["[]", "1"]),
        ({"prompt": None}, "prompt", ["null"]),
        ({"prompt": 5}, "prompt", ["5", "str | array"]),
        ({"prompt": [1, "a"]}, "prompt[1]", ['"a"', "prompt[0] is a token id"]),
        ({"prompt": [1, [2]]}, "prompt[1]", ["[2]", "prompt[0] is a token id"]),
        ({"prompt": ["a", "b", 1]}, "prompt[2]", ["1", "prompt[0] is a text"]),
        ({"prompt": [[1], "a"]}, "prompt[1]", ['"a"', "prompt[0] is a list of token ids"]),
        ({"prompt": ["a", ""]}, "prompt[1]", ['""', "1"]),
        ({"prompt": [[1], []]}, "prompt[1]", ["[]", "1"]),
        ({"prompt": [[1], [2, "a"]]}, "prompt[1][1]", ['"a"', "int"]),
        ({"prompt": ["a"] * 65}, "prompt", ["65 prompts with n 1 make 65 answers", "64"]),
        ({"prompt": ["a"] * 5, "n": 13}, "prompt", ["5 prompts with n 13 make 65 answers", "64"]),
        ({"prompt": [1, True]}, "prompt[1]", ["true", "int"]),
        ({"prompt": [1.5]}, "prompt[0]", ["1.5", "int"]),
        ({"messages": []}, "messages", ["unknown field"]),
        ({"max_completion_tokens": 4}, "max_completion_tokens", ["unknown field", "did you mean"]),
        ({"temperature": 3}, "temperature", ["3", "2.0"]),
        ({"return_token_ids": 1}, "return_token_ids", ["1", "bool"]),
        ({"n": 17}, "n", ["17", "16"]),
        ({"best_of": 2}, "best_of", ["2", "not supported with n 1"]),
        ({"best_of": 1, "n": 2}, "best_of", ["1", "not supported with n 2"]),
        ({"echo": True}, "echo", ["true", "not supported"]),
        ({"echo": True, "logprobs": 1, "max_tokens": 1}, "echo", ["true", "not supported"]),
        ({"prompt_logprobs": 2}, "prompt_logprobs", ["2", "not supported"]),
        ({"logprobs": 21}, "logprobs", ["21", "20"]),
        ({"logprobs": True}, "logprobs", ["true", "int"]),
        ({"top_logprobs": 2}, "top_logprobs", ["unknown field"]),
        ({"suffix": "x"}, "suffix", ['"x"', "not supported"]),
        ({"stream_options": {"include_usage": True}}, "stream_options", ["stream: true"]),
    ],
)
def test_refused_in_a_completion(fields: dict[str, Any], param: str, words: list[str]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_completion(json.dumps({"model": "m", "prompt": "hi"} | fields).encode())
    assert caught.value.param == param
    for word in (param, *words):
        assert word in str(caught.value)


def test_a_completion_that_asks_for_nothing_special() -> None:
    body = {"model": "m", "prompt": [0, 7], "best_of": 1, "echo": False, "logprobs": None, "suffix": None, "n": 1}
    completion = parse_completion(json.dumps(body).encode())
    assert completion.prompt == [0, 7] and not completion.return_token_ids
    assert completion.samples() == 1 and completion.top_logprobs_count() is None
    assert parse_completion(b'{"model": "m", "prompt": "a", "n": 3, "best_of": 3}').samples() == 3
    with pytest.raises(InvalidRequest, match="prompt is required"):
        parse_completion(b'{"model": "m"}')


def test_an_image_part_is_refused_by_its_type_whatever_else_it_holds() -> None:
    part = {"type": "image_url", "image_url": {"url": "data:"}}
    with pytest.raises(InvalidRequest, match="image_url") as caught:
        parse(messages=[{"role": "user", "content": [part]}])
    assert caught.value.param == "messages[0].content[0].type"


@pytest.mark.parametrize("name", ["model", "messages"])
def test_required(name: str) -> None:
    body = {key: value for key, value in GOOD.items() if key != name}
    with pytest.raises(InvalidRequest, match=f"{name} is required"):
        parse_chat(json.dumps(body).encode())


def test_what_asks_for_nothing_is_accepted() -> None:
    chat = parse(
        logprobs=False, top_logprobs=0, tools=[], presence_penalty=0, logit_bias={}, best_of=1,
        skip_special_tokens=True, stream=True,
        stream_options={"continuous_usage_stats": False, "include_obfuscation": False, "include_usage": None},
        response_format={"type": "text"},
        temperature=None, stop=None, n=1, user="anything", top_k=-1, max_tokens=4, max_completion_tokens=4,
    )  # fmt: skip
    assert chat.max_tokens == 4 and chat.stops() == ()


def test_our_own_reply_is_acceptable_as_history() -> None:
    reply = {"role": "assistant", "content": "yes", "refusal": None, "tool_calls": None, "annotations": []}
    chat = parse(messages=[*GOOD["messages"], reply, {"role": "user", "content": "why?"}])
    assert [message.text() for message in chat.messages] == ["hi", "yes", "why?"]


def test_text_parts_follow_each_other() -> None:
    parts = [{"type": "text", "text": "a "}, {"type": "text", "text": "b"}]
    assert parse(messages=[{"role": "user", "content": parts}]).messages[0].text() == "a b"


def test_long_values_are_cut_in_messages() -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse(temperature="x" * 100_000)
    assert len(str(caught.value)) < 300
