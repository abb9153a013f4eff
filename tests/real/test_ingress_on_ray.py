"""`kvferry serve` behind HAProxy: it serves, it listens where it should, and nothing of it is left."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvferry.cluster import ingress

pytestmark = pytest.mark.real

EVERYWHERE, LOOPBACK = "00000000", "0100007F"  # as /proc/net/tcp writes them


def listeners() -> set[tuple[str, int]]:
    """(address, port) of everything that listens on IPv4."""
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return {(row[1][:8], int(row[1][9:], 16)) for row in rows if row[3] == "0A"}


def folders() -> set[Path]:
    return set(ingress.PARENT.glob(f"{ingress.PREFIX}*"))


def test_haproxy_serves_and_leaves_nothing(server_of: Callable[..., Any], tmp_path: Path) -> None:
    before, listening = folders(), listeners()
    config = tmp_path / "c.yaml"
    application = {"import_path": "kvferry.serve.deployment:build", "args": {"cluster": {"ingress": "haproxy"}}}
    config.write_text(json.dumps({"applications": [application]}))
    server = server_of(str(config))
    try:
        answer = server.chat("What is the capital of France?", max_tokens=8)
        assert "Paris" in answer.json()["choices"][0]["message"]["content"]
        assert server.status()["ingress"] == "haproxy"
        (folder,) = folders() - before
        (pid,) = ingress.processes_of(folder)
        opened = listeners() - listening
        assert (LOOPBACK, server.port) in opened and (EVERYWHERE, server.port) not in opened
        assert not {port for _, port in opened} & {9101, 8404}  # HAProxy's own
        assert (EVERYWHERE, 30000) not in opened and (LOOPBACK, 30000) in opened  # the front's
    finally:
        assert server.stop() == 0
    assert not Path(f"/proc/{pid}").exists() and not folder.exists()
    assert not {port for _, port in listeners()} & {server.port}
