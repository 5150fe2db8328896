"""What is asked about next, where bytes taken are not those planned."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tfckpt.driving.aims import between, corrected

PLAIN = (1_000, 900)


@pytest.mark.parametrize("taken, wanted", [
    (lambda planned: planned, 400), (lambda planned: planned + 100, 400),
    (lambda planned: 2 * planned, 600)])
def test_a_corrected_plan_comes_near_what_is_allowed(taken, wanted):
    """From below, where more is taken than planned by a law that the plain step keeps to."""
    plain = 1_000, taken(1_000)
    planned = 900
    for _ in range(4):
        planned = corrected((planned, taken(planned)), [plain], wanted, 2)
    assert 0.9 * wanted <= taken(planned) <= wanted


def test_a_plan_that_takes_what_was_planned_has_none_between():
    assert between([(500, 470)], PLAIN) is None


def test_between_the_best_and_its_better_neighbour():
    room = between([(400, 850), (600, 700)], PLAIN)
    assert 400 < room < 600  # 850 at 400, 900 at 1,000
    assert 600 < between([(400, 950), (600, 700)], PLAIN) < 1_000


@given(st.lists(st.tuples(st.integers(1, 999), st.integers(1, 2_000)), min_size=1, max_size=6))
def test_what_lies_between_lies_beside_the_best(tried):
    room = between(tried, PLAIN)
    if room is not None:
        points = sorted({planned for planned, _ in (*tried, PLAIN)})
        assert points[0] <= room < points[-1]
        least = min(taken for _, taken in (*tried, PLAIN))
        best = {planned for planned, taken in (*tried, PLAIN) if taken == least}
        below = max(p for p in points if p <= room)
        above = min(p for p in points if p > room)
        assert {below, above} & best
