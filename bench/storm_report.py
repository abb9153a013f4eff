"""What a storm has shown: figures, a table, a picture, a page."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accounts import Account
from cancels import PHASES, Cancel
from report import table
from storm_clients import Request
from strikes import CUT, KILL, STOP, Strike

REQUESTS_PER_MINUTE, RECOVERY_S, CANCEL_S = 50, 5.0, 1.0
BIN_S = 10
GREEN, GREY, ORANGE, RED, BLUE, VIOLET = "#3a8f5c", "#b9bec6", "#e08a1e", "#c4302b", "#3b6fb6", "#7a5aa6"
COLOURS = {KILL: RED, STOP: ORANGE, CUT: BLUE}


@dataclass(frozen=True)
class Storm:
    """`accounts`: after the storm, and after the cancels. `looks`: time and quarantined pages by instance."""

    lasted_s: float
    every_s: float
    requests: list[Request]
    strikes: list[Strike]
    looks: list[tuple[float, dict[str, int]]]
    cancels: list[Cancel]
    accounts: tuple[Account, Account]

    @property
    def kills(self) -> list[Strike]:
        return [strike for strike in self.strikes if strike.kind == KILL and strike.pid]


def percentile(values: list[float], share: float) -> float:
    """The least value that `share` of all do not exceed; 0.0 of none."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


def recoveries_s(strikes: list[Strike]) -> list[float]:
    """From a process's registration to the next right answer."""
    return [s.right_s - s.end_s for s in strikes if s.right_s is not None and s.end_s is not None]


def figures(storm: Storm) -> dict[str, Any]:
    """The keys of `--json`. `passed`: whether the storm has shown what it should."""
    verdicts = Counter(request.verdict for request in storm.requests)
    kinds = Counter(strike.kind for strike in storm.strikes if strike.pid)
    took_s = [cancel.took_s for cancel in storm.cancels]
    kills = storm.kills
    served_s = [s.served_s - s.end_s for s in kills if s.served_s is not None and s.end_s is not None]
    found: dict[str, Any] = {
        "minutes": round(storm.lasted_s / 60, 2),
        "requests": len(storm.requests),
        "right": verdicts["right"] + verdicts["tie"],
        "ties": verdicts["tie"],
        "wrong": verdicts["wrong"],
        "lost": verdicts["lost"],
        "errors": verdicts["error"],
        "disconnects": verdicts["left"],
        "kills": kinds[KILL],
        "stops": kinds[STOP],
        "cuts": kinds[CUT],
        "pages_unaccounted": max(account.unaccounted for account in storm.accounts),
        "pages_quarantined": storm.accounts[-1].quarantined,
        "recovery_s_p95": round(percentile(recoveries_s(kills), 0.95), 2),
        "registered_s_max": round(max((s.end_s - s.at_s for s in kills if s.end_s is not None), default=0.0), 2),
        "served_s_max": round(max(served_s, default=0.0), 2),
        "cancels": len(took_s),
        "cancel_p50_s": round(percentile(took_s, 0.5), 3),
        "cancel_p99_s": round(percentile(took_s, 0.99), 3),
        "cancels_slowest": [f"{cancel.took_s:.2f} s: {cancel.phase}; {cancel.waited_for}" for cancel in slowest(storm)],
        "cancels_by_phase": dict(Counter(cancel.phase for cancel in storm.cancels)),
    }
    wanted = REQUESTS_PER_MINUTE * storm.lasted_s / 60
    good = not (found["wrong"] or found["lost"] or found["pages_unaccounted"])
    fast = found["recovery_s_p95"] < RECOVERY_S and found["cancel_p99_s"] < CANCEL_S
    return found | {"passed": good and fast and found["requests"] >= wanted}


def rows(storm: Storm) -> list[list[str]]:
    """One for each fault: when, what, until it was back, until the next right answer, errors that clients got."""
    found = []
    for number, strike in enumerate(storm.strikes):
        end_s = storm.lasted_s if number + 1 == len(storm.strikes) else storm.strikes[number + 1].at_s
        ended = [r for r in storm.requests if strike.at_s <= r.ended_s < end_s]
        errors = sum(request.verdict == "error" for request in ended)
        back = f"{strike.end_s - strike.at_s:.1f}" if strike.end_s is not None and strike.pid else "-"
        right = f"{strike.right_s - strike.end_s:.1f}" if strike.right_s and strike.end_s is not None else "-"
        named = f"{strike.kind} {strike.victim}" + (f" ({strike.note})" if strike.note else "")
        found.append([named, f"{strike.at_s:.0f}", back, right, str(len(ended)), str(errors)])
    return found


COLUMNS = ("fault", "at s", "lasted s", "right again s", "answers until the next", "errors")


