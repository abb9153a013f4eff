"""HAProxy as Ray configures it and as it runs here: one listener, no process and no folder left behind."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from ray.serve._private.haproxy import BackendConfig, HAProxyApi, HAProxyConfig, ServerConfig
from ray.serve.config import HTTPOptions, gRPCOptions

from kvferry.cluster import ingress
from kvferry.cluster.config import ClusterSettings, Config, HttpSettings
from kvferry.cluster.haproxy import UnknownConfiguration, narrowed


def configured(folder: Path, host: str, port: int, **options: object) -> Path:
    """The file that Ray 2.60 itself writes for one application with a replica and the fallback proxy."""
    folder.mkdir(exist_ok=True)
    settings = HAProxyConfig(
        http_options=HTTPOptions(host=host, port=port), is_head=True, socket_path=str(folder / "admin.sock"),
        server_state_base=str(folder), server_state_file=str(folder / "server-state"),
        metrics_socket_path=str(folder / "metrics.sock"), **options,
    )  # fmt: skip
    backend = BackendConfig(
        "http-kvferry", "/", servers=[ServerConfig("replica", "127.0.0.1", 30000)], app_name="kvferry",
        fallback_server=ServerConfig("fallback", "127.0.0.1", 8500),
    )  # fmt: skip
    file = folder / "haproxy.cfg"
    HAProxyApi(settings, {"http-kvferry": backend}, str(file))._generate_config_file_internal()
    return file


def binds(text: str) -> list[str]:
    return re.findall(r"^\s+bind (\S+)", text, re.MULTILINE)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def listeners(port: int) -> set[str]:
    """Local IPv4 addresses, in hex, on which something listens at `port`."""
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return {row[1].split(":")[0] for row in rows if row[3] == "0A" and int(row[1].split(":")[1], 16) == port}


def wait(holds: Callable[[], bool]) -> None:
    """The test's own timeout ends a wait for nothing."""
    while not holds():
        time.sleep(0.02)


def test_only_the_apis_listener_is_left(tmp_path: Path) -> None:
    """Ray opens two more on all addresses. All else stays as it was."""
    text = configured(tmp_path, "127.0.0.1", 8000).read_text()
    assert sorted(binds(text)) == ["*:8404", "127.0.0.1:8000", ":9101"]
    narrow = narrowed(text)
    assert binds(narrow) == ["127.0.0.1:8000"]
    assert "server replica 127.0.0.1:30000" in narrow and "stats socket" in narrow
    gone = [line for line in text.splitlines() if line not in narrow.splitlines()]
    assert gone.pop(0) == "    option splice-request" and "    option abortonclose" in narrow.splitlines()
    assert gone[0] == "frontend prometheus" and "listen stats" in gone and len(gone) == 9  # the two sections
    assert narrowed(narrow) == narrow


def test_the_servers_stand_where_the_host_says(tmp_path: Path) -> None:
    """Replica and fallback proxy bind the configured host; behind a wildcard they are at 127.0.0.1, too."""
    narrow = narrowed(configured(tmp_path, "192.0.2.7", 81).read_text())
    assert binds(narrow) == ["192.0.2.7:81"]
    assert re.findall(r"^\s+server (\w+) (\S+)", narrow, re.MULTILINE) == [
        ("replica", "192.0.2.7:30000"), ("fallback", "192.0.2.7:8500")
    ]  # fmt: skip
    everywhere = narrowed(configured(tmp_path, "0.0.0.0", 81).read_text())
    assert binds(everywhere) == ["*:81"] and "server replica 127.0.0.1:30000" in everywhere


def test_a_listener_that_is_not_known_here_is_refused(tmp_path: Path) -> None:
    grpc = gRPCOptions(port=9000, grpc_servicer_functions=["a.b"])
    text = configured(tmp_path, "127.0.0.1", 8000, grpc_options=grpc).read_text()
    with pytest.raises(UnknownConfiguration, match="grpc_frontend"):
        narrowed(text)
    with pytest.raises(UnknownConfiguration):
        narrowed(text[: text.index("frontend http_frontend")])


@pytest.fixture
def prepared(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Path, int]]:
    """Inside a start with HAProxy: its folder, and the port that it is for."""
    before = os.environ.get("RAY_SERVE_HAPROXY_SOCKET_PATH"), os.environ.get(ingress.ENABLED)
    port = free_port()
    config = Config(http=HttpSettings(port=port), cluster=ClusterSettings(ingress="haproxy"))
    with ingress.prepared(config):
        yield Path(os.environ["RAY_SERVE_HAPROXY_SOCKET_PATH"]).parent, port
    assert (os.environ.get("RAY_SERVE_HAPROXY_SOCKET_PATH"), os.environ.get(ingress.ENABLED)) == before


