"""The wire form: every message survives the round trip, nothing else decodes, and changes of the wire are noticed."""

from __future__ import annotations

import re
import struct
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.protocol import instance as i
from kvferry.protocol import messages as m
from kvferry.protocol.address import Address
from kvferry.protocol.errors import Cause
from kvferry.protocol.metadata import (
    MAX_TOP_LOGPROBS,
    ROW_BYTES,
    Introduction,
    Metadata,
    Notification,
    Placed,
    decode_notification,
    encode_notification,
)
from kvferry.protocol.offer import Nic, Offer
from kvferry.protocol.rank import Layout, Member, RankInfo, Slice
from kvferry.protocol.request import RequestSpec, Sampling

HERE = Address("front-0", "tcp://127.0.0.1:9", 1 << 63, "host", 12)
SAMPLING = Sampling(8, 0.5, 0.9, 40, 3, ("\n", "\u2028"), (2, 7))
SPEC = RequestSpec(1 << 62, (1, 2, 3), SAMPLING, HERE)
INNER = Cause("peer_lost", "gone", leg="decode", rank=0, peer="decode-0", room=5, state="S", elapsed_s=0.5)
CAUSE = Cause("handoff_failed", "no", param="messages", because=INNER)
LAYOUT = Layout("model", "rev", "float32", 16, 30, 3, 64)
INFO = RankInfo("prefill-0", "prefill", HERE, LAYOUT, pages=640, max_prompt_tokens=2048, max_total_tokens=2048)
OFFER = Offer(("local", "ucx/rdma"), "shared", (Nic("mlx5_0:1", "InfiniBand"),), "kernel:4026531836")
MEMBERS = (Member(0, HERE, Slice(0, 15, 0, 3), OFFER), Member(1, HERE, Slice(15, 15, 0, 3)))
LEADER = msgspec.structs.replace(INFO, pp_size=2, members=MEMBERS)

EXAMPLES: list[m.Message] = [
    m.OpenPrefill(5, 1, SPEC, HERE),
    m.OpenDecode(5, 1, SPEC, HERE),
    m.OpenDecode(5, 1, SPEC, HERE, MEMBERS),
    m.Opened(5, "prefill"),
    m.Admitted(5, 9),
    m.Progress(5, "prefill", "computed", position=2, step=3, chunk=4, tokens=5, kv_bytes=6, offset_s=0.25),
    m.Progress(5, "decode", "queued"),
    m.PrefillDone(5, 3, 0.5, True),
    m.Received(5, 0),
    m.Committed(5),
    m.Failed(5, "decode", CAUSE),
    m.Abort(5, CAUSE, stop_running=True),
    m.AbortAck(5, "prefill", 1),
    m.UnknownRoom(5, "router"),
    m.Destination(5, (7, 0, 3), 0, 2, b"\x00\xff", 1, (0, 1)),
    m.Destination(5, (7, 0, 3), 0, 2, b"\x00\xff", 1, (0, 1), (m.Way(1, 0, b"\x01"),)),
    m.AbortTransfer(5, CAUSE),
    m.Drained(5, 0, True, kv_bytes=1 << 40, metadata_bytes=256),
    m.Drained(5, 1, False, cause=CAUSE),
    m.Drained(5, 0, True, backend="ucx", measured=m.Measured(0.5, 0.25, 60)),
    m.Distrust(1 << 63),
    m.Reconcile((5, 1 << 62)),
    m.Draining(5, 0, broken=True),
    m.Released(5, "drained and revoked", 13, 2.5),
    m.DataPath(5, "local", "the writer is on the same host"),
    m.TokenBatch("decode", (m.Token(1, 0, 5, 0, 42, "é", "stop"), m.Token(1, 0, 5, 1, 43, ""))),
    m.Stop(1, 0, 5),
    m.TokenBatch("decode", (m.Token(1, 0, 5, 0, 42, "", "", m.Logprobs(-0.25, ((42, -0.25), (7, -1.5)))),)),
    m.Retracted(1, 0, 5, 17),
    m.Load("prefill", queued_tokens=900, tokens_per_s=321.5),
    m.Load("decode", waiting=1, running=2, free_pages=3, total_pages=64, free_places=4, place_s=1.5),
    m.Register(INFO),
    m.Register(LEADER),
    m.Registered(3),
    m.RegistrationRefused("held", True),
    m.RegisterDpRank(5, 1, "prefill-0"),
    m.Watch("router-0"),
    m.OverBudget("prefill-0", 1 << 63, 13, 301.5),
    m.Roster(4, (INFO,), False, ("decode: 0 of 1 instances are complete",)),
    i.Join(INFO),
    i.Joined(1),
    i.RunStep(b"\x93"),
    i.Stepped(7, b"\xff"),
    i.WriteTo(5, HERE, 20, (7, 0, 3), (0, 1), (b"\x00", b"\x01")),
    i.WriteChunk(5, 2, 64, 20, (9, 1)),
    i.Wrote(5, 2, False, kv_bytes=1 << 40, error="gone"),
    i.CancelRoom(5, CAUSE),
    i.RankFailed(5, CAUSE),
    i.ConfirmAbort(5, CAUSE),
    i.AbortConfirmed(5),
    i.Accept(1 << 63, 4, OFFER),
    i.Accepted(1 << 63, 4, b"\x00"),
    i.Revoke(1 << 63),
    i.RevokedAt(1 << 63, -1),
    i.Expect(-1),
    i.Arrived(5, 1, 1 << 63),
    i.Arrived(5, 1, 1 << 63, (Placed(2, 32, 16, True, (1 << 64) - 1),), last=False),
    i.TakeDigest(5, 1, 1 << 63, 32, 40, 72, (7, 0, 3)),
    i.Digested(5, 1, 32, (1 << 64) - 1),
]

