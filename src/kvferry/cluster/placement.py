"""Where Ray puts each actor: what has a slot goes where slots are, everything else stays with the head.

The head is the one host whose loss ends a Ray cluster anyway. With the front, the registry and the routers there, the
loss of any other host costs the ranks that ran on it and nothing more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvferry.cluster.config import Config

#: Ray's own resource of the head's node. So little of it that any number of actors fits.
ON_HEAD = {"node:__internal_head__": 0.0001}


def target_node(config: Config, nodes: Sequence[dict[str, Any]], ours: Mapping[str, int]) -> str | None:
    """The node that an instance should go to; `nodes` as `ray.nodes()` lists them, `ours` counts the slots that
    instances have taken there already, by node.

    Instances are spread over the hosts that have slots: the loss of one host then costs the fewest. With transports
    "host" they must share one, so all go to the host with the most slots while it lives. None: no host has a slot.
    """
    slot = config.cluster.slot_resource
    slots = {node["NodeID"]: node["Resources"][slot] for node in nodes if node["Alive"] and slot in node["Resources"]}
    if not config.transfer.one_host:
        slots = {name: number - ours.get(name, 0) for name, number in slots.items()}
    return max(slots, key=lambda name: (slots[name], name), default=None)
