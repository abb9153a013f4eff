"""Metrics out of a status object made by hand, and the dashboard that draws them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from kvferry.obs.metrics import FrontMetrics
from kvferry.obs.rooms import PHASE_BUCKETS_S, RoomStatistics
from kvferry.protocol.kvpoll import KVPoll

ROOT = Path(__file__).parents[2]


#: Of one room, by two source ranks; the second one's backend can tell its bytes only.
TRANSFERS: list[dict[str, Any]] = [
    {"rank": 0, "backend": "ucx", "bytes": 5000, "wait_s": 0.0, "wire_s": 0.02, "descriptors": 60},
    {"rank": 1, "backend": "mute", "bytes": 4096},
]


def statistics() -> RoomStatistics:
    """Two rooms that committed and one that failed before it got a destination."""
    rooms = RoomStatistics()
    bootstrapping, waiting, transferring = KVPoll.BOOTSTRAPPING, KVPoll.WAITING_FOR_INPUT, KVPoll.TRANSFERRING
    rooms.ended({bootstrapping: 0.002, waiting: 0.3, transferring: 0.02, KVPoll.SUCCESS: 0.0}, 1000, "", TRANSFERS)
    rooms.ended({bootstrapping: 0.001, transferring: 500.0, KVPoll.SUCCESS: 0.0}, 500, "")
    rooms.ended({bootstrapping: 7.0, KVPoll.FAILED: 0.0}, 0, "peer_lost")
    return rooms


STATUS: dict[str, Any] = {
    "instances": [
        {
            "id": "decode-0", "role": "decode", "queues": {"running": 2}, "step": 41,
            "counts": {"retracted": 3, "transfers that failed their check": 2},
            "pages": {"total": 11, "free": 7, "owned": 2, "leased": 1, "cached": 0, "quarantined": 0, "retired": 1},
        },
        {"id": "decode-1", "role": "decode", "queues": {}, "pages": {}},  # does not answer
    ],
    "routers": [{"id": "router-0", "counts": {"refused overloaded": 4}, "rooms": statistics().as_object()}],
    "rooms_live": 3,
    "requests_live": 1,
}  # fmt: skip


def samples(metrics: FrontMetrics) -> dict[tuple[str, ...], float]:
    """(name, label values in order of the labels' names) -> value, as a Prometheus server reads it."""
    families = text_string_to_metric_families(metrics.render(STATUS).decode())
    return {
        (sample.name, *(sample.labels[key] for key in sorted(sample.labels))): sample.value
        for family in families
        for sample in family.samples
    }


def test_rooms_by_phase_and_outcome() -> None:
    found = samples(FrontMetrics())
    phase = "kvferry_room_phase_seconds"
    # le sorts before phase and router
    assert found[f"{phase}_bucket", "0.001", "BOOTSTRAPPING", "router-0"] == 1  # a bound belongs to its bucket
    assert found[f"{phase}_bucket", "0.0025", "BOOTSTRAPPING", "router-0"] == 2
    assert found[f"{phase}_bucket", "5.0", "BOOTSTRAPPING", "router-0"] == 2
    assert found[f"{phase}_bucket", "10.0", "BOOTSTRAPPING", "router-0"] == 3
    assert found[f"{phase}_bucket", "120.0", "TRANSFERRING", "router-0"] == 1
    assert found[f"{phase}_bucket", "+Inf", "TRANSFERRING", "router-0"] == 2
    assert found[f"{phase}_count", "WAITING_FOR_INPUT", "router-0"] == 1
    assert found[f"{phase}_sum", "BOOTSTRAPPING", "router-0"] == 0.002 + 0.001 + 7.0
    assert found["kvferry_rooms_total", "committed", "router-0"] == 2
    assert found["kvferry_rooms_total", "peer_lost", "router-0"] == 1
    assert found["kvferry_kv_bytes_total", "router-0"] == 1500
    assert found["kvferry_router_events_total", "refused overloaded", "router-0"] == 4


def test_instances() -> None:
    found = samples(FrontMetrics())
    assert found["kvferry_pages", "decode-0", "decode", "leased"] == 1
    assert found["kvferry_pages", "decode-0", "decode", "retired"] == 1
    assert found["kvferry_transfer_check_failures_total", "decode-0"] == 2
    assert found["kvferry_queue_length", "decode-0", "running", "decode"] == 2
    assert found["kvferry_forwards_total", "decode-0", "decode"] == 41
    assert found["kvferry_events_total", "retracted", "decode-0", "decode"] == 3
    assert not any("decode-1" in key for key in found), "what is not known is absent, not zero"


def test_transfers_by_backend() -> None:
    found = samples(FrontMetrics())
    name = "kvferry_transfer"
    # backend sorts before le and router
    assert found[f"{name}_wait_seconds_bucket", "ucx", "0.001", "router-0"] == 1
    assert found[f"{name}_wire_seconds_bucket", "ucx", "0.01", "router-0"] == 0
    assert found[f"{name}_wire_seconds_bucket", "ucx", "0.025", "router-0"] == 1
    assert found[f"{name}_wire_seconds_sum", "ucx", "router-0"] == 0.02
    assert found[f"{name}_bytes_bucket", "ucx", "4096.0", "router-0"] == 0
    assert found[f"{name}_bytes_bucket", "ucx", "16384.0", "router-0"] == 1
    assert found[f"{name}_bytes_bucket", "mute", "4096.0", "router-0"] == 1, "a bound belongs to its bucket"
    assert found[f"{name}_descriptors_bucket", "ucx", "64.0", "router-0"] == 1
    told = {key[0] for key in found if key[0].startswith(name) and "mute" in key}
    assert told == {f"{name}_bytes_bucket", f"{name}_bytes_count", f"{name}_bytes_sum"}, "absent, not zero"


def test_the_buckets_rise_and_the_last_one_takes_the_rest() -> None:
    assert list(PHASE_BUCKETS_S) == sorted(set(PHASE_BUCKETS_S))
    assert len(statistics().as_object()["phases"]["TRANSFERRING"]["buckets"]) == len(PHASE_BUCKETS_S) + 1


def base_name(name: str) -> str:
    return re.sub(r"_(total|bucket|sum|count|created)$", "", name)


def test_the_dashboard_draws_every_metric_and_no_other() -> None:
    dashboard = json.loads((ROOT / "docs" / "grafana.json").read_text())
    expressions = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    drawn = {name for expression in expressions for name in re.findall(r"kvferry_\w+", expression)}
    metrics = FrontMetrics()
    for labelled in (metrics.requests.labels("200", "stop"), metrics.attempts_failed.labels("peer_lost")):
        labelled.inc()
    metrics.tokens_dropped.labels("duplicate").inc()
    exposed = {key[0] for key in samples(metrics)}
    assert drawn <= exposed, f"drawn and not exposed: {drawn - exposed}"
    assert {base_name(name) for name in exposed} == {base_name(name) for name in drawn}


def test_the_dashboard_is_laid_out_without_overlap() -> None:
    dashboard = json.loads((ROOT / "docs" / "grafana.json").read_text())
    taken: set[tuple[int, int]] = set()
    for panel in dashboard["panels"]:
        at = panel["gridPos"]
        cells = {(at["x"] + dx, at["y"] + dy) for dx in range(at["w"]) for dy in range(at["h"])}
        assert not cells & taken and at["x"] + at["w"] <= 24, panel["title"]
        taken |= cells
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])
