"""Who came first, and what a decode remembers of those that it sent away."""

from __future__ import annotations

from kvferry.memory.ages import Ages


def test_a_retracted_request_keeps_its_place_through_failed_attempts() -> None:
    ages = Ages(kept=10, kept_s=120.0)
    first, second = ages.arrived(71, 0.0), ages.arrived(72, 0.0)
    assert first < second
    assert ages.arrived(71, 1.0) > second, "an attempt that failed keeps nothing"
    ages.retracted(72, second, 5.0)
    third = ages.arrived(73, 6.0)
    assert ages.arrived(72, 7.0) == ages.arrived(72, 124.9) == second < third


def test_memory_is_bounded_in_time_and_number() -> None:
    ages = Ages(kept=3, kept_s=120.0)
    old = {request: ages.arrived(request, 0.0) for request in range(5)}
    for request, age in old.items():
        ages.retracted(request, age, float(request))
    assert len(ages) == 3
    ages.retracted(2, old[2], 10.0)  # once more: it is remembered from now on
    assert [ages.arrived(request, 10.0) == age for request, age in old.items()] == [False, False, True, True, True]
    assert ages.arrived(3, 123.0) != old[3], "120 s after its retraction"
    assert ages.arrived(2, 129.9) == old[2] and ages.arrived(2, 130.0) != old[2] and len(ages) == 0
