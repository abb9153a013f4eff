"""prefill_complete on real Ray and UCX, in pools that make prompts give way, against the reference."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.real

REFERENCE = json.loads((Path(__file__).parents[1] / "engine" / "reference.json").read_text())
LENGTHS = (200, 255, 256, 257, 300, 400)
#: Decode serves one at a time; of the six prompts, 106 pages of 16, prefill can keep not even a half.
ARGS = {
    "transfer": {"policy": "prefill_complete"},
    "prefill": {"pool_pages": 48},
    "decode": {"pool_pages": 48, "max_running": 1},
}


def test_answers_are_the_references_though_prompts_are_displaced(server: Any) -> None:
    entries = [entry for entry in REFERENCE["prompts"] if entry["length"] in LENGTHS]
    body = {"model": "smollm2-135m", "max_tokens": 32, "temperature": 0, "return_token_ids": True}
    with type(server)(ARGS) as served:

        def ask(entry: dict[str, Any]) -> Any:
            return served.http.post("/v1/completions", json=body | {"prompt": entry["prompt_ids"]})

        with ThreadPoolExecutor(len(entries)) as pool:
            answers = list(pool.map(ask, entries))
        for entry, answer in zip(entries, answers, strict=True):
            assert answer.status_code == 200, answer.text
            end = entry["first_eos"]
            right = entry["output_ids"][: None if end is None else end + 1]
            ids = answer.json()["choices"][0]["token_ids"]
            at = next((i for i, (a, b) in enumerate(zip(ids, right, strict=True)) if a != b), None)
            assert at is None or entry["margins"][at] <= 1e-3
        served.wait_baseline()
        counts = served.instance("prefill-0")["counts"]
        assert counts["pages displaced"] > 0 and counts["prompt tokens computed again"] > 0
        for answer in answers:
            events = [event["event"] for event in served.room(answer)["events"]]
            assert events.index("prefill done") < events.index("admitted") < events.index("committed")
