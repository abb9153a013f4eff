"""Opens the links of a real process: its incarnation, its socket, its kernel's word on other processes."""

from __future__ import annotations

import os

from kvferry.actors.links import LinkLayer
from kvferry.actors.ports import Clock, Random
from kvferry.actors.settings import LinkSettings
from kvferry.cluster.pidwatch import PidfdWatch, host_id
from kvferry.cluster.zmq_carrier import ZmqCarrier

INCARNATION_BITS = 64


async def open_network(name: str, bind_host: str, settings: LinkSettings, clock: Clock, random: Random) -> LinkLayer:
    """Bind a socket on `bind_host` and draw an incarnation. The address is known at once; `start` takes frames.

    Raises OSError when the host can't be bound. Not started or not, it is for the caller to `close`.
    """
    carrier = ZmqCarrier(bind_host)
    incarnation = random.bits(INCARNATION_BITS)
    return LinkLayer(carrier, name, incarnation, settings, clock, random, PidfdWatch(), host_id(), os.getpid())
