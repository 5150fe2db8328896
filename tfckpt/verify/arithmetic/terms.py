"""What executed graphs compute, as terms: equal terms are equal in every bit.

The term of a result is its kernel, with what is fused into it, the attributes that the kernel
reads, and the terms of its operands in order. A sum of many terms is the sums of two that its
kernel computes, and x + x is 2 x: Grappler writes the one for the other. Of
what a step does these terms are compared: its results, what it writes to variables, and its other
effects. A read of a variable names the writes that are done by then. Graphs with loops are compared
as partition refinement does (Hopcroft and Karp): terms are refined until no more can be told apart.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from tfckpt.ir.branches import arriving
from tfckpt.ops import Access, record
from tfckpt.verify.arithmetic.nodes import Node, Tensor, in_order, nodes_of, passes
from tfckpt.verify.arithmetic.op_labels import (
    ADDS,
    ARGUMENT,
    ARRIVAL,
    BACK,
    CONSTANT,
    ENTERS,
    EXITS,
    MERGES,
    POOL,
    POOL_GRADIENT,
    PRODUCT,
    RESULT,
    SAME_ENDS,
    SHAPED,
    SUM,
    SUM_OF_TWO,
    SWITCHES,
    WHOLE,
    Labels,
    has_effect,
    hashed,
    sum_of_two,
)
from tfckpt.verify.arithmetic.states import reads, states
from tfckpt.verify.arithmetic.sums import SideBySide, SliceSums, Starts


@dataclasses.dataclass(frozen=True)
class Computation:
    """Graphs that are executed together.

    Attributes:
      nodes: NodeDefs, those of all devices.
      arguments: for each argument, in order, what it is: equal for the same one in another step.
      function: gives the FunctionDef that is called by a name; None where it is not known.
      early: reads of variables and sums, by name, that are taken to run as they do where ops run
        in the order in which they become ready: reads before the writes that nothing orders with
        them, sums after what is ready before them.
      begun: the places of the terms that sums, by name, are taken to begin with where they may.
    """

    nodes: Sequence[Any]
    arguments: Sequence[str]
    function: Callable[[str], Any]
    early: frozenset[str] = frozenset()
    begun: Mapping[str, int] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Terms:
    """The terms of a computation.

    Attributes:
      roots: of what it does, by what that is: "result 0", "write 1 of kernel:0", "Print".
      ends: the op that does each of these, by name.
      nodes: of each op by name; those that pass on what they read are left out.
      reads: for each op the ops whose results it reads.
      arrivals: sums whose terms are added in the order in which they arrive, by name.
      open: reads of variables that nothing orders with a write, by name.
      open_sums: sums whose first term nothing decides, by name.
      begins: the places of the terms that the other sums begin with, by name.
    """

    roots: Mapping[str, str]
    ends: Mapping[str, str]
    nodes: Mapping[str, str]
    reads: Mapping[str, tuple[str, ...]]
    arrivals: tuple[str, ...]
    open: frozenset[str]
    open_sums: tuple[str, ...]
    begins: Mapping[str, int]


def terms_of(computations: Sequence[Computation]) -> list[Terms]:
    """Return the terms of computations that can be compared with each other.

    Args:
      computations: such as a plain step and the same step edited.

    Returns:
      One for each computation; a term is a digest, equal in two of them where it is the same.
    """
    graphs = [_Graph(computation) for computation in computations]
    told_apart = 0
    while True:
        for graph in graphs:
            graph.refine()
        classes = len({term for graph in graphs for term in graph.terms.values()})
        if classes <= told_apart or not any(graph.has_loops for graph in graphs):
            return [graph.found() for graph in graphs]
        told_apart = classes


def first_differences(first: Terms, second: Terms) -> tuple[str, ...]:
    """Return the ops of the second that compute what the first does not, from what it does.

    Of those on which something depends that the second does otherwise. In a loop each may depend
    on another; all are returned then.

    Args:
      first: terms of the plain step.
      second: terms of the edited step, made by the same call of `terms_of`.

    Returns:
      Names of ops of the second, in its order; empty where it does nothing otherwise.
    """
    known = set(first.nodes.values())
    found: set[str] = set()
    left = [name for root, name in sorted(second.ends.items(), reverse=True)
            if first.roots.get(root) != second.roots[root]]
    seen = set(left)
    while left:
        name = left.pop()
        others = [source for source in second.reads[name] if second.nodes[source] not in known]
        if not others and second.nodes[name] not in known:
            found.add(name)
        left += [source for source in others if source not in seen]
        seen.update(others)
    return tuple(name for name in second.nodes if name in (found or seen))


class _Graph:
    """One computation whose terms are being refined."""

    def __init__(self, computation: Computation) -> None:
        self.computation = computation
        self.definitions = {node.name: node for node in computation.nodes}
        self.nodes = nodes_of(self.definitions)
        self._all: dict[tuple[str, bool | int, bool], bool] = {}
        self._unchanged: dict[str, Tensor] = {}
        self._arriving: dict[Tensor, Tensor] = {}
        self._unchanged = self._handed_on()
        self.has_loops = any(node.type in BACK for node in self.nodes.values())
        self.order = in_order(self.nodes)
        self._arriving = arriving(self.nodes, self.order, self._source)
        self.added: dict[Tensor, list[str]] = {}  # to what; who reads that may await one by another
        for name in self.order:
            if self.nodes[name].type == ADDS:
                self.added.setdefault(self.nodes[name].inputs[0], []).append(name)
        found = SliceSums(self.nodes, self.definitions, self._source, self.added)
        self.together = {name: one for name in self.order if (one := found.of(name)) is not None}
        self.sums = self._sums()
        self.merged = frozenset(self._merged_gradients())
        labels = Labels(computation.arguments, computation.function)
        self.labels = {name: labels.of(self.definitions[name]) for name in self.order}
        self.states = states(self.nodes, self.order, self.definitions, computation.arguments,
                             computation.early)
        self.terms: dict[str, str] = {}

    def refine(self) -> None:
        """Compute every op's term from those of what it reads."""
        before, self.terms = self.terms, {}
        for name in self.order:
            one = self.together.get(name)
            self.terms[name] = self._side_by_side(name, one, before) if one else self._term(
                self.nodes[name], [self.tensor(t, before) for t in self.nodes[name].inputs])

    def found(self) -> Terms:
        """Return what was found."""
        kept = [name for name in self.order if self._passed(self.nodes[name], 0) is None]
        ends = dict(self._roots())
        return Terms(
            {key: self.terms[name] for key, name in ends.items()}, ends,
            {name: self.terms[name] for name in kept},
            {name: tuple(self._source(t)[0] for t in self.nodes[name].inputs) for name in kept},
            tuple(name for name in kept
                  if self.nodes[name].type == ARRIVAL and name not in self.together),
            frozenset(name for name, (*_, unordered) in self.states.items()
                      if unordered and reads(self.nodes[name].type)),
            tuple(name for name, (_, is_known) in self.sums.items() if not is_known),
            {name: order[0] for name, (order, is_known) in self.sums.items() if is_known})

    def tensor(self, tensor: Tensor, before: Mapping[str, str]) -> str:
        """Return the term of a result, seen through what only passes it on.

        Of what the next iteration is given it is always that of the round before: whether this
        round has one already is a matter of the graph's order.
        """
        name, slot = self._source(tensor)
        again = self.nodes[name].type in BACK
        term = "" if again else self.terms.get(name, "")
        return f"{term or before.get(name, '')}:{slot}"

    def _source(self, tensor: Tensor) -> Tensor:
        name, slot = tensor
        while True:
            if name in self._unchanged:
                name, slot = self._unchanged[name]
            elif (name, slot) in self._arriving:
                name, slot = self._arriving[name, slot]
            elif (index := self._passed(self.nodes[name], slot)) is not None:
                name, slot = self.nodes[name].inputs[index]
            else:
                return name, slot

    def _buffer(self, tensor: Tensor) -> Tensor:
        """Return the result in whose memory a tensor lies."""
        name, slot = self._source(tensor)
        while record(self.nodes[name].type).aliases and slot < len(self.nodes[name].inputs):
            name, slot = self._source(self.nodes[name].inputs[slot])
        return name, slot

    def _passed(self, node: Node, slot: int) -> int | None:
        """Return which of its inputs an op hands on as a result; None where it computes."""
        if passes(node):
            return 0 if node.type in SHAPED else slot
        if node.type in WHOLE:
            for i, (source, _) in enumerate(node.inputs):
                if self._is_all(source, WHOLE[node.type], scalar=node.type == PRODUCT):
                    return 1 - i
        return None

    def _is_all(self, name: str, value: bool | int, scalar: bool = False) -> bool:
        """Return whether each entry of an op's result is known to be a value."""
        if self.nodes[name].type != CONSTANT:
            return False
        if (name, value, scalar) not in self._all:  # it is asked for each reader in each round
            constant = tf.make_ndarray(self.definitions[name].attr["value"].tensor)
            self._all[name, value, scalar] = bool((constant == value).all()) and not (
                scalar and constant.ndim)
        return self._all[name, value, scalar]

    def _side_by_side(self, name: str, one: SideBySide, before: Mapping[str, str]) -> str:
        """Return the term of slices side by side, and of what is added to them."""
        kind = self.definitions[name].attr["T"].type
        pieces = hashed(("slices", kind, one.axis, one.begin, one.stacked, [
            self.tensor(piece, before) for piece in one.pieces]))
        return pieces if one.other is None else _of_two(
            sum_of_two(self.definitions[name]), f"{pieces}:0", self.tensor(one.other, before))

    def _term(self, node: Node, read: list[str]) -> str:
        label = self.labels[node.name]
        if node.type == SUM:
            return self._sum(label, node, read)
        if node.type == SUM_OF_TWO:
            return _of_two(label, *read)
        if node.type == PRODUCT:
            for i, (source, _) in enumerate(node.inputs):
                if self._is_all(source, 2, scalar=True):
                    return hashed(("twice", read[1 - i]))
        return hashed((label, self.states.get(node.name, ()), self._operands(node, read)))

    def _sum(self, label: str, node: Node, read: list[str]) -> str:
        """Return the term of a sum.

        Its kernel adds two to nine terms one after the other, and to these the sums of eight others
        each.
        """
        order, known = self.sums[node.name]
        terms = [read[place] for place in order]
        first = len(terms) % 8 + 8 * (len(terms) > 1 and len(terms) % 8 < 2)

        def added(terms: Sequence[str]) -> str:
            return functools.reduce(lambda one, other: f"{_of_two(label, one, other)}:0", terms)

        total = added([added(terms[:first]), *(added(terms[i:i + 8])
                                               for i in range(first, len(terms), 8))])
        return total.removesuffix(":0") if known else hashed((total, "open"))

    def _operands(self, node: Node, read: list[str]) -> Sequence[str]:
        if node.type == ARRIVAL:
            return sorted(self.tensor(self.nodes[name].inputs[1], {})
                          for name in self.added.get(node.inputs[0], ()))
        if node.type in SAME_ENDS:
            return sorted(read)
        if node.name in self.merged:
            return [*read, "merged"]
        if node.type == POOL_GRADIENT:
            return [*read[:3], self._notes_places(node)]
        return read

    def _sums(self) -> dict[str, tuple[tuple[int, ...], bool]]:
        """Return for each sum the order of its terms, and whether it is known."""
        starts = Starts(self.nodes, self.order, self._buffer, self._lasts, self._holds)
        early, begun = self.computation.early, self.computation.begun
        return {name: starts.order(name, name in early, begun.get(name))
                if len(node.inputs) > 2 else (tuple(range(len(node.inputs))), True)
                for name, node in self.nodes.items()
                if node.type == SUM and name not in self.together}

    def _merged_gradients(self) -> Iterable[str]:
        """Yield the gradients of biases that oneDNN computes with the filter's, by another kernel.

        It takes both together where they read the same and wait for the same.
        """
        filters = {(node.inputs[of], frozenset(node.controls)) for node in self.nodes.values()
                   if (of := record(node.type).filter_gradient_of) is not None}
        for node in self.nodes.values():
            if record(node.type).bias_gradient and (
                    node.inputs[0], frozenset(node.controls)) in filters:
                yield node.name

    def _lasts(self, name: str) -> bool:
        """Return whether an op's results stay in memory after their readers have run."""
        known = record(self.nodes[name].type)
        return known.source is not None or known.access in (Access.VALUE, Access.READ) or (
            self.nodes[name].type in (ARGUMENT, CONSTANT))

    def _holds(self, name: str) -> bool:
        """Return whether an op keeps what it reads until the step ends."""
        return self.nodes[name].type == RESULT

    def _notes_places(self, gradient: Node) -> str:
        """Return whether a pooling notes for its gradient where the largest numbers were.

        Then another kernel adds what windows that overlap have in common.
        """
        pooling, slot = gradient.inputs[1]
        return str(self.nodes[pooling].type == POOL and slot == 0
                   and _overlaps(self.definitions[gradient.name]))

    def _roots(self) -> Iterable[tuple[str, str]]:
        """Yield what the computation does, and the op that does it.

        Nothing is called by its name: TensorFlow names what it inlines otherwise than tfckpt does.
        """
        found: dict[str, list[str]] = {}
        for name in self.order:
            node, definition = self.nodes[name], self.definitions[name]
            if node.type == RESULT:
                yield f"result {definition.attr['index'].i}", name
            elif name in self.states and not reads(node.type):
                handle, before, _ = self.states[name]
                found.setdefault(f"write {before + 1} of {handle}", []).append(name)
            elif has_effect(node.type):
                found.setdefault(node.type, []).append(name)
        for key, names in found.items():
            for i, name in enumerate(sorted(names, key=self.terms.__getitem__)):
                yield key if len(names) == 1 else f"{key}, {i + 1}", name

    # What does not change from one round to the next.

    def _handed_on(self) -> dict[str, Tensor]:
        """Return what loops were given of that which no iteration changes, by their exits."""
        found: dict[str, Tensor] = {}
        for name, node in self.nodes.items():
            if node.type not in EXITS:
                continue
            switch = self._source(node.inputs[0])[0]
            merge = self._source(self.nodes[switch].inputs[0])[0] if (
                self.nodes[switch].type in SWITCHES) else ""
            if merge and self.nodes[merge].type in MERGES:
                given = [t for t, _ in self.nodes[merge].inputs if self.nodes[t].type in ENTERS]
                again = [t for t, _ in self.nodes[merge].inputs if self.nodes[t].type in BACK]
                if len(given) == len(again) == 1 and self._source(
                        self.nodes[again[0]].inputs[0]) == (switch, 1):
                    found[name] = self.nodes[given[0]].inputs[0]
        return found

def _overlaps(pooling: Any) -> bool:
    """Return whether a number may be in several windows of a pooling."""
    return any(size > stride for size, stride in zip(
        pooling.attr["ksize"].list.i, pooling.attr["strides"].list.i, strict=True))


def _of_two(label: str, first: str, second: str) -> str:
    """Return the term of a sum of two."""
    if first == second:
        return hashed(("twice", first))
    return hashed((label, (), sorted((first, second))))
