"""The cluster's secret: 32 random bytes that all its processes hold, and from which they derive their keys.

It lies in a file that only its owner may read, as 64 hexadecimal digits, and is the same on every host. It never
travels in a message, an actor's arguments or the configuration: those name the file. Who holds it is a member of the
cluster: its links are open to them, and the registry takes their word.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import stat
from pathlib import Path

from kvferry.cluster.config import Config
from kvferry.protocol.errors import ConfigError

SECRET_BYTES = 32
#: The secret itself, where no file can be put: in containers. `cluster.secret_file` comes before it.
VARIABLE = "KVFERRY_CLUSTER_SECRET"
KEY = "applications[0].args.cluster.secret_file"

_FORM = re.compile(rb"[0-9a-fA-F]{%d}" % (2 * SECRET_BYTES))
_RULE = f"{2 * SECRET_BYTES} hexadecimal digits"


class Secret:
    """Gives a key for each purpose. No key tells anything about another one, or about the secret; nor does `repr`."""

    __slots__ = ("_data",)

    def __init__(self, data: bytes) -> None:
        if len(data) != SECRET_BYTES:
            raise ValueError(f"a secret has {SECRET_BYTES} bytes, not {len(data)}")
        self._data = data

    def key(self, purpose: str) -> bytes:
        """32 bytes: BLAKE2b (RFC 7693) keyed with the secret."""
        return hashlib.blake2b(purpose.encode(), key=self._data, digest_size=32).digest()

    def __repr__(self) -> str:
        return "Secret(hidden)"


def registry_token(secret: Secret) -> str:
    """What a writer shows the registry's HTTP routes. It opens nothing else."""
    return secret.key("registry: bearer token").hex()


def needs_secret(config: Config) -> bool:
    """Whether any process of this configuration reads it."""
    return bool((config.links.carrier == "zmq" and config.links.encrypted) or config.registry.http_port)


def secret_path(configured: str | None) -> Path:
    """`cluster.secret_file`, or the place below the user's configuration folder."""
    if configured is not None:
        return Path(configured).expanduser()
    folder = os.environ.get("XDG_CONFIG_HOME") or "~/.config"
    return Path(folder).expanduser() / "kvferry" / "cluster_secret"


def load_secret(configured: str | None) -> Secret:
    """The secret of this host. Raises ConfigError where there is none, or where others could read or replace it."""
    if configured is None and VARIABLE in os.environ:
        return _parse(os.environ[VARIABLE].encode(errors="replace"), VARIABLE, f"what {VARIABLE} says")
    path = secret_path(configured)
    try:
        with path.open("rb") as file:
            _check_private(path, os.fstat(file.fileno()))
            content = file.read(4096)
    except OSError as error:
        allowed = (
            f"a readable file with the cluster's secret, the same on every host ({error.strerror}); "
            "`kvferry secret` makes it on one host, to be copied to the others"
        )
        raise ConfigError(KEY, str(path), allowed) from None
    return _parse(content, str(path), "the file")


def make_secret(configured: str | None) -> Path | None:
    """Make the secret if there is none; of several that try at once, one does. The path of a new file, else None.

    Raises ConfigError as `load_secret`, also for a place where no file can be made.
    """
    path = secret_path(configured)
    if (configured is None and VARIABLE in os.environ) or path.exists():
        load_secret(configured)
        return None
    draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_private(draft, f"{secrets.token_hex(SECRET_BYTES)}\n")
        try:
            os.link(draft, path)  # unlike a rename it never replaces what another process has just made
            made = True
        except FileExistsError:
            made = False
        finally:
            draft.unlink()
    except OSError as error:
        raise ConfigError(KEY, str(path), f"a place where a file can be made ({error.strerror})") from None
    load_secret(configured)
    return path if made else None


def write_private(path: Path, text: str) -> None:
    """A new file that nobody but us may read, at no moment. Raises OSError, FileExistsError among them."""
    with os.fdopen(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "w") as file:
        os.fchmod(file.fileno(), 0o600)  # whatever the umask
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _check_private(path: Path, found: os.stat_result) -> None:
    mode = stat.S_IMODE(found.st_mode)
    if not stat.S_ISREG(found.st_mode):
        raise ConfigError(KEY, str(path), "a regular file")
    if mode & 0o077:
        allowed = f"a file that only its owner may read (its mode is {mode:04o}: chmod 600 {path})"
        raise ConfigError(KEY, str(path), allowed)
    if found.st_uid not in (os.geteuid(), 0):
        raise ConfigError(KEY, str(path), f"a file of this user's (it belongs to user {found.st_uid})")
    folder = path.parent.stat()
    mode = stat.S_IMODE(folder.st_mode)
    if mode & 0o022 and not mode & stat.S_ISVTX:
        allowed = f"a file in a folder that only its owner may write (its mode is {mode:04o}: chmod 700 {path.parent})"
        raise ConfigError(KEY, str(path), allowed)


def _parse(content: bytes, where: str, what: str) -> Secret:
    digits = content.strip()
    if not _FORM.fullmatch(digits):  # what stands there may be a secret with a slip: it is not shown
        raise ConfigError(KEY, where, f"{_RULE}, and {what} is {len(digits)} characters of another form")
    return Secret(bytes.fromhex(digits.decode()))
