"""Cells of the tables that no whole system of correct processes comes to, each with its reason; to be in one of them is
a violation. Tables are made for every order of events that a machine can be given, systems give fewer.

Beside those listed, every cell that *refuses* is unreachable: that is what refusing means.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

Group = tuple[str, Mapping[str, str]]
_LEG = "OPENED_PREFILL OPENED_DECODE ADMITTED"
_ALL_LINK = "HELLO LOWER_HELLO HIGHER_HELLO WELCOME NOT_ME DATA ACK BYE STRAY SEND END"
_SENDER_OVER = (
    "DESTINATION WRITE_ENDED WRITE_BROKEN FAIL ABORT ABORT_TRANSFER STOP ROOM_LOST DECODE_LOST FRONT_LOST EXPIRED "
    "DECODE_EXITED UNKNOWN FLUSHED QUIET QUIET_BROKEN"
)
_RECEIVER_OVER = (
    "PREFILL_DONE RECEIVED ALL_RECEIVED CHECKED CHECK_FAILED DRAINED DRAINED_SHORT UNKNOWN ABORT ABORT_RUNNING STOP "
    "ROOM_LOST PREFILL_LOST PREFILL_EXITED REVOKED FRONT_LOST EXPIRED FAIL"
)

#: By reason: the events, by machine and state.
_UNREACHABLE: tuple[Group, ...] = (
    ("the links let go of a session in the call in which it ends", {"link OVER": _ALL_LINK}),
    ("the links hand a session the frames of its own id only", {"link CONNECTING": "STRAY", "link OPEN": "STRAY"}),
    ("the machine fires what is internal in the states that it is for", {
        "room OPENING_DECODE": "LEGS_ENDED", "room BOOTSTRAPPED": "LEGS_ENDED", "room AWAITING_INPUT": "LEGS_ENDED",
        "room TRANSFERRING": "LEGS_ENDED", "room SETTLING": "LEGS_ENDED", "room SUCCEEDED": "LEGS_ENDED",
        "room FAILED": "LEGS_ENDED", "sender DRAINING": "FLUSHED", "sender BROKEN": "FLUSHED QUIET QUIET_BROKEN",
        "receiver STOPPING": "PROVEN", "receiver DONE": "QUIET", "receiver ENDED": "PROVEN",
    }),
    ("the leader asks the machine first whether it is in that state", {
        "sender DRAINING": "CHUNK_COMPUTED LAST_COMPUTED", "sender BROKEN": "CHUNK_COMPUTED LAST_COMPUTED",
        "receiver RELEASING": "ALL_RECEIVED CHECK_FAILED",
        "receiver STOPPING": "ALL_RECEIVED CHECKED CHECK_FAILED FINISHED",
    }),
    ("clocks run out only for rooms that have neither failed nor committed", {
        "sender DRAINING": "EXPIRED", "sender BROKEN": "EXPIRED", "receiver RUNNING": "EXPIRED",
        "receiver RELEASING": "EXPIRED", "receiver STOPPING": "EXPIRED",
    }),
    ("the leader forgets a room in the call in which it ends", {
        "sender DONE": _SENDER_OVER, "sender ENDED": _SENDER_OVER,
        "receiver DONE": _RECEIVER_OVER, "receiver ENDED": _RECEIVER_OVER,
    }),
    ("each leg says `Opened` once, and decode is opened after prefill has said it", {
        "room OPENING_DECODE": "OPENED_PREFILL", "room BOOTSTRAPPED": "OPENED_PREFILL OPENED_DECODE",
        "room AWAITING_INPUT": "OPENED_PREFILL OPENED_DECODE", "room TRANSFERRING": "OPENED_PREFILL",
        "room SETTLING": "OPENED_PREFILL", "room COMMITTED": "OPENED_PREFILL", "room SUCCEEDED": "OPENED_PREFILL",
    }),
    ("before decode is opened prefill has nothing to do, and nobody but the room could have stopped it", {
        "room OPENING_PREFILL": "PROGRESS PREFILL_DONE RECEIVED PREFILL_STOPPED",
    }),
    ("a link keeps the order: what decode says before that comes before that", {
        "room OPENING_DECODE": "RECEIVED", "room BOOTSTRAPPED": "RECEIVED COMMITTED",
        "room COMMITTED": "OPENED_DECODE ADMITTED RECEIVED",
        "room SUCCEEDED": "OPENED_DECODE ADMITTED RECEIVED",
    }),
    ("a link keeps the order: prefill tells of a chunk before it tells that all is computed, or delivered", {
        "room OPENING_DECODE": "PREFILL_DONE DRAINED", "room BOOTSTRAPPED": "PREFILL_DONE DRAINED",
        "room AWAITING_INPUT": "PREFILL_DONE DRAINED",
    }),
    ("decode stops without a report of its own only when the room has told it to", {
        "room OPENING_DECODE": "DECODE_STOPPED", "room BOOTSTRAPPED": "DECODE_STOPPED",
        "room AWAITING_INPUT": "DECODE_STOPPED", "room TRANSFERRING": "DECODE_STOPPED",
    }),
    ("prefill has delivered before decode commits, and what is delivered does not fail", {
        "room COMMITTED": "PREFILL_FAILED", "room SUCCEEDED": "PREFILL_FAILED",
    }),
    ("a link keeps the order: prefill says that it has delivered before it says that it does not know the room", {
        "room COMMITTED": "PREFILL_STOPPED",
    }),
    ("decode reports no failure of what it has committed", {
        "room COMMITTED": "DECODE_FAILED", "room SUCCEEDED": "DECODE_FAILED",
    }),
    ("decode sends one destination a room", {
        "sender QUEUED": "DESTINATION", "sender COMPUTING": "DESTINATION", "sender FLUSHING": "DESTINATION",
        "sender DRAINING": "DESTINATION", "sender BROKEN": "DESTINATION",
    }),
    ("decode asks for pages, and prefill to stop, when it has been told that the prompt is computed", {
        "sender AWAITING_PAGES": "ABORT_TRANSFER", "sender COMPUTING_AHEAD": "ABORT_TRANSFER",
    }),
    ("a room is broken when none of its writes is open any more", {"sender BROKEN": "WRITE_ENDED WRITE_BROKEN"}),
    ("prefill says that it does not know a room to who has sent it a destination or an abort", {
        "receiver AWAITING_PREFILL": "UNKNOWN", "receiver QUEUED": "UNKNOWN", "receiver CHECKING": "UNKNOWN",
        "receiver RUNNING": "UNKNOWN", "receiver STOPPING": "UNKNOWN",
    }),
    ("decode says that it does not know a room to who has said that it still drains", {
        "sender AWAITING_PAGES": "UNKNOWN", "sender COMPUTING_AHEAD": "UNKNOWN", "sender KEPT": "UNKNOWN",
        "sender AWAITING_DESTINATION": "UNKNOWN", "sender QUEUED": "UNKNOWN", "sender COMPUTING": "UNKNOWN",
        "sender FLUSHING": "UNKNOWN",
    }),
    ("without a destination nothing is written", {"receiver QUEUED": "DRAINED"}),
    ("a room has agents, to be destroyed, from its admission on", {
        "receiver AWAITING_PREFILL": "REVOKED", "receiver QUEUED": "REVOKED",
    }),
    ("each rank notifies once, and decode checks and commits with the last of them", {
        "receiver CHECKING": "RECEIVED DRAINED_SHORT",
        "receiver RUNNING": "RECEIVED DRAINED_SHORT", "receiver STOPPING": "RECEIVED DRAINED_SHORT",
    }),
    ("that a prompt is kept is told once, before a destination is asked for", {
        "room COMMITTED": "PREFILL_KEPT", "room SUCCEEDED": "PREFILL_KEPT", "receiver RUNNING": "PREFILL_DONE",
        "receiver RELEASING": "PREFILL_DONE", "receiver STOPPING": "PREFILL_DONE",
    }),
)  # fmt: skip

#: What can happen, but hardly ever: counted, not required.
_SELDOM: tuple[Group, ...] = (
    ("both ends dial only when their link was lost and each still has something to say: decode its question, "
     "a rank of prefill its ack", {"link CONNECTING": "LOWER_HELLO HIGHER_HELLO"}),
    ("the router forgets a room when it has ended: only what came in the same turn still reaches it", {
        "room SUCCEEDED": "PROGRESS SENDING PREFILL_DONE DRAINED COMMITTED PREFILL_LOST PREFILL_STOPPED DECODE_LOST "
                          "DECODE_STOPPED ABORT_REQUESTED EXPIRED",
        "room FAILED": f"{_LEG} PROGRESS SENDING PREFILL_DONE PREFILL_KEPT DRAINED RECEIVED COMMITTED PREFILL_FAILED "
                       "PREFILL_LOST PREFILL_STOPPED DECODE_FAILED DECODE_LOST DECODE_STOPPED ABORT_REQUESTED EXPIRED",
    }),
    ("the end of a link is told before the end of its process, but where the link had been lost before", {
        "sender QUEUED": "DECODE_EXITED", "sender COMPUTING": "DECODE_EXITED", "sender FLUSHING": "DECODE_EXITED",
        "receiver AWAITING_PREFILL": "PREFILL_EXITED", "receiver QUEUED": "PREFILL_EXITED",
        "receiver RECEIVING": "PREFILL_EXITED", "receiver CHECKING": "PREFILL_EXITED",
    }),
    ("a check takes a moment: clocks that have nearly run out run out in it, and engines are not asked", {
        "receiver CHECKING": "EXPIRED FAIL",
    }),
    ("decode asks about a room on a new session; its proof must come before the answer, though as a rule it has had it "
     "since it lost the old one, or gets it in the answer", {"sender DRAINING": "UNKNOWN"}),
    ("the call has its answer: a cancel must meet it on its way back", {
        "room COMMITTED": "ABORT_REQUESTED", "room ABORTING": "ABORT_REQUESTED",
    }),
)  # fmt: skip


def _cells(groups: tuple[Group, ...]) -> Iterator[tuple[str, str]]:
    for reason, states in groups:
        for state, events in states.items():
            yield from ((f"{state} x {event}", reason) for event in events.split())


#: By cell, as `coverage.cell_name` names it: the reason.
UNREACHABLE = dict(_cells(_UNREACHABLE))
SELDOM = dict(_cells(_SELDOM))
