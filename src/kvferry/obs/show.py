"""How a status object and a room's journal look on a terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

BAR_CELLS = 30  # the whole table fits 80 columns
POOL_COLUMNS = ("wanted", "placing", "starting", "registered", "draining", "left")
PAGE_STATES = ("total", "free", "owned", "leased", "cached", "quarantined", "retired")

_COLOURS = {
    "FAILED": "red",
    "BOOTSTRAPPING": "yellow",
    "WAITING_FOR_INPUT": "cyan",
    "TRANSFERRING": "blue",
    "SUCCESS": "green",
}


def bar(start_s: float, duration_s: float, total_s: float, cells: int = BAR_CELLS) -> str:
    """The part [start, start + duration] of [0, total] as a line of `cells` characters; never without a mark."""
    if total_s <= 0:
        return "▏".ljust(cells)
    first = min(cells - 1, int(start_s / total_s * cells))
    last = min(cells, max(first + 1, round((start_s + duration_s) / total_s * cells)))
    mark = "█" * (last - first) if duration_s > 0 else "▏"
    return (" " * first + mark).ljust(cells)[:cells]


def show_status(status: Mapping[str, Any]) -> RenderableType:
    """Who is there, and under it the pages of each by state; dashes for an instance that does not answer. Then how many
    tokens a page has, where that is not the same everywhere, and why pages are quarantined."""
    who, pages = Table(title="instances", title_justify="left"), Table(title="pages", title_justify="left")
    for name in ("id", "role", "incarnation", "ranks", "queues"):
        who.add_column(name)
    pages.add_column("id")
    for name in PAGE_STATES:
        pages.add_column(name, justify="right")
    for instance in status["instances"]:
        ranks = "\n".join(f"{rank['rank']}: pid {rank['pid']}{_where(rank)}" for rank in instance["ranks"])
        queues = "\n".join(f"{name} {length}" for name, length in instance["queues"].items())
        role = f"{instance['role']}, draining" if instance.get("draining") else instance["role"]
        cells = [instance["id"], role, instance["incarnation"] or "-", ranks or "does not answer", queues]
        who.add_row(*map(str, cells))
        pages.add_row(str(instance["id"]), *(str(instance["pages"].get(name, "-")) for name in PAGE_STATES))
    live = f"rooms live {status['rooms_live']}, requests live {status['requests_live']}"
    lines = (*page_size_lines(status), *quarantine_lines(status), *path_lines(status), live)
    return Group(who, pages, *map(Text, lines))


def page_size_lines(status: Mapping[str, Any]) -> list[str]:
    """A line, where counts of pages can't be compared as they stand."""
    sizes: dict[int, list[str]] = {}
    for instance in status["instances"]:
        if "page_size" in instance:
            sizes.setdefault(instance["page_size"], []).append(str(instance["id"]))
    parts = [f"{size} of {', '.join(names)}" for size, names in sorted(sizes.items())]
    return [f"tokens in a page: {'; '.join(parts)}"] if len(parts) > 1 else []


def path_lines(status: Mapping[str, Any]) -> list[str]:
    """Which ways KV arrives, each with a reason for it: pairs of a prefill process and a rank that it writes to."""
    return [
        f"{instance['id']}: KV arrives by {name} ({count}){f': {why}' if why else ''}"
        for instance in status["instances"]
        for name, count in instance.get("data_paths", {}).items()
        for why in [instance.get("data_path_reasons", {}).get(name)]
    ]


def quarantine_lines(status: Mapping[str, Any]) -> list[str]:
    """Which pages are quarantined, and why: a line for each room that waits for proof."""
    return [
        f"{instance['id']}: {len(row['pages'])} pages of room {row['room']} are quarantined for {row['for_s']:.1f} s: "
        f"{row['writer']} (pid {row['writer_pid']}, {'' if row['linked'] else 'not '}linked) may still write to them; "
        f"waits for {' or '.join(row['waits_for'])}; the room ended: {row['cause']}"
        for instance in status["instances"]
        for row in instance.get("quarantined", ())
    ]


def show_pools(progress: Mapping[str, Any]) -> RenderableType:
    """Each role's instances by phase; under them who is on its way in or out, who has left, and what is missing."""
    table = Table(title="pools", title_justify="left")
    table.add_column("role")
    for name in POOL_COLUMNS:
        table.add_column(name, justify="right")
    for role, numbers in progress["roles"].items():
        met = numbers["registered"] == numbers["wanted"]
        table.add_row(role, *(str(numbers[name]) for name in POOL_COLUMNS), style="" if met else "yellow")
    lines = [_moving(row) for row in progress["instances"] if row["phase"] != "registered"]
    lines += [_gone(row) for row in progress["left"]]
    return Group(table, *map(Text, lines), *(Text(line, style="red") for line in progress["missing"]))


def _moving(row: Mapping[str, Any]) -> str:
    return f"{row['name']} is {row['phase']} for {row['for_s']:.0f} s" + (f": {row['detail']}" if row["detail"] else "")


