"""The largest batch that fits, against trying every one."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tfckpt.largest import ENDLESS, largest_batch


def tried(bytes_of, limit, start):
    """Return what is found, and which batches were asked about."""
    asked = []

    def counted(batch):
        asked.append(batch)
        return bytes_of(batch)

    return largest_batch(counted, limit, start), asked


def by_trying(bytes_of, limit, most=400):
    return max((b for b in range(1, most) if bytes_of(b) <= limit), default=0)


@given(base=st.integers(0, 1000), steps=st.lists(st.integers(1, 60), min_size=60, max_size=60),
       start=st.integers(1, 80), limit=st.integers(0, 1200))
@settings(max_examples=100, deadline=None)
def test_any_growing_bytes(base, steps, start, limit):
    total = [base]
    for step in steps:
        total.append(total[-1] + step)

    def bytes_of(batch):
        return total[batch] if batch < len(total) else total[-1] + 10_000 * (batch - 60)

    assert tried(bytes_of, limit, start)[0] == by_trying(bytes_of, limit)


@pytest.mark.parametrize("start", [1, 7, 12_345, 10_000_000])
@pytest.mark.parametrize("each, base", [(3_000, 0), (77, 5_000_000), (1, 123)])
def test_a_line_takes_few_questions(start, each, base):
    limit = 80_000_000
    found, asked = tried(lambda b: base + each * b, limit, start)
    assert found == (limit - base) // each
    assert len(asked) <= 8 and len(set(asked)) == len(asked)


def test_chunks_as_an_allocator_hands_them_out():
    def bytes_of(batch):
        return sum(256 * math.ceil(batch * size / 256) for size in (100, 33, 900, 7))

    limit = 350_000
    assert tried(bytes_of, limit, 8)[0] == by_trying(bytes_of, limit)


def test_nothing_fits_and_everything_fits():
    assert tried(lambda b: 100 + b, 50, 16)[0] == 0
    assert tried(lambda b: 100 + b, 101, 16)[0] == 1
    assert tried(lambda b: 100, 101, 16)[0] == ENDLESS
