"""API keys over HTTP: what is open, what is not, and that no key is ever repeated."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from kvferry.cli import main
from kvferry.protocol.errors import ConfigError
from kvferry.serve import launcher
from kvferry.serve.keys import InvalidApiKey, Keys, load_keys

BODY: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "one two three"}]}
GUARDED = ("/v1/models", "/v1/models/m", "/v1/nowhere", "/status", "/rooms/77", "/nowhere", "/health/x")
OPEN = ("/health", "/ready", "/metrics", "/")


def key(value: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {value}"}


async def test_without_keys_everybody_may(served: Any, http: httpx.AsyncClient) -> None:
    for headers in ({}, key("whatever")):
        assert (await http.get("/v1/models", headers=headers)).status_code == 200
        assert (await http.get("/status", headers=headers)).status_code == 200


async def test_what_asks_for_a_key_and_what_does_not(guarded: Any) -> None:
    guarded.answer_with(["a"])
    guarded.backend.journals[77] = {"room": "77"}
    async with httpx.AsyncClient(base_url=guarded.url, trust_env=False) as http:
        for path in OPEN:
            assert (await http.get(path)).status_code == 200, path
        for path in GUARDED:
            response = await http.get(path)
            assert response.status_code == 401 and response.headers["www-authenticate"].startswith("Bearer"), path
            right = await http.get(path, headers=key("other-key"))
            assert right.status_code == (200 if path in GUARDED[:2] + GUARDED[3:5] else 404), path
        assert not [spec for spec in guarded.backend.specs if spec.prompt_ids != (0,)]
        for path in ("/v1/chat/completions", "/v1/completions"):
            assert (await http.post(path, json=BODY)).status_code == 401
        assert (await http.post("/v1/chat/completions", json=BODY, headers=key("s3cret"))).status_code == 200
        text = (await http.get("/metrics")).text
        assert 'kvferry_requests_total{outcome="invalid_api_key",status="401"} 9.0' in text


@pytest.mark.parametrize(
    "header",
    ["", "Bearer", "s3cret", "Basic s3cret", "Bearer s3cre", "Bearer s3crets", "Bearer S3CRET",
     "Bearer s3cret other-key", "Bearer \u00e93cret"],
)  # fmt: skip
async def test_401_in_openais_shape_says_nothing_of_the_key(
    guarded: Any, header: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    async with httpx.AsyncClient(base_url=guarded.url, trust_env=False) as http:
        response = await http.post("/v1/chat/completions", json=BODY, headers={"Authorization": header.encode()})
        assert response.status_code == 401
        error = response.json()["error"]
        assert (error["type"], error["param"], error["code"]) == ("invalid_request_error", None, "invalid_api_key")
        status = (await http.get("/status", headers=key("s3cret"))).text
    assert not [word for word in ("s3cre", "other-key") if word in response.text + status + caplog.text.lower()]


async def test_the_openai_client_is_told(guarded: Any) -> None:
    guarded.answer_with(["yes"])
    async with openai.AsyncOpenAI(base_url=f"{guarded.url}/v1", api_key="wrong", max_retries=0) as client:
        with pytest.raises(openai.AuthenticationError) as caught:
            await client.chat.completions.create(**BODY)
        assert caught.value.code == "invalid_api_key"
        client.api_key = "s3cret"
        answer = await client.chat.completions.create(**BODY)
    assert answer.choices[0].message.content == "yes"


def test_the_scheme_is_case_insensitive_and_blanks_around_do_not_count() -> None:
    keys = Keys(["k"])
    for header in ("Bearer k", "bearer k", "BEARER   k ", " Bearer k"):
        keys.check(header)
    with pytest.raises(InvalidApiKey):
        keys.check("Bearer K")


def test_keys_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# clients\n\n  first  \nsecond\n")
    keys = load_keys(["third"], str(file))
    for good in ("first", "second", "third"):
        keys.check(f"Bearer {good}")
    assert len(keys) == 3 and len(load_keys([], None)) == 0
    with pytest.raises(InvalidApiKey):
        keys.check("Bearer # clients")


def test_a_file_that_would_open_the_api_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Missing, without a key, or with something that can't be one; the message names the line, not what it says."""
    file = tmp_path / "keys"
    with pytest.raises(ConfigError, match="No such file"):
        load_keys([], str(file))
    file.write_text("# none yet\n")
    with pytest.raises(ConfigError, match="at least one key"):
        load_keys([], str(file))
    file.write_text("fine\ns3cret with blanks\n")
    with pytest.raises(ConfigError, match="line 2") as caught:
        load_keys([], str(file))
    assert "s3cret" not in str(caught.value)

    def start(*_: object, **__: object) -> Any:
        raise AssertionError("a cluster was about to be started")

    monkeypatch.setattr(launcher, "local_cluster", start)
    config = tmp_path / "c.yaml"
    config.write_text(
        "applications:\n- import_path: kvferry.serve.deployment:build\n"
        f"  args: {{api: {{keys_file: {file}}}}}\nhttp_options: {{port: 0}}\n"
    )
    assert main(["serve", str(config)]) == 1
    assert "api.keys_file" in capsys.readouterr().err
