"""Instances of several ranks on real Ray, gloo and UCX: tokens of the real model against the reference.

SmolLM2 has 9 query heads, 3 KV heads and 30 layers. By default one pair of layouts is served, in which heads and layers
are cut differently on the two sides at once; `make test-full` serves every pair, one after the other, each on a cluster
of its own.
"""

from __future__ import annotations

import json
import os
import signal
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.real

REFERENCE = json.loads((Path(__file__).parents[1] / "engine" / "reference.json").read_text())
LENGTHS = (1, 16, 17, 65, 257)
ENTRIES = [entry for entry in REFERENCE["prompts"] if entry["length"] in LENGTHS]
TIE = 1e-3  # the reference's two best logits this close: either token is right

#: tp and pp of prefill, and of decode.
Pair = tuple[tuple[int, int], tuple[int, int]]
MIXED: Pair = ((3, 1), (1, 2))
PAIRS: list[Pair] = [
    ((3, 1), (3, 1)),
    ((3, 1), (1, 1)),
    ((1, 1), (3, 1)),
    ((1, 2), (1, 1)),
    ((1, 1), (1, 2)),
]


def named(pair: Pair) -> str:
    return "-to-".join(f"tp{tp}pp{pp}" for tp, pp in pair)


def ask(server: Any, entry: dict[str, Any]) -> list[int]:
    body = {"model": "smollm2-135m", "max_tokens": 32, "temperature": 0, "prompt": entry["prompt_ids"]}
    answer = server.http.post("/v1/completions", json=body | {"return_token_ids": True})
    assert answer.status_code == 200, answer.text
    ids: list[int] = answer.json()["choices"][0]["token_ids"]
    return ids


def asked(server: Any, pool: ThreadPoolExecutor) -> list[Future[list[int]]]:
    return [pool.submit(ask, server, entry) for entry in ENTRIES]


def assert_right(answers: list[list[int]]) -> None:
    """Equal to the reference, or first different at a tie; and no more than one tie among them."""
    equal = 0
    for entry, ids in zip(ENTRIES, answers, strict=True):
        end = entry["first_eos"]
        right = entry["output_ids"][: None if end is None else end + 1]
        at = next((i for i, (a, b) in enumerate(zip(ids, right, strict=False)) if a != b), None)
        assert at is not None or len(ids) == len(right), entry["length"]
        assert at is None or entry["margins"][at] <= TIE, (entry["length"], at)
        equal += at is None
    assert equal >= len(ENTRIES) - 1


def pids(server: Any, name: str) -> dict[int, int]:
    return {rank["rank"]: rank["pid"] for rank in server.instance(name)["ranks"]}


def configured(pair: Pair) -> dict[str, Any]:
    return {role: {"tp": tp, "pp": pp} for role, (tp, pp) in zip(("prefill", "decode"), pair, strict=True)}


def assert_layout(server: Any, pair: Pair) -> None:
    for name, (tp, pp) in zip(("prefill-0", "decode-0"), pair, strict=True):
        assert sorted(pids(server, name)) == list(range(tp * pp))


def test_tp_3_to_pp_2_and_the_death_of_a_rank(server_class: type[Any]) -> None:
    """The second answer to each prompt comes from instances of which one has lost a follower in mid-answer."""
    with server_class(configured(MIXED)) as server, ThreadPoolExecutor(len(ENTRIES)) as pool:
        assert_layout(server, MIXED)
        assert_right([answer.result() for answer in asked(server, pool)])
        server.wait_baseline()
        before = pids(server, "decode-0")
        answers = asked(server, pool)
        server.wait(lambda: server.instance("decode-0")["queues"]["running"] >= 3, 60, "three running requests")
        os.kill(before[1], signal.SIGKILL)
        assert_right([answer.result() for answer in answers])
        assert not set(pids(server, "decode-0").values()) & set(before.values()), "it has started again as one"
        server.wait_baseline()


@pytest.mark.full
@pytest.mark.parametrize("pair", PAIRS, ids=named)
def test_every_pair_of_layouts(server_class: type[Any], pair: Pair) -> None:
    with server_class(configured(pair)) as server, ThreadPoolExecutor(len(ENTRIES)) as pool:
        assert_layout(server, pair)
        assert_right([answer.result() for answer in asked(server, pool)])
        server.wait_baseline()
