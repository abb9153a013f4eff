"""Cases of real bug reports at the API, on virtual time: the ASGI app itself in front of simulated actors."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvferry.serve.app import build_app
from kvferry.serve.front import Front
from kvferry.sim.loop import run
from kvferry.sim.system import SimOptions, SimSystem

PROMPT = list(range(700, 760))


class Response:
    """What the server has sent so far."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self.body = b""
        self.complete = False

    async def send(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            assert self.status == 0
            self.status = message["status"]
            self.headers = {name.decode(): value.decode() for name, value in message["headers"]}
            return
        assert self.status and not self.complete
        self.body += message["body"]
        self.complete = not message.get("more_body", False)

    @property
    def events(self) -> list[str]:
        return [part.removeprefix("data: ") for part in self.body.decode().split("\n\n") if part]


async def post(app: Any, response: Response, **body: Any) -> None:
    """POST /v1/completions with a client that stays."""
    sent = json.dumps({"model": "scripted", "prompt": PROMPT, "max_tokens": 300, "temperature": 0, **body}).encode()
    scope = {
        "type": "http", "method": "POST", "path": "/v1/completions", "raw_path": b"/v1/completions",
        "query_string": b"", "headers": [(b"content-type", b"application/json")], "http_version": "1.1",
        "scheme": "http", "server": ("test", 80), "client": ("test", 1), "root_path": "", "app": app,
    }  # fmt: skip
    messages = [{"type": "http.request", "body": sent, "more_body": False}]

    async def receive() -> Any:
        if messages:
            return messages.pop(0)
        return await asyncio.Event().wait()

    await app(scope, receive, response.send)


def app_of(front: Front) -> Any:
    @contextlib.asynccontextmanager
    async def factory() -> AsyncIterator[Front]:
        yield front

    app = build_app(factory)
    app.state.front = front
    return app


async def killed_when(
    system: SimSystem, client: Any, wait_until: Any, ready: Callable[[Response], bool], **body: Any
) -> tuple[Response, float]:
    """Ask, kill the only decode when `ready`, and read the answer to its end: with the seconds that took."""
    response = Response()
    asking = asyncio.create_task(post(app_of(client.front), response, **body))
    await wait_until(lambda: ready(response))
    system.kill("decode-0")
    began_s = asyncio.get_running_loop().time()
    await asking
    assert response.complete
    return response, asyncio.get_running_loop().time() - began_s


@pytest.mark.parametrize("stream", [False, True])
def test_case_19_before_the_first_byte(client_of: Any, wait_until: Any, stream: bool) -> None:
    """Case 19 (a): 5xx with an error body, soon after the recovery time."""

    async def main() -> None:
        async with SimSystem(SimOptions()) as system:
            client = await client_of(system, attempts=3, recovery_s=2.0)
            rooms = system.decode().rooms
            response, took_s = await killed_when(system, client, wait_until, lambda _: bool(rooms), stream=stream)
            assert response.status == 502 and response.headers["content-type"] == "application/json"
            error = json.loads(response.body)["error"]
            assert error["code"] == "peer_lost" and error["type"] == "server_error" and "decode-0" in error["message"]
            assert 2.0 <= took_s < 4.0
            later = Response()
            await post(app_of(client.front), later, stream=stream)
            assert later.status == 503 and json.loads(later.body)["error"]["code"] == "unavailable"
            assert int(later.headers["retry-after"]) >= 1

    run(main())


def test_case_19_after_three_streamed_tokens(client_of: Any, wait_until: Any) -> None:
    """Case 19 (b): what was sent stays, then one error event and the end of the stream; no [DONE]."""

    async def main() -> None:
        async with SimSystem(SimOptions()) as system:
            client = await client_of(system, attempts=3, recovery_s=2.0)
            three = lambda response: len(response.events) >= 3  # noqa: E731
            response, took_s = await killed_when(system, client, wait_until, three, stream=True)
            assert response.status == 200 and response.headers["content-type"].startswith("text/event-stream")
            *tokens, last = map(json.loads, response.events)
            right = system.engine("prefill-0").expected_tokens(PROMPT, len(tokens))
            assert [event["choices"][0]["text"] for event in tokens] == [f"<{token}>" for token in right]
            assert len(tokens) >= 3 and all(event["choices"][0]["finish_reason"] is None for event in tokens)
            assert last["error"]["code"] == "peer_lost" and "decode-0" in last["error"]["message"]
            assert 2.0 <= took_s < 4.0

    run(main())


def test_case_19_the_whole_answer_fails_as_a_whole(client_of: Any, wait_until: Any) -> None:
    """Case 19 (b) without streaming: nothing has left yet, so it is a 5xx, with none of the tokens."""

    async def main() -> None:
        async with SimSystem(SimOptions()) as system:
            client = await client_of(system, attempts=3, recovery_s=2.0)
            running = system.decode()
            ready = lambda _: running.forward.done >= 3  # noqa: E731
            response, _ = await killed_when(system, client, wait_until, ready, stream=False)
            assert response.status == 502 and list(json.loads(response.body)) == ["error"]

    run(main())


async def get(app: Any, path: str) -> str:
    """The text of a GET."""
    response = Response()
    scope = {
        "type": "http", "method": "GET", "path": path, "raw_path": path.encode(), "query_string": b"", "headers": [],
        "http_version": "1.1", "scheme": "http", "server": ("test", 80), "client": ("test", 1), "root_path": "",
        "app": app,
    }  # fmt: skip

    async def receive() -> Any:
        return await asyncio.Event().wait()

    await app(scope, receive, response.send)
    assert response.status == 200
    return response.body.decode()


def test_case_52_what_is_counted_is_what_happened(client_of: Any, wait_until: Any) -> None:
    """Case 52: ten good answers, one refused request and one whose prefill dies; the scrape says exactly that, the
    stages add up to the whole, and no series that the run must have fed stands at zero.
    """

    async def main() -> str:
        async with SimSystem(SimOptions()) as system:
            client = await client_of(system)
            app = app_of(client.front)
            answers = [Response() for _ in range(10)]
            await asyncio.gather(*(post(app, answer, max_tokens=9) for answer in answers))
            assert [answer.status for answer in answers] == [200] * 10
            refused, lost = Response(), Response()
            await post(app, refused, max_tokens=10**6)
            losing = asyncio.create_task(post(app, lost, max_tokens=9))
            await wait_until(lambda: bool(system.prefill().rooms))
            system.kill("prefill-0")
            await losing
            assert (refused.status, lost.status) == (400, 502)
            assert await system.settle(20)
            return await get(app, "/metrics")

    families = list(text_string_to_metric_families(run(main())))
    value: dict[str, float] = {}
    for sample in (sample for family in families for sample in family.samples):
        for key in (sample.name, *(f"{sample.name} {label}" for label in sample.labels.values())):
            value[key] = value.get(key, 0.0) + sample.value
    assert value["kvferry_requests_total"] == 12 and value["kvferry_requests_total 200"] == 10
    assert value["kvferry_requests_total 400"] == value["kvferry_requests_total 502"] == 1
    for name in ("time_to_first_token", "generation", "request"):
        assert value[f"kvferry_{name}_seconds_count"] == 10
    assert value["kvferry_inter_token_seconds_count"] == 10 * 8
    stages_s = value["kvferry_time_to_first_token_seconds_sum"] + value["kvferry_generation_seconds_sum"]
    assert stages_s == pytest.approx(value["kvferry_request_seconds_sum"])
    assert value["kvferry_inter_token_seconds_sum"] == pytest.approx(value["kvferry_generation_seconds_sum"])
    assert value["kvferry_rooms_total committed"] == 10 and value["kvferry_rooms_total peer_lost"] == 1
    assert value["kvferry_room_phase_seconds_count TRANSFERRING"] >= 10
    assert value["kvferry_prompt_tokens_total"] == 11 * 60 and value["kvferry_generated_tokens_total"] == 10 * 9
    assert value["kvferry_transfer_bytes_count fake"] == value["kvferry_transfer_wire_seconds_count fake"] >= 10
    fed_by_this_run = {family.name for family in families} - {
        "kvferry_requests_live", "kvferry_rooms_live", "kvferry_retractions", "kvferry_attempts_failed",
        "kvferry_events", "kvferry_queue_length", "kvferry_transfer_check_failures",
    }  # fmt: skip
    for name in fed_by_this_run:
        assert any(value[key] > 0 for key in value if key.startswith(name)), name
