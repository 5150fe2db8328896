"""Invariants of the planner on every graph; `python -m tests.invariants` checks many more."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import invariants

pytestmark = pytest.mark.pure


@settings(max_examples=6)
@given(st.integers(0, 10**6))
def test_invariants_hold(seed):
    assert invariants.check(seed) == []


@pytest.mark.parametrize("seed", [20261160, 20261201, 20261240])
def test_of_two_plans_of_one_peak_the_faster_is_taken(seed):
    """With objective="memory", where nothing but the peak was compared."""
    assert invariants.check(seed) == []


@pytest.mark.nightly
@settings(max_examples=200)
@given(st.integers(0, 10**6))
def test_invariants_hold_of_many(seed):
    assert invariants.check(seed) == []