PARENT = "import subprocess, sys; print(subprocess.Popen(sys.argv[1:]).pid, flush=True); input()"


def started(folder: Path, port: int, replica: int = 30000) -> tuple[subprocess.Popen[str], int]:
    """A process that starts HAProxy as Ray does; it, and HAProxy's pid. `replica` is the port of what it serves."""
    file = configured(folder / "node", "127.0.0.1", port)
    file.write_text(file.read_text().replace("127.0.0.1:30000", f"127.0.0.1:{replica}"))
    command = [os.environ["RAY_SERVE_HAPROXY_BINARY_PATH"], "-db", "-f", str(file), "-dR"]
    pipe = subprocess.PIPE
    parent = subprocess.Popen([sys.executable, "-c", PARENT, *command], stdin=pipe, stdout=pipe, text=True)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    wait(lambda: bool(listeners(port)))
    return parent, pid


def test_haproxy_listens_there_only_and_ends_with_the_process_that_started_it(prepared: tuple[Path, int]) -> None:
    """A Ray that is killed takes it along; the pid is HAProxy's own, as Ray expects."""
    folder, port = prepared
    assert folder.stat().st_mode & 0o777 == 0o700
    known = listeners(9101), listeners(8404)
    parent, pid = started(folder, port)
    assert listeners(port) == {"0100007F"}  # 127.0.0.1
    assert (listeners(9101), listeners(8404)) == known
    assert ingress.processes_of(folder) == [pid]
    assert "haproxy" in Path(f"/proc/{pid}/exe").readlink().name
    parent.send_signal(signal.SIGKILL)
    parent.communicate()
    wait(lambda: not listeners(port))
    wait(lambda: ingress.processes_of(folder) == [])


def request_at(replica: socket.socket) -> socket.socket:
    """The connection of the next request, read to its end; HAProxy's health checks before it are answered."""
    while True:
        connection, _ = replica.accept()
        request = b""
        while b"\r\n\r\n" not in request and (part := connection.recv(65536)):
            request += part
        if request.startswith(b"POST"):
            while not request.endswith(b"the end"):
                request += connection.recv(65536)
            return connection
        if request:
            connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
        connection.close()


def test_a_client_that_leaves_before_the_answer_is_noticed(prepared: tuple[Path, int]) -> None:
    """What serves its request learns it, every time: the connection ends. (Else the test's time limit runs out.)"""
    folder, port = prepared
    body = b"x" * 9000 + b"the end"
    head = f"POST / HTTP/1.1\r\nHost: here\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    with socket.create_server(("127.0.0.1", 0)) as replica:
        parent, _ = started(folder, port, replica.getsockname()[1])
        for _ in range(8):
            client = socket.create_connection(("127.0.0.1", port))
            client.sendall(head)
            time.sleep(0.02)  # as clients do that send the head by itself: HAProxy would splice the body
            client.sendall(body)
            with request_at(replica) as connection:
                client.close()
                with contextlib.suppress(ConnectionResetError):  # one way for it to end
                    assert connection.recv(1) == b""
        parent.communicate("\n")


def test_what_is_left_at_the_end_is_ended() -> None:
    config = Config(http=HttpSettings(port=free_port()), cluster=ClusterSettings(ingress="haproxy"))
    with ingress.prepared(config):
        folder = Path(os.environ["RAY_SERVE_HAPROXY_SOCKET_PATH"]).parent
        parent, _ = started(folder, config.http.port)
    wait(lambda: not listeners(config.http.port))
    assert not folder.exists()
    parent.communicate("\n")


def test_leftovers_of_the_dead_are_cleared_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ingress, "PARENT", tmp_path)
    dead, living, foreign, other = (tmp_path / name for name in ("kvi-dead", "kvi-living", "kvi-foreign", "other"))
    for folder in (dead, living, foreign, other):
        folder.mkdir()
    for folder in (dead, living, other):
        (folder / ingress.LOCK).touch()
    with (living / ingress.LOCK).open("r+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        ingress.clear_leftovers()
        assert sorted(path.name for path in tmp_path.iterdir()) == ["kvi-foreign", "kvi-living", "other"]


def test_serves_own_proxy_is_chosen_as_plainly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the environment said before."""
    monkeypatch.setenv(ingress.ENABLED, "1")
    assert ingress.ingress_here() == "haproxy"
    with ingress.prepared(Config()):
        assert ingress.ingress_here() == "serve"
    assert ingress.ingress_here() == "haproxy"
    assert msgspec.to_builtins(Config())["cluster"]["ingress"] == "serve"
