"""Simulator and allocator agree where chunks do not matter: all requests are of one size.

Free chunks are then as large as a request or a multiple of it, so that no request gets more than it
asked for.
"""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support import liveness
from tests.support.graphs import random_execution, random_joint_graph, random_schedule, seeds
from tfckpt.ir.costgraph import BACKWARD, FORWARD, CostGraph, Storage, Vertex
from tfckpt.ir.schedule import resolve
from tfckpt.simulate.allocator import allocated_peaks
from tfckpt.simulate.simulate import simulate_order

pytestmark = pytest.mark.pure

SIZE = 4096


def of_one_size(graph):
    """Return the graph with storages and workspaces of one size."""
    return dataclasses.replace(
        graph, storages=tuple(dataclasses.replace(s, bytes=SIZE) for s in graph.storages),
        vertices=tuple(dataclasses.replace(v, workspace=SIZE if v.workspace else 0)
                       for v in graph.vertices))


@given(seeds, st.integers(1, 24), st.booleans())
@settings(max_examples=150, deadline=None)
def test_requests_of_one_size_are_counted_alike(seed, count, with_variables):
    graph = of_one_size(random_joint_graph(seed, count))
    if with_variables:  # of the size of what is donated, so that buffers change places
        graph = dataclasses.replace(graph, variable_bytes=(SIZE,) * 3)
    schedule = random_schedule(graph, seed)
    resolved = resolve(graph, schedule)
    for order in (None, random_execution(graph, schedule, seed)):
        peak = max(liveness.live_bytes(graph, schedule, order))
        assert simulate_order(graph, resolved, order).peak_bytes == peak
        assert set(allocated_peaks(graph, resolved, order, smallest=0)) == {peak}


def test_a_workspace_is_requested_while_its_step_runs():
    """Of three steps the second needs 256 MiB to itself, and what it reads and writes."""
    mib = 1 << 20
    graph = CostGraph(
        (Vertex("a", FORWARD, 1.0, writes=(0,)),
         Vertex("b", FORWARD, 1.0, reads=(0,), writes=(1,), workspace=256 * mib),
         Vertex("c", BACKWARD, 1.0, reads=(1,), writes=(2,))),
        (Storage("a", 8 * mib, 0), Storage("b", 8 * mib, 1), Storage("c", 8 * mib, 2)))
    resolved = resolve(graph, ((0, 0), (1, 0), (2, 0)))
    assert simulate_order(graph, resolved, None).peak_bytes == 272 * mib
    assert min(allocated_peaks(graph, resolved, None)) == 272 * mib  # where holes are large enough


def test_a_list_is_requested_in_pieces():
    """12 MiB at once get the hole of 20 MiB whole; four times three leave some of it."""
    mib = 1 << 20

    def peaks(pieces):
        graph = CostGraph(
            (Vertex("a", FORWARD, 1.0, writes=(0,)),
             Vertex("b", FORWARD, 1.0, reads=(0,), writes=(1,)),
             Vertex("c", FORWARD, 1.0, reads=(1,), writes=(2,)),
             Vertex("d", BACKWARD, 1.0, reads=(1, 2), writes=(3,), workspace=12 * mib,
                    pieces=pieces)),
            (Storage("a", 20 * mib, 0), Storage("b", 20 * mib, 1),
             Storage("c", 12 * mib, 2, pieces=pieces), Storage("d", 4 * mib, 3)))
        resolved = resolve(graph, tuple((v, 0) for v in range(4)))
        assert simulate_order(graph, resolved, None).peak_bytes == 48 * mib
        return allocated_peaks(graph, resolved, None)

    whole, pieces = peaks(1), peaks(4)
    assert sum(pieces) < sum(whole) and all(p <= w for p, w in zip(pieces, whole, strict=True))
