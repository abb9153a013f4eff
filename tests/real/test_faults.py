"""Issue M1, line 6: kill -9 under load. The ends of the two servers: conftest.py, test_growing_and_shrinking.py."""

from __future__ import annotations

import json
import os
import signal
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import httpx
import pytest

pytestmark = pytest.mark.real

STORY = "Tell me a long story about a ferry and its captain. "


def pid_of(server: Any, name: str) -> int:
    return int(server.instance(name)["ranks"][0]["pid"])


def undisturbed(server: Any, prompts: list[str], max_tokens: int) -> list[str]:
    """The right answers."""
    with ThreadPoolExecutor(len(prompts)) as pool:
        return [
            body_text(answer) for answer in pool.map(lambda text: server.chat(text, max_tokens=max_tokens), prompts)
        ]


def body_text(answer: httpx.Response) -> str:
    text: str = answer.json()["choices"][0]["message"]["content"]
    return text


def start(server: Any, pool: ThreadPoolExecutor, prompts: list[str], max_tokens: int) -> list[Future[Any]]:
    return [pool.submit(server.chat, prompt, max_tokens=max_tokens) for prompt in prompts]


def complete(answer: dict[str, Any]) -> bool:
    """A handoff has gone through, and no instance is missing: either can be without the other."""
    return bool(answer["ready"]) and not answer["missing"]


def assert_recovers(server: Any, victim: str, old_pid: int) -> None:
    """Ray starts it again; the next request is right; within 10 s of that the status is at baseline."""
    server.wait(lambda: complete(server.http.get("/ready").json()), 120, "ready again")
    server.wait(lambda: pid_of(server, victim) != old_pid, 60, "a new process")
    answer = server.chat("What is the capital of France?")
    assert answer.status_code == 200, answer.text
    assert body_text(answer) == "The capital of France is Paris."
    server.wait_baseline(10)


def stream(server: Any, prompt: str, max_tokens: int) -> str:
    """A streamed answer, ended by [DONE]: each token once and in order, and no gap but in time."""
    body = {"model": "smollm2-135m", "messages": [{"role": "user", "content": prompt}], "temperature": 0}
    with server.http.stream(
        "POST", "/v1/chat/completions", json=body | {"max_tokens": max_tokens, "stream": True}
    ) as response:
        assert response.status_code == 200
        events = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    assert events[-1] == "[DONE]"
    return "".join(json.loads(event)["choices"][0]["delta"].get("content") or "" for event in events[:-1])


def test_kill_9_of_decode_in_mid_stream(restless: Any) -> None:
    """Each request goes on in its next attempt, on the process that Ray starts: all get their full right answer, those
    that stream as well.
    """
    prompts = [f"{n}. " + STORY for n in range(8)]
    right = undisturbed(restless, prompts, 60)
    pid = pid_of(restless, "decode-0")
    with ThreadPoolExecutor(8) as pool:
        futures = start(restless, pool, prompts[:6], 60)
        streams = [pool.submit(stream, restless, prompt, 60) for prompt in prompts[6:]]
        restless.wait(lambda: restless.instance("decode-0")["queues"]["running"] >= 6, 60, "six running requests")
        os.kill(pid, signal.SIGKILL)
        answers = [future.result(timeout=90) for future in futures]
        streamed = [future.result(timeout=90) for future in streams]
    assert [answer.status_code for answer in answers] == [200] * 6, [answer.text for answer in answers]
    assert [*map(body_text, answers), *streamed] == right
    assert_recovers(restless, "decode-0", pid)


def test_kill_9_of_prefill_in_mid_transfer(restless: Any) -> None:
    prompts = [f"{n}. " + STORY * 24 for n in range(6)]
    right = undisturbed(restless, prompts, 8)
    pid = pid_of(restless, "prefill-0")
    with ThreadPoolExecutor(6) as pool:
        futures = start(restless, pool, prompts, 8)
        restless.wait(lambda: restless.instance("prefill-0")["pages"]["leased"] > 0, 60, "a transfer under way")
        os.kill(pid, signal.SIGKILL)
        answers = [future.result(timeout=90) for future in futures]
    assert [answer.status_code for answer in answers] == [200] * 6, [answer.text for answer in answers]
    assert [body_text(answer) for answer in answers] == right
    assert_recovers(restless, "prefill-0", pid)


@pytest.mark.full  # Ray waits for half a minute for its own processes, which have had the signal as well
def test_a_sigterm_for_all_its_processes_leaves_nothing(server_class: type[Any]) -> None:
    """As systemd sends it."""
    with server_class() as own:
        own.end_leaves_nothing(signal.SIGTERM, "serve")
