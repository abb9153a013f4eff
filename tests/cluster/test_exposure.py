"""What starts on an address that other hosts reach, and what does not."""

from __future__ import annotations

import logging
import os
import stat
from pathlib import Path
from typing import Any

import pytest

from kvferry.cluster.config import Config, from_args, load
from kvferry.cluster.exposure import asks_for_token, check_exposure, make_ray_token
from kvferry.protocol.errors import ConfigError
from kvferry.serve.deployment import build


def config(host: str = "127.0.0.1", **args: Any) -> Config:
    overrides = {f"{section}.{name}": value for section, values in args.items() for name, value in values.items()}
    return load(None, overrides | {"http.host": host})


REACHED: dict[str, Config] = {
    "http_options.host": config("0.0.0.0"),
    "cluster.bind_host": config(cluster={"bind_host": "node"}),
    "registry.http_host": config(registry={"http_host": "10.0.0.1", "http_port": 8998}),
}
AT_HOME = [
    config(), config("localhost"), config("::1"), config(cluster={"bind_host": "127.0.0.2"}),
    config(links={"encrypted": False}), config(registry={"http_host": "10.0.0.1"}),  # where nothing listens
]  # fmt: skip


@pytest.mark.parametrize("key", REACHED)
def test_an_address_that_others_reach_needs_rays_token(key: str, caplog: pytest.LogCaptureFixture) -> None:
    check_exposure(REACHED[key], ray_token=True)
    with pytest.raises(ConfigError) as caught:
        check_exposure(REACHED[key], ray_token=False)
    text = str(caught.value)
    assert caught.value.path.endswith(key) and "RAY_AUTH_MODE=token" in text and "cluster.insecure: true" in text
    assert caplog.records == []


@pytest.mark.parametrize("number", range(len(AT_HOME)))
def test_on_this_host_everything_starts(number: int, caplog: pytest.LogCaptureFixture) -> None:
    check_exposure(AT_HOME[number], ray_token=False)
    assert caplog.records == []


def test_links_that_others_reach_are_encrypted() -> None:
    check_exposure(
        config(cluster={"bind_host": "10.0.0.1"}, links={"encrypted": False, "carrier": "ray"}), ray_token=True
    )
    with pytest.raises(ConfigError, match=r"10\.0\.0\.1.*links\.encrypted is false"):
        check_exposure(config(cluster={"bind_host": "10.0.0.1"}, links={"encrypted": False}), ray_token=True)


def test_who_means_it_says_so_and_it_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    meant = config("0.0.0.0", cluster={"insecure": True}, links={"encrypted": False})
    with caplog.at_level(logging.WARNING, "kvferry.cluster"):
        check_exposure(meant, ray_token=False)
        check_exposure(config(cluster={"insecure": True}), ray_token=False)
    (line,) = [record.getMessage() for record in caplog.records]
    assert "0.0.0.0" in line and "RAY_AUTH_MODE" in line and "links.encrypted is false" in line


def test_what_serve_deploys_is_checked_where_it_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    args = {"cluster": {"bind_host": "node"}, "transfer": {"transports": "tcp"}}
    assert from_args(args).cluster.bind_host == "node"
    with pytest.raises(ConfigError, match="RAY_AUTH_MODE"):
        build(args)
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    build(args)


@pytest.mark.parametrize(
    ("mode", "unset", "asks"),
    [
        ("token", False, True),
        ("TOKEN", False, True),
        ("disabled", True, False),
        (None, True, True),
        (None, False, False),
    ],
)
def test_when_ray_asks_for_its_token(mode: str | None, unset: bool, asks: bool) -> None:
    assert asks_for_token({} if mode is None else {"RAY_AUTH_MODE": mode}, unset) is asks


def test_rays_token_is_made_for_its_owner_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    before = os.umask(0)
    try:
        assert make_ray_token() is None
    finally:
        os.umask(before)
    path = tmp_path / ".ray" / "auth_token"
    token = path.read_text()
    assert (stat.S_IMODE(path.stat().st_mode), stat.S_IMODE(path.parent.stat().st_mode)) == (0o600, 0o700)
    assert len(bytes.fromhex(token)) == 32
    assert make_ray_token() is None and path.read_text() == token
    path.chmod(0o644)
    problem = make_ray_token() or ""
    assert str(path) in problem and "0644" in problem and token not in problem
    monkeypatch.setenv("RAY_AUTH_TOKEN", "given")
    assert make_ray_token() is None
