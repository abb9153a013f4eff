"""The unified actor hosted by Ray, in a cluster of its own, against the reference."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.real

REFERENCE = json.loads((Path(__file__).parents[1] / "engine" / "reference.json").read_text())
SCRIPT = """
import json, sys
import ray
from kvferry.cluster.config import load
from kvferry.cluster.hosting import RemoteHost
from kvferry.protocol.messages import Address, RequestSpec, Sampling

prompts = json.load(sys.stdin)
ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
host = RemoteHost.options(num_cpus=0).remote("unified", "unified-0", load(None).to_bytes())
nobody = Address("test", "", 0, "", 0)
specs = [RequestSpec(i, tuple(ids), Sampling(max_tokens=32), nobody) for i, ids in enumerate(prompts)]
answers = ray.get([host.call.remote("answer", spec) for spec in specs])
status = ray.get(host.call.remote("status"))
print(json.dumps([[[token.token_id for token in answer] for answer in answers], status["pages"]]))
ray.shutdown()
"""


def test_unified_on_ray_equals_transformers() -> None:
    entries = [entry for entry in REFERENCE["prompts"] if entry["length"] in (16, 64, 257)]
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        input=json.dumps([entry["prompt_ids"] for entry in entries]),
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    answers, pages = json.loads(done.stdout.splitlines()[-1])
    assert pages["free"] == pages["total"]
    for ids, entry in zip(answers, entries, strict=True):
        end = entry["first_eos"]
        right = entry["output_ids"][: None if end is None else end + 1]
        at = next((i for i, (a, b) in enumerate(zip(ids, right, strict=True)) if a != b), None)
        assert at is None or entry["margins"][at] <= 1e-3
