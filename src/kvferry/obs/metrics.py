"""Every metric, with its help text. One registry per front.

What instances and routers count is not kept here: it is made into metrics at scrape time out of the status object, so
it can't disagree with `kvferry status`. docs/grafana.json draws these names, and a test holds it against them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from kvferry.obs.rooms import CHECKS_FAILED, PHASE_BUCKETS_S, TRANSFER_BUCKETS

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_TOKEN_BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)
_REQUEST_BUCKETS_S = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)


class FrontMetrics:
    """The front's own counters, made once; `render` adds the gauges of a status object."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "kvferry_requests",
            "Requests that ended, by HTTP status (499: the client left) and outcome "
            "(finish_reason, error code, or cancelled).",
            ("status", "outcome"),
            registry=self.registry,
        )
        self.live = Gauge("kvferry_requests_live", "Requests that this front holds.", registry=self.registry)
        self.first_token = Histogram(
            "kvferry_time_to_first_token_seconds",
            "From the opening of a request to its first token at the front.",
            buckets=_REQUEST_BUCKETS_S,
            registry=self.registry,
        )
        self.inter_token = Histogram(
            "kvferry_inter_token_seconds",
            "Time between tokens of one request at the front; tokens that came together share their time.",
            buckets=_TOKEN_BUCKETS_S,
            registry=self.registry,
        )
        self.generation = Histogram(
            "kvferry_generation_seconds",
            "From the first token of a request to its last, for requests that finished: with the time to the first "
            "token it adds up to kvferry_request_seconds.",
            buckets=_REQUEST_BUCKETS_S,
            registry=self.registry,
        )
        self.request_time = Histogram(
            "kvferry_request_seconds",
            "From the opening of a request to its last token, for requests that finished.",
            buckets=_REQUEST_BUCKETS_S,
            registry=self.registry,
        )
        self.prompt_tokens = Counter(
            "kvferry_prompt_tokens", "Prompt tokens of opened requests.", registry=self.registry
        )
        self.generated_tokens = Counter("kvferry_generated_tokens", "Tokens handed to clients.", registry=self.registry)
        self.attempts_failed = Counter(
            "kvferry_attempts_failed",
            "Attempts that failed and were followed by another, by error code.",
            ("code",),
            registry=self.registry,
        )
        self.retractions = Counter(
            "kvferry_retractions",
            "Attempts that decode gave up to make room for older requests; each went on in another attempt.",
            registry=self.registry,
        )
        self.tokens_dropped = Counter(
            "kvferry_tokens_dropped",
            "Tokens and messages that the front did not use: duplicate (normal: decode repeats index 0), stale, "
            "beyond, unknown_request, not_a_batch.",
            ("reason",),
            registry=self.registry,
        )
        self._status = _StatusCollector()
        self.registry.register(self._status)

    def render(self, status: dict[str, Any] | None) -> bytes:
        """Prometheus text. `status`: the status object, or None when it could not be had."""
        self._status.status = status
        return generate_latest(self.registry)


class _StatusCollector:
    """Turns the last status object into metrics."""

    def __init__(self) -> None:
        self.status: dict[str, Any] | None = None

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        status = self.status
        up = GaugeMetricFamily("kvferry_status_up", "1 when the cluster's status could be had for this scrape.")
        up.add_metric([], 0.0 if status is None else 1.0)
        yield up
        if status is None:
            return
        rooms = GaugeMetricFamily("kvferry_rooms_live", "Rooms that have not ended, at all routers.")
        rooms.add_metric([], float(status["rooms_live"]))
        yield rooms
        yield from _of_instances(status["instances"])
        yield from _of_routers([router for router in status.get("routers", ()) if "rooms" in router])


