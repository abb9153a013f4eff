"""`make cluster-test`: cluster.yaml and serve.yaml on two hosts, as an operator uses them.

Two hosts and the operator's machine are made of namespaces (hosts.py). `ray up`, `serve deploy`, two questions whose
answers must be those of one undivided process, with prefill and decode on different hosts, `ray down`. Needs root and a
few Debian packages; leaves nothing behind. Exit status 0: passed, 1: failed, 2: this machine can't run it.

Everything goes as in the files but for what only this machine has: addresses, the ssh key, and software that is
installed already, which the hosts share.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml
from hosts import Host, Hosts, Unusable, check_machine, quoted

ROOT = Path(__file__).parents[2]
URL = "http://{address}:8000"

SHORT = "What is the capital of France?"
#: Longer than a chunk of prefill, so that KV travels in several writes.
LONG = "Here is a list of numbers: " + ", ".join(str(n) for n in range(100, 190)) + ". Which number comes next?"

UP_S, JOIN_S, READY_S, ASK_S, DOWN_S = 400.0, 300.0, 300.0, 180.0, 180.0

#: Asks the head's dashboard which nodes are alive, and what each offers.
NODES = (
    "import json, pathlib, urllib.request as r; "
    "token = (pathlib.Path.home() / '.ray' / 'auth_token').read_text().strip(); "
    "ask = r.Request('http://127.0.0.1:8265/nodes?view=summary', headers={'Authorization': 'Bearer ' + token}); "
    "d = json.load(r.urlopen(ask, timeout=5))['data']; "
    "print(json.dumps([n['ip'] for n in d['summary'] if n['raylet'].get('state') == 'ALIVE']))"
)


class Failed(Exception):
    """The test has failed; the text says where."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--keep", metavar="DIRECTORY", help="leave the hosts' files (homes, Ray's logs) there")
    kept = parser.parse_args().keep
    directory = Path(kept or tempfile.mkdtemp(prefix="kvferry-hosts-"))
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        check_machine()
        with Hosts(directory) as hosts:
            Run(hosts).all()
        print("passed")
    except Unusable as error:
        print(f"make cluster-test can't run here: {error}", file=sys.stderr)
        return 2
    except Failed as error:
        print(f"FAILED: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 1
    finally:
        if not kept:
            shutil.rmtree(directory, ignore_errors=True)
    return 0


class Run:
    """The steps, in order. Each prints what it does."""

    def __init__(self, hosts: Hosts) -> None:
        self.hosts, self.operator = hosts, hosts.operator
        self.url = URL.format(address=hosts.head.address)

    def all(self) -> None:
        self.hosts_are_apart()
        self.prepare()
        self.do("kvferry secret", 60)
        self.do("ray get-auth-token --generate >/dev/null", 60)
        expected = {question: self.reference(question) for question in (SHORT, LONG)}
        self.do("ray up -y --no-config-cache cluster.yaml", UP_S)
        self.wait("both hosts are in the cluster", JOIN_S, self.nodes)
        self.do("ray exec cluster.yaml 'serve deploy ~/kvferry/serve.yaml'", 120)
        self.wait("every instance is ready", READY_S, self.ready)
        self.strangers_are_refused()
        self.do(f"ray exec cluster.yaml 'kvferry ask \"{SHORT}\"'", ASK_S)
        for question, text in expected.items():
            self.ask(question, text)
        self.at_rest()
        self.do("ray down -y cluster.yaml", DOWN_S)
        # `ray down` stops the head; Ray on other hosts of one's own ends when it has missed the head for a minute.
        self.wait("no actor and no node of Ray is left", 180, lambda: not self.left_over(), self.left_over)

    def hosts_are_apart(self) -> None:
        """Before anything is stopped there: `ray stop` kills all of Ray that it sees."""
        for kind in ("pid", "net", "mnt"):
            ours = str(Path(f"/proc/self/ns/{kind}").readlink())
            names = {ours, *(host.namespace(kind) for host in self.hosts.all)}
            if len(names) != 4:
                raise Failed(f"hosts share a {kind} namespace: {names}")
        print("two hosts and an operator, each with processes, network, /tmp and home of its own")

    def prepare(self) -> None:
        """The operator's checkout, with the two files as an operator would edit them; software that is there."""
        cluster = yaml.safe_load((ROOT / "cluster.yaml").read_text())
        checkout = self.operator.home / "checkout"
        for source in cluster["file_mounts"].values():
            if not source.startswith("~"):  # of the operator's own; they are made there
                copy(ROOT / source, checkout / source)
        head, worker = self.hosts.head, self.hosts.worker
        cluster["provider"] |= {"head_ip": head.address, "worker_ips": [worker.address]}
        cluster["auth"] = {"ssh_user": "root", "ssh_private_key": "~/key.pem"}
        there = "python -c 'import kvferry, nixl_cu12, torch'"
        cluster["setup_commands"] = [c for c in cluster["setup_commands"] if " -m pip " not in c] + [there]
        (checkout / "cluster.yaml").write_text(yaml.safe_dump(cluster, sort_keys=False))
        serve = yaml.safe_load((ROOT / "serve.yaml").read_text())
        serve["http_options"]["host"] = "0.0.0.0"
        args = serve["applications"][0]["args"]
        args["transfer"]["transports"] = "auto"  # no RDMA there: tcp
        args["cluster"]["bind_host"] = "node"
        (checkout / "serve.yaml").write_text(yaml.safe_dump(serve, sort_keys=False))
        for host, place in ((self.operator, "~/checkout"), (head, "~/kvferry"), (worker, "~/kvferry")):
            (host.home / "kvferry").mkdir()
            (host.home / "kvferry" / ".venv").symlink_to(sys.prefix)
            profile = f"export PYTHONPATH={place}/src RAY_USAGE_STATS_ENABLED=0 OMP_NUM_THREADS=1\n"
            profile += "export PATH=$HOME/kvferry/.venv/bin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin\n"
            (host.home / ".bash_profile").write_text(f"{profile}if [ -f ~/.bashrc ]; then . ~/.bashrc; fi\n")

    def reference(self, question: str) -> str:
        """The answer of one process that has both roles."""
        text: str = self.kvferry(f"ask --unified --max-tokens 32 --json {quoted(question)}")["text"]
        return text

    def ask(self, question: str, expected: str) -> None:
        answer = self.kvferry(f"ask --url {self.url} --max-tokens 32 --json {quoted(question)}")
        print(f"  asked:    {question if len(question) < 80 else question[:50] + ' … ' + question[-27:]}")
        print(f"  answered: {answer['text']!r}")
        if answer["text"] != expected:
            raise Failed(f"one process answers {expected!r}")
        room, status = self.kvferry(f"room {answer['room']} --url {self.url} --json"), self.status()
        hosts = {}
        for role in ("prefill", "decode"):
            instance = next(i for i in status["instances"] if i["id"] == room[role])
            rank = instance["ranks"][0]
            hosts[role] = (rank["host"], re.sub(r"tcp://|:\d+$", "", rank["endpoint"]))
        (prefill, prefill_ip), (decode, decode_ip) = hosts["prefill"], hosts["decode"]
        print(f"  {room['prefill']} on {prefill_ip}, {room['decode']} on {decode_ip}, "
              f"{room['kv_bytes']} bytes of KV over {room['backend']}, "
              f"{sum(e['event'] == 'written' for e in room['events'])} writes")  # fmt: skip
        if prefill == decode or {prefill_ip, decode_ip} != {self.hosts.head.address, self.hosts.worker.address}:
            raise Failed(f"prefill and decode did not run on the two hosts: {hosts}")
        if not room["outcome"]["ok"] or room["kv_bytes"] <= 0:
            raise Failed(f"the room did not move the KV: {room}")

    def strangers_are_refused(self) -> None:
        """Who has the network, but neither the token nor the secret, gets nothing from Ray or from a link."""
        head = self.hosts.head
        code = f"import ray; ray.init(address='{head.address}:6379', logging_level='ERROR'); print(ray.nodes())"
        environment = "env -u RAY_AUTH_MODE HOME=/tmp RAY_AUTH_MODE=disabled"
        done = self.operator.run(f"{environment} timeout 60 python -c {quoted(code)}", 90)
        if done.returncode == 0 or "uthenticat" not in done.stdout:
            raise Failed(f"Ray let in who has no token:\n{done.stdout[-2000:]}")
        modes = head.run("stat -c %a ~/.config/kvferry/cluster_secret ~/.ray/auth_token", 30).stdout.split()
        if modes != ["600", "600"]:
            raise Failed(f"the secrets have modes {modes} on {head.name}")
        print("  who has no token is refused by Ray; the secrets are their owner's alone")

    def at_rest(self) -> None:
        def idle() -> bool:
            pages = [instance["pages"] for instance in self.status()["instances"]]
            return all(p and p["free"] + p["cached"] == p["total"] and not p["quarantined"] for p in pages)

        self.wait("every page is free again", 30, idle)
        shown = self.run(self.operator, f"kvferry status --url {self.url}", 60)
        print("\n".join(line.rstrip() for line in shown.splitlines()))

    # --- asking the cluster ---

    def nodes(self) -> bool:
        done = self.hosts.head.run(f"python -c {quoted(NODES)}", 60)
        last = done.stdout.strip().rpartition("\n")[2]
        return done.returncode == 0 and sorted(json.loads(last)) == [
            self.hosts.head.address,
            self.hosts.worker.address,
        ]

    def ready(self) -> bool:
        code = "import sys, urllib.request as r; r.urlopen(sys.argv[1], timeout=10)"
        return self.operator.run(f"python -c {quoted(code)} {self.url}/ready", 60).returncode == 0

    def left_over(self) -> str:
        """Ray's processes, but for the worker's log monitor, which outlives its node."""
        lines = self.hosts.head.run("ps -eo pid,stat,args", 30).stdout.splitlines()
        lines += [
            line
            for line in self.hosts.worker.run("ps -eo pid,stat,args", 30).stdout.splitlines()
            if "log_monitor.py" not in line
        ]
        return "\n".join(line[:200] for line in lines if re.search(r"raylet|gcs_server|ray::|/ray/", line))

    def status(self) -> dict[str, Any]:
        return self.kvferry(f"status --url {self.url} --json")

    def kvferry(self, arguments: str) -> dict[str, Any]:
        answer: dict[str, Any] = json.loads(self.run(self.operator, f"kvferry {arguments} 2>/dev/null", ASK_S))
        return answer

    # --- running commands ---

    def do(self, command: str, limit_s: float) -> None:
        """What an operator types, in the checkout."""
        print(f"$ {command}", flush=True)
        started_s = time.monotonic()
        self.run(self.operator, command, limit_s, "~/checkout")
        print(f"  done in {time.monotonic() - started_s:.0f} s", flush=True)

    def run(self, host: Host, command: str, limit_s: float, directory: str = "~") -> str:
        done = host.run(f"timeout {limit_s:.0f} {command}", limit_s + 30, directory)
        if done.returncode != 0:
            tail = "\n".join(done.stdout.splitlines()[-40:])
            raise Failed(f"on {host.name}, `{command}` ended with {done.returncode}:\n{tail}")
        return done.stdout

    def wait(
        self, what: str, limit_s: float, holds: Callable[[], bool], evidence: Callable[[], str] | None = None
    ) -> None:
        started_s = time.monotonic()
        while not holds():
            if time.monotonic() - started_s > limit_s:
                raise Failed(f"not within {limit_s:.0f} s: {what}\n{(evidence or self.evidence)()}")
            time.sleep(1.0)
        print(f"  {what} (after {time.monotonic() - started_s:.0f} s)", flush=True)

    def evidence(self) -> str:
        """What the head says of itself, for a failure."""
        parts = []
        for command in (f"python -c \"import httpx; print(httpx.get('{self.url}/ready').text)\"", "ray status",
                        "serve status", "tail -n 40 /tmp/ray/session_latest/logs/monitor.log"):  # fmt: skip
            said = self.hosts.head.run(f"timeout 60 {command}", 90).stdout.splitlines()
            parts.append("\n".join([f"$ {command}", *said[-25:]]))
        return "\n".join(parts)


def copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    if source.is_dir():
        shutil.copytree(source, target, symlinks=True, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    else:
        shutil.copy(source, target)


if __name__ == "__main__":
    sys.exit(main())
