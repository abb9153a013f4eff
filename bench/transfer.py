"""How fast a request's KV gets from one process into another's pool: our backends, the peers' own APIs, and the limits.

128 MiB in 32 layers of K and V, pages of 16 and 64 tokens, scattered or one run, between two processes of this machine.
All contenders stay open and take turns in each round, in an order that is drawn anew, and ratios are medians of what
the same round gave: this kind of machine changes its speed by a factor of two while one watches.

    python bench/transfer.py [--rounds 11] [--only local,memmove] [--report docs] [--json]
"""

from __future__ import annotations

import importlib.util
import os
import random
import signal
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from report import arguments, finish, table
from transfer_parts import REQUEST_BYTES, Contender, Pair, Work, work
from transfer_report import write_report

from kvferry.transfer.copying import copier

#: Name -> the `Ends` of our own backends and of the limits.
OURS = {
    "local": "transfer_ours:Local",
    "ucx": "transfer_ours:Ucx",
    "ucx tcp": "transfer_ours:UcxTcp",
    "ucxx": "transfer_ours:Ucxx",
    "mooncake": "transfer_ours:Mooncake",
}
#: Of ours, what needs a package that is an extra.
NEEDS = {"ucxx": "ucxx", "mooncake": "mooncake"}
LIMITS = {
    "memmove": "transfer_ours:Memmove",
    "process_vm_writev": "transfer_ours:ProcessCopy",
    "raw socket": "transfer_ours:RawSocket",
}

#: (page size in tokens, scattered)
CASES = ((16, True), (16, False), (64, True), (64, False))
#: Seconds over which an idle pair's CPU time is taken.
IDLE_S = 5.0


def contenders(only: Sequence[str]) -> list[Contender]:
    """Ours, the peers that are installed here, and the limits."""
    there = {name: ends for name, ends in OURS.items() if importlib.util.find_spec(NEEDS.get(name, "kvferry"))}
    found: list[Contender] = [Pair(name, ends) for name, ends in (there | LIMITS).items()]
    if importlib.util.find_spec("transfer_peers") is not None:
        found += importlib.import_module("transfer_peers").contenders()
    return [contender for contender in found if not only or contender.name in only]


def is_peer(name: str) -> bool:
    return name not in OURS and name not in LIMITS


class Runs:
    """Opens all, and drops who fails, with the reason. `rates[case][name]`: GB/s of each round."""

    def __init__(self, found: list[Contender], rounds: int) -> None:
        self.rates: dict[tuple[int, bool], dict[str, list[float]]] = {case: {} for case in CASES}
        self.out: dict[str, str] = {}
        self.paths = {contender.name: contender.path for contender in found}
        self._rounds, self.all, self.live = rounds, found, list[Contender]()

    def run(self, before_the_end: Callable[[], None]) -> None:
        for contender in self.all:
            print(f"opening {contender.name}", file=sys.stderr, flush=True)
            if self._tried(contender, contender.open):
                self.live.append(contender)
                let(contender, go=False)
        try:
            for case in CASES:
                print(f"{len(self.live)} take turns: pages of {case[0]}", file=sys.stderr, flush=True)
                for round_number in range(-1, self._rounds):  # the first warms up, and is checked
                    self._round(case, round_number)
            before_the_end()
        finally:
            for contender in self.all:
                if contender in self.live:
                    let(contender, go=True)
                self._tried(contender, contender.close)

    def _round(self, case: tuple[int, bool], number: int) -> None:
        page_tokens, scattered = case
        todo = work(page_tokens, scattered, seed=number + 2)
        for contender in random.sample(self.live, len(self.live)):
            step = self._check if number < 0 else self._move
            let(contender, go=True)
            if not self._tried(contender, partial(step, case, contender, todo)):
                self.live.remove(contender)
            else:
                let(contender, go=False)

    def _move(self, case: tuple[int, bool], contender: Contender, todo: Work) -> None:
        self.rates[case].setdefault(contender.name, []).append(REQUEST_BYTES / contender.move(todo) / 1e9)

    @staticmethod
    def _check(_case: tuple[int, bool], contender: Contender, todo: Work) -> None:
        contender.move(todo)
        if contender.name != "memmove" and not contender.is_right(todo, 1):
            raise RuntimeError("what came is not what was sent")

    def _tried(self, contender: Contender, step: Callable[[], None]) -> bool:
        try:
            step()
        except Exception as error:  # noqa: BLE001  (it is out; the others go on)
            self.out.setdefault(contender.name, str(error) or type(error).__name__)
            print(f"{contender.name} is out: {self.out[contender.name]}", file=sys.stderr, flush=True)
            return False
        return True


