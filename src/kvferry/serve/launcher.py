"""`kvferry serve`: a Ray cluster on this machine with everything on it, until Ctrl-C."""

from __future__ import annotations

import json
import logging
import os
import shlex
import signal
import socket
import sys
import tempfile
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from typing import Any, TextIO

import httpx
import msgspec
import ray
from ray import serve as ray_serve
from rich.console import Console
from rich.markup import escape

from kvferry.cluster.config import Config
from kvferry.cluster.exposure import AUTH_MODE, asks_for_token, check_exposure, make_ray_token
from kvferry.cluster.ingress import prepared
from kvferry.cluster.secret import make_secret, needs_secret
from kvferry.engine.packaged import PACKAGED_MODEL, packaged_gguf
from kvferry.protocol.errors import ConfigError
from kvferry.serve.deployment import build
from kvferry.serve.keys import load_keys

APPLICATION = "kvferry"
POLL_S = 0.5

#: What listens, by `cluster.ingress`, as `kvferry serve` says it.
INGRESSES = {
    "serve": "Ray Serve's proxy (cluster.ingress: haproxy is faster)",
    "haproxy": "HAProxy; on the same address also listen the front itself (a port from 30000 to 31000) and Serve's "
    "fallback proxy (a free port)",
}

console = Console(stderr=True)


def serve(config: Config, as_json: bool = False) -> None:
    """Start, print where it is (`as_json`: as one line of JSON), wait for SIGINT or SIGTERM, stop. Leaves no process
    and no port behind.

    Raises ConfigError, before anything starts, for a model that isn't there, an address that can't be bound or that is
    open to other hosts, and a file of keys or a secret that can't be read: in the cluster each would only show as a
    start that never ends.
    """
    check_model(config.model.model)
    check_ranks(config)
    check_address(config)
    load_keys(config.api.keys, config.api.keys_file)
    check_exposure(config, asks_for_token(os.environ, unset=True))
    prepare_secrets(config)
    stop = threading.Event()

    def ask_to_stop(*_: object) -> None:
        if not stop.is_set():  # said at once: a start that is under way goes on to where it can be stopped
            console.print("[dim]stopping …[/dim]")
        stop.set()

    signal.signal(signal.SIGINT, ask_to_stop)
    signal.signal(signal.SIGTERM, ask_to_stop)
    out = sys.stdout  # ours alone: what Ray reports of its processes goes to stderr instead
    with redirect_stdout(sys.stderr), local_cluster(config):
        if _wait_ready(config, stop):
            _say_hello(config, as_json, out)
            stop.wait()


def check_model(model: str) -> None:
    """Raises ConfigError, saying what to do, when the model is not there; one of the hub is downloaded now, once."""
    if model == PACKAGED_MODEL:
        packaged_gguf()
        return
    from kvferry.engine.loader import locate  # takes seconds to import, which the default model need not wait for

    locate(model)


def check_ranks(config: Config) -> None:
    """Raises ConfigError for numbers of ranks that the model can't be cut into."""
    roles = [role for role, number in config.wanted().items() if number and role != "router"]
    if any(config.ranks(role) > 1 or config.stages(role) for role in roles):
        from kvferry.engine.adapter import check_split  # as above
        from kvferry.engine.loader import locate, model_config

        model = model_config(locate(config.model.model))
        for role in roles:
            check_split(model, *config.shape(role), config.stages(role), f"applications[0].args.{role}.")


def check_address(config: Config) -> None:
    """Raises ConfigError when HTTP can't listen where it should."""
    _check_free("http_options", config.http.host, config.http.port)
    if config.registry.http_port:
        _check_free("applications[0].args.registry", config.registry.http_host, config.registry.http_port)


def _check_free(key: str, host: str, port: int) -> None:
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a port that was only just left is free
            probe.bind(address)
    except OSError as error:
        allowed = f"an address and a port that are free here ({error.strerror or error})"
        raise ConfigError(key, f"{host}:{port}", allowed) from None


def prepare_secrets(config: Config) -> None:
    """Make what the cluster's processes must show each other, where it isn't there yet. Raises ConfigError, OSError."""
    if needs_secret(config) and (path := make_secret(config.cluster.secret_file)) is not None:
        console.print(f"[dim]made the cluster's secret: {escape(str(path))}[/dim]")
    if asks_for_token(os.environ, unset=True) and (problem := make_ray_token()) is not None:
        console.print(f"[yellow]{escape(problem)}[/yellow]")


@contextmanager
def local_cluster(config: Config) -> Iterator[None]:
    """A Ray cluster of this machine with the application deployed on it."""
    _quiet()
    with prepared(config), _ray(config):
        http_options: Any = {"host": config.http.host, "port": config.http.port, "location": "HeadOnly"}
        ray_serve.start(http_options=http_options)
        args = msgspec.to_builtins(config)
        args.pop("http")
        ray_serve.run(build(args), name=APPLICATION, route_prefix="/", blocking=False, _local_testing_mode=False)
        yield


