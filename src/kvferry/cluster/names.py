"""Names of the actors: the Ray name, the instance's name in the registry and the link name are one and the same.

Names of instances are given by `kvferry.actors.pools`.
"""

from __future__ import annotations

NAMESPACE = "kvferry"
REGISTRY = "registry"
CONTROLLER = "controller"