def _of_instances(instances: list[dict[str, Any]]) -> Iterator[Metric]:
    pages = GaugeMetricFamily(
        "kvferry_pages",
        "Pages of an instance by state: free, owned, leased, cached, quarantined, retired (failed checks); they add up "
        "to the pool.",
        labels=("instance", "role", "state"),
    )
    queues = GaugeMetricFamily(
        "kvferry_queue_length", "Requests in a queue of an instance.", labels=("instance", "role", "queue")
    )
    forwards = CounterMetricFamily(
        "kvferry_forwards", "Forwards that an instance's engine has finished.", labels=("instance", "role")
    )
    failures = CounterMetricFamily(
        "kvferry_transfer_check_failures",
        "Transfers whose bytes, as they lay at the target, were not those of the source. None of them was committed.",
        labels=("instance",),
    )
    events = CounterMetricFamily(
        "kvferry_events",
        "What an instance has counted since it started, by name: refused rooms, retractions, shared prompt tokens, "
        "late or stray messages.",
        labels=("instance", "role", "event"),
    )
    for instance in instances:
        place = [str(instance["id"]), str(instance["role"])]
        for state, count in instance["pages"].items():
            if state != "total":
                pages.add_metric([*place, state], float(count))
        for queue, length in instance["queues"].items():
            queues.add_metric([*place, queue], float(length))
        if "step" in instance:
            forwards.add_metric(place, float(instance["step"]))
        counts = instance.get("counts")
        if counts is not None and instance["role"] == "decode":
            failures.add_metric(place[:1], float(counts.get(CHECKS_FAILED, 0)))
        for event, count in sorted((counts or {}).items()):
            events.add_metric([*place, event], float(count))
    yield from (pages, queues, forwards, events, failures)


def _of_routers(routers: list[dict[str, Any]]) -> Iterator[Metric]:
    phases = HistogramMetricFamily(
        "kvferry_room_phase_seconds",
        "Time that ended rooms spent in each phase of KVPoll before Success or Failed.",
        labels=("router", "phase"),
    )
    outcomes = CounterMetricFamily(
        "kvferry_rooms",
        "Rooms that ended, by outcome: committed, or the error code of their cause.",
        labels=("router", "outcome"),
    )
    moved = CounterMetricFamily("kvferry_kv_bytes", "Bytes of KV that ended rooms have moved.", labels=("router",))
    refused = CounterMetricFamily(
        "kvferry_router_events",
        "What a router has counted since it started, by name: refusals by error code, rooms by end, stray messages.",
        labels=("router", "event"),
    )
    for router in routers:
        name, rooms = str(router["id"]), router["rooms"]
        for phase, durations in rooms["phases"].items():
            phases.add_metric([name, phase], _cumulative(durations["buckets"], PHASE_BUCKETS_S), durations["sum"])
        for outcome, count in sorted(rooms["outcomes"].items()):
            outcomes.add_metric([name, outcome], float(count))
        moved.add_metric([name], float(rooms["kv_bytes"]))
        for event, count in sorted(router["counts"].items()):
            refused.add_metric([name, event], float(count))
    yield from (phases, outcomes, moved, refused)
    yield from _of_transfers(routers)


def _of_transfers(routers: list[dict[str, Any]]) -> Iterator[Metric]:
    """One source rank's writes of a room each. A figure that no backend could tell is absent."""
    for figure, (name, text) in _TRANSFERS.items():
        family = HistogramMetricFamily(f"kvferry_transfer_{name}", text, labels=("router", "backend"))
        for router in routers:
            for backend, figures in router["rooms"].get("transfers", {}).items():
                if (found := figures.get(figure)) is not None:
                    buckets = _cumulative(found["buckets"], TRANSFER_BUCKETS[figure])
                    family.add_metric([str(router["id"]), backend], buckets, found["sum"])
        if family.samples:
            yield family


_TRANSFERS = {
    "wait_s": ("wait_seconds", "Time that a room's writes waited before their first byte was posted, added up."),
    "wire_s": ("wire_seconds", "Time from the first post of a room's writes to their last flush, added up."),
    "bytes": ("bytes", "Bytes of a room's writes, of KV and metadata."),
    "descriptors": ("descriptors", "Descriptors that a room's writes were posted in."),
}


def _cumulative(buckets: list[int], limits: tuple[float, ...]) -> list[tuple[str, float]]:
    """As Prometheus wants them: (upper bound, how many are at most that)."""
    bounds = [str(bound) for bound in limits] + ["+Inf"]
    return [(bound, float(sum(buckets[: at + 1]))) for at, bound in enumerate(bounds)]
