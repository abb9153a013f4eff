"""The few raw ASGI moves that a generating route needs."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
from starlette.types import Receive, Scope, Send

from kvferry.protocol.errors import InvalidRequest
from kvferry.serve.errors import BodyTooLarge, WrongContentType

JSON_TYPE = "application/json"
SSE_TYPE = "text/event-stream; charset=utf-8"


class ClientGone(Exception):
    """The client closed the connection."""


def header(scope: Scope, name: bytes) -> str:
    """The first of that name, or "" when there is none."""
    return next((value.decode("latin-1") for key, value in scope["headers"] if key == name), "")


def check_content_type(scope: Scope) -> None:
    """JSON must be called JSON: a web page may post other types to a server on the user's machine unasked."""
    kind = header(scope, b"content-type").partition(";")[0].strip().lower()
    if kind != JSON_TYPE:
        raise WrongContentType(f"content-type: {kind[:100]!r} is not acceptable; allowed: {JSON_TYPE}")


async def read_body(scope: Scope, receive: Receive, limit_bytes: int) -> bytes:
    """The whole body. Raises BodyTooLarge as soon as it is known, ClientGone when the client leaves midway."""
    length = header(scope, b"content-length")
    if length and not (length.isascii() and length.isdigit()):
        raise InvalidRequest(f"content-length: {length[:100]!r} is not a number")
    parts: list[bytes] = []
    size_bytes, more = 0, True
    if length and int(length) > limit_bytes:
        raise BodyTooLarge(f"the body has {length} bytes; the limit is {limit_bytes}")
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        part = message.get("body", b"")
        size_bytes += len(part)
        if size_bytes > limit_bytes:
            raise BodyTooLarge(f"the body has over {limit_bytes} bytes, which is the limit")
        parts.append(part)
        more = message.get("more_body", False)
    return b"".join(parts)


async def disconnected(receive: Receive) -> None:
    """Returns when the client has closed the connection. Call it only after the body has been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


class Reply:
    """Writes one response. Raises ClientGone when the server says that nobody listens any more."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.status = 0

    async def start(self, status: int, content_type: str, headers: Mapping[str, str]) -> None:
        self.status = status
        lines = {"content-type": content_type, **headers}
        raw = [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in lines.items()]
        await self._emit({"type": "http.response.start", "status": status, "headers": raw})

    async def write(self, data: bytes, more: bool = True) -> None:
        if data or not more:
            await self._emit({"type": "http.response.body", "body": data, "more_body": more})

    async def json(self, status: int, body: msgspec.Struct, headers: Mapping[str, str]) -> None:
        data = msgspec.json.encode(body)
        await self.start(status, JSON_TYPE, {"content-length": str(len(data)), **headers})
        await self.write(data, more=False)

    async def _emit(self, message: dict[str, object]) -> None:
        try:
            await self._send(message)
        except OSError:
            raise ClientGone from None
