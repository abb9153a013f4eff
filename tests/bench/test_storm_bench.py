"""What the storm calls right, left, wrong and lost, what it counts as accounted for, and that a cut is one."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from accounts import Account, account
from answers import Answer
from cancels import Cancel, explained
from cuts import Cut
from storm import TURNS, schedule
from storm_clients import MOST_PROMPT, TOKENS, Known, Request, judge, oracle
from storm_report import Storm, document, figures, picture
from strikes import Strike, seen_in

KNOWN = Known([1], [7, 8, 9], [0.5, 0.0009, 0.0011], "length")


@pytest.mark.parametrize(
    ("ids", "finish", "error", "left", "verdict"),
    [
        ([7, 8, 9], "length", "", False, "right"),
        ([7, 5, 6], "length", "", False, "tie"),
        ([7, 8, 6], "length", "", False, "wrong"),
        ([7, 8], "length", "", False, "wrong"),  # an answer that says it is complete and is not
        ([7, 8, 9], "stop", "", False, "wrong"),
        ([7, 8, 9, 9], "length", "", False, "wrong"),
        ([7, 8], "", "", False, "lost"),
        ([], "", "", False, "lost"),
        ([7, 8], "", "HTTP 502", False, "error"),
        ([7, 8], "", "", True, "left"),
        ([6], "", "", True, "wrong"),  # what came before the client left counts, too
        ([6], "", "HTTP 502", False, "wrong"),
    ],
)
def test_the_judge(ids: list[int], finish: str, error: str, left: bool, verdict: str) -> None:
    assert judge(Answer(ids, [], "", finish, error), KNOWN, left)[0] == verdict


def test_the_oracle_is_short_prompts_and_what_transformers_says() -> None:
    known = oracle()
    assert {len(k.prompt_ids) for k in known} >= {1, 16, 17, 64, 127, 128}
    assert max(len(k.prompt_ids) for k in known) == MOST_PROMPT
    assert all(len(k.ids) == len(k.gaps) == TOKENS and k.finish_reason == "length" for k in known)


def status(**decode: Any) -> dict[str, Any]:
    pages = {"total": 10, "free": 7, "owned": 0, "leased": 0, "cached": 1, "quarantined": 2}
    row = {"room": "5", "pages": [3, 4], "writer": "prefill-0", "for_s": 1.5, "waits_for": ["exited"], "cause": "lost"}
    instance = {"id": "decode-0", "queues": {"rooms": 1}, "pages": pages, "quarantined": [row]} | decode
    return {"rooms_live": 0, "requests_live": 0, "instances": [instance]}


def test_quarantined_pages_are_accounted_for_by_a_reason_only() -> None:
    found = account(status())
    assert (found.unaccounted, found.quarantined, found.live) == (0, 2, 0)
    assert found.explained and not found.baseline
    assert found.reasons == ("decode-0: 2 pages of room 5 wait since 1.5 s for exited of prefill-0: lost",)
    assert account(status(quarantined=[])) == Account(2, 0, (), 1)
    assert account(status(pages={})).unaccounted == 1
    clean = {"total": 10, "free": 9, "owned": 0, "leased": 0, "cached": 1, "quarantined": 0}
    assert account(status(pages=clean, quarantined=[], queues={"rooms": 0})).baseline
    assert not account(status(pages=clean, quarantined=[])).explained  # a room is left over


class Noted:
    """Stands for `Strikes`: what was to be struck."""

    def __init__(self) -> None:
        self.struck: list[tuple[str, ...]] = []

    def __getattr__(self, kind: str) -> Any:
        return lambda *roles: self.struck.append((kind, *roles))


def test_the_schedule_strikes_every_20_seconds_and_cuts_in_between() -> None:
    noted: Any = Noted()
    at_s = []
    for when_s, strike in schedule(600, 20, noted):
        at_s.append(when_s)
        strike()
    turns = [(at, struck) for at, struck in zip(at_s, noted.struck, strict=False) if struck[0] != "cut"]
    assert [at for at, _ in turns] == [20.0 * n for n in range(1, 30)]
    assert [struck for _, struck in turns] == [TURNS[n % len(TURNS)] for n in range(29)]
    assert {struck[1] for struck in noted.struck if struck[0] == "kill"} >= {"prefill", "decode", "router", "registry"}
    cuts = [at for at, struck in zip(at_s, noted.struck, strict=False) if struck[0] == "cut"]
    assert cuts == [at + 10 for at, struck in turns if struck[0] == "stop"] and at_s[-1] == 600


def test_what_a_status_shows_of_the_processes() -> None:
    rank = {"pid": 11, "endpoint": "tcp://127.0.0.1:4711"}
    instances = [
        {"id": "decode-0", "ranks": [rank], "step": 3, "registered": True},
        {"id": "decode-1", "ranks": [], "queues": {}, "pages": {}},  # does not answer
        {"id": "prefill-0", "ranks": [rank | {"pid": 12}], "step": 0, "registered": False},
    ]
    routers = [{"id": "router-0", "pid": 13, "ready": True}, {"id": "router-1", "pid": 14, "ready": False}]
    seen = seen_in({"instances": instances, "routers": routers, "registry": {"pid": 15, "ranks": 1}})
    assert seen.pids == {"decode-0": 11, "prefill-0": 12, "router-0": 13, "router-1": 14, "registry": 15}
    assert seen.registered == {"decode-0", "router-0"}  # the registry has one of two
    assert seen.ports["decode-0"] == 4711 and seen.step == {"decode-0": 3, "prefill-0": 0}


def small_storm() -> Storm:
    requests = [Request(at, at + 1.5, "right", 16) for at in range(100)]
    requests += [Request(3, 4, "left", 2), Request(5, 6, "error", 0, "HTTP 503: no | pair"), Request(7, 8, "tie", 16)]
    strikes = [
        Strike("kill", "prefill-0", 20, 77, end_s=33, served_s=35, right_s=36),
        Strike("stop", "decode-1", 40, 78, end_s=54, right_s=56, note="14 s"),
        Strike("cut", "decode-0 - prefill-1", 50, 79, end_s=53, right_s=54, note="3 s, 2 connections"),
        Strike("kill", "router", 60, 0, end_s=60, right_s=61, note="nobody was there"),
    ]
    clean, held = Account(0, 0, (), 0), Account(0, 9, ("decode-0: 9 pages",), 0)
    cancels = [Cancel("waiting", 0.3, clean), Cancel("running", 0.1, held), Cancel("running", 0.2, clean)]
    looks = [(1.0, {"decode-0": 0, "prefill-0": 0}), (50.0, {"decode-0": 9, "decode-1": 0})]
    return Storm(120.0, 20.0, requests, strikes, looks, cancels, (clean, clean))


def test_figures_and_page_and_picture(tmp_path: Any) -> None:
    storm = small_storm()
    numbers = figures(storm)
    wanted = {
        "requests": 103, "right": 101, "ties": 1, "wrong": 0, "lost": 0, "errors": 1, "disconnects": 1, "kills": 1,
        "stops": 1, "cuts": 1, "pages_unaccounted": 0, "recovery_s_p95": 3, "registered_s_max": 13, "served_s_max": 2,
        "cancels": 3, "cancel_p99_s": 0.3, "passed": True,
    }  # fmt: skip
    assert {name: numbers[name] for name in wanted} == wanted
    storm.requests[0].verdict = "wrong"
    assert not figures(storm)["passed"]
    picture(storm, tmp_path / "storm.png")
    assert (tmp_path / "storm.png").read_bytes().startswith(b"\x89PNG")
    document(storm, numbers, tmp_path / "storm.md")
    page = (tmp_path / "storm.md").read_text()
    assert "| kill prefill-0 | 20 | 13.0 | 3.0 |" in page and "1 times: HTTP 503: no / pair" in page


#: Answers every byte with the same byte.
ECHO = """
import os
import socket
with socket.create_server(("127.0.0.1", 0)) as server:
    print(server.getsockname()[1], flush=True)
    connection, _ = server.accept()
    while data := connection.recv(100):
        connection.sendall(data)
