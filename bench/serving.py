"""A real `kvferry serve` for bench scripts: its own processes, its own port, stopped at the end."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import yaml  # type: ignore[import-untyped]

STOP_S = 90.0


class Served:
    """A running server. `args` are the sections under `args` of a serve.yaml."""

    def __init__(self, process: subprocess.Popen[str], url: str) -> None:
        self.process, self.url = process, url
        self.http = httpx.Client(base_url=url, timeout=300.0)

    def status(self) -> dict[str, Any]:
        answer = self.http.get("/status")
        answer.raise_for_status()
        found: dict[str, Any] = answer.json()
        return found

    def pids(self) -> dict[str, int]:
        """Actor -> pid of those that answer."""
        status = self.status()
        found = {rank["id"]: rank["ranks"][0]["pid"] for rank in status["instances"] if rank["ranks"]}
        found |= {router["id"]: router["pid"] for router in status["routers"]}
        if status.get("registry"):
            found["registry"] = status["registry"]["pid"]
        return found

    def wait(self, holds: Any, limit_s: float, what: str) -> float:
        """Seconds until `holds()`. Raises TimeoutError, with the status, after `limit_s`."""
        began_s = time.monotonic()
        while not holds():
            if time.monotonic() - began_s > limit_s:
                raise TimeoutError(f"{what}: not within {limit_s} s; status {self.status()}")
            time.sleep(0.05)
        return time.monotonic() - began_s


@contextmanager
def served(args: dict[str, Any], *options: str) -> Iterator[Served]:
    """Start it with these `args`; the port is free and ours."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    application = {"name": "kvferry", "import_path": "kvferry.serve.deployment:build", "route_prefix": "/"}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "serve.yaml"
        path.write_text(yaml.safe_dump({"applications": [application | {"args": args}]}))
        kvferry = Path(sys.executable).with_name("kvferry")
        command = [str(kvferry), "serve", str(path), "--port", str(port), "--json", *options]
        said = Path(folder) / "stderr"  # Ray's reports of the processes that we kill, among others
        with said.open("w") as log:
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, start_new_session=True)
        try:
            assert process.stdout is not None
            hello = process.stdout.readline()
            if not hello:
                raise RuntimeError(f"kvferry serve ended with {process.wait()} before it was up: {said.read_text()}")
            yield Served(process, json.loads(hello)["url"])
        finally:
            os.killpg(process.pid, signal.SIGINT)
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
