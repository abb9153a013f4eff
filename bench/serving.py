"""A real `kvferry serve` for scripts and tests: its own process group, its own port, its own configuration."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Self

import httpx
import yaml  # type: ignore[import-untyped]

STOP_S = 60.0
ANSWER_S = 120.0
APPLICATION = {"name": "kvferry", "import_path": "kvferry.serve.deployment:build", "route_prefix": "/"}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Served:
    """A server that is up. Either `stop` it or use it as a context manager."""

    def __init__(self, args: Mapping[str, Any] | None = None, *options: str) -> None:
        """`args`: the sections under `args` of a serve.yaml; None starts it without a file. `options`: of the command.
        Raises RuntimeError, with what it said, when it ended before it was up.
        """
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._folder = tempfile.TemporaryDirectory(prefix="kvferry-serving-")
        command = [str(Path(sys.executable).with_name("kvferry")), "serve"]
        if args is not None:
            config = Path(self._folder.name) / "serve.yaml"
            config.write_text(yaml.safe_dump({"applications": [APPLICATION | {"args": dict(args)}]}))
            command.append(str(config))
        said = Path(self._folder.name) / "stderr"  # Ray's reports of processes that were killed, among others
        with said.open("w") as log:
            self.process = subprocess.Popen(
                [*command, "--port", str(self.port), *options],
                stdout=subprocess.PIPE, stderr=log, text=True, start_new_session=True,
            )  # fmt: skip
        assert self.process.stdout is not None
        self.curl = self.process.stdout.readline().strip()  # the line that it prints once it is ready
        if not self.curl:
            raise RuntimeError(f"kvferry serve ended with {self.process.wait()} before it was up: {said.read_text()}")
        self.http = httpx.Client(base_url=self.url, timeout=ANSWER_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

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

    def wait(self, holds: Callable[[], bool], limit_s: float, what: str) -> None:
        """Until `holds()`. Raises TimeoutError, with the status, after `limit_s`."""
        end_s = time.monotonic() + limit_s
        while not holds():
            if time.monotonic() > end_s:
                raise TimeoutError(f"{what}: not within {limit_s} s; status {self.status()}")
            time.sleep(0.05)

    def stop(self, number: int = signal.SIGINT, group: bool = True) -> int:
        """As Ctrl-C on a terminal does: the signal goes to the whole foreground process group; or to the one process
        that was started. The exit status, again when it has been stopped before; raises subprocess.TimeoutExpired, and
        ends it by force, when it does not end by itself.
        """
        if self.process.returncode is not None:
            return self.process.returncode
        self.http.close()
        (os.killpg if group else os.kill)(self.process.pid, number)
        try:
            return self.process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            raise
        finally:
            assert self.process.stdout is not None
            self.process.stdout.close()
            self._folder.cleanup()
