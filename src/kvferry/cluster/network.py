"""Opens the links of a real process: its incarnation, its socket, its kernel's word on other processes."""

from __future__ import annotations

import logging
import os

import ray

from kvferry.actors.carrier import Carrier
from kvferry.actors.links import LinkLayer
from kvferry.actors.ports import Clock, Random
from kvferry.actors.settings import LinkSettings
from kvferry.cluster.pidwatch import PidfdWatch
from kvferry.cluster.secret import Secret, load_secret
from kvferry.cluster.zmq_carrier import ZmqCarrier
from kvferry.cluster.zmq_curve import curve_keys
from kvferry.protocol.address import Address
from kvferry.protocol.errors import ConfigError
from kvferry.transfer.shared import host_identity

log = logging.getLogger("kvferry.links")

INCARNATION_BITS = 64

#: `cluster.bind_host`: not an address, but this process's own node's.
NODE = "node"


def own_host(bind_host: str) -> str:
    """The address where this process listens: `bind_host`, or the one by which the Ray cluster knows this node."""
    return str(ray.util.get_node_ip_address()) if bind_host == NODE else bind_host


def check_reachable(bind_host: str, peer: Address) -> None:
    """Raises ConfigError when the addresses on both sides are loopback ones, but `peer` lives on another host."""
    endpoint_host = peer.endpoint.removeprefix("tcp://").rpartition(":")[0].strip("[]")
    if peer.host != host_identity() and (endpoint_host.startswith("127.") or endpoint_host in ("localhost", "::1")):
        allowed = f"node, or an address that other hosts reach: {peer.name} runs on another host"
        raise ConfigError("applications[0].args.cluster.bind_host", bind_host, allowed)


def secret_of(settings: LinkSettings, secret_file: str | None) -> Secret | None:
    """What links need of the cluster's secret: nothing where they are not encrypted, or where Ray carries them.
    Raises ConfigError where it can't be had."""
    return load_secret(secret_file) if settings.carrier == "zmq" and settings.encrypted else None


async def open_network(
    name: str, bind_host: str, settings: LinkSettings, clock: Clock, random: Random, secret: Secret | None = None
) -> LinkLayer:
    """Make the configured carrier and draw an incarnation. The address is known at once; `start` takes frames.
    `bind_host` is an address, or `NODE`; `secret` is that of `secret_of`.

    Raises OSError when `bind_host` can't be bound, and RuntimeError when the carrier is "ray" and this process is not a
    named Ray actor, or when links are to be encrypted and there is no secret. Not started or not, it is for the caller
    to `close`.
    """
    incarnation = random.bits(INCARNATION_BITS)
    carrier = _carrier(name, bind_host, settings, incarnation, secret)
    return LinkLayer(carrier, name, incarnation, settings, clock, random, PidfdWatch(), host_identity(), os.getpid())


def _carrier(name: str, bind_host: str, settings: LinkSettings, incarnation: int, secret: Secret | None) -> Carrier:
    if settings.carrier == "ray":
        from kvferry.cluster.ray_carrier import RayCarrier

        return RayCarrier(incarnation)
    if not settings.encrypted:
        log.warning("%s: links.encrypted is false; whoever reaches its port can read and write its links", name)
        return ZmqCarrier(own_host(bind_host))
    if secret is None:
        raise RuntimeError(f"{name}: links.encrypted is true, and no secret was given")
    return ZmqCarrier(own_host(bind_host), keys=curve_keys(secret))
