"""The application on Ray Serve: `kvferry.serve.deployment:build`, for `serve deploy serve.yaml` and the launcher.

One deployment. Its replica is the front; the controller, which places every other actor, is an actor of the
deployment, so that Serve starts it before the first replica, restarts it, and ends it with the application.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from ray import serve
from ray.serve.config import DeploymentActorConfig
from starlette.applications import Starlette

from kvferry.cluster.config import Config, from_args
from kvferry.cluster.exposure import asks_for_token, check_exposure
from kvferry.cluster.ingress import ingress_here
from kvferry.cluster.names import CONTROLLER
from kvferry.cluster.placement import ON_HEAD
from kvferry.serve.app import build_app
from kvferry.serve.front import Front
from kvferry.serve.keys import load_keys

if TYPE_CHECKING:
    from kvferry.engine.tokenizer import ChatTokenizer

#: Streams that one replica holds; beyond it Serve itself makes requests wait. The router's own limit comes first.
MAX_ONGOING_REQUESTS = 1024


class FrontReplica:
    """What `serve.ingress` wraps around the application."""

    _telling: asyncio.Task[None] | None = None

    async def reconfigure(self, user_config: object) -> None:
        """Serve's update in place: numbers of instances by role, such as {"decode": 3}. Serve calls it when a replica
        starts and when the deployment's `user_config` changes.

        It raises nothing and waits for nobody: Serve ends a replica whose `reconfigure` fails, with its streams. What
        is not acceptable is told with what is missing.
        """
        from kvferry.cluster.client import apply_user_config

        if self._telling is not None:
            self._telling.cancel()
        self._telling = asyncio.get_running_loop().create_task(apply_user_config(find_controller, user_config))


def find_controller() -> Any:
    """The handle of the controller that belongs to this replica. Raises ValueError while there is none."""
    return serve.get_deployment_actor(CONTROLLER)


def build(args: dict[str, Any]) -> Any:
    """The Serve application of these `args` (of `serve.yaml`). Raises ConfigError, also for an address of links that
    other hosts reach where Ray lets everybody in. Runs in a process of the cluster, or in one that has joined it."""
    from kvferry.cluster.controller import RemoteController

    config = from_args(args)
    check_exposure(config, asks_for_token(os.environ, unset=False))
    data = config.to_bytes()

    def make_app() -> Starlette:
        """Called once in each replica; only the configuration's bytes travel there."""
        config = Config.from_bytes(data)
        keys = load_keys(config.api.keys, config.api.keys_file)
        return build_app(lambda: open_front(config), keys, ingress_here())

    others = config.without_keys().to_bytes()
    on_head = {"num_cpus": 0, "resources": ON_HEAD}
    controller = DeploymentActorConfig(
        name=CONTROLLER, actor_class=RemoteController, init_args=(others,), actor_options=on_head
    )
    deployment: Any = serve.deployment(
        serve.ingress(make_app)(FrontReplica),
        name="front",
        num_replicas=1,
        ray_actor_options=on_head,
        max_ongoing_requests=_ongoing_requests(config),
        health_check_period_s=5.0,  # Serve calls into the replica: one whose loop hangs is replaced
        health_check_timeout_s=30.0,
        graceful_shutdown_wait_loop_s=0.5,
        graceful_shutdown_timeout_s=5.0,
        deployment_actors=[controller],
    )
    return deployment.bind()


def _ongoing_requests(config: Config) -> int:
    """Serve makes this the number of calls that a replica takes at once, and frames that come as Ray calls need places
    among them however many streams are open: there are four times as many as the streams should ever fill."""
    streams = max(MAX_ONGOING_REQUESTS, 2 * config.router.max_requests)
    return 4 * streams if config.links.carrier == "ray" else streams


@asynccontextmanager
async def open_front(config: Config) -> AsyncIterator[Front]:
    """A front with real links, the model's tokenizer (not its weights) and the Ray backend, on the running loop."""
    # Imported where the front runs: the process that only deploys needs no tokenizer, and starts a second sooner.
    from kvferry.cluster.client import connect
    from kvferry.cluster.clock import SystemClock, SystemRandom
    from kvferry.cluster.network import open_network, secret_of
    from kvferry.obs.metrics import FrontMetrics
    from kvferry.obs.wall import unix_s
    from kvferry.serve.attempts import AttemptPolicy
    from kvferry.serve.gateway import FrontInfo, ReadyPolicy

    clock, random = SystemClock(), SystemRandom()
    tokenizer, vocab_size = await asyncio.to_thread(_vocabulary, config.model.model)
    api = config.api
    attempts = AttemptPolicy(api.max_attempts, api.recovery_s)
    ready = ReadyPolicy(api.ready_fresh_s, api.ready_limit_s, config.clocks.no_progress_s)
    info = FrontInfo(
        config.served_name(), int(unix_s()), api.default_max_tokens, api.max_body_bytes, vocab_size, attempts, ready
    )
    name = f"front-{random.bits(32):08x}"  # unlike other actors it is looked up by nobody, and there may be several
    secret = secret_of(config.links, config.cluster.secret_file)
    network = await open_network(name, config.cluster.bind_host, config.links, clock, random, secret)
    async with connect(find_controller, config) as backend:
        front = Front(network, backend, tokenizer, clock, random, info, FrontMetrics())
        await front.start()
        try:
            yield front
        finally:
            await front.close()


def _vocabulary(model: str) -> tuple[ChatTokenizer, int]:
    """The model's tokenizer, and how many ids its embedding has rows for. Raises ConfigError."""
    from kvferry.engine.loader import load_tokenizer, locate, model_config
    from kvferry.engine.tokenizer import ChatTokenizer

    source = locate(model)
    return ChatTokenizer(load_tokenizer(source)), int(model_config(source).vocab_size)
