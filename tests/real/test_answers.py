"""The product as its users meet it: real Ray, Serve, UCX, model; real HTTP clients."""

from __future__ import annotations

import asyncio
import re
import shlex
import socket
import subprocess
import time
from typing import Any

import httpx
import openai
import pytest
from cancels import Cancel, cancels

pytestmark = pytest.mark.real

BODY = {"model": "smollm2-135m", "temperature": 0, "return_token_ids": True}
QUESTION = "What is the capital of France?"


def test_the_printed_curl_line_answers_paris(server: Any) -> None:
    done = subprocess.run(shlex.split(server.curl), capture_output=True, text=True, timeout=120, check=True)
    assert "Paris" in done.stdout


def test_openai_client(server: Any) -> None:
    messages: Any = [{"role": "user", "content": QUESTION}]
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
        assert [model.id for model in client.models.list()] == ["smollm2-135m"]
        whole = client.chat.completions.create(model="smollm2-135m", messages=messages, temperature=0)
        assert whole.choices[0].message.content == "The capital of France is Paris."
        assert whole.choices[0].finish_reason == "stop"
        assert whole.usage is not None and (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (37, 8)
        text, usage = "", None
        for chunk in client.chat.completions.create(
            model="smollm2-135m", messages=messages, temperature=0, stream=True, stream_options={"include_usage": True}
        ):
            usage = chunk.usage or usage
            text += "".join(choice.delta.content or "" for choice in chunk.choices)
        assert text == whole.choices[0].message.content
        assert usage is not None and usage.total_tokens == 45
    server.wait_baseline()


@pytest.mark.parametrize("stream", [False, True])
def test_case_1_max_tokens_1(server: Any, stream: bool) -> None:
    """Case 1: exactly one token, finish_reason length."""
    answer = server.chat(
        QUESTION, max_tokens=1, stream=stream, stream_options={"include_usage": True} if stream else None
    )
    assert answer.status_code == 200
    if stream:
        assert answer.text.count('"finish_reason":"length"') == 1 and '"completion_tokens":1' in answer.text
        assert answer.text.rstrip().endswith("data: [DONE]")
    else:
        body = answer.json()
        assert body["choices"][0]["message"]["content"] == "The"
        assert body["choices"][0]["finish_reason"] == "length" and body["usage"]["completion_tokens"] == 1
    server.wait_baseline()


def test_case_2_the_first_token_completes_a_stop_string(server: Any) -> None:
    """Case 2: "The" is the greedy first token; the answer ends at once, without it, and decode makes no step."""
    server.wait_baseline()
    before = server.instance("decode-0")["step"]
    for rule in ({"stop": "The"}, {"stop_token_ids": [504]}):
        body = server.chat(QUESTION, **rule).json()
        assert body["choices"][0] == {
            "message": {"content": "", "role": "assistant", "refusal": None},
            "finish_reason": "stop", "index": 0, "logprobs": None,
        }  # fmt: skip
        assert body["usage"]["completion_tokens"] == 1
    server.wait_baseline()
    assert server.instance("decode-0")["step"] == before


def test_case_14_a_prompt_that_is_too_long(server: Any) -> None:
    """Case 14: refused with the numbers; SmolLM2's context is 8,192 tokens."""
    answer = server.chat("ferry " * 9000)
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["param"] == "messages"
    assert re.search(r"the prompt has \d{4,5} tokens.*8192", error["message"])
    server.wait_baseline()


@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        ({"model": "gpt-5"}, 404, "model"),
        ({"temperature": 3}, 400, "temperature"),
        ({"max_tokens": 0}, 400, "max_tokens"),
        ({"max_tokens": 100_000}, 400, "max_tokens"),
        ({"messages": []}, 400, "messages"),
        ({"kv_transfer_params": {"tp_size": 10**9}}, 400, "kv_transfer_params"),
        ({"bootstrap_room": 7}, 400, "bootstrap_room"),
    ],
)
def test_case_29_refusals_cost_nothing(server: Any, fields: dict[str, Any], status: int, param: str) -> None:
    """Case 29: bad parameters or an unknown model: 4xx naming the field, and pages stay free."""
    answer = server.chat(QUESTION, **fields)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (status, param), error
    server.wait_baseline(5)


