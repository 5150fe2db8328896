"""Forward-only graphs made by hand, as the papers draw them, and the joint graph of each.

`from_edges` builds and validates a `ForwardGraph`, and `with_backward` adds the backward pass, so
that a paper graph can be scheduled and simulated like a captured training step.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence

from tfckpt.errors import CostError
from tfckpt.ir.costgraph import BACKWARD, FORWARD, CostGraph, Storage, Vertex, check_cost_graph
from tfckpt.solvers.forward.forward_graph import ForwardGraph, integer_times

PaperGraph = tuple[
    Sequence[str] | None, Sequence[int], Sequence[float], Iterable[tuple[int, int]]
]
"""(names, bytes, time, edges), as `from_edges` takes them."""


def from_edges(
    bytes: Sequence[int],
    time: Sequence[float],
    edges: Iterable[tuple[int, int]],
    names: Sequence[str] | None = None,
) -> ForwardGraph:
    """Build a `ForwardGraph` from plain lists.

    Args:
      bytes: bytes of each vertex.
      time: time of each vertex, in any one unit.
      edges: pairs (u, v) of vertex indices: v needs u. Repeats count once.
      names: a name for each vertex; "v0", "v1" ... by default.

    Returns:
      The graph. Vertices keep their order where that is topological; otherwise they are
      sorted, the lowest given index first. Node `i` has members `(i,)` and storages `(i,)`,
      which is how `with_backward` numbers the joint graph.

    Raises:
      CostError: no vertices, a cost that is missing, negative or not a number, bytes that are
        not whole, two vertices of one name, an edge to no vertex, or a cycle.

    Complexity: O((V + E) log V).
    """
    count = max(len(bytes), len(time), len(names) if names is not None else 0)
    if not count:
        raise CostError("cost: the forward graph is empty; give it at least one vertex")
    labels = [f"v{i}" for i in range(count)] if names is None else list(names)
    _check_costs(count, labels, bytes, time)
    pairs = sorted(set(edges))
    for u, v in pairs:
        for end in (u, v):
            if not 0 <= end < count:
                raise CostError(f"cost: edge ({u}, {v}) names vertex {end}, but the graph has "
                                f"vertices 0 to {count - 1}")
    order = _topological(labels, pairs)
    place = [0] * count
    for position, vertex in enumerate(order):
        place[vertex] = position
    after: list[list[int]] = [[] for _ in range(count)]
    before: list[list[int]] = [[] for _ in range(count)]
    for u, v in pairs:
        after[place[u]].append(place[v])
        before[place[v]].append(place[u])
    alone = tuple((i,) for i in range(count))
    return ForwardGraph(
        names=tuple(labels[v] for v in order),
        bytes=tuple(int(bytes[v]) for v in order),
        time=integer_times([time[v] for v in order]),
        successors=tuple(tuple(sorted(nodes)) for nodes in after),
        predecessors=tuple(tuple(sorted(nodes)) for nodes in before),
        members=alone,
        storages=alone,
    )


def _check_costs(count, names, bytes, time):
    """Raise `CostError` for the first vertex whose name or costs cannot be used."""
    if len(names) < count:
        raise CostError(f"cost: vertex {len(names)} has no name; give as many names as costs")
    seen: set[str] = set()
    for index, name in enumerate(names):
        if name in seen:
            raise CostError(f"cost: two vertices are named {name!r}; names must be unique")
        seen.add(name)
        for what, costs in (("bytes", bytes), ("time", time)):
            cost = costs[index] if index < len(costs) else None
            if cost is None:
                raise CostError(f"cost: vertex {name!r} has no {what}")
            if not 0 <= cost < float("inf"):
                raise CostError(f"cost: vertex {name!r} has {what} {cost}; it must be finite "
                                "and not negative")
        if bytes[index] != int(bytes[index]):
            raise CostError(f"cost: vertex {name!r} has bytes {bytes[index]}; give whole bytes")


def _topological(names, pairs):
    """Vertices in topological order, the lowest index first wherever there is a choice."""
    waiting = [0] * len(names)
    after: list[list[int]] = [[] for _ in names]
    for u, v in pairs:
        after[u].append(v)
        waiting[v] += 1
    ready = [v for v, count in enumerate(waiting) if not count]
    order = []
    while ready:
        vertex = heapq.heappop(ready)
        order.append(vertex)
        for v in after[vertex]:
            waiting[v] -= 1
            if not waiting[v]:
                heapq.heappush(ready, v)
    if len(order) < len(names):
        stuck = names[min(v for v, count in enumerate(waiting) if count)]
        raise CostError(f"cost: the forward graph has a cycle at or before vertex {stuck!r}")
    return order


def with_backward(forward: ForwardGraph | PaperGraph) -> CostGraph:
    """Build the joint graph of a forward-only paper graph.

    Vertices, n being the number of forward nodes:
      1. 0 .. n-1: forward node `i`, recomputable, writes storage `i` of `bytes[i]` bytes;
      2. n: the loss; reads what the sinks wrote, writes the seed gradient (storage n, 0 bytes);
      3. n+1 .. 2n: the backward of node n-1, then n-2 ...; it takes the node's time, writes a
         gradient of the node's bytes, and reads the node's own value, the values of its inputs,
         and the gradients of its consumers (of a sink: the seed).

    Args:
      forward: a graph of one storage a node, or (names, bytes, time, edges) for `from_edges`.

    Raises:
      CostError: as `from_edges`, or two vertices of the joint graph would share a name.

    Source: Kusumoto et al. 2019, section 2 (figure 1) and section 3 (the backward of V_i needs
    the forward values of V_i and the cache of the boundary before it).
    """
    graph = forward if isinstance(forward, ForwardGraph) else _from_paper(forward)
    count = len(graph)
    if not count:
        raise CostError("cost: the forward graph is empty; give it at least one vertex")
    storages = [Storage(name, graph.bytes[i], i) for i, name in enumerate(graph.names)]
    vertices = [
        Vertex(name, FORWARD, float(graph.time[i]), reads=graph.predecessors[i], writes=(i,),
               recomputable=True, ops=(i,))
        for i, name in enumerate(graph.names)
    ]
    sinks = tuple(i for i in range(count) if not graph.successors[i])
    storages.append(Storage("loss:seed", 0, count))
    vertices.append(Vertex("loss", BACKWARD, 0.0, reads=sinks, writes=(count,), ops=(count,)))
    for node in reversed(range(count)):
        index = len(vertices)
        gradients = [_gradient(count, consumer) for consumer in graph.successors[node]]
        reads = sorted({node, *graph.predecessors[node], *(gradients or [count])})
        storages.append(Storage(f"{graph.names[node]}:gradient", graph.bytes[node], index))
        vertices.append(Vertex(f"{graph.names[node]}/backward", BACKWARD, float(graph.time[node]),
                               reads=tuple(reads), writes=(index,), ops=(index,)))
    joint = CostGraph(tuple(vertices), tuple(storages), name="paper")
    check_cost_graph(joint)
    return joint


def _from_paper(graph: PaperGraph) -> ForwardGraph:
    names, bytes, time, edges = graph
    return from_edges(bytes, time, edges, names)


def _gradient(count: int, node: int) -> int:
    """Storage (and vertex) of the backward of a node."""
    return 2 * count - node
