"""Where actors are put, and what is said when addresses can't work between hosts."""

from __future__ import annotations

from typing import Any

import pytest
import ray

from kvferry.cluster.config import Config, load
from kvferry.cluster.network import check_reachable, own_host
from kvferry.cluster.placement import target_node
from kvferry.protocol.address import Address
from kvferry.protocol.errors import ConfigError
from kvferry.transfer.shared import host_identity


def node(name: str, slots: float, alive: bool = True) -> dict[str, Any]:
    return {"NodeID": name, "Alive": alive, "Resources": {"CPU": 4.0} | ({"kvferry_slot": slots} if slots else {})}


def target(config: Config, nodes: list[dict[str, Any]], **ours: int) -> str | None:
    return target_node(config, nodes, ours)


def test_over_tcp_instances_are_spread() -> None:
    config = load(None, {"transfer.transports": "tcp"})
    nodes = [node("aa", 2), node("bb", 0), node("cc", 3), node("dd", 9, alive=False)]
    assert target(config, nodes) == "cc"
    assert target(config, nodes, cc=2) == "aa"
    assert target(config, nodes, cc=2, aa=1) == "cc", "equal ones by name"
    other = load(None, {"transfer.transports": "tcp", "cluster.slot_resource": "seat"})
    assert target(other, nodes) is None


def test_ranks_that_share_memory_share_the_host_with_the_most_slots() -> None:
    nodes = [node("aa", 0), node("bb", 2), node("cc", 4), node("dd", 8, alive=False)]
    assert target(load(None), nodes) == "cc"
    assert target(load(None), nodes, cc=3) == "cc"


def test_without_any_slot_ray_waits_for_one() -> None:
    assert target(load(None), [node("a", 0)]) is None


def test_an_address_is_taken_as_it_is_and_node_is_rays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: "10.1.2.3")
    assert own_host("192.168.1.5") == "192.168.1.5"
    assert own_host("node") == "10.1.2.3"


@pytest.mark.parametrize(
    ("host", "endpoint", "works"),
    [
        (host_identity(), "tcp://127.0.0.1:4000", True),
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
