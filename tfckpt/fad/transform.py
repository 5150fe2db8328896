"""The step with alternatives taken: a `Graph` again, so that every later stage reads it as usual.

What was changed on the way is recorded as `Edits`, since the captured graph is what gets edited.

The ops of a derivative come right after what they read, in the forward; the product with the
gradients stands where the sink stood. Derivatives are pure forward ops: a planner may keep them or
recompute them like any other.

An executor runs what is ready, in no order of ours: left alone it computes a derivative of several
ops late, and keeps everything that it reads until then (six layers of composed GELU: the peak did
not fall at all). So what the forward reads of a region passes an Identity that waits for the
derivatives. XLA, which ignores control edges, orders for itself.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

import networkx as nx

from tfckpt.errors import CostError
from tfckpt.fad.alternatives import Alternative, Kept
from tfckpt.fad.liveness import Liveness
from tfckpt.fad.residuals import DTYPE_BYTES
from tfckpt.ir.edits import PROTECTED, Create, Edits, Rewire, op_of
from tfckpt.ir.graph import BACKWARD, FORWARD, UPDATE, Graph, Op, Tensor, TensorId, check_graph
from tfckpt.ir.target import HERE, Target
from tfckpt.ops import names, record
from tfckpt.ops.terms import CAST, NUMBER, TENSOR, TWO, Node

MARK = "-tfckpt_fad"
"""In the name of every op that forward AD adds."""

Name = str
"""A tensor as "op:slot"."""


@dataclasses.dataclass
class _Entry:
    """An op of the new graph: what it reads and waits for by name, and where it would stand.

    Attributes:
      key: index of the old op at or after which it stands, and its number among the new ones.
    """

    key: tuple[int, int]
    op: Op
    inputs: tuple[Name, ...]
    controls: tuple[str, ...] = ()

    @property
    def is_new(self) -> bool:
        """Return whether forward AD adds the op."""
        return self.key[1] > 0

    def create(self) -> Create:
        """Return the edit that adds the op."""
        op = self.op
        return Create(op.name, op.type, self.inputs, self.controls,
                      tuple(t.dtype for t in op.outputs), op.attrs, op.device)


def take(graph: Graph, alternatives: Sequence[Alternative], target: Target = HERE
         ) -> tuple[Graph, Edits]:
    """Return the graph with these alternatives taken, and the edits that make it of the old one.

    O(edges log ops).

    Args:
      graph: joint graph; not changed.
      alternatives: those that are taken, one for a region at most; without any, nothing changes.
      target: the device and what runs the step: whether control edges order it.

    Raises:
      CostError: two alternatives replace or need what the other removes.
    """
    if not alternatives:
        return graph, Edits()
    added: list[_Entry] = []
    replaced: dict[Name, Name] = {}
    delayed: dict[tuple[int, int], Name] = {}
    removed: set[int] = set()
    for alternative in alternatives:
        writer = _Writer(graph, alternative)
        replaced[_name(graph, alternative.sink)] = writer.write()
        if target.orders_by_control:
            delayed.update(writer.delay())
        added.extend(writer.added)
        removed.update(alternative.removed)
    _drop_dead_readers(graph, replaced, removed)
    return _rebuilt(graph, added, replaced, delayed, frozenset(removed))


def _drop_dead_readers(graph: Graph, replaced: dict[Name, Name], removed: set[int]) -> None:
    """Remove what never ran and read what is removed (gradients of constants, for one)."""
    alive = Liveness(graph).alive
    for i, op in enumerate(graph.ops):
        if not alive[i] and (any(s in removed and _name(graph, (s, slot)) not in replaced
                                 for s, slot in op.inputs)):
            removed.add(i)


class _Writer:
    """Writes one alternative's ops."""

    def __init__(self, graph: Graph, alternative: Alternative) -> None:
        self.graph, self.alternative = graph, alternative
        source = graph.ops[alternative.region.source[0]]
        x = source.outputs[alternative.region.source[1]]
        self.shape, self.device, self.dtype = x.shape, source.device, x.dtype
        self.sink = graph.ops[alternative.sink[0]]
        self.forward = graph.ops[max(k.of for k in alternative.kept)[0]].name
        self.added: list[_Entry] = []
        self.written: dict[int, tuple[Name, int]] = {}
        self.numbers: dict[tuple[float, str, bool], Name] = {}

    def write(self) -> Name:
        """Add every op; return the name of what replaces the sink."""
        parts = [_name(self.graph, t) for t in self.alternative.addends]
        parts += [self._product(kept) for kept in self.alternative.kept]
        return self._sum(parts, self.dtype)

    def delay(self) -> dict[tuple[int, int], Name]:
        """For each forward reader (op, input) of the region what it reads instead."""
        graph, inside = self.graph, frozenset(self.alternative.region.ops)
        made = {new.op.name for new in self.added}
        waits = tuple(dict.fromkeys(
            op_of(name) for kept in self.alternative.kept
            for name, _ in [self.written.get(kept.node, ("", 0))] if op_of(name) in made))
        if not waits:
            return {}
        readers = graph.consumers()
        result: dict[tuple[int, int], Name] = {}
        for tensor in self.alternative.outputs:
            reading = [(r, n) for r in readers[tensor[0]] for n, t in enumerate(graph.ops[r].inputs)
                       if t == tensor and r not in inside
                       and graph.ops[r].region not in (BACKWARD, UPDATE)]
            if reading:
                output = graph.ops[tensor[0]].outputs[tensor[1]]
                after = max(self.written[k.node][1] for k in self.alternative.kept
                            if k.node in self.written)
                name = self._add(graph.ops[tensor[0]].name, names.IDENTITY,
                                 (_name(graph, tensor),), output.dtype, self.shape,
                                 {"T": f"dtype:{output.dtype}", PROTECTED: True},
                                 FORWARD, after, waits)
                result.update({entry: name for entry in reading})
        return result

    def _product(self, kept: Kept) -> Name:
        """Return g * D, in the dtype in which D is kept, then in x's."""
        node = self.alternative.program[kept.node]
        dtype = self.graph.ops[kept.of[0]].outputs[kept.of[1]].dtype
        g = self._sum([_name(self.graph, g) for g in kept.gradients], dtype)
        if kept.two_valued:
            mask = self._node(kept.node)[0]
            assert kept.on is not None and kept.off is not None
            on, off = (self._times(g, value, dtype) for value in (kept.on, kept.off))
            product = self._backward(names.SELECT, (mask, on, off), dtype)
            return self._cast(product, dtype, self.dtype)
        g = self._cast(g, dtype, node.dtype)
        if node.type == NUMBER:
            product = self._times(g, node.attr("value"), node.dtype)
        else:
            product = self._backward(names.MUL, (g, self._node(kept.node)[0]), node.dtype)
        return self._cast(product, node.dtype, self.dtype)

    def _times(self, g: Name, value: float, dtype: str) -> Name:
        if value == 1.0:
            return g
        constant = self._constant(value, dtype, backward=True)
        if value == 0.0:
            return constant
        return self._backward(names.MUL, (g, constant), dtype)

    def _sum(self, parts: list[Name], dtype: str) -> Name:
        if len(parts) == 1:
            return parts[0]
        return self._backward(names.ADD_N, tuple(parts), dtype,
                              {"N": len(parts), "T": f"dtype:{dtype}"})

    def _cast(self, tensor: Name, old: str, new: str) -> Name:
        if old == new:
            return tensor
        return self._backward(CAST, (tensor,), new, {
            "SrcT": f"dtype:{old}", "DstT": f"dtype:{new}", "Truncate": False})

    def _node(self, index: int) -> tuple[Name, int]:
        """Return the tensor of a program node, and the op after which it can be placed.

        All earlier nodes are written first, in order.
        """
        for i in range(index + 1):
            if i not in self.written:
                self.written[i] = self._write(self.alternative.program[i])
        return self.written[index]

    def _write(self, node: Node) -> tuple[Name, int]:
        if node.type == TENSOR:
            tensor = node.attr("tensor")
            return _name(self.graph, tensor), tensor[0]
        if node.type == NUMBER:
            return self._constant(node.attr("value"), node.dtype), -1
        args = [self.written[a] for a in node.args]
        after = max(position for _, position in args)
        inputs = tuple(name for name, _ in args)
        kind = node.type
        if kind == TWO:
            kind = names.SELECT
            inputs += tuple(self._constant(node.attr(v), node.dtype) for v in ("on", "off"))
        return self._add(self.forward, kind, inputs, node.dtype, self.shape,
                         self._attrs(node, kind), FORWARD, after), after

    def _attrs(self, node: Node, kind: str) -> dict[str, object]:
        attrs = {} if node.type == TWO else dict(node.attrs)
        made = record(kind)
        if not made.typed:
            return attrs
        operand = node if node.dtype != "bool" else self.alternative.program[node.args[0]]
        return {**attrs, **dict(made.made_with), "T": f"dtype:{operand.dtype}"}

    def _constant(self, value: float, dtype: str, backward: bool = False) -> Name:
        key = (value, dtype, backward)
        if key not in self.numbers:
            near = self.sink.name if backward else self.forward
            self.numbers[key] = self._add(
                near, names.CONST, (), dtype, (),
                {"dtype": f"dtype:{dtype}", "value": ("const", dtype, value)},
                BACKWARD if backward else FORWARD, -1)
        return self.numbers[key]

    def _backward(self, kind: str, inputs: tuple[Name, ...], dtype: str,
                  attrs: dict[str, object] | None = None) -> Name:
        return self._add(self.sink.name, kind, inputs, dtype, self.shape,
                         attrs or {"T": f"dtype:{dtype}"}, BACKWARD, self.alternative.sink[0])

    def _add(self, near: str, kind: str, inputs: tuple[Name, ...], dtype: str,
             shape: tuple[int | None, ...] | None, attrs: Mapping[str, object], region: str,
             after: int, controls: tuple[str, ...] = ()) -> Name:
        letter = "g" if region == BACKWARD else "d"
        name = f"{near}{MARK}_{letter}{len(self.added)}"
        count = DTYPE_BYTES[dtype] * math.prod(d or 0 for d in shape or ())
        device = self.device if region == FORWARD else self.sink.device
        op = Op(name, kind, (), (), (Tensor(dtype, shape, count),), region, record(kind).repeatable,
                device, attrs)
        self.added.append(_Entry((after, len(self.added) + 1), op, inputs, controls))
        return f"{name}:0"


