"""Case 19 at the API: the only decode is killed and nothing takes its place (virtual time, the ASGI app itself)."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

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
