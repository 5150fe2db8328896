"""`canonical_schedule`: a sequence of lower sets as a schedule of the joint graph.

Source: Kusumoto et al. 2019, section 3 (the canonical strategy), after liveness analysis. The
planner schedules the same keep sets in another order; see docs/architecture.md.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from benchmarks.paper_tables.lower_set_model import check_lower_sets
from tfckpt.ir.costgraph import FORWARD, CostGraph
from tfckpt.ir.schedule import Schedule
from tfckpt.plan.keep_sets import keep_schedule
from tfckpt.solvers.forward.forward_graph import ForwardGraph
from tfckpt.solvers.forward.lower_sets import kept_storages, nodes_of


def canonical_schedule(graph: CostGraph, forward: ForwardGraph,
                       lower_sets: Sequence[int]) -> Schedule:
    """Return a schedule of the joint graph in which V_i runs as the canonical strategy says.

    The forward runs V_1, V_2 ..., the backward what reads V_k, V_{k-1} ..., each in the order of
    the graph where that leaves a choice. What is not on a boundary is recomputed just before
    the backward first reads it, and, as liveness analysis has it, freed after its last reader.

    Args:
      graph: the joint graph; its forward vertices are what `forward.members` names.
      lower_sets: increasing, the last one V (`check_lower_sets`).

    Raises:
      PlanError: as `check_lower_sets`.

    Complexity: O((V + E) log V).
    """
    check_lower_sets(forward, lower_sets)
    segment: dict[int, int] = {}
    previous = 0
    for number, mask in enumerate(lower_sets):
        for node in nodes_of(mask & ~previous):
            segment.update((vertex, number) for vertex in forward.members[node])
        previous = mask
    return keep_schedule(graph, kept_storages(forward, lower_sets), _order(graph, segment))


def _order(graph, segment):
    """Return all vertices in a topological order: forward segments up, then backward segments down.
    """
    last = len(segment)
    rank = []
    for v, vertex in enumerate(graph.vertices):
        if vertex.region == FORWARD:
            rank.append(segment.get(v, 0))
        else:
            read = [segment[p] for p in graph.predecessors[v] if p in segment]
            rank.append(2 * last - max(read, default=last))
    waiting = [len(needs) for needs in graph.predecessors]
    after: list[list[int]] = [[] for _ in graph.vertices]
    for v, needs in enumerate(graph.predecessors):
        for p in needs:
            after[p].append(v)
    ready = [(rank[v], v) for v, count in enumerate(waiting) if not count]
    heapq.heapify(ready)
    order = []
    while ready:
        _, v = heapq.heappop(ready)
        order.append(v)
        for w in after[v]:
            waiting[w] -= 1
            if not waiting[w]:
                heapq.heappush(ready, (rank[w], w))
    return order
