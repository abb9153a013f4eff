"""Hosts made of namespaces: each has its own network, processes, host name, /tmp, home and shared memory, and an sshd.

What they share is the kernel and the installed software. A host is one process tree below `unshare`, which the kernel
kills when this process ends, however it ends; devices, addresses and mounts go with their namespaces. So nothing has
to be undone, and nothing that runs inside can reach a process outside.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

#: Commands that are needed, and the Debian package that has each.
NEEDED = {
    "ip": "iproute2", "unshare": "util-linux", "nsenter": "util-linux", "setpriv": "util-linux", "mount": "mount",
    "hostname": "hostname", "ssh": "openssh-client", "ssh-keygen": "openssh-client", "/usr/sbin/sshd": "openssh-server",
    "rsync": "rsync",
}  # fmt: skip

SSHD_CONFIG = """\
ListenAddress {address}
HostKey /run/host/etc/host_key
PidFile none
UsePAM no
StrictModes no
PasswordAuthentication no
PermitRootLogin prohibit-password
AuthorizedKeysFile /run/host/etc/authorized_keys
"""


class Unusable(Exception):
    """This machine can't have such hosts; the text says what is missing."""


def check_machine() -> None:
    """Raises Unusable."""
    if os.geteuid() != 0:
        raise Unusable("namespaces need root: run it as root")
    missing = sorted({package for command, package in NEEDED.items() if shutil.which(command) is None})
    if missing:
        raise Unusable(f"programs are missing; on Debian: apt-get install {' '.join(missing)}")
    tried = subprocess.run(["unshare", "-m", "-p", "-u", "-n", "-i", "-f", "true"], capture_output=True, text=True)
    if tried.returncode != 0:
        raise Unusable(f"the kernel gives no namespaces here: {tried.stderr.strip()}")


def software() -> list[str]:
    """Where this Python, its standard library and its packages lie, outermost paths only."""
    prefixes = {sys.prefix, sys.base_prefix, str(Path(sys.executable).resolve().parent.parent)}
    places = sorted({os.path.realpath(p) for p in prefixes} | prefixes)
    hidden = ("/tmp", "/var/tmp", "/run", str(Path.home()))
    return [p for p in places if any(Path(p).is_relative_to(h) for h in hidden)]


class Host:
    """One host. `directory` is its place outside: `home` and `tmp` below it are its own."""

    def __init__(self, name: str, address: str, directory: Path) -> None:
        self.name, self.address, self.directory = name, address, directory
        self._process: subprocess.Popen[str] | None = None
        self._pid = 0

    @property
    def home(self) -> Path:
        return self.directory / "home"

    def start(self, etc_hosts: str, public_key: str) -> None:
        """Its namespaces and mounts; it waits for its network then."""
        for part in ("home", "tmp", "etc"):
            (self.directory / part).mkdir(parents=True)
        etc = self.directory / "etc"
        (etc / "hosts").write_text(etc_hosts)
        (etc / "authorized_keys").write_text(public_key)
        (etc / "sshd_config").write_text(SSHD_CONFIG.format(address=self.address))
        make_key(etc / "host_key")
        init = Path(__file__).with_name("host_init.sh")
        namespaces = ["unshare", "-m", "-p", "-u", "-n", "-i", "-f", "--kill-child=KILL", "--mount-proc"]
        self._process = subprocess.Popen(
            ["setpriv", "--pdeathsig", "KILL", *namespaces, init, self.directory, self.name, *software()],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=(self.directory / "sshd.log").open("w"),
            text=True,
            start_new_session=True,  # Ctrl-C is for the test, which ends us in its own order
        )
        assert self._process.stdout is not None
        if self._process.stdout.readline().strip() != "mounted":
            raise Unusable(f"{self.name}: {(self.directory / 'sshd.log').read_text().strip()}")
        pid = self._process.pid
        self._pid = int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])

    def go(self) -> None:
        """The network is there: start sshd."""
        assert self._process is not None and self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()

    def network(self, *command: str) -> None:
        """A command of the outside on this host's network. Raises subprocess.CalledProcessError."""
        subprocess.run(["nsenter", "-t", str(self._pid), "-n", *command], check=True)

    def attach(self, bridge: Host, port: str) -> None:
        """Plug this host into the switch of `bridge`; its way out leads there too, so that it finds its own address."""
        bridge.network("ip", "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", str(self._pid))
        bridge.network("ip", "link", "set", port, "master", "switch", "up")
        for words in (
            f"addr add {self.address}/24 dev eth0", "link set lo up", "link set eth0 up",
            f"route add default via {bridge.address}",
        ):  # fmt: skip
            self.network("ip", *words.split())

    def namespace(self, kind: str) -> str:
        return os.readlink(f"/proc/{self._pid}/ns/{kind}")  # noqa: PTH115

    def run(self, command: str, limit_s: float, directory: str = "~") -> subprocess.CompletedProcess[str]:
        """A shell command on this host, as ssh would run it. Raises subprocess.TimeoutExpired."""
        inside = [
            "nsenter", "-t", str(self._pid), "-m", "-u", "-n", "-i", "-p", "env", "-i", f"HOME={Path.home()}",
            "TERM=dumb", "LANG=C.UTF-8", "bash", "--login", "-c", f"cd {directory} && {command}",
        ]  # fmt: skip
        return subprocess.run(
            inside, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            timeout=limit_s, start_new_session=True,
        )  # fmt: skip

    def stop(self) -> None:
        """Ends every process of the host at once; its namespaces go with the last one."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            for stream in (self._process.stdin, self._process.stdout):
                assert stream is not None
                stream.close()
            self._process = None


class Hosts:
    """An operator's machine, which also is the switch, and two hosts; a context manager. Raises Unusable."""

    def __init__(self, directory: Path) -> None:
        self.operator = Host("operator", "10.77.0.254", directory / "operator")
        self.head = Host("head", "10.77.0.1", directory / "head")
        self.worker = Host("worker", "10.77.0.2", directory / "worker")
        self.all = [self.operator, self.head, self.worker]
        self._directory = directory

    def __enter__(self) -> Hosts:
        self._directory.mkdir(parents=True, exist_ok=True)
        key = self._directory / "key"
        make_key(key)
        lines = ["127.0.0.1 localhost", *(f"{host.address} {host.name}" for host in self.all)]
        try:
            for host in self.all:
                host.start("\n".join(lines) + "\n", key.with_suffix(".pub").read_text())
            shutil.copy(key, self.operator.home / "key.pem")
            self._connect()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for host in self.all:
            host.stop()

    def _connect(self) -> None:
        switch = self.operator
        for words in (
            "link set lo up", "link add switch type bridge", f"addr add {switch.address}/24 dev switch",
            "link set switch up",
        ):  # fmt: skip
            switch.network("ip", *words.split())
        switch.go()
        for number, host in enumerate((self.head, self.worker)):
            host.attach(switch, f"port{number}")
            host.go()


def make_key(path: Path) -> None:
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", path], check=True)


def quoted(*words: object) -> str:
    return shlex.join(str(word) for word in words)
