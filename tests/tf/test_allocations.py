"""Allocators of ours on the requests that TensorFlow's own allocator served during real steps."""

from __future__ import annotations

import pytest

from tests.support import allocation_trace
from tests.support.planner_calls import allocator
from tests.support.reference_allocator import ReferenceAllocator


@pytest.fixture(scope="module")
def trace():
    """Events of three steps from an empty heap; see `tests.support.allocation_trace`."""
    events = allocation_trace.recorded()
    assert events[0][4] == events[0][3]  # nothing was in use before the first
    return events


def replay(trace, heap):
    """Yield (bytes in use, peak) of a heap after each event of a trace."""
    address = {}
    for kind, real, requested, *_ in trace:
        if kind == "MemoryAllocation":
            address[real] = heap.allocate(requested)
        else:
            heap.release(address.pop(real))
        yield heap.in_use, heap.peak


def test_the_trace_has_what_matters(trace):
    """Chunks larger than their rounded request, several regions, and many events."""
    slack = [chunk - requested for _, _, requested, chunk, *_ in trace]
    assert len(trace) > 1000 and max(slack) > 100_000
    reference = ReferenceAllocator()
    for _ in replay(trace, reference):
        pass
    assert len(reference.regions) >= 4


def test_the_reference_does_what_tensorflow_did(trace):
    """Every address, every chunk, every count, given where each new region begins."""
    reference = ReferenceAllocator()
    for event in trace:
        kind, address, requested, chunk, in_use, peak = event
        if kind == "MemoryAllocation":
            assert reference.allocate(requested, address) == address, event
            assert reference.size_at(address) == chunk, event
        else:
            assert reference.size_at(address) == chunk, event
            reference.release(address)
        assert (reference.in_use, reference.peak) == (in_use, peak), event


def test_ours_does_what_the_reference_does(trace):
    ours, reference = replay(trace, allocator()), replay(trace, ReferenceAllocator())
    for number, (found, expected) in enumerate(zip(ours, reference, strict=True)):
        assert found == expected, f"event {number}: {trace[number]}"


def test_ours_counts_what_tensorflow_counted(trace):
    """Exactly, until equal holes lie in several regions; then where malloc puts regions decides.

    Of equal holes TensorFlow takes the one at the lowest address. Ours places each region above the
    one before it, the system usually below.
    """
    ours, reference = allocator(), ReferenceAllocator()
    address = {}
    for number, (kind, real, requested, _, in_use, peak) in enumerate(trace):
        if kind == "MemoryAllocation":
            holes = [hole.address for hole in reference.equal_holes(requested)]
            if len({region[0].address for region in reference.regions
                    if any(chunk.address in holes for chunk in region)}) > 1:
                break
            reference.allocate(requested, real)
            address[real] = ours.allocate(requested)
        else:
            reference.release(real)
            ours.release(address.pop(real))
        assert (ours.in_use, ours.peak) == (in_use, peak), f"event {number}"
    assert number > 100 and len(reference.regions) > 1
    *_, last = replay(trace, allocator())
    assert last[1] == pytest.approx(max(event[5] for event in trace), rel=0.2)
