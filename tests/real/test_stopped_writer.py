"""Issue M3, done-when 6: a prefill that is stopped in mid-write for longer than every heartbeat limit, and continues.

Writes are held for a second each, so at a prompt's first token its last writes are still to come.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest

pytestmark = pytest.mark.real

STORY = "Tell me a long story about a ferry and its captain. "
#: Prompts of about 40 and 65 pages of 16 tokens.
SHORT, LONG = 50, 82


def config(transports: str, decode_pages: int, **decode: Any) -> dict[str, Any]:
    return {
        "prefill": {"instances": 2, "pool_pages": 128},
        "decode": {"pool_pages": decode_pages} | decode,
        "links": {"heartbeat_s": 0.3, "silence_s": 2.0},
        "transfer": {
            # On one host the backend is `local`; tcp on one host has to be asked for.
            "backend": "auto" if transports == "host" else "ucx",
            "transports": transports,
            "faults": {"delay_ms": 1000},
        },
    }


class Story:
    """One streamed answer: `room` is that of the attempt that gave its first token."""

    def __init__(self, server: Any, prompt: str) -> None:
        body = {"model": "smollm2-135m", "temperature": 0, "stream": True, "max_tokens": 12}
        body["messages"] = [{"role": "user", "content": prompt}]
        self._server = server
        self._stream = server.http.stream("POST", "/v1/chat/completions", json=body)
        self._answer = self._stream.__enter__()
        assert self._answer.status_code == 200, self._answer.read()
        self._lines = (line for line in self._answer.iter_lines() if line)
        self._first = next(self._lines)
        self.room = self._answer.headers["x-kvferry-room"]

    def journal(self) -> dict[str, Any]:
        journal: dict[str, Any] = self._server.http.get(f"/rooms/{self.room}").json()
        return journal

    def text(self) -> str:
        """To its end."""
        events = [line.removeprefix("data: ") for line in (self._first, *self._lines)]
        self._stream.__exit__(None, None, None)
        assert events[-1] == "[DONE]" and not any("error" in json.loads(event) for event in events[:-1]), events
        choices = [choice for event in events[:-1] for choice in json.loads(event)["choices"]]
        return "".join(choice["delta"].get("content") or "" for choice in choices)


@contextmanager
def stopped_in_mid_write(server: Any, repeat: int, name: str) -> Iterator[tuple[Story, str, int]]:
    """(the request, its prefill, that one's pid), while the prefill stands still."""
    pids = {i["id"]: int(i["ranks"][0]["pid"]) for i in server.status()["instances"]}
    story = Story(server, f"{name}. " + STORY * repeat)
    prefill = story.journal()["prefill"]
    os.kill(pids[prefill], signal.SIGSTOP)
    try:
        assert "committed" not in [event["event"] for event in story.journal()["events"]]
        yield story, prefill, pids[prefill]
    finally:
        with suppress(ProcessLookupError):  # it was killed, as it should be
            os.kill(pids[prefill], signal.SIGCONT)


def proof_of(server: Any, story: Story) -> str:
    """By which proof the room's pages came back, as its journal says."""
    found: list[str] = []

    def told() -> bool:
        events = [event for event in story.journal()["events"] if event["event"] == "released"]
        found.extend(event["detail"]["proof"] for event in events)
        return bool(found)

    server.wait(told, 30, "pages that have come back")
    return found[0]


def quarantined(server: Any) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = server.instance("decode-0")["quarantined"]
    return rows


def test_over_tcp_its_pages_are_revoked_and_serve_others_meanwhile(server_class: Any) -> None:
    """The pool has room for one such prompt: the next attempt of A, and B, run on the pages of A's first attempt."""
    with server_class(config("tcp", 62)) as own:
        right = {name: Story(own, f"{name}. " + STORY * SHORT).text() for name in "AB"}
        own.wait_baseline()
        with stopped_in_mid_write(own, SHORT, "A") as (story, prefill, pid):
            answer = story.text()
            assert proof_of(own, story) == "revoked"
            second = Story(own, "B. " + STORY * SHORT)
            assert second.journal()["prefill"] != prefill
            assert second.text() == right["B"]
            os.kill(pid, signal.SIGCONT)
            third = Story(own, "B. " + STORY * SHORT)  # while the writer finds out that it is shut out
            assert third.text() == right["B"]
        assert answer == right["A"]
        own.wait_baseline()
        assert own.instance(prefill)["ranks"][0]["pid"] == pid, "it lives, and serves again"


@pytest.mark.full  # its parts are tests on virtual time, too (tests/actors/test_quarantine.py)
def test_on_one_host_its_pages_wait_until_it_has_drained_or_is_killed_over_the_budget(server_class: Any) -> None:
    """40 of 180 pages are within the budget and wait for its word; 65 are not, and cost it its life."""
    with server_class(config("host", 180, quarantine_budget=0.3)) as own:
        right = {repeat: Story(own, f"A. {STORY * repeat}").text() for repeat in (SHORT, LONG)}
        own.wait_baseline()

        with stopped_in_mid_write(own, SHORT, "A") as (story, prefill, pid):
            assert story.text() == right[SHORT]  # by the other prefill, on other pages
            (row,) = quarantined(own)
            assert (row["room"], row["writer"], row["linked"]) == (story.room, prefill, False)
            assert 30 <= len(row["pages"]) <= 54
            assert row["waits_for"] == ["drained by rank 0", "exited"]
            os.kill(pid, signal.SIGCONT)
            assert proof_of(own, story) == "drained"
        own.wait_baseline()
        assert own.instance(prefill)["ranks"][0]["pid"] == pid

        with stopped_in_mid_write(own, LONG, "A") as (story, prefill, pid):
            assert story.text() == right[LONG]
            assert proof_of(own, story) == "exited"
        own.wait(lambda: not own.http.get("/ready").json()["missing"], 60, "its successor")
        own.wait_baseline()
        assert own.instance(prefill)["ranks"][0]["pid"] != pid
        assert own.instance("decode-0")["counts"]["writers killed over the quarantine's budget"] == 1
