"""The processes of a running server, by the process table."""

from __future__ import annotations

import subprocess
from pathlib import Path

#: How Ray titles the process of the front's replica.
FRONT_TITLE = "ServeReplica:kvferry:front"


def descendants(root: int) -> set[int]:
    """`root` and every live process below it."""
    table = subprocess.run(["ps", "-eo", "pid=,ppid="], capture_output=True, text=True, check=True).stdout
    parents = {int(pid): int(parent) for pid, parent in (line.split() for line in table.splitlines())}
    found = {root}
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return {pid for pid in found if Path(f"/proc/{pid}").exists()}


def title(pid: int) -> str:
    """What the process calls itself; "" when it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return ""


def front_pid(root: int) -> int | None:
    """The front's replica in the server that `root` has started; None while there is none."""
    found = [pid for pid in descendants(root) if FRONT_TITLE in title(pid)]
    return max(found, default=None)