#: The wire as it is. A line that has to change here breaks every peer that runs the version before, unless the
#: change is a new field at the end, with a default (shown by "=").
WIRE = {
    "OpenPrefill": "room attempt spec decode",
    "OpenDecode": "room attempt spec prefill sources=",
    "Opened": "room leg front_link=",
    "Admitted": "room pages",
    "Progress": "room leg event position= step= chunk= tokens= kv_bytes= offset_s=",
    "PrefillDone": "room chunks offset_s= awaits_destination=",
    "Received": "room rank",
    "Committed": "room",
    "Failed": "room leg cause",
    "Abort": "room cause stop_running=",
    "AbortAck": "room leg rank=",
    "UnknownRoom": "room leg=",
    "Destination": "room pages prefix_tokens metadata_slot agent generation required_acks ways=",
    "AbortTransfer": "room cause",
    "Drained": "room rank complete kv_bytes= metadata_bytes= cause= backend= measured=",
    "Distrust": "group",
    "Reconcile": "rooms",
    "Draining": "room rank broken=",
    "Released": "room proof pages quarantined_s",
    "DataPath": "room backend why",
    "TokenBatch": "leg tokens",
    "Stop": "request attempt room",
    "Retracted": "request attempt room next_index",
    "Load": "role queued_tokens= tokens_per_s= waiting= running= free_pages= total_pages= free_places= place_s=",
    "Register": "info",
    "Registered": "version",
    "RegistrationRefused": "reason retry",
    "RegisterDpRank": "room dp_rank instance",
    "Watch": "name",
    "OverBudget": "instance incarnation pages quarantined_s",
    "Roster": "version ranks ready missing=",
    "Join": "info",
    "Joined": "rank",
    "RunStep": "plan",
    "Stepped": "step part=",
    "WriteTo": "room owner prompt_tokens pages targets agents",
    "WriteChunk": "room chunk first tokens pages",
    "Wrote": "room chunk flushed kv_bytes= error=",
    "CancelRoom": "room cause",
    "RankFailed": "room cause",
    "ConfirmAbort": "room cause",
    "AbortConfirmed": "room",
    "Accept": "writer turn offer=",
    "Accepted": "writer turn agent error=",
    "Revoke": "writer ended=",
    "RevokedAt": "writer generation",
    "Expect": "change",
    "Arrived": "room source incarnation placed= last=",
    "TakeDigest": "room source incarnation first tokens prompt_tokens pages",
    "Digested": "room source first digest= error=",
}
PARTS = {
    Address: "name endpoint incarnation host pid",
    Sampling: "max_tokens temperature= top_p= top_k= seed= stop= stop_token_ids= min_p= logit_bias= "
    "presence_penalty= frequency_penalty= repetition_penalty= min_tokens= ignore_eos= logprobs=",
    m.Logprobs: "logprob top=",
    RequestSpec: "request prompt_ids sampling front frozen_ids= group= samples= prefer= avoid=",
    m.Token: "request attempt room index token_id text finish_reason= logprobs=",
    Layout: "model revision dtype page_size layers kv_heads head_dim policy=",
    RankInfo: "instance role address layout dp_rank= dp_size= cp_rank= cp_size= tp_rank= tp_size= pp_rank= pp_size= "
    "pages= max_prompt_tokens= max_total_tokens= draining= members= stages= offer=",
    m.Way: "source target agent",
    Member: "rank address slice offer=",
    Offer: "ways= memory= nics= host=",
    Nic: "name link",
    Slice: "first_layer layers first_head heads replica= replicas= cp_rank= cp_size= part=",
    Cause: "code message leg= rank= peer= room= state= elapsed_s= param= because=",
    m.Measured: "wait_s= wire_s= descriptors=",
    Notification: "room rank incarnation placed= last=",
    Introduction: "incarnation regions",
    Placed: "chunk first tokens row digest",
}


