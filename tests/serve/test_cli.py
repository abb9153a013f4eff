"""The command line against the real API on fakes, and without a server."""

from __future__ import annotations

import asyncio
import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from kvferry.cli import main
from kvferry.obs.show import bar, total_s
from kvferry.protocol.errors import Cause
from kvferry.protocol.outcome import Outcome

JOURNAL: dict[str, Any] = {
    "room": "77", "request": "5", "attempt": 0, "prefill": "prefill-0", "decode": "decode-0", "backend": "ucx",
    "prompt_tokens": 40, "kv_bytes": 414720, "metadata_bytes": 64,
    "kvpoll": [
        {"state": "BOOTSTRAPPING", "at_s": 0.0, "duration_s": 0.004},
        {"state": "WAITING_FOR_INPUT", "at_s": 0.004, "duration_s": 0.006},
        {"state": "TRANSFERRING", "at_s": 0.01, "duration_s": 0.03},
        {"state": "SUCCESS", "at_s": 0.04, "duration_s": 0.0},
    ],
    "events": [{"at_s": 0.012, "event": "computed", "leg": "prefill", "detail": {"chunk": 0, "tokens": 40}}],
    "outcome": {"ok": True, "cause": None},
}  # fmt: skip


async def run(*argv: str) -> int:
    """The command beside the server's loop."""
    return await asyncio.to_thread(main, argv)


async def test_ask_streams_the_text(served: Any, capsys: pytest.CaptureFixture[str]) -> None:
    served.answer_with(["The capital", " is", " Paris."])
    args = ("ask", "What is it?", "--url", served.url, "--max-tokens", "7", "--stop", "x", "--system", "be brief")
    assert await run(*args) == 0
    assert capsys.readouterr() == ("The capital is Paris.\n", "")
    (spec,) = served.backend.specs
    assert (spec.sampling.max_tokens, spec.sampling.temperature, spec.sampling.stop) == (7, 0.0, ("x",))
    assert len(spec.prompt_ids) == 5
    args = (
        "--min-tokens",
        "2",
        "--ignore-eos",
        "--min-p",
        "0.5",
        "--presence-penalty",
        "1",
        "--repetition-penalty",
        "2",
    )
    assert await run("ask", "w", "--url", served.url, *args) == 0
    sampling = served.backend.specs[1].sampling
    assert (sampling.min_tokens, sampling.ignore_eos, sampling.min_p) == (2, True, 0.5)
    assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty) == (1.0, 0.0, 2.0)


async def test_ask_json(served: Any, capsys: pytest.CaptureFixture[str]) -> None:
    served.answer_with(["Paris", "."])
    assert await run("ask", "w", "--url", served.url, "--json") == 0
    assert json.loads(capsys.readouterr().out) == {
        "id": f"chatcmpl-{served.backend.specs[0].request:016x}", "model": "m", "room": str(served.room),
        "text": "Paris.", "finish_reason": "stop",
        "usage": {
            "prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3, "prompt_tokens_details": {"cached_tokens": 0}
        },
    }  # fmt: skip