def _gone(row: Mapping[str, Any]) -> str:
    pages = row["pages"]
    if not pages:
        return f"{row['name']} left" + (f": {row['detail']}" if row["detail"] else "")
    counts = f"{pages['leased']} pages leased, {pages['quarantined']} quarantined"
    return f"{row['name']} left with {counts}; {row['handed_over']} rooms were handed over"


def pools_move(progress: Mapping[str, Any]) -> bool:
    """Something changes by itself: it is not only room on the cluster, or a start that fails, that is waited for."""
    roles = progress["roles"].values()
    fails = any("could not start" in line for line in progress["missing"])
    starting = any(role["starting"] for role in roles) and not fails
    return not progress["missing"] or starting or any(role["draining"] for role in roles)


def way_back(progress: Mapping[str, Any]) -> str:
    fewer = {
        name: role["registered"] for name, role in progress["roles"].items() if role["registered"] < role["wanted"]
    }
    return f"to take it back: kvferry scale {as_numbers(fewer)}"


def as_numbers(numbers: Mapping[str, int]) -> str:
    return " ".join(f"{role}={number}" for role, number in numbers.items())


def show_room(journal: Mapping[str, Any]) -> RenderableType:
    """The journal as a timeline: who, how KVPoll went, and every event with its offset from the opening."""
    return Group(_heading(journal), _kvpoll(journal), _events(journal))


def total_s(journal: Mapping[str, Any]) -> float:
    """When the last thing in the journal ended, in seconds since the room was opened."""
    ends = [step["at_s"] + (step["duration_s"] or 0.0) for step in journal["kvpoll"]]
    return max(ends + [event["at_s"] for event in journal["events"]], default=0.0)


def _heading(journal: Mapping[str, Any]) -> RenderableType:
    grid = Table.grid(padding=(0, 2))
    outcome = journal["outcome"]
    if outcome is None:
        end = Text("still open", style="yellow")
    elif outcome["ok"]:
        end = Text("ok", style="green")
    else:
        end = Text(str(outcome["cause"]), style="red")
    rows: list[tuple[str, str | Text]] = [
        ("room", str(journal["room"])),
        ("request", f"{journal['request']}, attempt {journal['attempt']}"),
        ("pair", f"{journal['prefill']} → {journal['decode']} over {journal['backend']}"),
        ("prompt", f"{journal['prompt_tokens']} tokens"),
        ("moved", f"{journal['kv_bytes']} bytes of KV, {journal['metadata_bytes']} of metadata"),
        *(("transfer", _transfer(transfer)) for transfer in journal.get("transfers", ())),
        ("outcome", end),
    ]
    for name, value in rows:
        grid.add_row(Text(name, style="bold"), value)
    return grid


def _transfer(transfer: Mapping[str, Any]) -> str:
    parts = [f"rank {transfer['rank']} over {transfer['backend']}: {transfer['bytes']} bytes"]
    parts += [f"{transfer['descriptors']} descriptors"] if "descriptors" in transfer else []
    parts += [f"waited {_ms(transfer['wait_s'])}"] if "wait_s" in transfer else []
    parts += [f"on the wire {_ms(transfer['wire_s'])}"] if "wire_s" in transfer else []
    return ", ".join(parts)


def _kvpoll(journal: Mapping[str, Any]) -> RenderableType:
    table = Table(title="KVPoll", title_justify="left")
    table.add_column("at", justify="right")
    table.add_column("state", no_wrap=True)
    table.add_column("for", justify="right")
    table.add_column("timeline", no_wrap=True)
    whole_s = total_s(journal)
    for step in journal["kvpoll"]:
        duration_s = step["duration_s"] or 0.0
        colour = _COLOURS.get(step["state"], "white")
        line = Text(bar(step["at_s"], duration_s, whole_s), style=colour)
        table.add_row(_ms(step["at_s"]), Text(step["state"], style=colour), _ms(duration_s), line)
    return table


def _events(journal: Mapping[str, Any]) -> RenderableType:
    table = Table(title="events", title_justify="left")
    table.add_column("at", justify="right")
    for name in ("leg", "event", "detail"):
        table.add_column(name)
    for event in journal["events"]:
        detail = ", ".join(f"{name} {_plain(value)}" for name, value in event["detail"].items())
        table.add_row(_ms(event["at_s"]), Text(event["leg"]), Text(event["event"]), Text(detail))
    return table


def _ms(duration_s: float) -> str:
    return f"{duration_s * 1000:.1f} ms"


def _where(rank: Mapping[str, Any]) -> str:
    """The rank's host, by its address; on one host, where links use the loopback device, there is nothing to tell."""
    host = str(rank.get("endpoint", "")).removeprefix("tcp://").rpartition(":")[0]
    return f" on {host}" if host and not host.startswith("127.") else ""


def _plain(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
