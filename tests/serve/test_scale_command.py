"""`kvferry scale` and its route: numbers in, progress out, and an end in every case."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from kvferry.cli import main
from kvferry.obs.show import pools_move

PHASES = ("placing", "starting", "registered", "draining", "left")


def progress(version: int = 1, missing: tuple[str, ...] = (), left: Any = (), **decode: int) -> dict[str, Any]:
    """Pools whose decodes are as given; done when as many are registered as wanted and nobody is leaving."""
    numbers = {"wanted": 0} | dict.fromkeys(PHASES, 0) | decode
    rows = [
        {"name": f"decode-{phase}-{i}", "role": "decode", "phase": phase, "for_s": 3.2, "detail": f"{phase} it is"}
        for phase in PHASES[:4]
        for i in range(numbers[phase])
    ]
    done = numbers["wanted"] == numbers["registered"] == len(rows)
    return {
        "version": version, "done": done, "wanted": {"decode": numbers["wanted"]}, "roles": {"decode": numbers},
        "missing": list(missing), "instances": rows, "left": list(left),
    }  # fmt: skip


DONE = progress(wanted=2, registered=2)
STARTING = progress(wanted=2, registered=1, starting=1)
NO_ROOM = ("decode: 2 wanted, 1 placed; decode-1 needs 1 kvferry_slot, the cluster offers 1, 1 are taken",)
STUCK = progress(wanted=2, registered=1, placing=1, missing=NO_ROOM)


async def run(*argv: str) -> int:
    """The command beside the server's loop."""
    return await asyncio.to_thread(main, argv)


@pytest.fixture(autouse=True)
def _fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvferry.cli.FOLLOW_S", 0.01)
    monkeypatch.setenv("COLUMNS", "140")


async def test_scale_follows_until_it_is_so(served: Any, capsys: pytest.CaptureFixture[str]) -> None:
    gone = {
        "name": "decode-3", "role": "decode", "phase": "left", "for_s": 0.1, "detail": "", "handed_over": 2,
        "pages": {"total": 9, "free": 9, "owned": 0, "leased": 0, "cached": 0, "quarantined": 0},
    }  # fmt: skip
    killed = gone | {"name": "decode-4", "pages": None, "detail": "ended before it had drained: killed"}
    draining = progress(wanted=2, registered=2, draining=1)
    served.backend.progresses = [STARTING, draining, progress(wanted=2, registered=2, left=(gone, killed))]
    assert await run("scale", "decode=2", "--url", served.url) == 0
    assert served.backend.asked == [{"decode": 2}]
    out = capsys.readouterr().out
    assert "decode-3 left with 0 pages leased, 0 quarantined; 2 rooms were handed over" in out
    assert "decode-4 left: ended before it had drained: killed" in out
    row = next(line for line in out.splitlines() if "│ decode" in line)
    assert [cell.strip() for cell in row.split("│")[1:-1]] == ["decode", "2", "0", "0", "2", "0", "0"]


async def test_scale_json_is_the_last_progress(served: Any, capsys: pytest.CaptureFixture[str]) -> None:
    served.backend.progresses = [STARTING, DONE]
    assert await run("scale", "decode=2", "prefill=3", "--json", "--url", served.url) == 0
    assert json.loads(capsys.readouterr().out) == DONE
    assert served.backend.asked == [{"decode": 2, "prefill": 3}]


async def test_without_waiting_and_without_numbers(served: Any, capsys: pytest.CaptureFixture[str]) -> None:
    served.backend.progresses = [STARTING]
    assert await run("scale", "decode=2", "--no-wait", "--url", served.url) == 0
    assert "decode-starting-0 is starting for 3 s: starting it is" in capsys.readouterr().out
    assert await run("scale", "--json", "--url", served.url) == 0
    assert json.loads(capsys.readouterr().out) == STARTING
    assert served.backend.asked == [{"decode": 2}]


async def test_no_room_is_told_instead_of_waited_for(served: Any, capsys: pytest.CaptureFixture[str]) -> None:
    served.backend.progresses = [STUCK]
    argv = ("scale", "decode=2", "--placement-timeout", "0.05", "--url", served.url)
    assert await run(*argv) == 1
    captured = capsys.readouterr()
    assert captured.err == (f"kvferry: {NO_ROOM[0]}. It stays asked for; to take it back: kvferry scale decode=1\n")
    assert NO_ROOM[0] in captured.out


async def test_a_later_call_ends_an_earlier_one(served: Any, capsys: pytest.CaptureFixture[str]) -> None:
    served.backend.progresses = [STARTING, progress(version=2, wanted=5, registered=1, starting=4)]
    assert await run("scale", "decode=2", "--url", served.url) == 1
    assert "a later call has asked for other numbers: decode=5" in capsys.readouterr().err


async def test_a_controller_that_is_new_is_waited_for(served: Any) -> None:
    """It knows nothing yet; a front tells it, and the version is the old one again."""
    served.backend.progresses = [STARTING, progress(version=0, wanted=1, starting=1), DONE]
    assert await run("scale", "decode=2", "--url", served.url) == 0


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        ("decod=2", "decod: there is no such role; the roles are prefill, decode, unified, router (HTTP 400)"),
        ("decode=65", "decode: 65 is not acceptable; allowed: a whole number, at least 0 and at most 64 (HTTP 400)"),
        ("router=0", "router: 0 is not acceptable; allowed: a whole number, at least 1 and at most 64 (HTTP 400)"),
        ("decode", "'decode' is not acceptable; allowed: ROLE=N, such as decode=3"),
        ("decode=two", "'decode=two' is not acceptable"),
    ],
)
async def test_bad_numbers_are_one_line(
    served: Any, capsys: pytest.CaptureFixture[str], argument: str, words: str
) -> None:
    assert await run("scale", argument, "--url", served.url) == 1
    captured = capsys.readouterr()
    assert words in captured.err and captured.err.count("\n") == 1 and captured.out == ""
    assert served.backend.asked == []


async def test_the_route(served: Any, http: Any) -> None:
    served.backend.progresses = [STARTING]
    answer = await http.post("/scale", json={"decode": 2})
    assert (answer.status_code, answer.json()) == (202, STARTING)
    assert (await http.get("/scale")).json() == STARTING
    for body in (b"[]", b"{", b'{"decode": 1.5}', b'{"decode": null}', b"{}"):
        answer = await http.post("/scale", content=body, headers={"content-type": "application/json"})
        assert answer.status_code == 400 and answer.json()["error"]["type"] == "invalid_request_error", body
    assert (await http.post("/scale", content=b'{"decode": 2}')).status_code == 415  # what a web page may send
    assert (await http.post("/scale", json={"decode": 2} | {str(i): 1 for i in range(1000)})).status_code == 413
    assert (await http.delete("/scale")).status_code == 405
    assert served.backend.asked == [{"decode": 2}]


@pytest.mark.parametrize(
    ("state", "moves"),
    [
        (STARTING, True),
        (STUCK, False),
        (progress(wanted=3, registered=1, placing=1, starting=1, missing=NO_ROOM), True),
        (progress(wanted=1, registered=1, placing=1, draining=1, missing=NO_ROOM), True),
        (progress(wanted=2, registered=1, starting=1, missing=("decode-1 could not start (3 times): no",)), False),
    ],
)
def test_what_moves_by_itself(state: dict[str, Any], moves: bool) -> None:
    assert pools_move(state) is moves