def fields_of(struct: type[msgspec.Struct]) -> str:
    return " ".join(f"{field.name}{'' if field.required else '='}" for field in msgspec.structs.fields(struct))


def test_the_wire_is_the_table() -> None:
    assert {type(example).__name__ for example in EXAMPLES} == set(WIRE)
    assert {cls.__struct_config__.tag: fields_of(cls) for cls in map(type, EXAMPLES)} == WIRE
    assert {cls: fields_of(cls) for cls in PARTS} == PARTS


def test_every_message_class_is_an_example() -> None:
    assert {cls.__name__ for cls in m.Message.__subclasses__()} == set(WIRE)


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda message: type(message).__name__)
def test_round_trip(message: m.Message) -> None:
    assert m.decode(m.encode(message)) == message


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda message: type(message).__name__)
def test_a_message_of_a_later_version_decodes(message: m.Message) -> None:
    """A field that this version does not know is skipped."""
    wire: dict[str, Any] = msgspec.msgpack.decode(m.encode(message))
    assert wire["type"] == type(message).__name__
    later = msgspec.msgpack.encode({**wire, "added_later": {"deep": [1, 2]}})
    assert m.decode(later) == message


def test_a_token_of_a_later_version_decodes() -> None:
    """Tokens are arrays: what a later version appends is skipped, what an earlier one lacks has its default."""
    token = [1, 0, 5, 0, 42, "a", "stop", None, "added later"]
    data = msgspec.msgpack.encode({"type": "TokenBatch", "leg": "decode", "tokens": [token, [1, 0, 5, 1, 43, "b"]]})
    tokens = (m.Token(1, 0, 5, 0, 42, "a", "stop"), m.Token(1, 0, 5, 1, 43, "b"))
    assert m.decode(data) == m.TokenBatch("decode", tokens)


