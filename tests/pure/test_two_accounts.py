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
from tfckpt.plan.allocator import allocated_peaks
from tfckpt.plan.schedule import resolve
from tfckpt.plan.simulate import simulate_order

pytestmark = pytest.mark.pure

SIZE = 4096


def of_one_size(graph):
    """The graph with storages of one size, and no workspaces."""
    return dataclasses.replace(
        graph, storages=tuple(dataclasses.replace(s, bytes=SIZE) for s in graph.storages),
        vertices=tuple(dataclasses.replace(v, workspace=0) for v in graph.vertices))


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
