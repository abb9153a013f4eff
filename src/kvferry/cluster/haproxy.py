"""Runs in HAProxy's place and becomes it: closes what Ray would open beside the API, and ties it to Ray's own life.

Ray writes HAProxy's configuration and starts the program at RAY_SERVE_HAPROXY_BINARY_PATH with it; a script written by
`kvferry.cluster.ingress` stands there and runs this file: `python -I -S haproxy.py BINARY ARGUMENTS…`. So it imports
the standard library only. Three things of Ray 2.60 are put right:

* Two listeners (HAProxy's own metrics and its statistics page) open on all addresses, whatever host is configured, and
  nothing reads them. They go. If any other listener than the API's is left, nothing is started.
* An HAProxy outlives a Ray that dies abruptly, and keeps the port. The kernel now ends it with the process that
  started it.
* With `option splice-request` HAProxy (2.8) mostly overlooks that a client has left while its answer is awaited, in
  spite of `option abortonclose`, so prompts would be computed for nobody. It goes: our requests are short.
"""

from __future__ import annotations

import ctypes
import os
import re
import signal
import sys
from pathlib import Path

UNUSED = ("frontend prometheus", "listen stats")
API = "frontend http_frontend"
PR_SET_PDEATHSIG = 1

_SECTION = re.compile(r"(?m)^(?=\S)")
_BIND = re.compile(r"(?m)^\s+bind\s+(\S+)")
_SPLICE = re.compile(r"(?m)^\s+option splice-request\n")
_LOCAL_SERVER = re.compile(r"(?m)^(\s+server \S+ )127\.0\.0\.1:")


class UnknownConfiguration(Exception):
    """The configuration is not of the shape that is known here."""


def narrowed(text: str) -> str:
    """Ray's configuration with the API's listener and no other, and without `option splice-request`.

    The front's replica and Serve's fallback proxy bind the configured host, but Ray has HAProxy look for them at
    127.0.0.1; with another host than that the servers' lines follow it. Raises UnknownConfiguration.
    """
    kept = [section for section in _SECTION.split(text) if not section.startswith(UNUSED)]
    binds = [(section.splitlines()[0], address) for section in kept for address in _BIND.findall(section)]
    if len(binds) != 1 or binds[0][0] != API:
        raise UnknownConfiguration(f"its listeners are {binds}; expected one, of {API}")
    host, _, _ = binds[0][1].rpartition(":")
    text = _SPLICE.sub("", "".join(kept))
    return text if host in ("", "*") else _LOCAL_SERVER.sub(rf"\g<1>{host}:", text)


def end_with(parent: int) -> None:
    """Have the kernel kill this process, and what it becomes, when `parent` ends."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it has ended already
        sys.exit(1)


def main(binary: str, *arguments: str) -> None:
    """Does not return."""
    end_with(os.getppid())
    path = Path(arguments[arguments.index("-f") + 1])
    try:
        path.write_text(narrowed(path.read_text()))
    except UnknownConfiguration as error:
        sys.exit(f"{path}: {error}; HAProxy is not started, since it might listen where it should not")
    os.execv(binary, [binary, *arguments])


if __name__ == "__main__":
    main(*sys.argv[1:])
