"""Every metric of the front, with its help text. One registry per process.

The gauges of instances are not kept here: they are made at scrape time out of the status object, so they can't
disagree with `kvferry status`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.metrics_core import GaugeMetricFamily, Metric

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
    """Turns the last status object into gauges."""

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
        pages = GaugeMetricFamily(
            "kvferry_pages",
            "Pages of an instance by state: free, owned, leased, cached, quarantined; they add up to the pool.",
            labels=("instance", "role", "state"),
        )
        queues = GaugeMetricFamily(
            "kvferry_queue_length", "Requests in a queue of an instance.", labels=("instance", "role", "queue")
        )
        for instance in status["instances"]:
            place = [str(instance["id"]), str(instance["role"])]
            for state, count in instance["pages"].items():
                if state != "total":
                    pages.add_metric([*place, state], float(count))
            for queue, length in instance["queues"].items():
                queues.add_metric([*place, queue], float(length))
        yield pages
        yield queues