def _name(graph: Graph, tensor: TensorId) -> Name:
    return f"{graph.ops[tensor[0]].name}:{tensor[1]}"


def _rebuilt(graph: Graph, added: list[_Entry], replaced: dict[Name, Name],
             delayed: dict[tuple[int, int], Name], removed: frozenset[int]) -> tuple[Graph, Edits]:
    """Old and new ops in a topological order close to the old one, with indices made anew."""
    entries: list[_Entry] = []
    for i, op in enumerate(graph.ops):
        if i not in removed:
            inputs = tuple(delayed.get((i, n)) or _final(replaced, _name(graph, t))
                           for n, t in enumerate(op.inputs))
            entries.append(_Entry((i, 0), op, inputs, tuple(
                graph.ops[c].name for c in op.controls if c not in removed)))
    entries += [dataclasses.replace(new, key=(new.key[0], n + 1),
                                    inputs=tuple(_final(replaced, t) for t in new.inputs))
                for n, new in enumerate(added)]
    entries = _sorted(sorted(entries, key=lambda entry: entry.key))
    index = {entry.op.name: n for n, entry in enumerate(entries)}
    ops = tuple(dataclasses.replace(
        entry.op, inputs=tuple((index[op_of(t)], int(t.rpartition(":")[2])) for t in entry.inputs),
        controls=tuple(index[c] for c in entry.controls)) for entry in entries)
    result = dataclasses.replace(
        graph, ops=ops, fetches=tuple((index[graph.ops[i].name], slot)
                                      for i, slot in graph.fetches),
        sinks=tuple(index[graph.ops[i].name] for i in graph.sinks))
    check_graph(result)
    rewires = tuple(Rewire(entry.op.name, n, tensor)
                    for entry in entries if not entry.is_new
                    for n, tensor in enumerate(entry.inputs)
                    if tensor != _name(graph, graph.ops[entry.key[0]].inputs[n]))
    return result, Edits(tuple(entry.create() for entry in entries if entry.is_new), rewires,
                         dropped=tuple(graph.ops[i].name for i in sorted(removed)))


def _final(replaced: dict[Name, Name], tensor: Name) -> Name:
    while tensor in replaced:
        tensor = replaced[tensor]
    return tensor


def _sorted(entries: Sequence[_Entry]) -> list[_Entry]:
    """Return the entries in a topological order that follows the given one where it can."""
    number = {entry.op.name: n for n, entry in enumerate(entries)}
    reads = nx.DiGraph()
    reads.add_nodes_from(range(len(entries)))
    for n, entry in enumerate(entries):
        for source in sorted({op_of(t) for t in entry.inputs} | set(entry.controls)):
            if source not in number:
                raise CostError(f"cost: {entry.op.name!r} reads {source!r}, which another "
                                "forward-AD alternative removes")
            reads.add_edge(number[source], n)
    try:
        return [entries[n] for n in nx.lexicographical_topological_sort(reads)]
    except nx.NetworkXUnfeasible:
        raise CostError("cost: forward-AD alternatives close a cycle") from None