BAD: dict[str, bytes] = {
    "empty": b"",
    "unknown tag": msgspec.msgpack.encode({"type": "Surprise", "room": 1}),
    "no tag": msgspec.msgpack.encode({"room": 1}),
    "an array": msgspec.msgpack.encode([1, 2]),
    "a missing field": msgspec.msgpack.encode({"type": "Received", "room": 1}),
    "a wrong type": msgspec.msgpack.encode({"type": "Received", "room": "1", "rank": 0}),
    "half a message": m.encode(EXAMPLES[0])[:-3],
    "two messages": m.encode(m.Committed(1)) * 2,
    "text that is not UTF-8": b"\x83\xa4type\xa6Opened\xa4room\x05\xa3leg\xa2\xff\xfe",
    "a pickle": b"\x80\x04\x95\x0c\x00\x00\x00\x00\x00\x00\x00\x8c\x08builtins\x94.",
    "nested without end": b"\x91" * 100_000,
}


@pytest.mark.parametrize("name", BAD)
def test_bytes_that_are_no_message_are_a_bad_frame(name: str) -> None:
    with pytest.raises(m.BadFrame):
        m.decode(BAD[name])


@settings(deadline=None)
@given(data=st.binary(max_size=200))
def test_garbage_never_raises_anything_else(data: bytes) -> None:
    try:
        m.decode(data)
    except m.BadFrame:
        return


@settings(deadline=None)
@given(data=st.data(), example=st.sampled_from(EXAMPLES))
def test_damaged_messages_never_raise_anything_else(data: st.DataObject, example: m.Message) -> None:
    frame = bytearray(m.encode(example))
    for _ in range(data.draw(st.integers(1, 4))):
        frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    try:
        assert isinstance(m.decode(bytes(frame)), m.Message)
    except m.BadFrame:
        return


def test_a_message_over_the_limit_is_refused_at_both_ends() -> None:
    limit = m.MAX_MESSAGE_BYTES
    overhead = len(m.encode(m.Watch("x" * 70_000))) - 70_000  # the length of such a name takes 5 bytes
    assert m.decode(m.encode(m.Watch("x" * (limit - overhead)))) == m.Watch("x" * (limit - overhead))
    with pytest.raises(m.BadFrame, match=f"Watch is {limit + 1} bytes; the limit is {limit}"):
        m.encode(m.Watch("x" * (limit - overhead + 1)))
    with pytest.raises(m.BadFrame, match=f"{limit + 1} bytes; the limit is {limit}"):
        m.decode(b"\x00" * (limit + 1))


def test_a_notification_round_trip_and_garbage() -> None:
    note = Notification((1 << 63) - 1, 3, (1 << 64) - 1)
    assert decode_notification(encode_notification(note)) == note
    told = Notification(5, 0, 7, (Placed(0, 0, 16, False, 1), Placed(1, 16, 1, True, (1 << 64) - 1)), last=False)
    assert decode_notification(encode_notification(told)) == told
    news = Introduction(7, b"\x90")
    assert decode_notification(encode_notification(news)) == news
    for data in (b"", b"\xc1", b"\x91\x01", b"\xa2\xff\xfe", encode_notification(note) + b"\x00"):
        assert decode_notification(data) is None


def test_the_metadata_row_is_laid_out_by_hand() -> None:
    """Little-endian: room (8), incarnation (8), prompt tokens (4), first token (4, signed), KV bytes (8), zeros."""
    row = bytearray(b"\xee" * ROW_BYTES)
    Metadata(5, 1 << 63, 100, -1, 1 << 33).pack_into(memoryview(row))
    expected = bytes([5] + 7 * [0] + 7 * [0] + [0x80] + [100, 0, 0, 0] + 4 * [255] + [0, 0, 0, 0, 2, 0, 0, 0])
    assert bytes(row) == expected + bytes(ROW_BYTES - 32)
    assert Metadata.unpack(memoryview(row)) == Metadata(5, 1 << 63, 100, -1, 1 << 33)


