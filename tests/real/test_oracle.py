"""Issue M1, line 3: PD over HTTP, and unified, against plain transformers on the same weights in float32.

`tests/engine/reference.json` holds the references, `tests/engine/reference.py` makes it.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from kvferry.actors.unified.unified import Unified
from kvferry.engine.contract import StepPlan, StepResult
from kvferry.engine.loader import load
from kvferry.engine.text import TokenizerTexts
from kvferry.engine.torch_engine import TorchEngine
from kvferry.protocol.address import Address
from kvferry.protocol.request import RequestSpec, Sampling

pytestmark = pytest.mark.real

REFERENCE = json.loads((Path(__file__).parents[1] / "engine" / "reference.json").read_text())
TOKENS = 32
TIE = 1e-3  # the reference's two best logits this close: either token is right
EDGES = {1, 15, 16, 17, 64, 128, 255, 256, 257, 513, 1500}
EDGE = 1e-4  # a draw this close to a boundary may fall on either side
NOBODY = Address("test", "", 0, "", 0)
SAMPLED = [
    {"temperature": 0.7, "seed": 1},
    {"temperature": 1.0, "seed": 2},
    {"temperature": 1.3, "seed": 3, "top_p": 0.9},
    {"temperature": 1.0, "seed": 4, "top_k": 20},
    {"temperature": 0.9, "seed": 5, "top_k": 50, "top_p": 0.8},
    {"temperature": 2.0, "seed": 6},
]


#: A prompt, and the fields of `Sampling` that are not the default.
Asked = tuple[list[int], dict[str, Any]]


class Watched:
    """An engine that keeps the margin of each draw."""

    def __init__(self, engine: TorchEngine) -> None:
        self._engine = engine
        self.margins: dict[int, list[float]] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def step(self, plan: StepPlan) -> StepResult:
        result = await self._engine.step(plan)
        for sequence, drawn in zip(plan.sequences, result.drawn, strict=True):
            if drawn is not None:
                self.margins.setdefault(sequence.key, []).append(drawn.margin)
        return result


@pytest.fixture(scope="module")
def unified() -> Callable[..., list[tuple[list[int], list[float]]]]:
    """Answers several prompts in this process, both roles in one: (token ids, margins) of each."""
    torch.set_num_threads(1)
    loaded = load("smollm2-135m")
    engine = TorchEngine(loaded, pages=720, page_size=16, metadata_rows=1, threads=1, now_s=time.perf_counter)
    texts = TokenizerTexts(loaded.tokenizer, loaded.eos_token_ids)

    async def answer(asked: list[Asked]) -> list[tuple[list[int], list[float]]]:
        watched = Watched(engine)
        actor = Unified(watched, texts)
        task = asyncio.get_running_loop().create_task(actor.run())

        async def one(prompt: list[int], sampling: dict[str, Any]) -> list[int]:
            spec = RequestSpec(1, tuple(prompt), Sampling(max_tokens=TOKENS, **sampling), NOBODY)
            return [token.token_id async for token in actor.generate(spec)]

        answers = await asyncio.gather(*(one(*each) for each in asked))
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert actor.ledger.counts().at_baseline
        return [(ids, watched.margins[key + 1]) for key, ids in enumerate(answers)]

    async def keep_open() -> None:
        """Many actors share the engine, one after the other."""

    engine.close = keep_open  # type: ignore[method-assign]

    def ask(asked: list[Asked]) -> list[tuple[list[int], list[float]]]:
        return asyncio.run(answer(asked))

    return ask


def over_http(server: Any, prompt: list[int], **sampling: Any) -> list[int]:
    body = {"model": "smollm2-135m", "prompt": prompt, "max_tokens": TOKENS, "temperature": 0} | sampling
    answer = server.http.post("/v1/completions", json=body | {"return_token_ids": True})
    assert answer.status_code == 200, answer.text
    ids: list[int] = answer.json()["choices"][0]["token_ids"]
    return ids


def assert_same(ids: list[int], right: list[int], margins: list[float], limit: float, what: object) -> bool:
    """Equal, or first different where `margins` allow it. Returns whether they are equal."""
    if ids == right:
        return True
    at = next((i for i, (a, b) in enumerate(zip(ids, right, strict=False)) if a != b), min(len(ids), len(right)))
    assert margins[at] <= limit, f"{what}: token {at} is {ids[at : at + 1]}, not {right[at]}, margin {margins[at]}"
    return False


def up_to_eos(entry: dict[str, Any]) -> list[int]:
    """The reference goes on after EOS; an answer ends with it."""
    end = entry["first_eos"]
    ids: list[int] = entry["output_ids"]
    return ids if end is None else ids[: end + 1]


def test_pd_over_http_equals_transformers(server: Any) -> None:
    """Eight at a time: they give what the reference gives to each alone."""
    entries = REFERENCE["prompts"]
    assert len(entries) == 30 and {1, 15, 16, 17, 255, 256, 257, 511, 512, 513, 1500} <= {e["length"] for e in entries}
    equal = 0
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda entry: over_http(server, entry["prompt_ids"]), entries))
    for entry, ids in zip(entries, answers, strict=True):
        equal += assert_same(ids, up_to_eos(entry), entry["margins"], TIE, entry["length"])
    assert equal >= 28  # ties are rare: the rule must not be what makes this pass
    server.wait_baseline()


def test_unified_equals_transformers(unified: Any) -> None:
    """Around the edges of pages and chunks, and the longest. All thirty go through PD: the engine, which is the same,
    knows nothing of roles.
    """
    entries = [entry for entry in REFERENCE["prompts"] if entry["length"] in EDGES]
    assert len(entries) == len(EDGES)
    answers = unified([(entry["prompt_ids"], {}) for entry in entries])
    for entry, (ids, _) in zip(entries, answers, strict=True):
        assert_same(ids, up_to_eos(entry), entry["margins"], TIE, entry["length"])


def test_seeded_sampling_pd_equals_unified(server: Any, unified: Any) -> None:
    """Equal, or first different where the draw lies within 1e-4 of a boundary; and not simply greedy. All at once, on
    both sides: what else runs must not change a draw.
    """
    entries = [entry for entry in REFERENCE["prompts"] if entry["length"] in (17, 65, 200)]
    asked = [(entry, sampling) for sampling in SAMPLED for entry in entries]
    rights = unified([(entry["prompt_ids"], sampling) for entry, sampling in asked])
    with ThreadPoolExecutor(9) as pool:
        answers = list(pool.map(lambda pair: over_http(server, pair[0]["prompt_ids"], **pair[1]), asked))
    different_from_greedy = set()
    for (entry, sampling), ids, (right, margins) in zip(asked, answers, rights, strict=True):
        assert_same(ids, right, margins, EDGE, (entry["length"], sampling))
        if right != up_to_eos(entry):
            different_from_greedy.add(sampling["seed"])
    assert different_from_greedy == {sampling["seed"] for sampling in SAMPLED}