"""


@pytest.fixture
def echo() -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen([sys.executable, "-c", ECHO], stdout=subprocess.PIPE, text=True) as process:
        yield process
        process.kill()


def test_a_cut_link_is_silent_and_not_closed_and_heals(echo: subprocess.Popen[str]) -> None:
    assert echo.stdout is not None
    port = int(echo.stdout.readline())
    with socket.create_connection(("127.0.0.1", port)) as client:
        client.sendall(b"a")
        assert client.recv(10) == b"a"
        cut = Cut(os.getpid(), echo.pid, port)
        try:
            cut.hold()
        except PermissionError as error:
            pytest.skip(f"this kernel lets nobody borrow sockets: {error}")
        assert cut.connections == 1
        client.sendall(b"b")
        client.settimeout(0.5)
        with pytest.raises(TimeoutError):
            client.recv(10)
        cut.hold()
        assert cut.connections == 1
        cut.heal()
        client.settimeout(60)
        assert client.recv(10) == b"b"  # nothing was lost: TCP has sent it again


async def test_a_cancel_tells_whose_forward_it_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prefill has a room for two looks, and makes its fourth forward meanwhile."""
    pages = {"total": 4, "free": 4, "cached": 0}
    looks = 0

    async def look(_http: object) -> dict[str, Any]:
        nonlocal looks
        looks += 1
        row = {"id": "prefill-0", "queues": {"rooms": int(looks < 3)}, "step": 3 + (looks >= 3), "pages": pages}
        return {"rooms_live": 0, "requests_live": 0, "routers": [], "instances": [row]}

    monkeypatch.setattr("cancels.status_of", look)
    async with httpx.AsyncClient() as http:
        _, found, _, waited_for = await explained(http, time.monotonic())
    assert found.baseline and looks > 3
    assert waited_for.startswith("prefill-0 1; a forward ended: prefill-0; seen by a look of 0.")
