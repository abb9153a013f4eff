"""`bench/control.py` runs, prints each of its figures, and counts right. How fast it is, is not asked here."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from serving import free_port

pytestmark = pytest.mark.real

SCRIPT = Path(__file__).parents[2] / "bench" / "control.py"
REQUIRED = {"rooms_per_s_per_core", "ray_calls_per_request", "us_per_token_32_streams", "bytes_per_parked_room"}
PEERS = {
    "rooms_per_s_per_core_ray_actor_each", "rooms_per_s_per_core_ray_carrier", "ray_calls_per_request_ray_carrier",
    "us_per_token_32_streams_ray_carrier", "us_per_token_32_streams_ray_generator",
    "us_per_token_32_streams_trivial_serve", "requests_per_s_trivial_serve", "bytes_per_room_ray_actor_each",
}  # fmt: skip
#: Of one room: the router opens 2 legs; prefill tells the room Opened, 4 steps of progress, PrefillDone and Drained,
#: and decode the steps and Drained; decode tells the room Opened, Admitted, Received and Committed, and prefill its
#: Destination.
MESSAGES_OF_A_ROOM = 2 + 7 + 5 + 4 + 1


def test_every_figure_is_there_and_the_counts_are_right() -> None:
    command = [sys.executable, str(SCRIPT), "--json", "--scale", "0.005", "--port", str(free_port())]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    *shown, last = done.stdout.splitlines()
    figures = json.loads(last)
    assert figures.keys() >= REQUIRED | PEERS
    assert all(value > 0 for value in figures.values() if isinstance(value, float | int))
    text = "\n".join(shown)
    for peer in ("a Ray actor per room", "Ray calls as the carrier", "streaming generator", "trivial application"):
        assert peer in text
    # 32 requests, a call each; the front's own link has nothing to say to the router.
    assert figures["ray_calls_per_request"] == 1 and figures["ray_calls"] == {"submit": 32}
    assert figures["ray_calls_by_the_clock"].keys() <= {"roster"}
    assert figures["ray_calls_per_request_ray_carrier"] > 1
    # Beside the room's own: a batch or two of tokens, and who waits for a second says so.
    assert MESSAGES_OF_A_ROOM < figures["messages_per_room"] <= MESSAGES_OF_A_ROOM + 4
