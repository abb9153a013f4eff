"""One real server for all tests here: `kvferry serve` in a process group of its own, on ports of its own."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

START_S = 180.0
STOP_S = 60.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Server:
    """A running `kvferry serve`; `curl` is the line that it printed."""

    def __init__(self, *arguments: str) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        kvferry = Path(sys.executable).with_name("kvferry")
        command = [str(kvferry), "serve", *arguments, "--port", str(self.port)]
        environment = os.environ | {"PYTHONUNBUFFERED": "1"}
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, start_new_session=True
        )
        self.curl = self._first_line()
        self.http = httpx.Client(base_url=self.url, timeout=120.0)

    def _first_line(self) -> str:
        assert self.process.stdout is not None and self.process.stderr is not None
        line = self.process.stdout.readline().strip()
        assert line.startswith("curl "), f"{line!r}, and on stderr: {self.process.stderr.read()}"
        return line

    def chat(self, content: str, **fields: Any) -> httpx.Response:
        body = {"model": "smollm2-135m", "temperature": 0, "messages": [{"role": "user", "content": content}]} | fields
        return self.http.post("/v1/chat/completions", json=body)

    def status(self) -> dict[str, Any]:
        answer: dict[str, Any] = self.http.get("/status").json()
        return answer

    def instance(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = next(i for i in self.status()["instances"] if i["id"] == name)
        return found

    def room(self, response: httpx.Response) -> dict[str, Any]:
        journal: dict[str, Any] = self.http.get(f"/rooms/{response.headers['x-kvferry-room']}").json()
        return journal

    def wait(self, holds: Any, limit_s: float, what: str) -> None:
        end_s = time.monotonic() + limit_s
        while not holds():
            assert time.monotonic() < end_s, f"{what} not within {limit_s} s: {self.status()}"
            time.sleep(0.1)

    def wait_baseline(self, limit_s: float = 30.0) -> None:
        self.wait(lambda: at_baseline(self.status()), limit_s, "baseline")

    def stop(self, number: int = signal.SIGINT) -> int:
        """As Ctrl-C on a terminal does: the signal goes to the whole foreground process group."""
        self.http.close()
        os.killpg(self.process.pid, number)
        try:
            return self.process.wait(STOP_S)
        finally:
            self.process.kill()
            for stream in (self.process.stdout, self.process.stderr):
                if stream is not None:
                    stream.close()


def at_baseline(status: dict[str, Any]) -> bool:
    """Design §5: owned = leased = quarantined = 0, free + cached = total, no rooms, no requests."""
    if status["rooms_live"] or status["requests_live"]:
        return False
    for instance in status["instances"]:
        pages = instance["pages"]
        if not pages or instance["queues"]["rooms"]:
            return False
        if pages["owned"] or pages["leased"] or pages["quarantined"]:
            return False
        if pages["free"] + pages["cached"] != pages["total"]:
            return False
    return True


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.stop()
