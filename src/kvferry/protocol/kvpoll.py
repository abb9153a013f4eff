"""KVPoll: where a handoff stands, as both ends and the room report it."""

from enum import IntEnum


class KVPoll(IntEnum):
    """Values are the field's own (SGLang's `KVPoll`); Failed is the smallest so that a MIN over ranks fails."""

    FAILED = 0
    BOOTSTRAPPING = 1
    WAITING_FOR_INPUT = 2
    TRANSFERRING = 3
    SUCCESS = 4


STICKY = frozenset({KVPoll.FAILED, KVPoll.SUCCESS})


def combined(sender: KVPoll, receiver: KVPoll) -> KVPoll:
    """KVPoll of a handoff from its two ends.

    Decode's commit decides: Success at the receiver is Success whatever became of the sender. Before it, one
    failed end fails the handoff; otherwise the handoff is as far as the end that is ahead, and a sender that
    has flushed everything is still Transferring until decode commits.
    """
    if receiver is KVPoll.SUCCESS:
        return KVPoll.SUCCESS
    if KVPoll.FAILED in (sender, receiver):
        return KVPoll.FAILED
    return min(max(sender, receiver), KVPoll.TRANSFERRING)
