"""Where actors are put, and what is said when addresses can't work between hosts."""

from __future__ import annotations

from typing import Any

import pytest

from kvferry.cluster.config import Config, load
from kvferry.cluster.network import check_reachable, own_host
from kvferry.cluster.pidwatch import host_id
from kvferry.protocol.errors import ConfigError
from kvferry.protocol.messages import Address

HEAD = {"node:__internal_head__": 0.0001}


def node(name: str, slots: float, alive: bool = True) -> dict[str, Any]:
    return {"NodeID": name, "Alive": alive, "Resources": {"CPU": 4.0} | ({"kvferry_slot": slots} if slots else {})}


def options(role: str, config: Config, nodes: list[dict[str, Any]]) -> dict[str, Any]:
    placement = pytest.importorskip("kvferry.cluster.placement")
    found: dict[str, Any] = placement.actor_options(role, config, nodes)
    return found


@pytest.mark.parametrize("role", ["registry", "router"])
def test_what_has_no_slot_stays_with_the_head(role: str) -> None:
    assert options(role, load(None), [node("a", 1)]) == {"resources": HEAD}


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_over_tcp_ranks_are_spread(role: str) -> None:
    config = load(None, {"transfer.transports": "tcp", "cluster.slot_resource": "seat"})
    assert options(role, config, [node("a", 1)]) == {"resources": {"seat": 1}, "scheduling_strategy": "SPREAD"}


def test_ranks_that_share_memory_share_the_host_with_the_most_slots() -> None:
    nodes = [node("aa" * 28, 0), node("bb" * 28, 2), node("cc" * 28, 4), node("dd" * 28, 8, alive=False)]
    for role in ("prefill", "decode"):
        strategy = options(role, load(None), nodes)["scheduling_strategy"]
        assert (strategy.node_id, strategy.soft) == ("cc" * 28, True)


def test_without_any_slot_ray_waits_for_one() -> None:
    assert options("prefill", load(None), [node("a", 0)])["scheduling_strategy"] == "SPREAD"


def test_an_address_is_taken_as_it_is_and_node_is_rays(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = pytest.importorskip("ray")
    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: "10.1.2.3")
    assert own_host("192.168.1.5") == "192.168.1.5"
    assert own_host("node") == "10.1.2.3"


@pytest.mark.parametrize(
    ("host", "endpoint", "works"),
    [
        (host_id(), "tcp://127.0.0.1:4000", True),
        ("other", "tcp://10.0.0.1:4000", True),
        ("other", "tcp://[fd00::1]:4000", True),
        ("other", "tcp://127.0.0.1:4000", False),
        ("other", "tcp://[::1]:4000", False),
        ("other", "tcp://localhost:4000", False),
    ],
)
def test_a_loopback_address_works_within_one_host_only(host: str, endpoint: str, works: bool) -> None:
    peer = Address("registry", endpoint, 1, host, 10)
    if works:
        check_reachable("127.0.0.1", peer)
        return
    with pytest.raises(ConfigError, match=r"cluster\.bind_host: '127\.0\.0\.1'.*node.*registry runs on another host"):
        check_reachable("127.0.0.1", peer)
