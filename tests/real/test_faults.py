"""Issue M1, line 6, and the end of the server: kill -9 under load, and Ctrl-C that leaves nothing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvferry.cluster import ingress

pytestmark = pytest.mark.real

STORY = "Tell me a long story about a ferry and its captain. "


@pytest.fixture(scope="module")
def frail(server: Any) -> Iterator[Any]:
    """A second server, with writes that are held for 100 ms each, so that a kill meets them under way."""
    with type(server)({"transfer": {"faults": {"delay_ms": 100}}}) as frail:
        yield frail


def pid_of(server: Any, name: str) -> int:
    return int(server.instance(name)["ranks"][0]["pid"])


def stories(server: Any, count: int, repeat: int, max_tokens: int) -> list[str]:
    """The right answers, one at a time."""
    return [body_text(server.chat(f"{n}. " + STORY * repeat, max_tokens=max_tokens)) for n in range(count)]


def body_text(answer: httpx.Response) -> str:
    text: str = answer.json()["choices"][0]["message"]["content"]
    return text


def start(server: Any, pool: ThreadPoolExecutor, count: int, repeat: int, max_tokens: int) -> list[Future[Any]]:
    prompts = [f"{n}. " + STORY * repeat for n in range(count)]
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


def test_kill_9_of_decode_in_mid_stream(frail: Any) -> None:
    """Each request goes on in its next attempt, on the process that Ray starts: all get their full right answer."""
    right = stories(frail, 8, 1, 60)
    pid = pid_of(frail, "decode-0")
    with ThreadPoolExecutor(8) as pool:
        futures = start(frail, pool, 8, 1, 60)
        frail.wait(lambda: frail.instance("decode-0")["queues"]["running"] >= 4, 60, "four running requests")
        os.kill(pid, signal.SIGKILL)
        answers = [future.result(timeout=90) for future in futures]
    assert [answer.status_code for answer in answers] == [200] * 8, [answer.text for answer in answers]
    assert [body_text(answer) for answer in answers] == right
    assert_recovers(frail, "decode-0", pid)


def test_kill_9_of_prefill_in_mid_transfer(frail: Any) -> None:
    right = stories(frail, 8, 30, 8)
    pid = pid_of(frail, "prefill-0")
    with ThreadPoolExecutor(8) as pool:
        futures = start(frail, pool, 8, 30, 8)
        frail.wait(lambda: frail.instance("prefill-0")["pages"]["leased"] > 0, 60, "a transfer under way")
        os.kill(pid, signal.SIGKILL)
        answers = [future.result(timeout=90) for future in futures]
    assert [answer.status_code for answer in answers] == [200] * 8, [answer.text for answer in answers]
    assert [body_text(answer) for answer in answers] == right
    assert_recovers(frail, "prefill-0", pid)


def test_a_stream_that_loses_its_decode_goes_on(frail: Any) -> None:
    """The client sees each token once and in order, and no gap but in time."""
    body = {"model": "smollm2-135m", "messages": [{"role": "user", "content": STORY}], "temperature": 0}
    body |= {"max_tokens": 100}
    right = body_text(frail.http.post("/v1/chat/completions", json=body))
    pid = pid_of(frail, "decode-0")
    lines: list[str] = []
    with frail.http.stream("POST", "/v1/chat/completions", json=body | {"stream": True}) as response:
        assert response.status_code == 200
        for line in response.iter_lines():
            lines.append(line)
            if len(lines) == 12:
                os.kill(pid, signal.SIGKILL)
    events = [line.removeprefix("data: ") for line in lines if line]
    assert events[-1] == "[DONE]"
    deltas = [json.loads(event)["choices"][0]["delta"].get("content") or "" for event in events[:-1]]
    assert "".join(deltas) == right
    assert_recovers(frail, "decode-0", pid)


def processes_of(group: int) -> set[int]:
    """Every live descendant of the server, by the process table."""
    table = subprocess.run(["ps", "-eo", "pid=,ppid="], capture_output=True, text=True, check=True).stdout
    parents = {int(pid): int(parent) for pid, parent in (line.split() for line in table.splitlines())}
    found = {group}
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return {pid for pid in found if Path(f"/proc/{pid}").exists()}


def ports_of(pids: set[int]) -> set[str]:
    table = subprocess.run(["ss", "-ltnpH"], capture_output=True, text=True, check=True).stdout
    return {line.split()[3] for line in table.splitlines() if any(f"pid={pid}," in line for pid in pids)}


def folders() -> set[Path]:
    """Where HAProxies that `kvferry serve` has started keep their state."""
    return set(ingress.PARENT.glob(f"{ingress.PREFIX}*"))


@pytest.mark.parametrize(("number", "chosen"), [(signal.SIGINT, "haproxy"), (signal.SIGTERM, "serve")])
def test_the_end_leaves_nothing(server: Any, number: int, chosen: str) -> None:
    """Ctrl-C, and what `kill`, systemd and containers send; behind either ingress."""
    before = folders()
    own = type(server)({"cluster": {"ingress": chosen}})
    assert own.chat("Say hi.", max_tokens=4).status_code == 200
    assert own.status()["ingress"] == chosen
    made = folders() - before
    assert len(made) == (chosen == "haproxy")
    pids = processes_of(own.process.pid) | {pid for folder in made for pid in ingress.processes_of(folder)}
    ports = ports_of(pids)
    assert len(pids) > 5 and f"127.0.0.1:{own.port}" in ports
    everywhere = {address.rpartition(":")[2] for address in ports if not address.startswith(("127.0.0.1:", "[::1]:"))}
    assert not everywhere & {str(own.port), "9101", "8404"}, "HAProxy's own listeners, or ours, on all addresses"
    assert own.stop(number) == 0
    deadline_s = time.monotonic() + 20
    while (left := {pid for pid in pids if Path(f"/proc/{pid}").exists()}) and time.monotonic() < deadline_s:
        time.sleep(0.2)
    assert not left and not folders() & made
    listening = subprocess.run(["ss", "-ltnH"], capture_output=True, text=True, check=True).stdout
    assert not ports & {line.split()[3] for line in listening.splitlines()}
