"""Names of the actors: the Ray name, the instance's name in the registry and the link name are one and the same."""

from __future__ import annotations

from kvferry.cluster.config import Config

NAMESPACE = "kvferry"
REGISTRY = "registry"
CONTROLLER = "controller"


def router_names(config: Config) -> list[str]:
    return [f"router-{i}" for i in range(config.router.instances)]


def instance_names(config: Config) -> list[tuple[str, str]]:
    """(role, name) of every instance of the configuration."""
    prefill = [("prefill", f"prefill-{i}") for i in range(config.prefill.instances)]
    return prefill + [("decode", f"decode-{i}") for i in range(config.decode.instances)]


def all_names(config: Config) -> list[tuple[str, str]]:
    """(role, name) of every actor, in the order in which they are started."""
    routers = [("router", name) for name in router_names(config)]
    return [("registry", REGISTRY), *routers, *instance_names(config)]