def show(storm: Storm, numbers: dict[str, Any]) -> None:
    table(f"A storm of {storm.lasted_s / 60:.1f} minutes: 2 prefill, 2 decode, 2 routers", COLUMNS, rows(storm))
    table("Requests", ("verdict", "number"), [[verdict, str(count)] for verdict, count in verdicts(storm)])
    if storm.cancels:
        columns = ("cancelled while", "number", "p50 s", "p99 s", "pages left quarantined")
        table("Cancels, until everything was at baseline", columns, cancel_rows(storm))
    for text, count in Counter(r.detail for r in storm.requests if r.verdict in ("error", "wrong", "lost")).most_common(
        12
    ):
        print(f"{count} times: {text[:300]}")
    for reason in storm.accounts[-1].reasons:
        print(reason)
    print("passed" if numbers["passed"] else "failed")


def verdicts(storm: Storm) -> list[tuple[str, int]]:
    count = Counter(request.verdict for request in storm.requests)
    return [(verdict, count[verdict]) for verdict in ("right", "tie", "left", "error", "wrong", "lost")]


def slowest(storm: Storm) -> list[Cancel]:
    """The five cancels that took longest: what they waited for shows where."""
    return sorted(storm.cancels, key=lambda cancel: -cancel.took_s)[:5]


def cancel_rows(storm: Storm) -> list[list[str]]:
    found = []
    for phase in reversed(PHASES):
        ours = [cancel for cancel in storm.cancels if cancel.phase == phase]
        took_s = [cancel.took_s for cancel in ours]
        held = sum(cancel.account.quarantined > 0 for cancel in ours)
        figures = (f"{percentile(took_s, share):.3f}" if ours else "-" for share in (0.5, 0.99))
        found.append([phase, str(len(ours)), *figures, str(held)])
    return found


# --- the picture ---


def picture(storm: Storm, path: Path) -> None:
    """Answers per second over the faults of each process; recoveries; quarantined pages; cancels. Needs matplotlib."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    sizes = {"height_ratios": (2.2, 3, 1.3, 1.1, 1.6)}
    figure, (load, faults, recovery, pages, left) = pyplot.subplots(
        5, 1, figsize=(12, 13), gridspec_kw=sizes, layout="constrained"
    )
    _draw_load(load, storm)
    _draw_faults(faults, storm)
    _draw_recovery(recovery, storm)
    _draw_pages(pages, storm)
    for axes in (load, faults, recovery, pages):
        axes.set_xlim(0, storm.lasted_s)
        axes.grid(axis="x", alpha=0.3)
    pages.set_xlabel("seconds since the storm began")
    _draw_cancels(left, storm)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _draw_load(axes: Any, storm: Storm) -> None:
    edges = [BIN_S * at for at in range(int(storm.lasted_s // BIN_S) + 2)]
    kinds: tuple[tuple[str, tuple[str, ...], str], ...] = (
        ("right", ("right", "tie"), GREEN),
        ("left by their clients", ("left",), GREY),
        ("errors", ("error",), ORANGE),
        ("wrong or lost", ("wrong", "lost"), RED),
    )
    ended = [[r.ended_s for r in storm.requests if r.verdict in wanted] for _, wanted, _ in kinds]
    labels = [f"{name} ({len(values)})" for (name, _, _), values in zip(kinds, ended, strict=True)]
    weights = [[1 / BIN_S] * len(values) for values in ended]
    axes.hist(ended, edges, weights=weights, stacked=True, label=labels, color=[colour for _, _, colour in kinds])
    axes.set_ylabel("requests / s")
    axes.set_title(f"A storm of {storm.lasted_s / 60:.0f} minutes: {len(storm.requests)} requests", loc="left")
    axes.legend(ncols=4, loc="lower right", bbox_to_anchor=(1, 1), fontsize=8, frameon=False)


def _lanes(storm: Storm) -> list[str]:
    order = ("front", "router", "registry", "prefill", "decode")
    names = {name for strike in storm.strikes if strike.pid for name in strike.victim.split(" - ")}
    return sorted(names, key=lambda name: (order.index(name.split("-")[0]), name), reverse=True)


def _draw_faults(axes: Any, storm: Storm) -> None:
    """A cross for each kill, and its process away until it has registered again; a bar for each stop and each cut."""
    lanes = _lanes(storm)
    for strike in storm.strikes:
        if not strike.pid:
            continue
        end_s = storm.lasted_s if strike.end_s is None else strike.end_s
        spots = [lanes.index(name) for name in strike.victim.split(" - ")]
        for spot in spots:
            thick, alpha = (0.36, 0.25) if strike.kind == KILL else (0.5, 0.75)
            axes.barh(
                spot, end_s - strike.at_s, left=strike.at_s, height=thick, color=COLOURS[strike.kind], alpha=alpha
            )
        if strike.kind == KILL:
            axes.plot(strike.at_s, spots[0], "x", color=RED, markersize=9, markeredgewidth=2.5)
        if strike.kind == CUT:
            axes.vlines((strike.at_s + end_s) / 2, min(spots), max(spots), color=BLUE, linewidth=1.5)
    axes.set_yticks(range(len(lanes)), lanes)
    axes.set_ylim(-0.6, len(lanes) + 0.4)  # room for the legend
    handles = [axes.plot([], [], "x", color=RED, markeredgewidth=2.5, label="kill -9 (bar: until registered again)")[0]]
    handles += [
        axes.barh(0, 0, color=ORANGE, label="SIGSTOP until SIGCONT"),
        axes.barh(0, 0, color=BLUE, label="link cut"),
    ]
    axes.legend(handles=handles, ncols=3, loc="upper right", fontsize=8)
    axes.set_title("Faults", loc="left")


def _draw_recovery(axes: Any, storm: Storm) -> None:
    for strike in storm.kills:
        if strike.right_s is not None and strike.end_s is not None:
            took_s = strike.right_s - strike.end_s
            axes.plot(strike.end_s, took_s, "o", color=GREEN if took_s < RECOVERY_S else RED)
            axes.annotate(strike.victim, (strike.end_s, took_s), (4, 4), textcoords="offset points", fontsize=7)
    axes.axhline(RECOVERY_S, color=RED, linestyle="--", linewidth=1)
    axes.set_ylim(0, 1.2 * max([RECOVERY_S, *recoveries_s(storm.kills)]))
    axes.set_ylabel("s")
    axes.set_title("From a killed process's registration to the next right answer (dashed: the limit)", loc="left")


def _draw_pages(axes: Any, storm: Storm) -> None:
    names = sorted({name for _, pages in storm.looks for name in pages if name.startswith("decode")})
    for name, colour in zip(names, (VIOLET, BLUE, ORANGE, GREEN), strict=False):
        shown = [(at_s, pages.get(name, 0)) for at_s, pages in storm.looks]
        axes.step(*zip(*shown, strict=True), where="post", color=colour, label=name)
    axes.set_ylabel("pages")
    axes.set_title("Quarantined: waiting for proof that nobody writes to them any more", loc="left")
    if names:
        axes.legend(ncols=2, loc="upper right", fontsize=8)


def _draw_cancels(axes: Any, storm: Storm) -> None:
    """Each cancel as a dot in its phase's lane."""
    phases = list(PHASES)
    for lane, phase in enumerate(phases):
        took_s = sorted(cancel.took_s for cancel in storm.cancels if cancel.phase == phase)
        spread = [lane + 0.5 * (at / max(1, len(took_s) - 1) - 0.5) for at in range(len(took_s))]
        axes.plot(took_s, spread, ".", color=VIOLET, alpha=0.6)
    axes.axvline(CANCEL_S, color=RED, linestyle="--", linewidth=1)
    counts = Counter(cancel.phase for cancel in storm.cancels)
    axes.set_yticks(range(len(phases)), [f"{phase} ({counts[phase]})" for phase in phases])
    axes.set_ylim(-0.6, len(phases) - 0.4)
    axes.set_xlim(left=0)
    axes.set_xlabel("seconds from a cancel until every counter was at baseline (dashed: the limit of the p99)")
    axes.set_title("Cancels of an idle server, by the phase of their room", loc="left")


