"""The controller: places one Ray actor per role and instance, and owns them, so that they end with it.

Ray Serve runs it as an actor of the front's deployment: it outlives replicas, and goes with the application.
"""

from __future__ import annotations

from typing import Any

import ray

from kvferry.cluster.config import Config
from kvferry.cluster.host import Host
from kvferry.cluster.names import NAMESPACE, all_names
from kvferry.cluster.placement import actor_options

#: A submit call stays open as long as its room: many calls per router at once.
CONCURRENT_CALLS = 4096

RemoteHost = ray.remote(Host)


class Controller:
    """Starts every actor of the configuration. Ray restarts one whose process has died."""

    def __init__(self, config: bytes) -> None:
        self._config = Config.from_bytes(config)
        self.hosts = {name: self._start(role, name, config) for role, name in all_names(self._config)}

    def _start(self, role: str, name: str, config: bytes) -> Any:
        return RemoteHost.options(
            name=name,
            namespace=NAMESPACE,
            num_cpus=0,
            **actor_options(role, self._config, ray.nodes()),
            max_restarts=-1,
            max_task_retries=0,
            max_concurrency=CONCURRENT_CALLS,
        ).remote(role, name, config)

    def names(self) -> list[str]:
        return list(self.hosts)


RemoteController = ray.remote(Controller)
