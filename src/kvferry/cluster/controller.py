"""The controller: the Ray host of the pools. It owns every other actor, so that they end with it.

Ray Serve runs it as an actor of the front's deployment: it outlives replicas, and goes with the application. When it
dies, Serve starts another, which begins with the configuration's numbers; a front that remembers others tells it.
"""

from __future__ import annotations

import asyncio
import logging
import os
from typing import Any

import ray

from kvferry.actors.pools import Pools
from kvferry.cluster.clock import SystemClock, SystemRandom
from kvferry.cluster.config import Config
from kvferry.cluster.hosting import RayHosting
from kvferry.cluster.secret import make_secret, needs_secret
from kvferry.protocol.errors import InvalidRequest

log = logging.getLogger("kvferry.controller")


class Controller:
    """A plain class, wrapped below. All methods run on one loop, so of several calls the last one wins.

    The answers are `Pools.progress` with `controller` (which one it is) and `applied` (Serve's last user_config).
    """

    def __init__(self, config: bytes) -> None:
        settings = Config.from_bytes(config)
        if needs_secret(settings):  # where nobody has made one; every other host must be given it
            make_secret(settings.cluster.secret_file)
        self._pools = Pools(RayHosting(config), SystemClock(), settings.wanted(), settings.cluster.drain_s)
        self._id = f"{SystemRandom().bits(64):016x}"
        self._applied: Any = None
        self._refused = ""
        self._task = asyncio.get_running_loop().create_task(self._live())

    async def pools(self) -> dict[str, Any]:
        answer = self._pools.progress() | {"controller": self._id, "applied": self._applied}
        if self._refused:
            answer["missing"].append(f"Serve's user_config is refused: {self._refused}")
        return answer

    async def scale(self, numbers: dict[str, int]) -> dict[str, Any]:
        """Ask for other numbers; `{"refused": text}` when they are not acceptable."""
        try:
            self._pools.scale(numbers)
        except InvalidRequest as error:
            return {"refused": str(error)}
        return await self.pools()

    async def apply(self, user_config: Any) -> dict[str, Any]:
        """Serve's user_config, told by each replica at its start and at each change. The same one again changes
        nothing: a replica that is started again must not undo what `kvferry scale` has asked for since.
        """
        if user_config == self._applied:
            return await self.pools()
        self._applied, self._refused = user_config, ""
        answer = await self.scale(user_config)
        self._refused = answer.get("refused", "")
        return answer

    async def restore(self, known: dict[str, Any]) -> dict[str, Any]:
        """What a front knows of the controller before this one."""
        if known["version"] > self._pools.version:
            self._applied = known["applied"]
            self._pools.restore(known["wanted"], known["version"])
        return await self.pools()

    async def _live(self) -> None:
        try:
            await self._pools.run()
        except Exception:
            log.exception("the pools failed; the controller's process ends, and with it every actor")
            os._exit(1)


RemoteController = ray.remote(Controller)