def test_the_journal_of_a_long_prompt(server: Any) -> None:
    """Issue M1, line 4: every KVPoll transition with its duration, the pair, the backend, bytes = pages x page bytes
    x layers; and each chunk is written before the next one has been computed.
    """
    answer = server.chat("The ferry crosses the river. " * 245, max_tokens=4)
    assert answer.status_code == 200
    tokens = answer.json()["usage"]["prompt_tokens"]
    assert 1280 < tokens <= 1536  # six chunks of 256
    server.wait_baseline()
    journal = server.room(answer)
    assert [row["state"] for row in journal["kvpoll"]] == [
        "BOOTSTRAPPING", "WAITING_FOR_INPUT", "TRANSFERRING", "SUCCESS",
    ]  # fmt: skip
    assert all(row["duration_s"] > 0 for row in journal["kvpoll"][:3])
    assert (journal["prefill"], journal["decode"]) == ("prefill-0", "decode-0")
    (path,) = (event["detail"] for event in journal["events"] if event["event"] == "data path")
    assert (journal["backend"], path["backend"]) == ("local", "local") and "on the same host" in path["why"]
    assert server.instance("decode-0")["data_path_reasons"]["local"] == path["why"]
    offers = [rank["offer"] for name in ("prefill-0", "decode-0") for rank in server.instance(name)["ranks"]]
    assert offers == 2 * [{"ways": ["local"], "memory": "shared", "nics": []}]
    token_bytes, layers = 2 * 3 * 64 * 4, 30
    assert journal["kv_bytes"] == tokens * token_bytes * layers
    at = {(e["event"], e["detail"].get("chunk", -1)): e["at_s"] for e in journal["events"]}
    for chunk in range(5):
        assert at["computed", chunk] < at["written", chunk] < at["computed", chunk + 1]


def test_cancels_at_random_phases(server: Any) -> None:
    """Each brings every counter back to baseline. `make storm` does 200 of them and says how long that takes."""
    body = BODY | {"prompt": "Tell me a story. " * 20, "max_tokens": 24, "ignore_eos": True, "stream": True}

    async def leave() -> list[Cancel]:
        async with httpx.AsyncClient(base_url=server.url, timeout=60.0) as http:
            return await cancels(http, body, 6, 3, lambda: None)

    found = asyncio.run(leave())
    assert len(found) == 6 and len({cancel.phase for cancel in found}) >= 2
    assert all(cancel.account.baseline for cancel in found)


@pytest.mark.parametrize("after_s", [0.5, 2.0])
def test_a_client_that_leaves_frees_everything(server: Any, after_s: float) -> None:
    """Within the first chunk of a long prompt, and within a later one."""
    body = {"model": "smollm2-135m", "messages": [{"role": "user", "content": "Tell me a story. " * 200}]}
    with socket.create_connection(("127.0.0.1", server.port)) as raw:
        payload = httpx.Request("POST", server.url, json=body | {"max_tokens": 400}).content
        head = "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        head += f"Content-Length: {len(payload)}\r\n\r\n"
        raw.sendall(head.encode() + payload)
        time.sleep(after_s)
    server.wait_baseline()


def test_the_small_routes(server: Any) -> None:
    assert server.http.get("/health").json() == {"status": "ok"}
    assert server.http.get("/ready").json()["ready"] is True
    metrics = server.http.get("/metrics").text
    assert 'state="free"' in metrics and "kvferry_" in metrics
    assert server.http.get("/rooms/12345").status_code == 404
    assert server.http.get("/nowhere").json()["error"]["message"]


def test_the_ingress_listens_on_the_configured_address_only(server: Any) -> None:
    listening = subprocess.run(["ss", "-ltnH"], capture_output=True, text=True, check=True).stdout
    addresses = {line.split()[3] for line in listening.splitlines() if line.split()[3].endswith(f":{server.port}")}
    assert addresses == {f"127.0.0.1:{server.port}"}
