"""The registry behind an HTTP server: its routes (registry_routes.py) on a port of its own, in its own process."""

from __future__ import annotations

from typing import Any

from aiohttp import web

from kvferry.actors.bootstrap.registry import Registry
from kvferry.actors.ports import Clock, Network
from kvferry.cluster.registry_routes import MAX_BODY_BYTES, Request, Routes
from kvferry.protocol.errors import ConfigError


class HttpRegistry(Registry):
    """A `Registry` that listens while it runs. `run` raises ConfigError where it can't; `parts` are the registry's."""

    def __init__(
        self, network: Network, clock: Clock, mailbox: int, host: str, port: int, token: str, **parts: Any
    ) -> None:
        super().__init__(network, clock, mailbox, **parts)
        self._host, self._port = host, port
        self._routes = Routes(self, token)
        self._runner: web.AppRunner | None = None

    async def run(self) -> None:
        application = web.Application(client_max_size=MAX_BODY_BYTES)
        application.router.add_route("*", "/{path:.*}", self._serve)
        self._runner = web.AppRunner(application, access_log=None, handle_signals=False, shutdown_timeout=1.0)
        await self._runner.setup()
        try:
            await web.TCPSite(self._runner, self._host, self._port).start()
        except OSError as error:
            await self._runner.cleanup()
            allowed = f"an address and a port that are free here ({error.strerror or error})"
            raise ConfigError("applications[0].args.registry", f"{self._host}:{self._port}", allowed) from None
        await super().run()

    async def close(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
        await super().close()

    async def _serve(self, request: web.Request) -> web.Response:
        asked = Request(
            request.method, request.path, request.remote or "", dict(request.query),
            request.headers.get("Authorization", ""), await request.read(),
        )  # fmt: skip
        answer = await self._routes.answer(asked)
        return web.Response(
            status=answer.status, body=answer.body, content_type=answer.content_type, headers=answer.headers
        )
