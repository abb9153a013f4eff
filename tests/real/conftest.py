"""One real server for all tests here: `kvferry serve` in a process group of its own, on ports of its own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from serving import Served


class Server(Served):
    """A running `kvferry serve`, and what the tests ask it."""

    def chat(self, content: str, **fields: Any) -> httpx.Response:
        body = {"model": "smollm2-135m", "temperature": 0, "messages": [{"role": "user", "content": content}]} | fields
        return self.http.post("/v1/chat/completions", json=body)

    def instance(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = next(i for i in self.status()["instances"] if i["id"] == name)
        return found

    def room(self, response: httpx.Response) -> dict[str, Any]:
        journal: dict[str, Any] = self.http.get(f"/rooms/{response.headers['x-kvferry-room']}").json()
        return journal

    def wait_baseline(self, limit_s: float = 30.0) -> None:
        self.wait(lambda: at_baseline(self.status()), limit_s, "baseline")


def at_baseline(status: dict[str, Any]) -> bool:
    """Owned = leased = quarantined = 0, free + cached = total, no rooms, no requests."""
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
    with Server() as server:
        yield server


@pytest.fixture(scope="session")
def server_class() -> type[Server]:
    """For tests whose server has a configuration of its own."""
    return Server
