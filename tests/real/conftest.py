"""Two real servers for all tests here: `kvferry serve` in a process group of its own, on ports of its own.

`make test` runs the tests in two processes, side by side: those of the first server, and all others.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest
from accounts import account
from answers import Answer, take
from processes import descendants
from serving import Served
from storm_clients import Known, body_of, judge

from kvferry.cluster import ingress


class Server(Served):
    """A running `kvferry serve`, and what the tests ask it."""

    def __init__(self, args: Mapping[str, Any] | None = None, *options: str) -> None:
        super().__init__(args, *options)
        self.folders = haproxy_folders(self.process.pid)

    def chat(self, content: str, **fields: Any) -> httpx.Response:
        body = {"model": "smollm2-135m", "temperature": 0, "messages": [{"role": "user", "content": content}]} | fields
        return self.http.post("/v1/chat/completions", json=body)

    def complete(self, known: Known) -> httpx.Response:
        """The reference's prompt, and as many tokens as it has at most."""
        return self.http.post("/v1/completions", json=body_of(known, stream=False, tokens=32))

    @staticmethod
    def assert_same(known: Known, response: httpx.Response) -> bool:
        """Equal to the reference, or first different at a tie. Returns whether they are equal."""
        assert response.status_code == 200, response.text
        answer = Answer()
        take(answer, response.json())
        verdict, detail = judge(answer, known, left=False)
        assert verdict in ("right", "tie"), f"{len(known.prompt_ids)} tokens: {verdict}, {detail}"
        return verdict == "right"

    def instance(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = next(i for i in self.status()["instances"] if i["id"] == name)
        return found

    def room(self, response: httpx.Response) -> dict[str, Any]:
        journal: dict[str, Any] = self.http.get(f"/rooms/{response.headers['x-kvferry-room']}").json()
        return journal

    def wait_baseline(self, limit_s: float = 30.0) -> None:
        self.wait(lambda: account(self.status()).baseline, limit_s, "baseline")

    def end_leaves_nothing(self, number: int, chosen: str, group: bool = True) -> None:
        """Stop it; then no process, port or folder of it is left. `chosen`: the ingress that it must have had."""
        assert self.status()["ingress"] == chosen and len(self.folders) == (chosen == "haproxy")
        pids = descendants(self.process.pid)
        pids |= {pid for folder in self.folders for pid in ingress.processes_of(folder)}
        ports = ports_of(pids)
        assert len(pids) > 5 and f"127.0.0.1:{self.port}" in ports
        everywhere = {address.rpartition(":")[2] for address in ports if not address.startswith(LOOPBACK)}
        assert not everywhere & {str(self.port), "9101", "8404"}, "HAProxy's own listeners, or ours, on all addresses"
        assert self.stop(number, group) == 0
        deadline_s = time.monotonic() + 20
        while (left := {pid for pid in pids if Path(f"/proc/{pid}").exists()}) and time.monotonic() < deadline_s:
            time.sleep(0.2)
        assert not left and not any(folder.exists() for folder in self.folders)
        listening = subprocess.run(["ss", "-ltnH"], capture_output=True, text=True, check=True).stdout
        assert not ports & {line.split()[3] for line in listening.splitlines()}


LOOPBACK = ("127.0.0.1:", "[::1]:")


def ports_of(pids: set[int]) -> set[str]:
    table = subprocess.run(["ss", "-ltnpH"], capture_output=True, text=True, check=True).stdout
    return {line.split()[3] for line in table.splitlines() if any(f"pid={pid}," in line for pid in pids)}


def haproxy_folders(pid: int) -> set[Path]:
    """Where the HAProxies of the `kvferry serve` that is this process keep their state: it holds a lock there."""
    opened = (os.path.realpath(entry) for entry in Path(f"/proc/{pid}/fd").iterdir())
    return {Path(path).parent for path in opened if path.startswith(f"{ingress.PARENT}/{ingress.PREFIX}")}


def pytest_itemcollected(item: pytest.Item) -> None:
    if {"server", "unified"} & set(getattr(item, "fixturenames", ())):
        item.add_marker(pytest.mark.shared)


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    """Ended by what `kill` and containers send; Ctrl-C and HAProxy: see `restless`. A SIGTERM for its whole group ends
    Ray's processes under it, which costs Ray half a minute: see test_faults.py.
    """
    with Server() as server:
        yield server
        server.end_leaves_nothing(signal.SIGTERM, "serve", group=False)


@pytest.fixture(scope="session")
def restless() -> Iterator[Server]:
    """A second server, for what would disturb others: processes that are killed, and other numbers of instances.

    Behind HAProxy, with writes that are held for 100 ms each, so that a kill meets them under way; with slots for three
    decodes; with a drain limit that some streams outlive, so that they are handed over. The last test of
    test_growing_and_shrinking.py ends it.
    """
    cluster = {"ingress": "haproxy", "slots": 4, "drain_s": 1.0}
    with Server({"transfer": {"faults": {"delay_ms": 100}}, "cluster": cluster}) as restless:
        yield restless


@pytest.fixture(scope="session")
def server_class() -> type[Server]:
    """For tests whose server has a configuration of its own."""
    return Server
