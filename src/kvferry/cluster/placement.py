"""Where Ray puts each actor: what has a slot goes where slots are, everything else stays with the head.

The head is the one host whose loss ends a Ray cluster anyway. With the front, the registry and the routers there, the
loss of any other host costs the ranks that ran on it and nothing more.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from kvferry.cluster.config import Config

#: Ray's own resource of the head's node. So little of it that any number of actors fits.
ON_HEAD = {"node:__internal_head__": 0.0001}


def actor_options(role: str, config: Config, nodes: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Ray's options that place an actor of `role`; `nodes` as `ray.nodes()` lists them.

    Ranks are spread over the hosts that have slots: the loss of one host then costs the fewest. With transports "host"
    they must share one, so all go to the host with the most slots while it lives.
    """
    if role in ("registry", "router"):
        return {"resources": ON_HEAD}
    slot = config.cluster.slot_resource
    options: dict[str, Any] = {"resources": {slot: 1}, "scheduling_strategy": "SPREAD"}
    alive = [node for node in nodes if node["Alive"] and slot in node["Resources"]]
    if config.transfer.transports == "host" and alive:
        most = max(alive, key=lambda node: (node["Resources"][slot], node["NodeID"]))
        options["scheduling_strategy"] = NodeAffinitySchedulingStrategy(most["NodeID"], soft=True)
    return options