async def test_errors_are_one_line_and_exit_code_1(served: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert await run("ask", "w", "--url", served.url, "--max-tokens", "0") == 1
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1 and "max_tokens: 0" in captured.err
    served.backend.on_submit = lambda spec: served.settle(
        spec, Outcome(77, False, Cause("handoff_failed", "decode said no", leg="decode"))
    )
    assert await run("ask", "w", "--url", served.url) == 1
    assert "decode said no (leg decode) (HTTP 502)" in capsys.readouterr().err
    assert await run("room", "1/../status", "--url", served.url) == 1
    assert "not" in capsys.readouterr().err


async def test_a_stream_that_breaks_is_an_error(served: Any, capsys: pytest.CaptureFixture[str]) -> None:
    def play(spec: Any) -> None:
        served.from_prefill(served.token(spec, 0, "Par"))
        asyncio.get_running_loop().call_later(
            0.02, served.settle, spec, Outcome(77, False, Cause("peer_lost", "decode is gone"))
        )

    served.backend.on_submit = play
    assert await run("ask", "w", "--url", served.url) == 1
    assert capsys.readouterr() == ("Par", "kvferry: decode is gone\n")


async def test_status_and_room(
    served: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "140")
    served.backend.journals[77] = JOURNAL
    assert await run("status", "--json", "--url", served.url) == 0
    assert json.loads(capsys.readouterr().out) == served.backend.state | {"requests_live": 0, "ingress": "none"}
    assert await run("status", "--url", served.url) == 0
    text = capsys.readouterr().out
    assert "decode-0" in text and "pid 4321" in text and "running 2" in text and "rooms live 3" in text
    served.backend.state["instances"].append(
        {"id": "prefill-0", "role": "prefill", "incarnation": None, "ranks": [], "queues": {}, "pages": {}}
    )
    assert await run("status", "--url", served.url) == 0
    assert "does not answer" in capsys.readouterr().out
    assert await run("room", "77", "--json", "--url", served.url) == 0
    assert json.loads(capsys.readouterr().out) == JOURNAL
    assert await run("room", "77", "--url", served.url) == 0
    lines = capsys.readouterr().out.splitlines()
    for words in (
        ("pair", "prefill-0 → decode-0 over ucx"),
        ("moved", "414720 bytes of KV"),
        ("BOOTSTRAPPING", "0.0 ms", "4.0 ms"),
        ("WAITING_FOR_INPUT", "4.0 ms", "6.0 ms"),
        ("TRANSFERRING", "10.0 ms", "30.0 ms"),
        ("SUCCESS", "40.0 ms"),
        ("12.0 ms", "prefill", "computed", "chunk 0, tokens 40"),
    ):
        assert any(all(word in line for word in words) for line in lines), words


async def test_the_api_key_comes_from_the_environment(
    guarded: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    guarded.answer_with(["Paris", "."])
    guarded.backend.journals[77] = JOURNAL
    commands = (("ask", "w"), ("status",), ("room", "77"))
    for command in commands:
        assert await run(*command, "--url", guarded.url) == 1
        assert "no API key was given" in capsys.readouterr().err
    monkeypatch.setenv("KVFERRY_API_KEY", "wr\u00f6ng")
    assert await run("status", "--url", guarded.url) == 1
    assert "wr" not in capsys.readouterr().err
    monkeypatch.setenv("KVFERRY_API_KEY", "s3cret")
    for command in commands:
        assert await run(*command, "--url", guarded.url) == 0
        shown = capsys.readouterr()
        assert "s3cret" not in shown.out + shown.err


def test_no_server_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    for argv in (["status"], ["ask", "hi"], ["room", "7"]):
        assert main([*argv, "--url", "http://127.0.0.1:9"]) == 1
        assert "can't be reached" in (err := capsys.readouterr().err) and err.count("\n") == 1


def test_config_check(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("applications:\n- {import_path: 'kvferry.serve.deployment:build', args: {decode: {tp: 1}}}\n")
    assert main(["config", "check", str(file)]) == 0
    assert "acceptable" in capsys.readouterr().out
    assert main(["config", "check", str(file), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["prefill"]["chunk_tokens"] == 256
    file.write_text("applications:\n- {import_path: 'kvferry.serve.deployment:build', args: {api: {keys: [s3cret]}}}\n")
    assert main(["config", "check", str(file), "--json"]) == 0
    text = capsys.readouterr().out
    assert json.loads(text)["api"]["keys"] == ["(hidden)"] and "s3cret" not in text
    file.write_text("applications:\n- {import_path: 'kvferry.serve.deployment:build', args: {decode: {tp: 65}}}\n")
    assert main(["config", "check", str(file)]) == 1
    assert capsys.readouterr().err == (
        "kvferry: applications[0].args.decode.tp: 65 is not acceptable; allowed: at least 1 and at most 64\n"
    )


def test_serve_puts_its_options_over_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    launcher = types.ModuleType("kvferry.serve.launcher")
    launcher.serve = lambda config, as_json: seen.append(config)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "kvferry.serve.launcher", launcher)
    argv = ["serve", "--model", "/d", "--prefill", "2", "--decode", "3", "--host", "::1", "--port", "81"]
    assert main(argv) == 0
    (config,) = seen
    assert (config.model.model, config.prefill.instances, config.decode.instances) == ("/d", 2, 3)
    assert (config.http.host, config.http.port) == ("::1", 81)
    assert main(["serve", "--prefill", "0"]) == 1


def test_ask_unified(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def ask(config: Any, chat: Any, show: Any) -> dict[str, Any]:
        assert config.model.model == chat.model == "/d" and chat.max_tokens == 4 and chat.temperature == 0.0
        show("Par")
        show("is")
        return {"text": "Paris", "finish_reason": "length", "usage": {"prompt_tokens": 1, "completion_tokens": 2}}

    unified = types.ModuleType("kvferry.serve.unified")
    unified.ask = ask  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "kvferry.serve.unified", unified)
    assert main(["ask", "hi", "--unified", "--model", "/d", "--max-tokens", "4"]) == 0
    assert capsys.readouterr().out == "Paris\n"
    assert main(["ask", "hi", "--unified", "--max-tokens", "-4"]) == 1
    assert "max_tokens: -4" in capsys.readouterr().err


def test_bars() -> None:
    assert bar(0, 5, 10, 10) == "█████     "
    assert bar(5, 5, 10, 10) == "     █████"
    assert bar(9.99, 0.001, 10, 10) == "         █"  # short ones stay visible
    assert bar(10, 0, 10, 10) == "         ▏"
    assert bar(0, 0, 0, 4) == "▏   "
    assert total_s(JOURNAL) == pytest.approx(0.04)
