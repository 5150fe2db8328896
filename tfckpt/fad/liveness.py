"""Search for the ops of a step that run, and those that no longer do once a tensor is replaced."""

from __future__ import annotations

from collections.abc import Sequence

from tfckpt.ir.graph import Graph


class Liveness:
    """Ops that something needs, by data or control, from the step's results and effects.

    TensorFlow builds gradients that nothing reads (that of a constant divisor, say) and prunes
    them before it runs the step: they must not count as readers.

    Attributes:
      alive: for each op whether it runs.
      required: for each op whether it runs whatever reads it (fetched, or run for its effect).
      readers: for each op the live and dead ops that read or wait for it, ascending.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        count = len(graph.ops)
        self.required = [False] * count
        for i in (*(i for i, _ in graph.fetches), *graph.sinks):
            self.required[i] = True
        if not any(self.required):  # a bare GraphDef: all of it may be asked for
            self.required = [True] * count
        self.sources = [sorted({s for s, _ in op.inputs} | set(op.controls)) for op in graph.ops]
        self.readers: list[list[int]] = [[] for _ in range(count)]
        for i, entry in enumerate(self.sources):
            for source in entry:
                self.readers[source].append(i)
        self.alive = list(self.required)
        for i in range(count - 1, -1, -1):
            if self.alive[i]:
                for source in self.sources[i]:
                    self.alive[source] = True
        self._uses = [sum(self.alive[r] for r in entry) for entry in self.readers]

    def dies(self, op: int, keep: Sequence[int] = ()) -> tuple[int, ...]:
        """Ops that stop running once nothing reads the results of `op`, ascending.

        Args:
          op: the op whose readers are moved elsewhere.
          keep: ops that are needed all the same.
        """
        needed = frozenset(keep)
        uses: dict[int, int] = {}
        dead, stack = [op], [op]
        while stack:
            for source in self.sources[stack.pop()]:
                left = uses.get(source, self._uses[source]) - 1
                uses[source] = left
                if not left and not self.required[source] and source not in needed:
                    dead.append(source)
                    stack.append(source)
        return tuple(sorted(dead))
