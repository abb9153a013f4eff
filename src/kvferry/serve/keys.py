"""API keys: who may use the API, when the configuration names any keys.

A client shows its key as `Authorization: Bearer KEY`. Only digests are kept here, and every one is compared, so that
the time of an answer says nothing about a key.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from starlette.types import ASGIApp, Receive, Scope, Send

from kvferry.cluster.config_rules import API_KEY, API_KEY_RULE
from kvferry.protocol.errors import ConfigError, RequestError
from kvferry.serve.asgi import ClientGone, Reply, header
from kvferry.serve.errors import error_body


class InvalidApiKey(RequestError):
    """No key, or one that is not known; the message never repeats it."""

    code = "invalid_api_key"
    http_status = 401


class Keys:
    """The keys that are accepted; with none at all everybody is."""

    def __init__(self, keys: Iterable[str] = ()) -> None:
        self._digests = [_digest(key.encode("ascii")) for key in keys]

    def __len__(self) -> int:
        return len(self._digests)

    def check(self, authorization: str) -> None:
        """`authorization`: the header's value, "" when there is none. Raises InvalidApiKey."""
        if not self._digests:
            return
        scheme, _, shown = authorization.strip().partition(" ")
        if scheme.lower() != "bearer" or not shown.strip():
            raise InvalidApiKey("no API key was given; send one in the header Authorization: Bearer YOUR_KEY")
        digest = _digest(shown.strip().encode("latin-1"))
        if sum(hmac.compare_digest(digest, known) for known in self._digests) == 0:
            raise InvalidApiKey("the API key that was given is not known here")


def _digest(key: bytes) -> bytes:
    """Of one length for every key, so that comparing takes the same time for all of them."""
    return hashlib.sha256(key).digest()


def load_keys(listed: Sequence[str], path: str | None) -> Keys:
    """The keys of the configuration and those in the file at `path`: one a line, lines with # in front are comments.

    Raises ConfigError, which names the line and not what stands there.
    """
    return Keys([*listed, *(_read(path) if path is not None else ())])


def _read(path: str) -> list[str]:
    try:
        lines = Path(path).read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise ConfigError("api.keys_file", path, f"a readable file with one key a line ({reason})") from None
    keys = [(number, line.strip()) for number, line in enumerate(lines, 1)]
    keys = [(number, key) for number, key in keys if key and not key.startswith("#")]
    if not keys:
        raise ConfigError("api.keys_file", path, "a file with at least one key: an empty one would open the API")
    for number, key in keys:
        if not API_KEY.fullmatch(key):
            raise ConfigError("api.keys_file", f"{path}, line {number}", API_KEY_RULE)
    return [key for _, key in keys]


class KeyGuard:
    """Answers 401 to who shows no key, whatever the path but one of `open_paths`; what it lets through it leaves as it
    is."""

    def __init__(self, app: ASGIApp, keys: Keys, open_paths: Collection[str]) -> None:
        self._app, self._keys, self._open_paths = app, keys, open_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"].removeprefix(scope.get("root_path", "")) in self._open_paths:
            await self._app(scope, receive, send)
            return
        try:
            self._keys.check(header(scope, b"authorization"))
        except InvalidApiKey as error:
            scope["app"].state.front.metrics.requests.labels(str(error.http_status), error.code).inc()
            with suppress(ClientGone):
                headers = {"www-authenticate": 'Bearer realm="kvferry"'}
                await Reply(send).json(error.http_status, error_body(error), headers)
            return
        await self._app(scope, receive, send)
