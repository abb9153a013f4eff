"""What a plan costs, as descriptors and bytes, and whether its slices pay for staging. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from kvferry.transfer.blocks import Block


@dataclass(frozen=True)
class Costs:
    """Of the machine and the backend. The defaults were measured on host memory with UCX on one host.

    `span_us`: one more descriptor in a write; `gather_gb_s`, `scatter_gb_s`: the copies into and out of a staging
    buffer, by one thread; `write_bytes`: the size of one staged write.
    """

    span_us: float = 6.0
    gather_gb_s: float = 9.0
    scatter_gb_s: float = 4.2
    write_bytes: int = 8 << 20


@dataclass(frozen=True)
class Estimate:
    """Of one plan. `slice_spans` and `slice_bytes` are those of its slices; the rest goes straight in any case.

    `slices_s`, `staged_s`: what the slices cost above their bytes on the wire when each is a span of its own, and when
    they are staged.
    """

    spans: int
    size_bytes: int
    slice_spans: int
    slice_bytes: int
    slices_s: float
    staged_s: float

    @property
    def staged(self) -> bool:
        return self.staged_s < self.slices_s

    @property
    def reason(self) -> str:
        if not self.slice_spans:
            return f"direct: no slices; {self.spans} spans, {self.size_bytes} bytes"
        each = self.slice_bytes / self.slice_spans
        way, other = ("staged", "direct") if self.staged else ("direct", "staged")
        least, most = sorted((self.slices_s, self.staged_s))
        return (
            f"{way}: {self.slice_spans} slices of {each:.0f} bytes ({self.slice_bytes} bytes) cost {least * 1e3:.3g} ms"
            f" beside the wire, {most * 1e3:.3g} ms {other}"
        )


def estimate(blocks: Iterable[Block], costs: Costs) -> Estimate:
    """Staging costs two copies and a descriptor per write; a slice that goes straight costs a descriptor."""
    every = list(blocks)
    sliced = [block for block in every if block.sliced]
    slice_spans, slice_bytes = sum(b.span_count for b in sliced), sum(b.size_bytes for b in sliced)
    writes = -(-slice_bytes // costs.write_bytes)
    copies_s = slice_bytes * (1 / costs.gather_gb_s + 1 / costs.scatter_gb_s) / 1e9
    return Estimate(
        spans=sum(block.span_count for block in every),
        size_bytes=sum(block.size_bytes for block in every),
        slice_spans=slice_spans,
        slice_bytes=slice_bytes,
        slices_s=slice_spans * costs.span_us / 1e6,
        staged_s=copies_s + writes * costs.span_us / 1e6,
    )
