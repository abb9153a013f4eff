"""Runs of seeds: what they are made of, that they come again exactly, and what the command says of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from kvferry.cli import main
from kvferry.memory.ledger import PageLedger
from kvferry.protocol.machine import Machine
from kvferry.protocol.sender import SenderEvent, SenderMachine, SenderState
from kvferry.sim import seeds
from kvferry.sim.chaos import WEIGHTS
from kvferry.sim.coverage import TABLES, Cells, all_cells
from kvferry.sim.findings import CHECKERS
from kvferry.sim.required import required_cells, required_pairs, unreachable_cells
from kvferry.sim.scenario import ROOM_AIMS, draw
from kvferry.sim.seeds import Report, Sum, Violation, run_seed, run_seeds
from kvferry.sim.unreachable import SELDOM, UNREACHABLE

ROOT = Path(__file__).parents[2]


def test_each_seed_has_two_instances_of_each_role_twenty_rooms_and_three_faults() -> None:
    for seed in range(200):
        scenario = draw(seed)
        options = scenario.options
        answers = [sampling for ask in scenario.asks for _, samplings in ask.prompts for sampling in samplings]
        assert min(options.prefill.instances, options.decode.instances, options.router.instances) >= 2
        assert len(answers) >= 20 and len(scenario.strikes) >= 3


def test_a_run_opens_its_rooms_and_strikes_and_nobody_gets_a_wrong_token() -> None:
    report = run_seed(1)
    assert report.rooms >= 20 and not report.violations
    assert len(report.faults) >= 3
    assert sum(report.ends.values()) == len(draw(1).asks)
    assert report.cells["room NEW x START"] == report.rooms


def test_equal_seeds_give_equal_runs_in_every_process() -> None:
    """Strings hash differently in each Python process; nothing may depend on it."""
    script = (
        "import msgspec, sys; from kvferry.sim.seeds import run_seed\n"
        "sys.stdout.buffer.write(msgspec.json.encode([run_seed(seed, trace=True) for seed in (3,)]))"
    )
    runs = [
        subprocess.run([sys.executable, "-c", script], env=os.environ | {"PYTHONHASHSEED": hash_seed}, check=True,
                       stdout=subprocess.PIPE).stdout
        for hash_seed in ("1", "2")
    ]  # fmt: skip
    assert runs[0] == runs[1]
    (report,) = json.loads(runs[0])
    assert len(report["trace"]) > 300


def test_a_trace_does_not_change_the_run_and_tells_of_rooms_links_and_faults() -> None:
    plain, traced = run_seed(5), run_seed(5, trace=True)
    assert (plain.cells, plain.ends, plain.faults) == (traced.cells, traced.ends, traced.faults)
    lines = "\n".join(traced.trace)
    for told in ("router-0 starts as", "prefill-0: link up decode-", ": decode committed", ": prefill opened", "*** "):
        assert told in lines
    times = [float(line.split()[0]) for line in traced.trace[:-1]]
    assert times == sorted(times) and traced.trace[-1].startswith("clients: ")


def test_counting_stands_in_front_of_machines_only_while_it_counts() -> None:
    before = Machine.__init__, Machine._apply
    cells = Cells()
    with cells.counted():
        assert Machine.__init__ is not before[0] and Machine._apply is not before[1]
    assert (Machine.__init__, Machine._apply) == before


def test_who_waits_for_a_state_is_told_once_whether_a_machine_comes_to_it_or_begins_in_it() -> None:
    cells, told = Cells(), list[Machine[Any, Any]]()
    with cells.counted():
        cells.when_entered(SenderState.AWAITING_DESTINATION, told.append)
        first, _second = SenderMachine(), SenderMachine()
        cells.when_entered(SenderState.QUEUED, told.append)
        first.handle(SenderEvent.DESTINATION)
    assert told == [first, first]


def test_several_processes_give_the_same_sums_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seeds, "CHUNK", 2)

    def total(workers: int) -> tuple[int, int, Counter[str], Counter[str]]:
        added = Sum()
        for report in run_seeds(range(40, 44), workers):
            added.add(report)
        return added.seeds, added.rooms, added.cells, added.pairs

    assert total(1) == total(2)


def test_a_break_is_told_with_its_checker_and_the_command_that_shows_it_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A ledger that frees what it quarantines: pages are used again while their writer may still write."""
    quarantine = PageLedger.quarantine

    def careless(self: PageLedger, holding: Any) -> None:
        quarantine(self, holding)
        self._free.extend(holding.pages)

    monkeypatch.setattr(PageLedger, "quarantine", careless)
    found = next(report for report in map(run_seed, range(16)) if report.violations)
    assert {violation.checker for violation in found.violations} <= CHECKERS.keys()
    assert found.violations[0].checker == "conservation"
    seed = found.seed
    assert main(["sim", "--first", str(seed), "--seeds", "1", "--workers", "1"]) == 1
    printed = capsys.readouterr().out
    assert f"FAILED: conservation: kvferry sim --seed {seed} --trace" in printed
    assert main(["sim", "--seed", str(seed), "--trace"]) == 1
    printed = capsys.readouterr().out
    assert "conservation: " in printed and "*** " in printed and "FAILED" in printed


def test_the_command_prints_what_was_hit_and_fails_on_what_was_not(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sim", "--seeds", "2", "--workers", "1", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert (printed["seeds"], printed["failed"]) == (2, [])
    assert printed["cells"]["room NEW x START"] == printed["rooms"] > 40
    assert printed["cells"].keys() == set(required_cells())
    assert printed["never_hit"]
    assert main(["sim", "--seeds", "2", "--workers", "1", "--require-coverage"]) == 1
    assert "never hit: " in capsys.readouterr().out


def test_required_are_all_cells_but_those_that_are_listed_with_a_reason() -> None:
    cells = all_cells()
    assert len(cells) == sum(len(row) for table in TABLES.values() for row in table.values())
    unreachable = unreachable_cells()
    assert UNREACHABLE.keys() <= cells.keys() and SELDOM.keys() <= cells.keys() - UNREACHABLE.keys()
    assert all(cells[cell] != "refused" for cell in (*UNREACHABLE, *SELDOM)), "what is refused needs no line"
    assert {*required_cells(), *SELDOM, *unreachable} == cells.keys()
    assert "room TRANSFERRING x COMMITTED" in required_cells() and "room NEW x COMMITTED" in unreachable
    assert len(required_pairs()) == len(WEIGHTS) * len(ROOM_AIMS)


def test_to_be_in_a_cell_that_is_unreachable_is_a_violation(monkeypatch: pytest.MonkeyPatch) -> None:
    cell = "receiver RUNNING x FINISHED"
    monkeypatch.setitem(UNREACHABLE, cell, "nothing ever finishes, or so one thinks")
    assert run_seed(1).violations == [Violation("cells", f"{cell}: nothing ever finishes, or so one thinks")]


def test_what_no_checker_foresees_is_a_crash(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise LookupError("no such thing")

    monkeypatch.setattr(seeds, "Play", broken)
    (violation,) = run_seed(1).violations
    assert violation.checker == "crash" and "LookupError: no such thing" in violation.text


def test_sums_add_up() -> None:
    total = Sum()
    total.add(Report(1, rooms=20, ends={"left": 1}, cells={"a": 2}, pairs={"p": 1}))
    total.add(Report(2, rooms=22, violations=[Violation("alive", "x")], ends={"left": 2}, cells={"a": 1}))
    assert (total.seeds, total.rooms, total.ends["left"], total.cells["a"], total.pairs["p"]) == (2, 42, 3, 3, 1)
    assert [report.seed for report in total.failed] == [2]