@contextmanager
def _ray(config: Config) -> Iterator[None]:
    """Ray on this machine; at the end Serve and Ray are shut down."""
    slots = config.cluster.slots or max(config.slots(), 2 * (os.cpu_count() or 2))
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    # The dashboard would bind one more port, and nothing here needs it.
    ray.init(
        address="local",
        num_cpus=max(2, os.cpu_count() or 2),
        resources={config.cluster.slot_resource: slots},
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
        configure_logging=True,
    )
    try:
        if not asks_for_token(os.environ, unset=False):
            console.print(f"[yellow]{AUTH_MODE} is disabled: whoever reaches Ray's ports may run any program[/yellow]")
        # Ray has put its own handlers over SIGTERM: one dumps a stack and aborts the process 3 s later.
        for number, handler in handlers.items():
            signal.signal(number, handler)
        yield
    finally:
        # A second Ctrl-C while this runs must not leave half of it behind.
        previous = [signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)]
        with _hushed():
            ray_serve.shutdown()
            ray.shutdown()
        for number, handler in zip((signal.SIGINT, signal.SIGTERM), previous, strict=True):
            signal.signal(number, handler)


@contextmanager
def _hushed() -> Iterator[None]:
    """Ray reports actors that Serve itself has just killed; that is shown only if shutting down fails.

    The descriptor is turned aside, not `sys.stderr`: Ray's threads write to streams that they opened earlier.
    """
    sys.stderr.flush()
    kept = os.dup(2)
    with tempfile.TemporaryFile() as said:
        os.dup2(said.fileno(), 2)
        try:
            yield
        except BaseException:
            said.seek(0)
            os.write(kept, said.read())
            raise
        finally:
            sys.stderr.flush()
            os.dup2(kept, 2)
            os.close(kept)


def base_url(config: Config) -> str:
    """Where this machine reaches the API: a wildcard address is bound, but can't be called; IPv6 needs brackets."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(config.http.host, config.http.host)
    return f"http://[{host}]:{config.http.port}" if ":" in host else f"http://{host}:{config.http.port}"


def _wait_ready(config: Config, stop: threading.Event) -> bool:
    """Poll `/ready` until every instance is there and a handoff goes through, showing what is still missing. False when
    asked to stop meanwhile."""
    url, told = base_url(config), ""
    with httpx.Client(timeout=config.api.ready_limit_s + 5.0) as client, console.status("starting") as spinner:
        while not stop.wait(POLL_S):
            try:
                answer = client.get(f"{url}/ready")
            except httpx.HTTPError as error:
                spinner.update(f"waiting for {url}: {type(error).__name__}")
                continue
            missing = _missing(answer)
            if answer.status_code == 200 and not missing:
                return True
            spinner.update(f"loading the model and registering: {escape(missing)}")
            if "could not start" in missing and missing != told:
                told = missing  # also where no spinner shows; Ray goes on trying
                console.print(f"[red]{escape(missing)}[/red]")
    return False


def _missing(answer: httpx.Response) -> str:
    try:
        body = answer.json()
        if body["missing"] or body["ready"]:
            return "; ".join(body["missing"])
        return str(body["error"]["message"])
    except (ValueError, KeyError, AttributeError):
        return f"HTTP {answer.status_code}"


def _say_hello(config: Config, as_json: bool, out: TextIO) -> None:
    url = base_url(config)
    pairs = " + ".join(f"{n} {role}" for role, n in config.wanted().items() if n and role != "router")
    hello = f"[bold green]KVFerry serves {config.served_name()} at {url}/v1[/bold green]"
    console.print(f"{hello} ({pairs}); Ctrl-C stops it")
    console.print(f"a page to chat with it: {url}/")
    console.print(f"ingress: {INGRESSES[config.cluster.ingress]}")
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    body = json.dumps({"model": config.served_name(), "temperature": 0, "messages": messages})
    key = ' -H "Authorization: Bearer $KVFERRY_API_KEY"' if config.api.keys or config.api.keys_file else ""
    curl = f"curl {url}/v1/chat/completions{key} -H 'Content-Type: application/json' -d {shlex.quote(body)}"
    facts = {"url": url, "model": config.served_name(), "ingress": config.cluster.ingress, "curl": curl}
    print(json.dumps(facts) if as_json else curl, file=out, flush=True)


def _quiet() -> None:
    """Ray and Serve narrate their start at length; errors still show."""
    warnings.filterwarnings("ignore", module=r"ray\..*")
    os.environ.setdefault("RAY_SERVE_LOG_TO_STDERR", "0")
    logging.getLogger("ray.serve").setLevel(logging.ERROR)
    logging.getLogger("ray").setLevel(logging.ERROR)
    sys.stdout.flush()