def test_the_first_tokens_logprobs_lie_behind_it() -> None:
    """At byte 32: its logprob (float32), 1 + the number of alternatives (4); then id (4) and logprob (4) of each."""
    row = bytearray(b"\xee" * ROW_BYTES)
    found = Metadata(5, 6, 100, 7, 8, m.Logprobs(-0.5, ((7, -0.5), (49151, -2.0))))
    found.pack_into(memoryview(row))
    minus_half, minus_two = bytes([0, 0, 0, 0xBF]), bytes([0, 0, 0, 0xC0])
    expected = (
        minus_half + bytes([3, 0, 0, 0]) + bytes([7, 0, 0, 0]) + minus_half + bytes([0xFF, 0xBF, 0, 0]) + minus_two
    )
    assert bytes(row[32:]) == expected + bytes(ROW_BYTES - 32 - len(expected))
    assert Metadata.unpack(memoryview(row)) == found
    alone = Metadata(5, 6, 100, 7, 8, m.Logprobs(-0.25))
    alone.pack_into(memoryview(row))
    assert Metadata.unpack(memoryview(row)) == alone


def test_a_row_holds_20_alternatives_and_no_more() -> None:
    row = memoryview(bytearray(ROW_BYTES))
    full = Metadata(5, 6, 100, 7, 8, m.Logprobs(-0.5, tuple((i, -float(i)) for i in range(MAX_TOP_LOGPROBS))))
    full.pack_into(row)
    assert MAX_TOP_LOGPROBS == 20 and Metadata.unpack(row) == full
    assert full.token_problem(asked=20, vocab_size=100) is None
    over = Metadata(5, 6, 100, 7, 8, m.Logprobs(-0.5, tuple((i, -1.0) for i in range(21))))
    with pytest.raises(struct.error, match="21 alternatives; the row holds 20"):
        over.pack_into(row)


@pytest.mark.parametrize(
    ("metadata", "asked", "problem"),
    [
        (Metadata(5, 6, 9, 7, 8), -1, None),
        (Metadata(5, 6, 9, 7, 8, m.Logprobs(-1.0)), 0, None),
        (Metadata(5, 6, 9, 7, 8, m.Logprobs(-1.0, ((1, -1.0), (99, -2.0)))), 2, None),
        (Metadata(5, 6, 9, 100, 8), -1, "the first token is 100; allowed: 0 to 99"),
        (Metadata(5, 6, 9, -1, 8), -1, "the first token is -1"),
        (Metadata(5, 6, 9, 7, 8), 0, r"logprobs -1; the request asked for 0"),
        (Metadata(5, 6, 9, 7, 8, m.Logprobs(-1.0)), -1, "logprobs 0; the request asked for -1"),
        (Metadata(5, 6, 9, 7, 8, m.Logprobs(-1.0)), 2, "logprobs 0; the request asked for 2"),
        (Metadata(5, 6, 9, 7, 8, m.Logprobs(-1.0, ((100, -1.0),))), 1, r"token ids \[100\]; allowed: 0 to 99"),
    ],
)
def test_what_a_row_says_of_the_first_token_is_checked(metadata: Metadata, asked: int, problem: str | None) -> None:
    row = memoryview(bytearray(ROW_BYTES))
    metadata.pack_into(row)
    found = Metadata.unpack(row).token_problem(asked, 100)
    assert (found is None) if problem is None else re.search(problem, found or "")


def test_any_bytes_are_a_row() -> None:
    """A damaged row is found by what it says, and reading it raises nothing."""
    for byte in (0x00, 0x7F, 0x80, 0xFF):
        assert Metadata.unpack(memoryview(bytearray([byte] * ROW_BYTES))).token_problem(3, 100) is not None


def test_a_cause_tells_where_and_why_in_one_line() -> None:
    assert CAUSE.text() == ("no; because gone (room 5, leg decode, rank 0, peer decode-0, state S, after 0.500 s)")