def let(contender: Contender, go: bool) -> None:
    """Stop or continue the processes of one that uses the CPU while nothing moves: the others shall have it."""
    for pid in contender.pids() if contender.spins else ():
        try:
            os.kill(pid, signal.SIGCONT if go else signal.SIGSTOP)
        except ProcessLookupError:
            return


def idle_percent(found: Sequence[Contender]) -> dict[str, float]:
    """CPU that each pair takes while nothing moves, both ends together, in percent of one core."""
    before, began_s = {c.name: cpu_s(c) for c in found}, time.monotonic()
    time.sleep(IDLE_S)
    took_s = time.monotonic() - began_s
    return {c.name: 100 * (cpu_s(c) - before[c.name]) / took_s for c in found}


def cpu_s(contender: Contender) -> float:
    """User and system time of both processes so far."""
    ticks = 0
    for pid in contender.pids():
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / 100


def ratio(rates: Mapping[str, Sequence[float]], ours: str, other: str) -> float | None:
    """The median of the ratios within each round; None where one is not there."""
    if len(rates.get(ours, ())) != len(rates.get(other, ())) or not rates.get(ours):
        return None
    return statistics.median(a / b for a, b in zip(rates[ours], rates[other], strict=True))


def best(rates: Mapping[str, Sequence[float]], names: Sequence[str]) -> str | None:
    there = [name for name in names if rates.get(name)]
    return max(there, key=lambda name: statistics.median(rates[name]), default=None)


def figures(runs: Runs) -> dict[str, object]:
    """The keys that are asked for: of 16-token pages, scattered; with the peer that was the best."""
    rates = {name: got for name, got in runs.rates[CASES[0]].items() if name not in runs.out}
    peers = [name for name in rates if is_peer(name)]
    tcp_peer = best(rates, [name for name in peers if runs.paths[name] == "tcp"])
    peer = best(rates, peers)
    nixl = best(rates, [n for n in peers if n.startswith("NIXL") and runs.paths[n] == "host"])
    pairs = {
        "local_scattered_vs_memmove": ("local", "memmove"),
        "local_scattered_vs_best_peer": ("local", peer),
        "ucx_scattered_vs_nixl_api": ("ucx", nixl),
        "tcp_scattered_vs_best_peer": ("ucx tcp", tcp_peer),
        "ucxx_scattered_vs_ucxx_api": ("ucxx", "UCXX tcp"),
        "mooncake_scattered_vs_mooncake_api": ("mooncake", best(rates, [n for n in peers if n.startswith("Mooncake")])),
        "tcp_scattered_vs_raw_socket": ("ucx tcp", "raw socket"),
    }
    found: dict[str, object] = {key: other and ratio(rates, ours, other) for key, (ours, other) in pairs.items()}
    return found | {"best_peer": peer, "best_tcp_peer": tcp_peer}


def shown(runs: Runs) -> dict[str, dict[str, float]]:
    """Name -> case -> median GB/s."""
    found: dict[str, dict[str, float]] = {}
    for (page, scattered), rates in runs.rates.items():
        for name, got in rates.items():
            case = f"{'scattered' if scattered else 'contiguous'}_{page}"
            found.setdefault(name, {})[case] = round(statistics.median(got), 3)
    return found


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--rounds", type=int, default=11, help="of each case (%(default)s)")
    parser.add_argument("--report", help="a folder: transfer.md and transfer.png are written there")
    parser.add_argument("--only", default="", help="names of contenders, with commas between")
    options = parser.parse_args()
    runs = Runs(contenders([name for name in options.only.split(",") if name]), options.rounds)
    idle: dict[str, float] = {}
    ours = [contender for contender in runs.all if contender.name in OURS]
    runs.run(before_the_end=lambda: idle.update(idle_percent([c for c in ours if c in runs.live])))
    rates = shown(runs)
    columns = [f"{'scattered' if scattered else 'contiguous'}_{page}" for page, scattered in CASES]
    rows = [[name, *(f"{got[c]:.2f}" if c in got else "-" for c in columns)] for name, got in rates.items()]
    table("128 MiB between two processes, GB/s, medians", ("", *columns), rows)
    for name, why in runs.out.items():
        print(f"{name}: {why}")
    found = figures(runs) | {"idle_cpu_percent": max(idle.values(), default=None), "idle_cpu": idle}
    table("", ("", "figure"), [[key, f"{value:.3f}"] for key, value in found.items() if isinstance(value, float)])
    if options.report:
        write_report(Path(options.report), rates, found, runs.out, options.rounds)
    finish(options.json, found | {"copier": copier()[0], "gb_s": rates, "out": runs.out})
    return 0


if __name__ == "__main__":
    sys.exit(main())
