"""`main_path`: a forward graph without its side inputs and dead ends.

The view of a captured step has nodes without a consumer (the statistics of a normalisation, which
only the update reads) and nodes without a predecessor (a dropout mask drawn from a seed). Each is
an end of its own and so opens a path around vertices that all other paths pass, which hides these
vertices from solvers that cut at single vertices. Here such nodes are merged into a neighbour.
"""

from __future__ import annotations

from collections.abc import Sequence

from tfckpt.solvers.forward.forward_graph import ForwardGraph, neighbours

__all__ = ["main_path"]

NEGLIGIBLE = 4096
"""A dead end may hand on less than 1/4096 of all bytes."""


def main_path(forward: ForwardGraph) -> ForwardGraph:
    """Return a graph whose nodes off the paths from the inputs to the last node are merged.

    - A node without a consumer that hands on a negligible number of bytes joins the last of its
      predecessors. So does a node whose consumers have all been merged in this way. The last node
      of the graph stays.
    - A node without a predecessor whose first consumer needs other nodes as well joins that
      consumer. A second input with a network of its own stays.

    The order of nodes is kept. An edge that would lead from a higher to a lower node after merging
    is reversed, so that the result has no cycle.

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
