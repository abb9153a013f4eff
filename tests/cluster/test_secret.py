"""The cluster's secret: who makes it, who may read it, and that it shows nowhere."""

from __future__ import annotations

import hashlib
import os
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kvferry.cluster.secret import VARIABLE, Secret, load_secret, make_secret, secret_path
from kvferry.protocol.errors import ConfigError


@pytest.fixture(autouse=True)
def _no_secret_from_outside(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))


def refusal(configured: str | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        load_secret(configured)
    return str(caught.value)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_it_is_made_once_and_for_its_owner_alone(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        path = make_secret(None)
    finally:
        os.umask(before)
    assert path == tmp_path / "config" / "kvferry" / "cluster_secret" == secret_path(None)
    assert (mode(path), mode(path.parent)) == (0o600, 0o700)
    assert len(path.read_text().strip()) == 64 and bytes.fromhex(path.read_text().strip()) != bytes(32)
    assert make_secret(None) is None and [entry.name for entry in path.parent.iterdir()] == ["cluster_secret"]
    assert load_secret(None).key("a") == load_secret(str(path)).key("a")


def test_of_those_that_make_it_at_once_one_does(tmp_path: Path) -> None:
    where = str(tmp_path / "s" / "secret")
    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(lambda _: make_secret(where), range(8)))
    assert [path for path in made if path is not None] == [Path(where)]
    assert len(list((tmp_path / "s").iterdir())) == 1


def test_each_purpose_has_its_own_key() -> None:
    """Against Python's BLAKE2b, as RFC 7693 defines keyed hashing."""
    secret = Secret(bytes(range(32)))
    expected = hashlib.blake2b(b"links", key=bytes(range(32)), digest_size=32).digest()
    assert secret.key("links") == expected != secret.key("registry")
    assert bytes(range(32)).hex() not in repr(secret) and repr(secret) == "Secret(hidden)"


@pytest.mark.parametrize("bits", [0o640, 0o604, 0o622, 0o660])
def test_a_file_that_others_can_read_is_refused(tmp_path: Path, bits: int) -> None:
    path = tmp_path / "secret"
    make_secret(str(path))
    path.chmod(bits)
    text = refusal(str(path))
    assert str(path) in text and f"{bits:04o}" in text and "cluster.secret_file" in text
    path.chmod(0o400)
    load_secret(str(path))


def test_a_folder_that_others_can_write_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "open" / "secret"
    make_secret(str(path))
    path.parent.chmod(0o770)
    assert "0770" in refusal(str(path)) and str(path.parent) in refusal(str(path))
    path.parent.chmod(0o755)
    load_secret(str(path))


def test_without_one_it_says_how_to_get_it() -> None:
    text = refusal()
    assert str(secret_path(None)) in text and "No such file" in text and "kvferry secret" in text


@pytest.mark.parametrize("content", ["", "short", "g" * 64, "a" * 63, "a" * 65, "ab" * 32 + " " + "cd" * 32])
def test_what_is_no_secret_is_refused_and_not_shown(tmp_path: Path, content: str) -> None:
    path = tmp_path / "secret"
    path.write_text(content)
    path.chmod(0o600)
    text = refusal(str(path))
    assert "64 hexadecimal digits" in text and (len(content) < 10 or content not in text)


def test_no_regular_file_and_no_place_to_make_one(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"a place where a file can be made"):
        make_secret(str(tmp_path / "file" / "below" / "secret"))
    assert "regular file" in refusal("/dev/null")


def test_the_variable_stands_for_the_default_file_only(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(VARIABLE, "0f" * 32)
    assert make_secret(None) is None and not secret_path(None).exists()
    assert load_secret(None).key("x") == Secret(b"\x0f" * 32).key("x")
    path = tmp_path / "other"
    make_secret(str(path))
    assert load_secret(str(path)).key("x") != load_secret(None).key("x")
    monkeypatch.setenv(VARIABLE, "0f")
    assert VARIABLE in refusal()