# --- the page ---


def document(storm: Storm, numbers: dict[str, Any], path: Path) -> None:
    """A page with the picture beside it (`storm.png`)."""
    verdict_lines = [f"| {verdict} | {count} |" for verdict, count in verdicts(storm)]
    lines = [
        "# A storm on real Ray",
        "",
        "Made by `make storm`; what it does and counts is at the top of `bench/storm.py`.",
        "",
        "![Timeline of the faults, requests per second, recoveries, quarantined pages and cancels](storm.png)",
        "",
        "| requests that ended | number |", "|---|---|", *verdict_lines,
        "",
        "| figure | value |", "|---|---|",
        *(f"| `{name}` | {value} |" for name, value in numbers.items() if not isinstance(value, dict)),
        "",
        "## Faults",
        "",
        f"| {' | '.join(COLUMNS)} |", "|" + "---|" * len(COLUMNS),
        *(f"| {' | '.join(row)} |" for row in rows(storm)),
        "",
        "*Lasted*: a killed process until it had registered again (model loading included), a stopped one until it "
        "went on, a link until it was healed. *Right again*: from there to the next right answer of a request that "
        "came after.",
        "",
    ]  # fmt: skip
    if storm.cancels:
        lines += [
            "## Cancels", "",
            "| cancelled while | number | p50 s | p99 s | pages left quarantined |", "|---|---|---|---|---|",
            *(f"| {' | '.join(row)} |" for row in cancel_rows(storm)), "",
        ]  # fmt: skip
    errors = Counter(r.detail for r in storm.requests if r.verdict == "error")
    if errors:
        lines += [
            "## Errors that clients got",
            "",
            *(f"- {count} times: {_short(text)}" for text, count in errors.most_common()),
            "",
        ]
    path.write_text("\n".join(lines))


def _short(text: str) -> str:
    line = " ".join(text.split()).replace("|", "/")
    return line if len(line) <= 200 else line[:200] + " …"
