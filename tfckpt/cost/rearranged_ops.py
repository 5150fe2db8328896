"""Forward ops that are one vertex with a reader, because Grappler rearranges or fuses the two.

c * (a * b) is made a * (c * b), a sum of sums one sum, and so on, where the inner op has no other
reader; log(1 + x) is made log1p(x) in any case. Were the inner result kept and the outer op run
again, the inner one would have two readers, or be read through a guard, and stay as it is: the copy
would round differently from the plain step. So would a MatMul, its bias and its tanh, which one
kernel computes otherwise than three. As one vertex they lose little: what comes in or what goes
out can be kept as well.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from tfckpt.cost.merging import merges_into_its_reader, multiplies_by_one, only_reader
from tfckpt.cost.time import is_expensive
from tfckpt.ir.graph import FORWARD, Graph, Op, TensorId
from tfckpt.ops import SUM, OpRecord, record


def absorbed_ops(graph: Graph, anchors: Sequence[int], readers: list[list[int]],
                 fetched: Collection[TensorId]) -> dict[int, int]:
    """For each op that is merged with its reader the anchor, the last op of its group.

    Args:
      graph: the captured step.
      anchors: ops that would be vertices, ascending.
      readers: as `Graph.consumers`.
      fetched: tensors that leave the step.
    """
    merger = _Merger(graph, anchors, readers, fetched)
    found: dict[int, int] = {}
    for final in reversed(anchors):
        if final in found or graph.ops[final].region != FORWARD:
            continue
        pending = [final]
        while pending:
            op = pending.pop()
            for source in merger.joining(op, final):
                if source not in found:
                    found[source] = final
                    pending.append(source)
    return found


class _Merger:
    """Finds ops that Grappler rearranges with a reader."""

    def __init__(self, graph: Graph, anchors: Sequence[int], readers: list[list[int]],
                 fetched: Collection[TensorId]) -> None:
        self.graph, self.readers, self.fetched = graph, readers, fetched
        self.anchors = frozenset(anchors)
        self.work = [0]  # expensive ops before each op
        for i, op in enumerate(graph.ops):
            self.work.append(self.work[-1] + (i in self.anchors and is_expensive(op)))

    def joining(self, op: int, final: int) -> list[int]:
        """Return the ops whose results `op` reads and with which it is rearranged.

        Sums are moved to the last of them, and fused ops to the activation. Where anything else
        is rearranged, only cheap ops run between the two, so counting them as one keeps nothing
        alive much longer.
        """
        found = []
        for source in self._sources(op):
            near = self.work[source] == self.work[final]
            alike = SUM in self._known(source).kinds and SUM in self._known(op).kinds
            if self._fused(source, op) or (near or alike) and (
                    self._rearranged(source, op) or self._removed(source, op)
                    or self._converted(source, op, final)):
                found.append(source)
        return found

    def _sources(self, op: int) -> list[int]:
        """Return the anchors whose results an op reads, through pass-throughs."""
        found: dict[int, None] = {}
        for source, slot in self.graph.ops[op].inputs:
            while self._known(source).passes_on and source not in self.anchors:
                source, slot = self.graph.ops[source].inputs[slot]
            if source in self.anchors and (source, 0) not in self.fetched:
                found[source] = None
        return list(found)

    def _known(self, op: int) -> OpRecord:
        return record(self.graph.ops[op].type)

    def _rearranged(self, source: int, op: int) -> bool:
        one, other = self.graph.ops[source], self.graph.ops[op]
        return (self._known(source).rearranged and self._known(op).rearranged
                and self._alike(one, other)
                and merges_into_its_reader(self.graph, source, self.readers)
                and only_reader(self.graph, source, self.readers) == op)

    def _fused(self, source: int, op: int) -> bool:
        """Return whether an op rounds as one with its reader and an activation.

        It is a bias before the activation, or a contraction before the bias.
        """
        ops = self.graph.ops
        bias, activation = (source, op) if not self._known(source).rounds_with else (
            op, only_reader(self.graph, op, self.readers))
        return activation is not None and all(
            merges_into_its_reader(self.graph, i, self.readers) for i in (source, bias)) and any(
            self._known(activation).is_among(self._known(s).rounds_with)
            and merges_into_its_reader(self.graph, s, self.readers)
            and self._alike(ops[s], ops[activation]) for s in self._sources(bias))

    def _removed(self, source: int, op: int) -> bool:
        """1 * x, whatever reads it."""
        return (multiplies_by_one(self.graph, source)
                and self._alike(self.graph.ops[source], self.graph.ops[op])
                and only_reader(self.graph, source, self.readers) == op)

    def _converted(self, source: int, op: int, final: int) -> bool:
        """log(x + 1) and exp(x) - 1, which become one op whoever else reads the inner one."""
        one, other = self.graph.ops[source], self.graph.ops[op]
        if not self._known(source).is_among(self._known(op).one_with):
            return False
        added = one if SUM in self._known(source).kinds else other
        return (self._alike(one, other)
                and any(self.graph.ops[s].attrs.get("value") == 1.0 for s, _ in added.inputs)
                and all(r >= final or r == op for r in self.readers[source]))

    def _alike(self, one: Op, other: Op) -> bool:
        return (one.region == other.region == FORWARD and one.pure and other.pure
                and one.device == other.device)


def workspace(graph: Graph, root: Sequence[Sequence[TensorId]], inner: Mapping[TensorId, int],
              members: Sequence[int]) -> int:
    """Return bytes that a group allocates besides its result while it runs.

    An op's result is written into the buffer of an input that dies, where that is possible.

    Args:
      graph: the captured step.
      root: the tensor whose storage each tensor is (`tfckpt.cost.storage.roots`).
      inner: bytes of the results that stay inside of groups.
      members: the group's anchor, then its other ops, ascending.
    """
    live = most = 0
    result = max((t.bytes or 0 for t in graph.ops[members[0]].outputs), default=0)
    for op in (*members[1:], members[0]):
        dying = sum(inner.get(t, 0) for t in {
            root[source][slot] for source, slot in graph.ops[op].inputs})
        made = result if op == members[0] else inner.get((op, 0), 0)
        most = max(most, live - dying + max(dying, made))
        live += made - dying
    return max(0, most - result)
