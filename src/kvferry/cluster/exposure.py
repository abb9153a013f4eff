"""What other hosts reach of a cluster, and whether they must show something there.

Ray listens on every address of a host, whatever is configured, and whoever may talk to it may run any program: its
token is what keeps others out. So on an address that other hosts reach nothing starts without it, nor with links that
are open to everybody, unless the configuration says that this is meant.
"""

from __future__ import annotations

import logging
import os
import secrets
import stat
from collections.abc import Mapping
from pathlib import Path

from kvferry.actors.bootstrap.ranks import is_loopback
from kvferry.cluster.config import Config
from kvferry.cluster.secret import write_private
from kvferry.protocol.errors import ConfigError

log = logging.getLogger("kvferry.cluster")

AUTH_MODE = "RAY_AUTH_MODE"
_TOKENS = ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")


def asks_for_token(environment: Mapping[str, str], unset: bool) -> bool:
    """Ray's processes that are started from this environment ask for its token. `unset`: what holds where nothing is
    said; a cluster that `ray.init` starts does, one that `ray start` starts does not."""
    mode = environment.get(AUTH_MODE)
    return unset if mode is None else mode.lower() != "disabled"


def check_exposure(config: Config, ray_token: bool) -> None:
    """Raises ConfigError when other hosts reach something that asks them for nothing; with `cluster.insecure` that is
    a line in the log."""
    reached = _reached(config)
    lacking = _lacking(config, ray_token)
    if not reached or not lacking:
        return
    key, value = reached[0]
    problem = " and ".join(lacking)
    if not config.cluster.insecure:
        raise ConfigError(key, value, f"a loopback address as long as {problem}; or cluster.insecure: true")
    log.warning("cluster.insecure is true: %s is %r, and %s", key, value, problem)


def _reached(config: Config) -> list[tuple[str, str]]:
    """(key, value) of the addresses that are not loopback ones; `node` is none."""
    args = "applications[0].args"
    addresses = [("http_options.host", config.http.host), (f"{args}.cluster.bind_host", config.cluster.bind_host)]
    if config.registry.http_port:
        addresses.append((f"{args}.registry.http_host", config.registry.http_host))
    return [(key, host) for key, host in addresses if not is_loopback(host)]


def _lacking(config: Config, ray_token: bool) -> list[str]:
    lacking = [] if ray_token else [f"Ray asks for no token ({AUTH_MODE}=token for all its processes turns that on)"]
    if config.links.carrier == "zmq" and not config.links.encrypted:
        lacking.append("links.encrypted is false")
    return lacking


def make_ray_token() -> str | None:
    """Make Ray's token where there is none, before Ray does: it would let everybody read it. What is to be said about
    one that everybody can read already, or None. Raises OSError where none can be made.
    """
    if any(name in os.environ for name in _TOKENS):
        return None
    path = Path.home() / ".ray" / "auth_token"
    try:
        path.parent.mkdir(mode=0o700, exist_ok=True)
        write_private(path, secrets.token_hex(32))
    except FileExistsError:
        mode = stat.S_IMODE(path.stat().st_mode)
        if mode & 0o077:
            return f"others can read Ray's token: {path} has mode {mode:04o}; chmod 600 {path}"
    return None
