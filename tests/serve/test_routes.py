"""The routes beside those that generate: models, health, readiness, status, journals, metrics."""

from __future__ import annotations

from typing import Any

import httpx
import openai

from kvferry.protocol.errors import Cause, PeerLost
from kvferry.protocol.outcome import Outcome
from kvferry.protocol.request import RequestSpec

BODY: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "one two three"}]}


async def test_models_health_ready_status_room(
    served: Any, client: openai.AsyncOpenAI, http: httpx.AsyncClient
) -> None:
    assert [model.id for model in (await client.models.list()).data] == ["m"]
    assert (await client.models.retrieve("m")).owned_by == "kvferry"
    assert (await http.get("/health")).json() == {"status": "ok"}
    assert (await http.get("/status")).json() == served.backend.state | {"requests_live": 0, "ingress": "none"}
    served.backend.journals[77] = {"room": "77"}
    assert (await http.get("/rooms/77")).json() == {"room": "77"}


async def test_the_status_counts_the_requests_that_clients_still_hold(served: Any, http: httpx.AsyncClient) -> None:
    def play(spec: RequestSpec) -> None:
        served.settle(spec)  # the router has nothing open any more
        served.from_decode(served.token(spec, 0))

    served.backend.on_submit = play
    async with http.stream("POST", "/v1/chat/completions", json=BODY | {"stream": True}):
        assert (await http.get("/status")).json()["requests_live"] == 1
    await served.until(lambda: served.metrics.live._value.get() == 0)
    assert (await http.get("/status")).json()["requests_live"] == 0


async def test_ready_by_a_handoff_that_no_client_sees(served: Any, http: httpx.AsyncClient) -> None:
    """One token of the cheapest prompt, and then nothing more for a while; the client's series don't count it."""
    served.answer_with(["x"], finish="length")
    fact = {"ready": True, "missing": [], "busy": False, "handoff_age_s": 0.0}
    for _ in range(2):
        assert (await http.get("/ready")).json() == fact
    (spec,) = served.backend.specs
    assert spec.prompt_ids == (0,) and spec.sampling.max_tokens == 1
    lines = (await http.get("/metrics")).text.splitlines()
    for line in (
        "kvferry_requests_live 0.0",
        "kvferry_prompt_tokens_total 0.0",
        "kvferry_generated_tokens_total 0.0",
        "kvferry_time_to_first_token_seconds_count 0.0",
        "kvferry_request_seconds_count 0.0",
    ):
        assert line in lines
    assert not any(line.startswith("kvferry_requests_total{") for line in lines)


async def test_not_ready_says_what_went_wrong(served: Any, http: httpx.AsyncClient) -> None:
    cause = Cause("handoff_failed", "the transfer broke", leg="decode")
    served.backend.on_submit = lambda spec: served.settle(spec, Outcome(77, False, cause))
    response = await http.get("/ready")
    assert response.status_code == 503 and response.headers["retry-after"] == "5"
    assert response.json()["ready"] is False and response.json()["missing"] == []
    assert "the transfer broke" in response.json()["error"]["message"]


async def test_not_ready_says_what_is_missing(served: Any, http: httpx.AsyncClient) -> None:
    served.backend.present = type(served.backend.present)(1, (), False, ("decode: 0 of 1 ranks",))
    response = await http.get("/ready")
    assert response.status_code == 503 and response.json()["missing"] == ["decode: 0 of 1 ranks"]
    assert (await http.get("/health")).status_code == 200
    response = await http.post("/v1/chat/completions", json=BODY)
    assert response.status_code == 503 and response.headers["retry-after"] == "5"
    assert "decode: 0 of 1 ranks" in response.json()["error"]["message"]


async def test_metrics_come_from_requests_and_from_the_status(served: Any, http: httpx.AsyncClient) -> None:
    served.answer_with(["a", "b", "c"])
    await http.post("/v1/chat/completions", json=BODY)
    await http.post("/v1/chat/completions", json={})
    response = await http.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain")
    lines = response.text.splitlines()
    for line in (
        'kvferry_requests_total{outcome="stop",status="200"} 1.0',
        'kvferry_requests_total{outcome="invalid_request",status="400"} 1.0',
        "kvferry_requests_live 0.0",
        "kvferry_prompt_tokens_total 3.0",
        "kvferry_generated_tokens_total 3.0",
        'kvferry_tokens_dropped_total{reason="duplicate"} 1.0',
        "kvferry_time_to_first_token_seconds_count 1.0",
        "kvferry_inter_token_seconds_count 2.0",
        "kvferry_request_seconds_count 1.0",
        "kvferry_status_up 1.0",
        "kvferry_rooms_live 3.0",
        'kvferry_pages{instance="decode-0",role="decode",state="free"} 7.0',
        'kvferry_queue_length{instance="decode-0",queue="running",role="decode"} 2.0',
    ):
        assert line in lines
    served.backend.status_error = PeerLost(Cause("peer_lost", "no cluster"))
    text = (await http.get("/metrics")).text
    assert "kvferry_status_up 0.0" in text and "kvferry_pages" not in text
    response = await http.get("/status")
    assert response.status_code == 502 and response.json()["error"]["code"] == "peer_lost"
