"""Sums of three and more begin with the term with which they begin in the plain step.

Grappler makes one AddN of the terms of one shape in a tree of sums, sorted by name. The kernel
writes into the first term whose buffer nothing else uses, and begins with it, whatever its place:
a + b + c, but c + b + a where a and b are still to be read. A plan changes what is still to be
read. So terms which the kernel must not begin with are read by a pass-through that waits for the
sum, and their buffers are kept until then. (Sums of two, and the first two of several, commute.)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Mapping, Sequence

from tfckpt.cost.storage import RESIDENT
from tfckpt.errors import RewriteError
from tfckpt.ir.costgraph import FORWARD
from tfckpt.ir.edits import Clone
from tfckpt.ir.graph import TensorId, ancestors
from tfckpt.ir.schedule import Step
from tfckpt.ops import record
from tfckpt.rewrite.edit_builder import EditBuilder
from tfckpt.rewrite.names import copy_name


@dataclasses.dataclass(frozen=True)
class RetainedTerm:
    """A tensor that must outlive a sum.

    Attributes:
      step: the step of the schedule that adds.
      tensor: a term as the edited step reads it.
      dtype: of the term.
    """

    step: Step
    tensor: str
    dtype: str


def retained_terms(builder: EditBuilder) -> list[RetainedTerm]:
    """Return the terms to keep alive in the forward's sums and their copies.

    None are kept alive in sums of which a plan repeats neither the sum nor what it reads.

    Args:
      builder: the edits in the making, with all copies made; not changed.

    Raises:
      RewriteError: a plan keeps a term that the plain step writes into, to add twice.
    """
    copies: dict[int, list[int]] = {}
    for v, copy in builder.plan.schedule:
        if copy:
            copies.setdefault(v, []).append(copy)
    return [term for v, vertex in enumerate(builder.cost.vertices)
            if copies and vertex.region == FORWARD and not vertex.fusible
            for adding, terms in _trees(builder, vertex.ops)
            for term in _Sum(builder, v, adding, terms).retained(copies)]


def _trees(builder: EditBuilder, members: Sequence[int]
           ) -> Iterator[tuple[frozenset[int], list[tuple[int, int]]]]:
    """Yield the sums of three and more of one shape in a group.

    Of each the ops that add, and (op, input) of each term, sorted by its name. A term of another
    shape is added to the others' sum, and a constant may be moved to where it is added first: were
    a term of two kept alive for its sake, it would have one more reader, and the constant would not
    be moved.
    """
    ops, inner = builder.graph.ops, set()
    for root in sorted((i for i in members if record(ops[i].type).adds), reverse=True):
        found, adding, pending = [], set(), [] if root in inner else [root]
        while pending:
            op = pending.pop()
            adding.add(op)
            for i in range(len(ops[op].inputs)):
                source, _ = _origin(builder, ops[op].inputs[i])
                if source in members and record(ops[source].type).adds:
                    inner.add(source)
                    pending.append(source)
                else:
                    found.append((op, i))
        shapes: dict[object, list[tuple[int, int]]] = {}
        for op, i in found:
            shapes.setdefault(builder.tensor(ops[op].inputs[i]).shape, []).append((op, i))
        for terms in shapes.values():
            if len(terms) > 2:
                yield frozenset(adding), sorted(terms, key=lambda term: builder.tensor_name(
                    _origin(builder, ops[term[0]].inputs[term[1]])))


def _origin(builder: EditBuilder, tensor: TensorId) -> TensorId:
    """Return what a tensor is without the pass-throughs that Grappler removes."""
    while record(builder.graph.ops[tensor[0]].type).passes_on:
        tensor = builder.graph.ops[tensor[0]].inputs[tensor[1]]
    return tensor


class _Sum:
    """The terms of one shape of a tree of sums in a vertex."""

    def __init__(self, builder: EditBuilder, v: int, adding: Collection[int],
                 tree: Sequence[tuple[int, int]]) -> None:
        self.builder, self.v, self.adding, self.tree = builder, v, adding, tree
        self.terms = [builder.graph.ops[op].inputs[i] for op, i in tree]

    def retained(self, copies: Mapping[int, Sequence[int]]) -> Iterator[RetainedTerm]:
        """Yield terms to keep alive: all but the first two, or those before the one begun with."""
        builder = self.builder
        stored = [builder.storage_of(t) for t in self.terms]
        makers = [self.v if s is None else builder.cost.storages[s].producer for s in stored]
        if not copies.keys() & {self.v, *makers}:
            return
        before = {*self.adding, *ancestors(builder.graph.ops, self.adding)}
        roots = [builder.root[i][slot] for i, slot in self.terms]
        free = [roots.count(root) == 1 and not self._read_later(t, before)  # or read twice
                for root, t in zip(roots, self.terms, strict=True)]
        first = free.index(True) if True in free else 0
        again = copies.get(self.v, ())
        if first > 1 and again and makers[first] not in copies:
            name = builder.tensor_name(self.terms[first])
            raise RewriteError(f"rewrite: a sum that writes into {name!r} is to be computed twice "
                               "from it; the graph is left as it was")
        clones = {new.name: new for new in builder.added if isinstance(new, Clone)}
        rewired = {(r.op, r.index): r.tensor for r in builder.rewires}
        for copy in (0, *again):
            for k, (op, i) in enumerate(self.tree):
                if k < first if first > 1 else k > 1:
                    name, tensor = builder.graph.ops[op].name, builder.tensor_name(self.terms[k])
                    read = (clones[copy_name(name, copy)].inputs[i] if copy
                            else rewired.get((name, i), tensor))
                    yield RetainedTerm((self.v, copy), read, builder.tensor(self.terms[k]).dtype)

    def _read_later(self, tensor: TensorId, before: Collection[int]) -> bool:
        """Return whether something may use a term's buffer while the plain step adds."""
        builder = self.builder
        root = builder.root[tensor[0]][tensor[1]]
        if root == RESIDENT:
            return True
        fetched = {builder.root[i][slot] for i, slot in builder.graph.fetches}
        pending, seen = [root[0]], {root[0]}
        while pending:
            i = pending.pop()
            for r in builder.readers[i]:
                if not any(builder.root[s][k] == root for s, k in builder.graph.ops[r].inputs):
                    continue
                known = record(builder.graph.ops[r].type)
                if known.aliases and r not in seen:
                    seen.add(r)
                    pending.append(r)
                elif r not in before and not known.shape_only:
                    return True
        return root in fetched
