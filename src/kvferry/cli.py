"""The `kvferry` command: serve, ask, scale, status, room, secret, sim, sim explore, config check.

A server that asks for an API key gets the one in the environment variable KVFERRY_API_KEY.
Expected failures (a server that is not there, a bad configuration) are one line on stderr and exit code 1.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import httpx
from rich.console import Console
from rich.live import Live

from kvferry import __version__
from kvferry.obs.show import as_numbers, pools_move, show_pools, show_room, show_status, way_back
from kvferry.protocol.errors import KVFerryError
from kvferry.serve.remote import ServerFailed, answer_of, ask, client, get

DEFAULT_URL = "http://127.0.0.1:8000"
FOLLOW_S = 0.3
#: A server that loads models on every core may be slow to say how far it is.
PATIENCE_S = 60.0


class CommandFailed(Exception):
    """An expected failure; its text is for the user."""


def main(argv: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    run: Callable[[argparse.Namespace], int] = args.run
    try:
        return run(args)
    except (CommandFailed, ServerFailed, KVFerryError) as error:
        print(f"kvferry: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:
        sys.stderr.close()  # the reader of our output has gone: nothing to say, and nobody to say it to
        return 1
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="kvferry", description="Prefill/decode disaggregation on Ray.")
    parser.add_argument("--version", action="version", version=f"kvferry {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_serve(commands)
    _add_ask(commands)
    _add_scale(commands)
    _add_sim(commands)
    status = commands.add_parser("status", help="instances, queues, pages")
    status.set_defaults(run=run_status)
    room = commands.add_parser("room", help="the journal of a room, as a timeline")
    room.add_argument("room", metavar="ID", help="the X-KVFerry-Room of an answer")
    room.set_defaults(run=run_room)
    for command in (status, room):
        command.add_argument("--url", default=DEFAULT_URL, help="the server (%(default)s)")
        command.add_argument("--json", action="store_true", help="print the object itself")
    secret = commands.add_parser("secret", help="make the cluster's secret where there is none, and say where it is")
    secret.add_argument("config", metavar="CONFIG", nargs="?", help="a YAML file such as serve.yaml, for its place")
    secret.add_argument("--token", action="store_true", help="print what writers show the registry's HTTP routes")
    secret.set_defaults(run=run_secret)
    config = commands.add_parser("config", help="work on configuration files").add_subparsers(required=True)
    check = config.add_parser("check", help="read a file, refuse what is not acceptable")
    check.add_argument("file", metavar="FILE")
    check.add_argument("--json", action="store_true", help="print the whole configuration, defaults included")
    check.set_defaults(run=run_config_check)
    return parser


def _add_serve(commands: Any) -> None:
    serve = commands.add_parser("serve", help="start a local cluster and serve until Ctrl-C")
    serve.add_argument("config", metavar="CONFIG", nargs="?", help="a YAML file such as serve.yaml (default: defaults)")
    serve.add_argument("--model", help="the packaged model, a local directory, or a hub id")
    serve.add_argument("--prefill", type=int, metavar="N", help="prefill instances")
    serve.add_argument("--decode", type=int, metavar="N", help="decode instances")
    serve.add_argument(
        "--unified", type=int, metavar="N", help="instances that are both, instead of prefill and decode"
    )
    serve.add_argument("--host", help="address to listen on")
    serve.add_argument("--port", type=int, help="port to listen on")
    serve.add_argument("--json", action="store_true", help="when it is up, print one object instead of the curl line")
    serve.set_defaults(run=run_serve)


def _add_ask(commands: Any) -> None:
    ask = commands.add_parser("ask", help="ask once, and stream the answer")
    ask.add_argument("prompt")
    ask.add_argument("--unified", action="store_true", help="no server: both roles in this process")
    ask.add_argument("--url", default=DEFAULT_URL, help="the server (%(default)s)")
    ask.add_argument("--model", help="with --unified the model to load, else the name to ask for")
    ask.add_argument("--system", help="a system message before the prompt")
    ask.add_argument("--max-tokens", type=int, metavar="N")
    ask.add_argument("--min-tokens", type=int, metavar="N")
    ask.add_argument("--ignore-eos", action="store_true", default=None, help="go on behind the end, to max-tokens")
    ask.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (%(default)s)")
    ask.add_argument("--top-p", type=float)
    ask.add_argument("--top-k", type=int)
    for name in ("min-p", "presence-penalty", "frequency-penalty", "repetition-penalty"):
        ask.add_argument(f"--{name}", type=float)
    ask.add_argument("--seed", type=int)
    ask.add_argument("--stop", action="append", help="may be given several times")
    ask.add_argument("--json", action="store_true", help="print one object at the end")
    ask.set_defaults(run=run_ask)


def _add_scale(commands: Any) -> None:
    scale = commands.add_parser("scale", help="other numbers of instances, while it runs")
    scale.add_argument("numbers", nargs="*", metavar="ROLE=N", help="prefill=2 decode=3 router=2; none: show how it is")
    scale.add_argument("--no-wait", action="store_true", help="ask for it, and don't wait until it is so")
    scale.add_argument(
        "--placement-timeout", type=float, default=10.0, metavar="S",
        help="give up waiting for what has no room on the cluster after so many seconds (%(default)s)",
    )  # fmt: skip
    scale.add_argument("--url", default=DEFAULT_URL, help="the server (%(default)s)")
    scale.add_argument("--json", action="store_true", help="print the object itself, at the end")
    scale.set_defaults(run=run_scale)


def _add_sim(commands: Any) -> None:
    sim = commands.add_parser("sim", help="run the production actors on virtual time, with faults, and check them")
    sim.add_argument("--seeds", type=int, default=1000, metavar="N", help="how many (%(default)s)")
    sim.add_argument("--first", type=int, default=0, metavar="K", help="the first of them (%(default)s)")
    sim.add_argument("--seed", type=int, metavar="N", help="this one alone")
    sim.add_argument("--trace", action="store_true", help="with --seed: print all that happens")
    sim.add_argument("--workers", type=int, metavar="N", help="processes (default: one a core)")
    sim.add_argument("--require-coverage", action="store_true", help="fail when a row of a table was never hit")
    sim.add_argument("--json", action="store_true", help="print one object at the end")
    sim.set_defaults(run=run_sim)
    explore = sim.add_subparsers().add_parser("explore", help="every order of events of a few actors, within bounds")
    models = ("session", "handoff", "ranks", "routers")
    explore.add_argument("--model", choices=models, help="one of them (default: all)")
    explore.add_argument("--small", action="store_true", help="smaller bounds, as the tests use them")
    explore.add_argument("--json", action="store_true", help="print one object at the end")
    explore.set_defaults(run=run_explore)


# --- Commands --------------------------------------------------------------------------------------------------


def run_serve(args: argparse.Namespace) -> int:
    from kvferry.cluster.config import load

    overrides = {
        "model.model": args.model,
        "prefill.instances": 0 if args.unified and args.prefill is None else args.prefill,
        "decode.instances": 0 if args.unified and args.decode is None else args.decode,
        "unified.instances": args.unified,
        "http.host": args.host,
        "http.port": args.port,
    }
    config = load(args.config, overrides)
    from kvferry.serve.launcher import serve

    serve(config, args.json)
    return 0


def run_ask(args: argparse.Namespace) -> int:
    """Streams the text to stdout as it comes; the last line ends with a newline."""
    body = _chat_body(args)

    def show(text: str) -> None:
        if not args.json:
            print(text, end="", flush=True)

    answer = _ask_unified(args, body, show) if args.unified else ask(args.url, body, show)
    if args.json:
        _print_json(answer)
        return 0
    print()
    if sys.stdout.isatty():
        usage, room = answer["usage"], answer.get("room")
        where = f", room {room}" if room else ""
        Console(stderr=True).print(
            f"[dim]{usage['prompt_tokens']} + {usage['completion_tokens']} tokens, "
            f"finish_reason {answer['finish_reason']}{where}[/dim]"
        )
    return 0


def run_status(args: argparse.Namespace) -> int:
    status = get(args.url, "/status")
    if args.json:
        _print_json(status)
    else:
        Console().print(show_status(status))
    return 0


def run_room(args: argparse.Namespace) -> int:
    journal = get(args.url, f"/rooms/{httpx.URL(path='/' + args.room).raw_path.decode()[1:]}")
    if args.json:
        _print_json(journal)
    else:
        Console().print(show_room(journal))
    return 0


def run_scale(args: argparse.Namespace) -> int:
    """Exit code 0 when the numbers are met (with --no-wait: asked for)."""
    numbers = dict(map(_number, args.numbers))
    with client(args.url) as http:
        answer = http.post("/scale", json=numbers) if numbers else http.get("/scale")
    progress = answer_of(answer)
    if numbers and not args.no_wait:
        progress = _follow(args, progress)
    elif not args.json:
        Console().print(show_pools(progress))
    if args.json:
        _print_json(progress)
    return 0


def run_secret(args: argparse.Namespace) -> int:
    from kvferry.cluster.config import load
    from kvferry.cluster.secret import VARIABLE, load_secret, make_secret, registry_token, secret_path

    place = load(args.config).cluster.secret_file
    make_secret(place)
    if args.token:
        print(registry_token(load_secret(place)))
    else:
        print(secret_path(place) if place or VARIABLE not in os.environ else f"${VARIABLE}")
    return 0


def run_sim(args: argparse.Namespace) -> int:
    """Exit code 0 when no checker has found anything."""
    from kvferry.sim.command import run

    return run(args)


def run_explore(args: argparse.Namespace) -> int:
    """Exit code 0 when every model is covered and nothing was violated."""
    from kvferry.sim.explore.command import run

    return run(args.model, small=args.small, as_json=args.json)


def run_config_check(args: argparse.Namespace) -> int:
    from kvferry.cluster.config import load
    from kvferry.cluster.config_rules import HIDDEN

    config = load(args.file)
    if args.json:
        _print_json(json.loads(config.without_keys(HIDDEN).to_bytes()))
    else:
        print(f"{args.file}: acceptable")
    return 0


# --- Asking ----------------------------------------------------------------------------------------------------


def _chat_body(args: argparse.Namespace) -> dict[str, Any]:
    """The body of the chat request; what was not given is left out."""
    messages = [{"role": "system", "content": args.system}] if args.system else []
    messages.append({"role": "user", "content": args.prompt})
    names = (
        "model", "max_tokens", "min_tokens", "ignore_eos", "temperature", "top_p", "top_k", "min_p", "seed", "stop",
        "presence_penalty", "frequency_penalty", "repetition_penalty",
    )  # fmt: skip
    given = {name: getattr(args, name) for name in names}
    return {"messages": messages} | {name: value for name, value in given.items() if value is not None}


def _ask_unified(args: argparse.Namespace, body: dict[str, Any], show: Callable[[str], None]) -> dict[str, Any]:
    """Both roles in this process. The body passes the same checks as over HTTP."""
    from kvferry.cluster.config import load
    from kvferry.serve.schemas import parse_chat
    from kvferry.serve.unified import ask as ask_here

    config = load(None, {"model.model": args.model})
    chat = parse_chat(json.dumps(body | {"model": config.served_name()}).encode())
    answer: dict[str, Any] = ask_here(config, chat, show)
    return answer


# --- Scaling ---------------------------------------------------------------------------------------------------


def _number(text: str) -> tuple[str, int]:
    role, _, number = text.partition("=")
    try:
        return role, int(number)
    except ValueError:
        raise CommandFailed(f"{text!r} is not acceptable; allowed: ROLE=N, such as decode=3") from None


def _follow(args: argparse.Namespace, progress: dict[str, Any]) -> dict[str, Any]:
    """Show how far it is, until it is done. Raises CommandFailed when that will not happen by itself."""
    version = progress["version"]
    moved_s = heard_s = time.monotonic()
    console = Console(stderr=args.json)
    with Live(show_pools(progress), console=console, auto_refresh=False) as live:
        while not progress["done"]:
            time.sleep(FOLLOW_S)
            try:
                progress = get(args.url, "/scale")
            except ServerFailed:
                if time.monotonic() - heard_s > PATIENCE_S:
                    raise
                continue
            heard_s = time.monotonic()
            live.update(show_pools(progress), refresh=console.is_terminal)
            if progress["version"] > version:
                raise CommandFailed(f"a later call has asked for other numbers: {as_numbers(progress['wanted'])}")
            if pools_move(progress):
                moved_s = heard_s
            elif heard_s - moved_s >= args.placement_timeout:
                raise CommandFailed(f"{'; '.join(progress['missing'])}. It stays asked for; {way_back(progress)}")
    return progress


def _print_json(value: object) -> None:
    print(json.dumps(value, ensure_ascii=False, indent=2 if sys.stdout.isatty() else None))


if __name__ == "__main__":
    sys.exit(main())
