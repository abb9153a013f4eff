"""The Starlette application: routes, lifespan, and one shape for every error.

When there are API keys, everything asks for one that is not in `OPEN`: all below `/v1`, but also `/status` and
`/rooms`. They name no content, but hosts and processes, and who watches them learns how long prompts are and when.
Open to everybody are the page, which shows nothing by itself, and what load balancers and Prometheus call.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from kvferry.actors.pools import check_wanted
from kvferry.obs.metrics import CONTENT_TYPE
from kvferry.protocol.errors import InvalidRequest, KVFerryError, PeerError
from kvferry.serve.asgi import JSON_TYPE, check_content_type, read_body
from kvferry.serve.chat import CHAT
from kvferry.serve.completions import COMPLETIONS
from kvferry.serve.errors import NotFound, error_body, retry_after_header, status_body
from kvferry.serve.exchange import Endpoint
from kvferry.serve.front import Front
from kvferry.serve.keys import KeyGuard, Keys
from kvferry.serve.page import chat_page
from kvferry.serve.ready import Readiness
from kvferry.serve.replies import ModelCard, ModelList

#: Makes the front on the loop that will serve, and takes it down at the end.
FrontFactory = Callable[[], AbstractAsyncContextManager[Front]]

MAX_ROOM = 2**63 - 1
SCALE_BODY_BYTES = 4096

OPEN = frozenset({"/", "/health", "/ready", "/metrics"})


def build_app(front_factory: FrontFactory, keys: Keys | None = None, ingress: str = "") -> Starlette:
    """The whole API. `front_factory` is entered when the server starts and left when it stops. `keys`: None opens it
    to everybody. `ingress` is what stands in front of this application, for the status to say.
    """
    executor = ThreadPoolExecutor(1, thread_name_prefix="tokenizer")

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        async with front_factory() as front:
            app.state.front, app.state.ingress = front, ingress
            app.state.readiness = Readiness(front, front.info.ready)
            try:
                yield
            finally:
                executor.shutdown(wait=False, cancel_futures=True)

    routes = [
        Route("/", page),
        Route("/v1/chat/completions", Endpoint(CHAT, executor), methods=["POST"]),
        Route("/v1/completions", Endpoint(COMPLETIONS, executor), methods=["POST"]),
        Route("/v1/models", list_models),
        Route("/v1/models/{model:path}", show_model),
        Route("/status", status),
        Route("/rooms/{room}", room_journal),
        Route("/health", health),
        Route("/ready", ready),
        Route("/metrics", metrics),
        Route("/scale", pools),
        Route("/scale", scale, methods=["POST"]),
    ]
    handlers = {KVFerryError: on_error, HTTPException: on_http_error, Exception: on_exception}
    guard = [Middleware(KeyGuard, keys=keys, open_paths=OPEN)] if keys else []
    return Starlette(
        routes=routes, middleware=guard, lifespan=lifespan, exception_handlers=handlers  # type: ignore[arg-type]
    )  # fmt: skip


def _json(body: Any, status_code: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(body), status_code, headers, JSON_TYPE)


def _front(request: Request) -> Front:
    front: Front = request.app.state.front
    return front


async def page(_: Request) -> Response:
    """The chat page, the same for everybody."""
    return Response(*chat_page())


async def list_models(request: Request) -> Response:
    return _json(ModelList((_card(_front(request)),)))


async def show_model(request: Request) -> Response:
    card = _card(_front(request))
    if request.path_params["model"] != card.id:
        raise NotFound(f"model {request.path_params['model'][:100]!r} is not served here; served: {card.id!r}", "model")
    return _json(card)


def _card(front: Front) -> ModelCard:
    return ModelCard(front.info.model, front.info.created)


async def health(_: Request) -> Response:
    """This process answers; says nothing about the instances."""
    return _json({"status": "ok"})


async def ready(request: Request) -> Response:
    """200 when a handoff has just gone through (`kvferry.serve.ready`), else 503 with what is missing, or what went
    wrong with the one that was tried."""
    readiness: Readiness = request.app.state.readiness
    report = await readiness.report()
    body = {
        "ready": report.ready, "missing": report.missing, "busy": report.busy, "handoff_age_s": report.handoff_age_s
    }  # fmt: skip
    if report.error is None:
        return _json(body)
    body["error"] = error_body(report.error).error
    return _json(body, report.error.http_status, retry_after_header(report.error))


async def metrics(request: Request) -> Response:
    """Prometheus text; the front's own metrics are there even when the cluster can't be asked."""
    front = _front(request)
    try:
        state = await front.backend.status()
    except PeerError:
        state = None  # shown as kvferry_status_up 0
    return Response(front.metrics.render(state), media_type=CONTENT_TYPE)


async def room_journal(request: Request) -> Response:
    text: str = request.path_params["room"]
    known = text.isascii() and text.isdigit() and len(text) <= 19 and 0 < int(text) <= MAX_ROOM
    journal = await _front(request).backend.room(int(text)) if known else None
    if journal is None:
        raise NotFound(f"room {text[:40]!r} is not known: its id is wrong, or its journal was dropped", "room")
    return _json(journal)


async def status(request: Request) -> Response:
    """The cluster's status; how many requests are open is the front's to say, since a client may still read the
    tokens of one whose room has ended."""
    front = _front(request)
    ours = {"requests_live": front.requests_live, "ingress": request.app.state.ingress}
    return _json(await front.backend.status() | ours)


async def pools(request: Request) -> Response:
    """How many instances of each role there are, and are wanted, and what keeps the numbers from being met."""
    return _json(await _front(request).backend.pools())


async def scale(request: Request) -> Response:
    """Ask for other numbers of instances, such as {"decode": 3}; the answer says how far they are."""
    check_content_type(request.scope)
    body = await read_body(request.scope, request.receive, SCALE_BODY_BYTES)
    try:
        numbers = msgspec.json.decode(body)
    except msgspec.DecodeError as error:
        raise InvalidRequest(f"the body is not JSON: {error}") from None
    return _json(await _front(request).backend.scale(check_wanted(numbers)), 202)


# --- Errors ----------------------------------------------------------------------------------------------------


async def on_error(_: Request, error: KVFerryError) -> Response:
    return _json(error_body(error), error.http_status, retry_after_header(error))


async def on_http_error(request: Request, error: HTTPException) -> Response:
    detail = f"{request.method} {request.url.path[:200]}: {error.detail}"
    return _json(status_body(error.status_code, detail), error.status_code, error.headers)


async def on_exception(_: Request, __: Exception) -> Response:
    """The framework logs the exception after this answer."""
    return _json(error_body(KVFerryError()), 500)
