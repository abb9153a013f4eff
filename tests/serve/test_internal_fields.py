"""Fields of other systems' insides in a client's body: they reach nothing here."""

from __future__ import annotations

import gc
import sys
import tracemalloc
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

FAR = "203.0.113.7"  # a documentation address: nobody's
INTERNAL: dict[str, Any] = {
    "kv_transfer_params": {
        "do_remote_prefill": True, "remote_host": FAR, "remote_port": 5600, "remote_engine_id": "x", "tp_size": 10**9,
        "remote_block_ids": [[1, 2]],
    },
    "bootstrap_host": FAR, "bootstrap_port": 8998, "bootstrap_room": 5, "bootstrap_pair_key": "x",
    "disagg_prefill_dp_rank": 10**9, "data_parallel_rank": 3, "rid": "a", "tp_size": 10**9, "room": 5,
    "extra_body": {"kv_transfer_params": {"tp_size": 10**9}}, "request_id": "a",
}  # fmt: skip
CHAT = {"model": "m", "messages": [{"role": "user", "content": "one"}], "max_tokens": 2}
COMPLETION = {"model": "m", "prompt": "one", "max_tokens": 2}

_connected: list[Any] | None = None


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "socket.connect" and _connected is not None:
        _connected.append(arguments[1])


sys.addaudithook(_audit)  # it can't be taken away again; without a list it does nothing


@pytest.fixture
def connected() -> Iterator[list[Any]]:
    """Every address that this process connects a socket to."""
    global _connected
    _connected = []
    yield _connected
    _connected = None


@pytest.mark.parametrize("field", INTERNAL)
@pytest.mark.parametrize(("path", "body"), [("/v1/chat/completions", CHAT), ("/v1/completions", COMPLETION)])
async def test_case_65_internal_fields_are_refused_by_name(
    field: str, path: str, body: dict[str, Any], served: Any, http: httpx.AsyncClient, connected: list[Any]
) -> None:
    """Case 65: 400 that names the field; nobody hears of the request, and nothing is connected to."""
    answer = await http.post(path, json=body | {field: INTERNAL[field]})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == field
    assert served.backend.specs == [] and served.network.sent == []
    assert {address[0] for address in connected} == {"127.0.0.1"}, "the client's own"


async def test_case_65_memory_stays_flat(served: Any, http: httpx.AsyncClient) -> None:
    """Case 65: a size of a billion makes nothing of that size, and refusals leave nothing behind."""
    body = CHAT | INTERNAL | {"padding": "x" * 10_000}
    for number in range(60):
        assert (await http.post("/v1/chat/completions", json=body)).status_code == 400
        if number == 30:
            gc.collect()
            tracemalloc.start()
    gc.collect()
    kept_bytes, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert kept_bytes < 500_000 and peak_bytes < 5_000_000
    assert served.backend.specs == []
