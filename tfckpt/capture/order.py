"""The order of a program for a graph whose order says nothing.

Grappler hands a graph on in some topological order: dropout masks and other ops that read no
data stand first, whatever layer they belong to. Planning reads more into an order (a cut after
a position, the step as it would run), so the order in which a person would have written the
step is made anew.
"""

from __future__ import annotations

from collections.abc import Sequence

from tfckpt.ir.graph import BACKWARD, FORWARD, Graph, depth_first_order


def in_program_order(graph: Graph) -> Graph:
    """Return the same graph with its ops in the order in which a program would create them.

    Gradients, and what follows from them, come in the order of their depth (the longest path
    that leads there). All else comes when it is first asked for, of several inputs the deepest
    first: a layer's mask comes after the layer's input, the forward before the first gradient.
    What nothing asks for comes last.

    Args:
      graph: the captured step; not changed.

    Complexity: O((V + E) log V).
    """
    ops = graph.ops
    sources = [sorted({s for s, _ in op.inputs} | set(op.controls)) for op in ops]
    depth: list[int] = []
    for before in sources:
        depth.append(1 + max((depth[s] for s in before), default=-1))
    asked = _follows_gradient(graph, sources, depth)
    for before in sources:
        before.sort(key=lambda s: depth[s])  # the last is taken from a stack first
    roots = sorted((i for i in range(len(ops)) if asked[i]), key=lambda i: (depth[i], i))
    return graph.part(depth_first_order([*roots, *range(len(ops))], sources.__getitem__))


def _follows_gradient(graph: Graph, sources: Sequence[Sequence[int]], depth: Sequence[int]
                      ) -> list[bool]:
    """Return which ops are gradients or follow from them.

    A backward op that reads the forward alone and could wait (the square in GELU's derivative)
    is no gradient yet; the gradient of the loss, which waits for nothing, is.
    """
    ops = graph.ops
    late = [-1] * len(ops)  # the depth at which the first reader needs it
    for i in range(len(ops) - 1, -1, -1):
        late[i] = depth[i] if late[i] < 0 else late[i]
        for s in sources[i]:
            late[s] = late[i] - 1 if late[s] < 0 else min(late[s], late[i] - 1)
    follows: list[bool] = []
    for i, op in enumerate(ops):
        follows.append(any(follows[s] for s in sources[i])
                       or op.region == BACKWARD and late[i] == depth[i] and any(
                           ops[s].region == FORWARD for s in sources[i]))
    return follows
