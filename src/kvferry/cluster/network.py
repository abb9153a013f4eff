"""Opens the links of a real process: its incarnation, its socket, its kernel's word on other processes."""

from __future__ import annotations

import os

import ray

from kvferry.actors.carrier import Carrier
from kvferry.actors.links import LinkLayer
from kvferry.actors.ports import Clock, Random
from kvferry.actors.settings import LinkSettings
from kvferry.cluster.pidwatch import PidfdWatch, host_id
from kvferry.cluster.zmq_carrier import ZmqCarrier
from kvferry.protocol.address import Address
from kvferry.protocol.errors import ConfigError

INCARNATION_BITS = 64

#: `cluster.bind_host`: not an address, but this process's own node's.
NODE = "node"


def own_host(bind_host: str) -> str:
    """The address where this process listens: `bind_host`, or the one by which the Ray cluster knows this node."""
    return str(ray.util.get_node_ip_address()) if bind_host == NODE else bind_host


def check_reachable(bind_host: str, peer: Address) -> None:
    """Raises ConfigError when the addresses on both sides are loopback ones, but `peer` lives on another host."""
    endpoint_host = peer.endpoint.removeprefix("tcp://").rpartition(":")[0].strip("[]")
    if peer.host != host_id() and (endpoint_host.startswith("127.") or endpoint_host in ("localhost", "::1")):
        allowed = f"node, or an address that other hosts reach: {peer.name} runs on another host"
        raise ConfigError("applications[0].args.cluster.bind_host", bind_host, allowed)


async def open_network(name: str, bind_host: str, settings: LinkSettings, clock: Clock, random: Random) -> LinkLayer:
    """Make the configured carrier and draw an incarnation. The address is known at once; `start` takes frames.
    `bind_host` is an address, or `NODE`.

    Raises OSError when `bind_host` can't be bound, and RuntimeError when the carrier is "ray" and this process is not a
    named Ray actor. Not started or not, it is for the caller to `close`.
    """
    incarnation = random.bits(INCARNATION_BITS)
    carrier = _carrier(bind_host, settings, incarnation)
    return LinkLayer(carrier, name, incarnation, settings, clock, random, PidfdWatch(), host_id(), os.getpid())


def _carrier(bind_host: str, settings: LinkSettings, incarnation: int) -> Carrier:
    if settings.carrier == "ray":
        from kvferry.cluster.ray_carrier import RayCarrier

        return RayCarrier(incarnation)
    return ZmqCarrier(own_host(bind_host))
