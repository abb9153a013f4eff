"""One write of an endpoint, from its call to its end: what is known of it on the way, and what its end says."""

from __future__ import annotations

from collections.abc import Callable

from kvferry.transfer.contract import Spans, WriteOutcome, WriteResult


class Write:
    """`result` is set on the endpoint's loop; everything else belongs to whoever does the work, which may be a thread
    of its own. Until its end `flushed_bytes` and `descriptors` count up.
    """

    def __init__(self, spans: Spans, on_end: Callable[[WriteResult], None], called_s: float) -> None:
        self.result: WriteResult | None = None
        self.spans = spans
        self.on_end = on_end
        self.flushed_bytes = self.descriptors = 0
        self.called_s = called_s
        self.first_post_s: float | None = None
        self.cancelled = False

    def end(
        self, outcome: WriteOutcome, error: str, now_s: float, deliver: Callable[[Callable[[], None]], object]
    ) -> None:
        """Tell the owner, by a call that `deliver` has run on the loop. To be called once for each write."""
        first_s, posted = self.first_post_s, self.descriptors or None
        wire_s = None if first_s is None else now_s - first_s
        wait_s = None if first_s is None else first_s - self.called_s
        result = WriteResult(outcome, self.flushed_bytes, wire_s, error, wait_s, posted)

        def ended() -> None:
            self.result = result
            self.on_end(result)

        deliver(ended)
