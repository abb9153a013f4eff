"""What `kvferry status` says of pages beside their counts: whose are quarantined, and how large they are."""

from __future__ import annotations

from typing import Any

from rich.console import Console

from kvferry.obs.show import page_size_lines, path_lines, quarantine_lines, show_status

ROW: dict[str, Any] = {
    "room": "77", "pages": [4, 5, 9], "writer": "prefill-1", "writer_pid": 41, "linked": False, "for_s": 12.34,
    "waits_for": ["drained by rank 0", "exited"], "cause": "the link to prefill-1 ended: silent",
}  # fmt: skip


def test_each_room_that_waits_for_proof_has_its_line() -> None:
    empty: dict[str, Any] = {"id": "decode-1", "role": "decode", "incarnation": None, "ranks": [], "queues": {}}
    decode = empty | {"id": "decode-0", "pages": {"total": 9, "quarantined": 3}, "quarantined": [ROW]}
    status = {"instances": [decode, empty | {"pages": {}}], "rooms_live": 0, "requests_live": 0}
    right = (
        "decode-0: 3 pages of room 77 are quarantined for 12.3 s: prefill-1 (pid 41, not linked) may still write to "
        "them; waits for drained by rank 0 or exited; the room ended: the link to prefill-1 ended: silent"
    )
    assert quarantine_lines(status) == [right]
    console = Console(width=400)
    with console.capture() as shown:
        console.print(show_status(status))
    assert right in shown.get()


def test_page_sizes_are_told_where_they_differ() -> None:
    ids = {"prefill-0": 16, "prefill-1": 16, "decode-0": 64}
    instances: list[dict[str, Any]] = [{"id": name, "page_size": size} for name, size in ids.items()]
    gone: dict[str, Any] = {"id": "decode-1"}
    line = "tokens in a page: 16 of prefill-0, prefill-1; 64 of decode-0"
    assert page_size_lines({"instances": [*instances, gone]}) == [line]
    assert page_size_lines({"instances": [*instances[:2], gone]}) == []


def test_by_which_ways_kv_arrives_is_said_and_why() -> None:
    decode = {"id": "decode-0", "data_paths": {"local": 1, "ucx/tcp+staging": 3}}
    decode["data_path_reasons"] = {"ucx/tcp+staging": "another host"}
    status = {"instances": [decode, {"id": "prefill-0", "data_paths": {}}, {"id": "decode-1"}]}
    assert path_lines(status) == [
        "decode-0: KV arrives by local (1)", "decode-0: KV arrives by ucx/tcp+staging (3): another host",
    ]  # fmt: skip
