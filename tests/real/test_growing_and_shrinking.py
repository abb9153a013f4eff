"""Issue M2, done-when 3: pools that scale under sixteen streams, on Ray; to unified instances, too; and the end."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from answers import compare

pytestmark = pytest.mark.real

REFERENCE = json.loads((Path(__file__).parents[1] / "engine" / "reference.json").read_text())
PROMPTS = [f"{n}. Tell me a long story about a ferry and its captain." for n in range(16)]


@pytest.fixture(scope="module")
def pools(restless: Any) -> Any:
    """The instances that are left at the end are not those of the beginning."""
    return restless


def scale(pools: Any, *numbers: str) -> subprocess.CompletedProcess[str]:
    """The command itself; it waits until the numbers are met."""
    command = [str(Path(sys.executable).with_name("kvferry")), "scale", *numbers, "--json", "--url", pools.url]
    return subprocess.run([*command, "--placement-timeout", "2"], capture_output=True, text=True, timeout=180)


def stream(pools: Any, prompt: str, max_tokens: int) -> str:
    """One streamed answer; it must end with [DONE] and without an error."""
    body = {"model": "smollm2-135m", "temperature": 0, "stream": True, "max_tokens": max_tokens}
    body["messages"] = [{"role": "user", "content": prompt}]
    with pools.http.stream("POST", "/v1/chat/completions", json=body) as response:
        assert response.status_code == 200
        events = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    assert events[-1] == "[DONE]" and not any("error" in json.loads(event) for event in events[:-1])
    choices = [choice for event in events[:-1] for choice in json.loads(event)["choices"]]
    return "".join(choice["delta"].get("content") or "" for choice in choices)


def start(pools: Any, pool: ThreadPoolExecutor, prompts: list[str]) -> list[Future[str]]:
    return [pool.submit(stream, pools, prompt, 60) for prompt in prompts]


def alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def test_scaling_up_and_down_under_sixteen_streams(pools: Any) -> None:
    with ThreadPoolExecutor(16) as pool:
        right = [future.result() for future in start(pools, pool, PROMPTS)]
        first = start(pools, pool, PROMPTS[:8])
        pools.wait(lambda: pools.instance("decode-0")["queues"]["running"] >= 8, 60, "eight running requests")
        up = scale(pools, "decode=3")
        assert up.returncode == 0, up.stderr
        second = start(pools, pool, PROMPTS[8:])
        pools.wait(lambda: pools.instance("decode-2")["queues"]["running"] > 0, 60, "the newest one serves")
        before = {i["id"]: i["ranks"][0]["pid"] for i in pools.status()["instances"]}
        down = scale(pools, "decode=1")
        assert down.returncode == 0, down.stderr
        assert [future.result(timeout=120) for future in first + second] == right
    progress = json.loads(down.stdout)
    gone = {row["name"]: row for row in progress["left"]}
    assert len(gone) == 2 and progress["roles"]["decode"]["registered"] == 1
    for name, row in gone.items():
        pages = row["pages"]
        assert pages is not None and not (pages["owned"] or pages["leased"] or pages["quarantined"]), row
        assert pages["free"] + pages["cached"] == pages["total"]
        assert not alive(before[name]), "the process is gone for good"
    assert {i["id"] for i in pools.status()["instances"]} == set(before) - set(gone)
    assert pools.http.get("/ready").status_code == 200
    pools.wait_baseline(20)


def test_what_cannot_be_placed_is_told_and_taken_back(pools: Any) -> None:
    """And a kill -9 of one that is there does not disturb the numbers: Ray starts it again."""
    more = scale(pools, "prefill=4")
    assert more.returncode == 1
    told = r"prefill: 4 wanted, 3 placed; prefill-\d needs 1 kvferry_slot, the cluster offers 4, 4 are taken"
    assert re.search(told, more.stderr) and "kvferry scale prefill=3" in more.stderr, more.stderr
    newest = max(i["id"] for i in pools.status()["instances"] if i["role"] == "prefill" and i["ranks"])
    os.kill(pools.instance(newest)["ranks"][0]["pid"], signal.SIGKILL)
    back = scale(pools, "prefill=1", "router=2")
    assert back.returncode == 0, back.stderr
    progress = json.loads(back.stdout)
    assert progress["done"] and progress["missing"] == [] and len(progress["left"]) == 3
    assert pools.chat("What is the capital of France?").json()["choices"][0]["finish_reason"] == "stop"


def test_unified_instances_take_over_and_equal_transformers(pools: Any) -> None:
    """The same server without prefill and decode: a unified one serves, against the reference."""
    over = scale(pools, "prefill=0", "decode=0", "unified=1")
    assert over.returncode == 0, over.stderr
    pools.wait(lambda: [i["role"] for i in pools.status()["instances"]] == ["unified"], 60, "only one that is unified")
    body = {"model": "smollm2-135m", "max_tokens": 32, "temperature": 0, "return_token_ids": True}
    entries = [entry for entry in REFERENCE["prompts"] if entry["length"] in (16, 64, 257)]
    for entry in entries:
        answer = pools.http.post("/v1/completions", json=body | {"prompt": entry["prompt_ids"]})
        assert answer.status_code == 200, answer.text
        end = entry["first_eos"]
        right = entry["output_ids"][: None if end is None else end + 1]
        ids = answer.json()["choices"][0]["token_ids"]
        assert len(ids) == len(right) and compare(ids, right, entry["margins"]) != "wrong"
    journal = pools.room(answer)
    assert (journal["prefill"], journal["decode"], journal["kv_bytes"]) == ("unified-0", "unified-0", 0)
    pools.wait_baseline()


def test_ctrl_c_leaves_nothing(pools: Any) -> None:
    """Behind HAProxy, after all of the above and after the kills of test_faults.py. It ends the server: it is last."""
    pools.end_leaves_nothing(signal.SIGINT, "haproxy")
