"""Backwards from where all is over: which states can't get there."""

from __future__ import annotations

from array import array


def cannot_end(quiet: bytearray, sources: array[int], targets: array[int]) -> tuple[int, int]:
    """The first state from which no quiet one can be reached along the edges (sources[i] -> targets[i]), and how many
    there are. Nothing is counted before the whole graph is known: a state with a way out is never named.
    """
    count = len(quiet)
    begins = array("i", bytes(4 * (count + 1)))
    for to in targets:
        begins[to + 1] += 1
    for at in range(count):
        begins[at + 1] += begins[at]
    before, places = array("i", bytes(4 * len(targets))), array("i", begins)
    for source, to in zip(sources, targets, strict=True):
        before[places[to]] = source
        places[to] += 1
    reached = bytearray(quiet)
    stack = [state for state in range(count) if reached[state]]
    while stack:
        state = stack.pop()
        for at in range(begins[state], begins[state + 1]):
            source = before[at]
            if not reached[source]:
                reached[source] = 1
                stack.append(source)
    return reached.find(0), reached.count(0)
