"""Damaged frames, a few thousand here; `python bench/fuzz.py --frames 1000000` is the same with more of them."""

from __future__ import annotations

import fuzz
import pytest
from fuzz_actors import Stage
from fuzz_decoders import FRAMES, MESSAGES, Target, decoders
from fuzz_mutator import Mutator

from kvferry.protocol import frames, messages
from kvferry.protocol.address import Address
from kvferry.sim.loop import run


def test_nothing_crashes_remains_or_grows() -> None:
    report = run(fuzz.Fuzz(6000, seed=3).run())
    assert report.findings == []
    assert report.states_after == report.states_before and report.states_before["rooms"] == 0
    assert report.tokens_after == 4, "the next request is served"
    assert sum(report.by_target.values()) == 6000 and len(report.by_target) == 16
    assert report.refused["undecodable_frame"] > 100 and report.refused["undecodable_message"] > 100
    assert report.rss_after_bytes - report.rss_before_bytes < 16 << 20
    assert report.good


def test_every_message_and_frame_is_in_the_corpus() -> None:
    assert {type(message) for message in MESSAGES} == set(messages.Message.__subclasses__())
    assert {type(frame) for frame in FRAMES} == set(frames.Frame.__subclasses__())


def test_what_is_whole_is_taken() -> None:
    """The corpus itself passes: what is damaged later was good before."""
    for target in decoders():
        for data in target.corpus:
            assert target.take(data) is None
    for payload, message in zip(decoders()[1].corpus, MESSAGES, strict=True):
        assert messages.decode(payload) == message


def test_equal_seeds_give_equal_frames() -> None:
    def drawn(seed: int) -> list[bytes]:
        mutator = Mutator(seed)
        return [mutator.damaged((b"one good frame", b"another")) for _ in range(200)]

    assert drawn(5) == drawn(5) != drawn(6)


def test_an_error_that_escapes_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def raises(data: bytes) -> None:
        if len(data) % 7 == 0:
            raise UnicodeDecodeError("utf-8", b"\xff", 0, 1, "planted")

    monkeypatch.setattr(fuzz, "decoders", lambda: [Target("planted", 1e6, (b"seven bytes and seven",), raises)])
    report = run(fuzz.Fuzz(50, seed=1).run())
    assert report.findings and "planted" in report.findings[0] and not report.good


@pytest.mark.parametrize("fault", ["an actor that dies", "a rank that stays"])
def test_what_an_actor_makes_of_a_frame_is_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = Stage.__aenter__

    async def with_fault(stage: Stage) -> Stage:
        await made(stage)
        registry = stage._registry

        def planted(_peer: Address, _message: messages.Message) -> None:
            if fault == "an actor that dies":
                raise KeyError("planted")
            registry.table.ranks["planted", 0, 0, 0, 0] = stage._system.decode().info

        registry._on_message[messages.Drained] = planted
        return stage

    monkeypatch.setattr(Stage, "__aenter__", with_fault)
    monkeypatch.setattr(fuzz, "decoders", list)
    report = run(fuzz.Fuzz(6000, seed=2).run())
    assert not report.good
    if fault == "an actor that dies":
        assert "registry ended: KeyError" in report.findings[0]
    else:
        assert report.findings == [] and report.states_after["registered ranks"] == 3


def test_one_frame_alone() -> None:
    report = run(fuzz.Fuzz(300, seed=3, only=299).run())
    assert sum(report.by_target.values()) == 1 and report.good
