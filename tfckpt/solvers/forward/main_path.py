"""`trunk`: a forward graph without its side entrances and dead ends.

The view of a captured step has nodes that lead nowhere (the statistics of a normalisation, which
only the update reads) and nodes that come from nowhere (a dropout mask drawn from a seed). Solvers
that cut at single vertices would see a second path around all that lies between. Here such nodes
join a neighbour.
"""

from __future__ import annotations

from collections.abc import Sequence

from tfckpt.solvers.forward.forward_graph import ForwardGraph, neighbours

__all__ = ["trunk"]

NEGLIGIBLE = 4096
"""A dead end may hand on less than 1/4096 of all bytes."""


def trunk(forward: ForwardGraph) -> ForwardGraph:
    """Contract what stands beside the paths from the inputs to the last node.

    - A node that nothing needs, and that hands on nothing worth counting, joins the last of its
      predecessors; so do those of which nothing else is left then. The last node of all stays.
    - A node that needs nothing, whose first consumer needs other nodes besides, joins that
      consumer. A second input with a network of its own stays.

    The order of nodes is kept, and an edge that would lead down (from what joined a later node to
    what joined an earlier one, a dead end) is turned round, so that no cycle is closed.

    Args:
      forward: the forward part of a step; not changed.

    Returns:
      A graph whose nodes have the members, storages and costs of all that joined them.

    Complexity: O((V + E) log V).
    """
    count = len(forward)
    joined = list(range(count))
    total = sum(forward.bytes)
    uses = [len(after) for after in forward.successors]
    for node in reversed(range(count - 1)):
        needs = forward.predecessors[node]
        light = not forward.storages[node] or forward.bytes[node] * NEGLIGIBLE < total
        if not uses[node] and needs and light:
            joined[node] = needs[-1]
            for other in needs:
                uses[other] -= 1
    for node in range(count):
        kept = [v for v in forward.successors[node] if joined[v] == v]
        if not forward.predecessors[node] and kept and len(forward.predecessors[kept[0]]) > 1:
            joined[node] = kept[0]
    for node in range(count):
        while joined[joined[node]] != joined[node]:
            joined[node] = joined[joined[node]]
    return _contract(forward, joined)


def _contract(forward: ForwardGraph, joined: Sequence[int]) -> ForwardGraph:
    """Return the graph whose nodes are those that joined none, with all that joined them."""
    roots = [node for node in range(len(forward)) if joined[node] == node]
    place = {root: i for i, root in enumerate(roots)}
    inside: list[list[int]] = [[] for _ in roots]
    edges = []
    for node, root in enumerate(joined):
        inside[place[root]].append(node)
        for other in forward.successors[node]:
            ends = place[root], place[joined[other]]
            edges.append((min(ends), max(ends)))
    successors, predecessors = neighbours(len(roots), edges)
    return ForwardGraph(
        names=tuple(forward.names[root] for root in roots),
        bytes=tuple(sum(forward.bytes[v] for v in nodes) for nodes in inside),
        time=tuple(sum(forward.time[v] for v in nodes) for nodes in inside),
        successors=successors,
        predecessors=predecessors,
        members=tuple(tuple(sorted(m for v in nodes for m in forward.members[v]))
                      for nodes in inside),
        storages=tuple(tuple(sorted(s for v in nodes for s in forward.storages[v]))
                       for nodes in inside),
    )
