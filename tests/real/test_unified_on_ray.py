"""Unified instances behind the router on real Ray (`kvferry serve --unified 1`), against the reference."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.real

REFERENCE = json.loads((Path(__file__).parents[1] / "engine" / "reference.json").read_text())


def test_unified_on_ray_equals_transformers(server: Any) -> None:
    entries = [entry for entry in REFERENCE["prompts"] if entry["length"] in (16, 64, 257)]
    with type(server)(None, "--unified", "1") as unified:
        body = {"model": "smollm2-135m", "max_tokens": 32, "temperature": 0, "return_token_ids": True}
        for entry in entries:
            answer = unified.http.post("/v1/completions", json=body | {"prompt": entry["prompt_ids"]})
            assert answer.status_code == 200, answer.text
            end = entry["first_eos"]
            right = entry["output_ids"][: None if end is None else end + 1]
            ids = answer.json()["choices"][0]["token_ids"]
            at = next((i for i, (a, b) in enumerate(zip(ids, right, strict=True)) if a != b), None)
            assert at is None or entry["margins"][at] <= 1e-3
        journal = unified.room(answer)
        assert (journal["prefill"], journal["decode"], journal["kv_bytes"]) == ("unified-0", "unified-0", 0)
        unified.wait_baseline()
        assert [instance["role"] for instance in unified.status()["instances"]] == ["unified"]
