"""A running server as the `kvferry` command reaches it: over its HTTP API, with the key from the environment.

Everything that goes wrong raises ServerFailed.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx


class ServerFailed(Exception):
    """The server can't be reached, or refuses, or breaks off; the text is for the user."""


@contextmanager
def client(url: str) -> Iterator[httpx.Client]:
    """No read timeout: the server's own clocks end a request. Transport errors become ServerFailed.

    An API key comes from the environment: on the command line everybody on the machine could read it.
    """
    headers = {}
    if key := os.environ.get("KVFERRY_API_KEY", "").strip():
        if not (key.isascii() and key.isprintable()):
            raise ServerFailed("KVFERRY_API_KEY has characters that no API key has")
        headers["authorization"] = f"Bearer {key}"
    try:
        with httpx.Client(base_url=url, timeout=httpx.Timeout(None, connect=5.0), headers=headers) as http:
            yield http
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        reason = str(error) or type(error).__name__
        raise ServerFailed(f"{url} can't be reached: {reason}; is `kvferry serve` running?") from None


def get(url: str, path: str) -> dict[str, Any]:
    """The object at `path`."""
    with client(url) as http:
        response = http.get(path)
    return answer_of(response)


def answer_of(response: httpx.Response) -> dict[str, Any]:
    """The object that the server answered with."""
    if not response.is_success:
        raise ServerFailed(_error_text(response))
    try:
        answer: dict[str, Any] = response.json()
    except ValueError:
        raise ServerFailed(f"{response.url} did not answer with JSON; is it a KVFerry server?") from None
    return answer


def _error_text(response: httpx.Response) -> str:
    try:
        message: str = response.json()["error"]["message"]
    except (ValueError, KeyError, TypeError):
        return f"{response.request.url} answered {response.status_code}"
    return f"{message} (HTTP {response.status_code})"


def ask(url: str, body: dict[str, Any], show: Callable[[str], None]) -> dict[str, Any]:
    """Stream the answer to a chat request; `show` gets the text as it comes. Without a model in it,
    ask for the one that is served."""
    if "model" not in body:
        body["model"] = get(url, "/v1/models")["data"][0]["id"]
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    answer: dict[str, Any] = {"id": "", "model": body["model"], "room": None, "text": "", "finish_reason": None}
    with client(url) as http, http.stream("POST", "/v1/chat/completions", json=body) as response:
        if response.status_code != 200:
            response.read()
            raise ServerFailed(_error_text(response))
        answer["room"] = response.headers.get("x-kvferry-room")
        for chunk in _events(response):
            answer["id"] = chunk["id"]
            if chunk.get("usage"):
                answer["usage"] = chunk["usage"]
            for choice in chunk["choices"]:
                text = choice["delta"].get("content") or ""
                show(text)
                answer["text"] += text
                answer["finish_reason"] = choice["finish_reason"] or answer["finish_reason"]
    return answer


def _events(response: httpx.Response) -> Iterator[dict[str, Any]]:
    """The chunks up to [DONE]. Raises ServerFailed for an error event, or when the stream ends without one."""
    for line in response.iter_lines():
        if line == "data: [DONE]":
            return
        if line.startswith("data: "):
            chunk: dict[str, Any] = json.loads(line.removeprefix("data: "))
            if "error" in chunk:
                raise ServerFailed(chunk["error"]["message"])
            yield chunk
    raise ServerFailed("the answer ended before its end")
