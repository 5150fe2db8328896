"""`forward_view`: the recomputable forward part of a joint graph, small enough to solve on.

Solvers that come from papers work on a graph of forward values. A captured step has hundreds or
thousands of forward vertices, most of which no solver needs to decide on: what the backward never
reads is recomputed with its consumer anyway. The view merges vertices in two passes:

1. chains: a vertex whose consumers all lie in one node, and of which the backward reads nothing
   worth counting, joins that node;
2. if more than `limit` nodes remain: neighbours in topological order are merged, smallest bytes
   first; neighbours between two single-vertex cuts are merged before neighbours across a cut.

Neither pass can close a cycle. In the first, all paths out of a merged vertex lead through the
last vertex of its node. In the second, nodes are intervals of a topological order.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Sequence

from tfckpt.ir.costgraph import CostGraph
from tfckpt.ir.graph import FORWARD
from tfckpt.solvers.forward.forward_graph import ForwardGraph, integer_times, neighbours
from tfckpt.solvers.forward.lower_sets import nodes_of

NEGLIGIBLE = 4096
"""A vertex that hands the backward less than 1/4096 of all residual bytes still merges: the
saved mean and variance of a normalisation must not keep its large output apart."""


def forward_view(graph: CostGraph, limit: int = 160) -> ForwardGraph:
    """Return the recomputable forward vertices of a joint graph, contracted.

    An edge means that one node reads what another makes. A vertex that reads nothing
    recomputable takes as predecessors the recomputable vertices it depends on through others
    (through an op that may not run twice, or by control), so that lower sets follow the order
    of the step across such ops.

    Args:
      graph: the joint graph.
      limit: nodes to have at most; reached by merging, so never undercut by much.

    Returns:
      The view; without nodes if nothing is recomputable. A node is named after its last vertex.
      `bytes` counts the storages handed on to other nodes, or to anything that is not forward;
      fetched storages are listed but cost nothing, since they stay in memory in any case.

    Complexity: O((V + E) log V), and a few hundredths of a second at 3,000 vertices.
    """
    inside = [i for i, vertex in enumerate(graph.vertices) if vertex.recomputable]
    before, ordering = _predecessors(graph, inside)
    group = _merge_chains(before, ordering, _saved_bytes(graph, inside))
    if len(set(group)) > limit:
        group = _merge_neighbours(graph, inside, before, group, max(1, limit))
    return _build(graph, inside, before, group)


def _predecessors(graph: CostGraph, inside: Sequence[int]) -> tuple[list[list[int]], list[bool]]:
    """Return the predecessors of each vertex of `inside`, and whether they only order it.

    Predecessors are positions in `inside`. They only order the vertex if it reads no data of any
    vertex of `inside`.
    """
    position = {vertex: place for place, vertex in enumerate(inside)}
    storages, vertices = graph.storages, graph.vertices
    nearest = [0] * (inside[-1] + 1 if inside else 0)
    before: list[list[int]] = []
    ordering: list[bool] = []
    for index in range(len(nearest)):
        mask = 0
        for other in graph.predecessors[index]:
            mask |= nearest[other]
        place = position.get(index)
        if place is None:
            nearest[index] = mask
            continue
        nearest[index] = 1 << place
        made_by = {storages[s].producer for s in vertices[index].reads}
        data = sorted(position[v] for v in made_by if v in position)
        before.append(data or nodes_of(mask))
        ordering.append(not data)
    return before, ordering


def _leaves_forward(graph: CostGraph, storage: int) -> bool:
    """Return whether anything but the forward reads a storage."""
    return any(graph.vertices[reader].region != FORWARD for reader in graph.readers[storage])


def _saved_bytes(graph: CostGraph, inside: Sequence[int]) -> list[int]:
    """Return for each position the bytes that the backward reads, 0 where negligible."""
    saved = []
    for vertex in inside:
        written = graph.vertices[vertex].writes
        saved.append(sum(graph.storages[s].bytes for s in written
                         if not graph.storages[s].fetched and _leaves_forward(graph, s)))
    total = sum(saved)
    return [0 if size * NEGLIGIBLE < total else size for size in saved]


def _merge_chains(before: Sequence[Sequence[int]], ordering: Sequence[bool], saved: Sequence[int]
                  ) -> list[int]:
    """Merge chains (pass 1) and return for each position the last position of its node."""
    count = len(before)
    after: list[list[int]] = [[] for _ in range(count)]
    fixed = [False] * count
    for place, others in enumerate(before):
        for other in others:
            after[other].append(place)
            fixed[other] = fixed[other] or ordering[place]
    group = list(range(count))
    for place in reversed(range(count)):
        into = {group[consumer] for consumer in after[place]}
        if len(into) == 1 and not saved[place] and not fixed[place]:
            (group[place],) = into
    return group


def _node_order(before: Sequence[Sequence[int]], group: Sequence[int]) -> list[int]:
    """Return the nodes, each given by its last position, in topological order.

    A node that needs nothing stands just before its first consumer: a dropout mask made at the
    start of the step would otherwise widen every cut.
    """
    first_consumer: dict[int, int] = {}
    fed = set()
    for place, others in enumerate(before):
        for other in others:
            if group[other] != group[place]:
                fed.add(group[place])
                last = first_consumer.get(group[other], group[place])
                first_consumer[group[other]] = min(last, group[place])
    roots = sorted(set(group))
    return sorted(roots, key=lambda root: (root, 1, root) if root in fed
                  else (first_consumer.get(root, root), 0, root))


def _merge_neighbours(graph: CostGraph, inside: Sequence[int], before: Sequence[Sequence[int]],
                      group: Sequence[int], limit: int) -> list[int]:
    """Merge intervals of the topological order until `limit` nodes remain (pass 2)."""
    order = _node_order(before, group)
    place_of = {root: place for place, root in enumerate(order)}
    rank_of = [place_of[root] for root in group]
    size = _bytes(graph, _handed_on(graph, inside, rank_of, len(order)))
    narrow = _narrow_cuts(before, rank_of, len(order))
    end = _merge_intervals(size, narrow, limit)
    return [end[rank] for rank in rank_of]


def _bytes(graph: CostGraph, handed: Sequence[Sequence[int]]) -> list[int]:
    """Return for each node the bytes of the storages it hands on."""
    return [sum(graph.storages[s].bytes for s in storages if not graph.storages[s].fetched)
            for storages in handed]


def _handed_on(graph: CostGraph, inside: Sequence[int], node: Sequence[int], count: int
               ) -> list[list[int]]:
    """Return for each node the storages that another node, or anything but the forward, reads."""
    node_of = dict(zip(inside, node, strict=True))
    handed: list[list[int]] = [[] for _ in range(count)]
    for vertex, mine in zip(inside, node, strict=True):
        for storage in graph.vertices[vertex].writes:
            if _leaves_forward(graph, storage) or any(
                    node_of.get(reader, mine) != mine for reader in graph.readers[storage]):
                handed[mine].append(storage)
    return handed


def _narrow_cuts(before: Sequence[Sequence[int]], node: Sequence[int], count: int) -> list[bool]:
    """Return for each place in the order whether at most one node up to it feeds what follows."""
    furthest = list(range(count))
    for place, others in enumerate(before):
        for other in others:
            furthest[node[other]] = max(furthest[node[other]], node[place])
    change = [0] * (count + 1)
    for place, last in enumerate(furthest):
        change[place] += 1
        change[last] -= 1
    return [crossing <= 1 for crossing in itertools.accumulate(change[:-1])]


def _merge_intervals(size: Sequence[int], narrow: Sequence[bool], limit: int) -> list[int]:
    """Merge neighbouring intervals and return, for each place, the last place of its own.

    Order of merging: first between two narrow cuts, except into the last node there (which is the
    one worth keeping); then into that node; then across the cuts. Among equals the smallest sum of
    bytes, then the earliest.
    """
    count = len(size)
    start = list(range(count))  # of the interval that ends here
    end = list(range(count))  # of the interval that starts here
    total = list(size)  # of the interval that starts here
    heap: list[tuple[int, int, int, int, int]] = []

    def offer(left: int) -> None:
        cut = end[left]
        right = cut + 1
        if right < count:
            rank = 2 if narrow[cut] else int(narrow[end[right]])
            heapq.heappush(heap, (rank, total[left] + total[right], left, cut, end[right]))

    for place in range(count - 1):
        offer(place)
    remaining = count
    while remaining > limit and heap:
        _, both, left, cut, last = heapq.heappop(heap)
        if start[cut] != left or end[left] != cut or end[cut + 1] != last:
            continue  # one side has grown since
        start[cut] = end[cut + 1] = -1
        end[left], start[last], total[left] = last, left, both
        remaining -= 1
        offer(left)
        if left:
            offer(start[left - 1])
    result = [0] * count
    place = 0
    while place < count:
        result[place:end[place] + 1] = [end[place]] * (end[place] + 1 - place)
        place = end[place] + 1
    return result


def _build(graph: CostGraph, inside: Sequence[int], before: Sequence[Sequence[int]],
           group: Sequence[int]) -> ForwardGraph:
    """Return the view whose nodes are the groups, ordered topologically."""
    order = _node_order(before, group)
    place_of = {root: place for place, root in enumerate(order)}
    node = [place_of[root] for root in group]
    count = len(order)
    members: list[list[int]] = [[] for _ in range(count)]
    for place, mine in enumerate(node):
        members[mine].append(inside[place])
    successors, predecessors = neighbours(count, (
        (node[other], mine) for mine, others in zip(node, before, strict=True)
        for other in others))
    handed = _handed_on(graph, inside, node, count)
    vertices = graph.vertices
    return ForwardGraph(
        names=tuple(vertices[vertex[-1]].name for vertex in members),
        bytes=tuple(_bytes(graph, handed)),
        time=integer_times([sum(vertices[v].time for v in vertex) for vertex in members]),
        successors=successors,
        predecessors=predecessors,
        members=tuple(map(tuple, members)),
        storages=tuple(tuple(sorted(s)) for s in handed),
    )
