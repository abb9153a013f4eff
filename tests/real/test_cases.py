"""Cases of real bug reports, over HTTP to the real server. What they say about durations is tested on virtual time."""

from __future__ import annotations

import json
import socket
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

pytestmark = pytest.mark.real

BODY = {"model": "smollm2-135m", "temperature": 0, "return_token_ids": True}
QUESTION = "What is the capital of France?"
PARIS = "The capital of France is Paris."
IDLE_S = 12.0  # longer than the keep-alive of clients (5 s), of the front (5 s) and the silence of links (10 s)


def completion(server: Any, prompt: Any, max_tokens: int, **headers: str) -> list[int]:
    answer = server.http.post(
        "/v1/completions", json=BODY | {"prompt": prompt, "max_tokens": max_tokens}, headers=headers
    )
    assert answer.status_code == 200, answer.text
    ids: list[int] = answer.json()["choices"][0]["token_ids"]
    return ids


def test_case_20_who_leaves_before_the_first_token_holds_nobody_up(server: Any) -> None:
    """Case 20: a prompt of eight chunks, whose client leaves in the first; no more than two of them are computed."""
    steps = server.instance("prefill-0")["step"]
    with (
        pytest.raises(httpx.ReadTimeout),
        httpx.Client(base_url=server.url, timeout=httpx.Timeout(0.4, connect=5.0)) as leaver,
    ):
        leaver.post("/v1/completions", json=BODY | {"prompt": [100] * 2000, "max_tokens": 4})
    answer = server.chat(QUESTION)
    assert answer.json()["choices"][0]["message"]["content"] == PARIS
    server.wait_baseline()
    assert server.instance("prefill-0")["step"] - steps <= 3  # at most two of them, and the question's own


def test_case_55_a_clients_own_names_for_requests_mean_nothing(server: Any) -> None:
    """Case 55: "a" leaves; "ab", "abc" and one without a name get what they get when they are alone."""
    right = completion(server, QUESTION, 40)
    names: list[dict[str, str]] = [{"x-request-id": "ab"}, {"x-request-id": "abc"}, {}]
    with httpx.Client(base_url=server.url, timeout=60.0) as client:
        body = BODY | {"prompt": QUESTION, "max_tokens": 400, "stream": True, "user": "a"}
        with client.stream("POST", "/v1/completions", json=body, headers={"x-request-id": "a"}) as leaving:
            next(leaving.iter_lines())
            first = completion(server, QUESTION, 40, **names[0])
    assert [first, *(completion(server, QUESTION, 40, **name) for name in names[1:])] == [right] * 3
    server.wait_baseline()


def test_case_65_the_insides_of_other_systems_in_a_body_reach_nothing(server: Any) -> None:
    """Case 65: sizes of a billion, a foreign host, a room: 400 each time, no process grows, nobody calls that host."""
    far = "203.0.113.7"  # a documentation address: who called it would wait there
    params = {"tp_size": 10**9, "remote_host": far, "remote_port": 5600, "do_remote_prefill": True, "room": 5}
    body = BODY | {"prompt": QUESTION, "max_tokens": 4}
    pids = set(server.pids().values())

    def sizes_kib() -> dict[int, int]:
        return {pid: int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4 for pid in pids}

    before = sizes_kib()
    for _ in range(50):
        for field in ({"kv_transfer_params": params}, {"bootstrap_host": far, "bootstrap_room": 5}):
            answer = server.http.post("/v1/completions", json=body | field)
            assert answer.status_code == 400 and answer.json()["error"]["param"] in field, answer.text
    calls = socket.inet_aton(far)[::-1].hex().upper()
    assert calls not in Path("/proc/net/tcp").read_text()
    grown_kib = {pid: size - before[pid] for pid, size in sizes_kib().items()}
    assert max(grown_kib.values()) < 16 * 1024, grown_kib
    assert completion(server, QUESTION, 4) == completion(server, QUESTION, 4)
    server.wait_baseline()


def test_case_62_a_service_that_was_idle_serves_at_the_first_try(server: Any) -> None:
    """Case 62: a pooled connection, and everything behind it, after a pause longer than every keep-alive."""
    transport = httpx.HTTPTransport(retries=0, limits=httpx.Limits(keepalive_expiry=5.0))
    with httpx.Client(base_url=server.url, timeout=60.0, transport=transport) as client:
        body = {"model": "smollm2-135m", "temperature": 0, "messages": [{"role": "user", "content": QUESTION}]}
        for pause_s in (IDLE_S, 0.0):
            answer = client.post("/v1/chat/completions", json=body)
            assert answer.status_code == 200, answer.text
            assert json.loads(answer.text)["choices"][0]["message"]["content"] == PARIS
            time.sleep(pause_s)
