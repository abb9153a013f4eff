"""Opens the links of a real process: its incarnation, its socket, its kernel's word on other processes."""

from __future__ import annotations

import os

from kvferry.actors.carrier import Carrier
from kvferry.actors.links import LinkLayer
from kvferry.actors.ports import Clock, Random
from kvferry.actors.settings import LinkSettings
from kvferry.cluster.pidwatch import PidfdWatch, host_id
from kvferry.cluster.zmq_carrier import ZmqCarrier

INCARNATION_BITS = 64


async def open_network(name: str, bind_host: str, settings: LinkSettings, clock: Clock, random: Random) -> LinkLayer:
    """Make the configured carrier and draw an incarnation. The address is known at once; `start` takes frames.

    Raises OSError when `bind_host` can't be bound, and RuntimeError when the carrier is "ray" and this process is not a
    named Ray actor. Not started or not, it is for the caller to `close`.
    """
    incarnation = random.bits(INCARNATION_BITS)
    carrier = _carrier(bind_host, settings, incarnation)
    return LinkLayer(carrier, name, incarnation, settings, clock, random, PidfdWatch(), host_id(), os.getpid())


def _carrier(bind_host: str, settings: LinkSettings, incarnation: int) -> Carrier:
    if settings.carrier == "ray":
        from kvferry.cluster.ray_carrier import RayCarrier  # Ray takes a second to import, which ZMQ does not need

        return RayCarrier(incarnation)
    return ZmqCarrier(bind_host)
