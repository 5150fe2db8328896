"""What branches do, and what they keep for their gradients.

A branch hands out what its gradient reads, each value in an optional, since the other branches have
none of it. An optional has no shape: its bytes are those of the value that the branch puts into it.
TensorFlow lowers branches before the step runs, so that what no branch of the gradient reads in the
end is not kept.
"""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Callable, Collection, Iterable, Sequence

import tensorflow as tf

from tfckpt.capture import tf_adapter
from tfckpt.capture.loops.comparisons import is_call
from tfckpt.capture.loops.priced import Inner, priced_body
from tfckpt.capture.nodes import is_lowered
from tfckpt.capture.variables import only_reads, origin
from tfckpt.errors import CaptureError
from tfckpt.ir.graph import Branches
from tfckpt.ops import record


def branches_of(op: tf.Operation, known: Callable[[tf.Operation], tf.Operation],
                unread: Collection[str] = ()) -> Inner:
    """Return what the branches of an op do, and the bytes that they keep.

    One branch runs, whichever: that which keeps most counts, and what the branches keep comes and
    goes together, so that all of it shares the memory of the first such result. What a branch was
    given or reads of a variable takes no memory of its own, and what it returns as well has that of
    the result; nor is a value counted whose size is not known.

    Args:
      op: of a type that chooses between branches.
      known: returns the op with the shapes that its inputs really have.
      unread: names of ops around it that read its results, and whose own nothing reads.

    Returns:
      Nothing of what is known, where a branch is unlike any known.
    """
    shapes = [tensor.shape for tensor in known(op).inputs[record(op.type).first_argument:]]
    slots, filling = _read_slots(op, unread), _filled_slots(op)
    bodies, shares, filled, zeros = [], dict[int, int](), list[int](), dict[int, int]()
    most, pieces = 0, 1
    try:
        for name in tf_adapter.called_functions(op):
            branch = _Branch(op, name, shapes, slots)
            shared, kept = branch.kept()
            bodies.append(priced_body(name, branch.graph, branch.shape, branch.inner))
            shares |= shared
            filled += kept
            most, pieces = max((most, pieces), (sum(map(branch.bytes, kept.values())),
                                                sum(map(branch.pieces, kept.values()))))
            zeros = max(zeros, {slot: sum(map(branch.bytes, _wrapped(branch.graph.outputs[slot])))
                                for slot in filling}, key=lambda sizes: sum(sizes.values()))
    except (KeyError, ValueError, TypeError, tf.errors.OpError):
        return Inner()
    root = min(filled, default=-1)
    shares = {slot: root if slot in filled or other in filled else other
              for slot, other in (shares | dict.fromkeys(filled, root)).items() if slot != root}
    return Inner({root: most} if filled else {}, None, Branches(tuple(bodies), shares, pieces),
                 zeros)


def branch_shapes(op: tf.Operation, known: Callable[[tf.Operation], tf.Operation]
                  ) -> dict[int, tf.TensorShape]:
    """Return the shapes that branches give their results, by slot.

    Of results whose shape the trace leaves open, as it does where the size of a batch is. Where
    branches differ, or of one it is not known, it is the largest that is known.

    Args:
      op: of a type that chooses between branches.
      known: returns the op with the shapes that its inputs really have.

    Raises:
      ValueError: a branch is unlike any known.
    """
    shapes = [tensor.shape for tensor in known(op).inputs[record(op.type).first_argument:]]
    branches = [_Branch(op, name, shapes, ()) for name in tf_adapter.called_functions(op)]
    found = {}
    for slot, tensor in enumerate(op.outputs):
        if not tensor.shape.is_fully_defined() and tensor.dtype not in (tf.resource, tf.variant):
            given = [shape for branch in branches if (
                shape := branch.shape(branch.graph.outputs[slot])).is_fully_defined()]
            if given:
                found[slot] = max(given, key=lambda shape: shape.num_elements())
    return found


def inferred_in_bodies(graph: tf_adapter.FuncGraph) -> Callable[[tf.Operation], tf.Operation]:
    """Return what gives ops of a function shapes that the bodies of loops and branches in it tell.

    Args:
      graph: of the function, with as many shapes as TensorFlow infers by itself.
    """
    if not any(record(op.type).has_bodies for op in graph.get_operations()):
        return lambda op: op
    from tfckpt.capture.loops.shapes import infer_shapes_of_bodies  # which asks here

    try:
        return infer_shapes_of_bodies(graph.as_graph_def(), graph)
    except (CaptureError, KeyError, ValueError, tf.errors.OpError):
        return lambda op: op  # a body unlike any known: its shapes stay as they are


def call_of(op: tf.Operation, known: Callable[[tf.Operation], tf.Operation]) -> Inner:
    """Return what the function does that an op calls, as the only one of its branches.

    Args:
      op: of a body; see `tfckpt.capture.loops.comparisons.is_call`.
      known: returns the op with the shapes that its inputs really have.

    Returns:
      Nothing of what is known, where the function is unlike any known.
    """
    try:
        (name,) = tf_adapter.called_functions(op)
        called = _Branch(op, name, [tensor.shape for tensor in known(op).inputs], ())
        body = priced_body(name, called.graph, called.shape, called.inner)
    except (KeyError, ValueError, TypeError, tf.errors.OpError):
        return Inner()
    return Inner(branches=Branches((body,)))


class _Branch:
    """One of the branches of an op."""

    def __init__(self, op: tf.Operation, name: str, shapes: Sequence[tf.TensorShape],
                 slots: Sequence[int]) -> None:
        self.graph, self.slots = tf_adapter.graph_called(op, name), slots
        self._inferred = functools.cache(functools.partial(
            tf_adapter.graph_called, op, name, shapes))
        self._in_bodies = functools.cache(lambda: inferred_in_bodies(self._inferred()))
        self._arguments = {tensor.name: i for i, tensor in enumerate(self.graph.inputs)}
        self.inner = functools.cache(self._inner)

    def kept(self) -> tuple[dict[int, int], dict[int, tf.Tensor]]:
        """Return what the branch hands out in optionals, by slot.

        First another slot for those with the same value in them, a result of the branch perhaps,
        then what is in those that take memory of their own.
        """
        given = {tensor.ref() for tensor in self.graph.inputs}
        seen = {origin(tensor).ref(): slot for slot, tensor in enumerate(self.graph.outputs)
                if tensor.dtype != tf.variant and origin(tensor).ref() not in given}
        shared: dict[int, int] = {}
        kept: dict[int, tf.Tensor] = {}
        for slot in self.slots:
            for value in map(self._memory, _wrapped(self.graph.outputs[slot])):
                if value.ref() in seen:
                    shared[slot] = seen[value.ref()]
                elif value.ref() not in given and not only_reads(value.op):
                    seen[value.ref()] = slot
                    kept[slot] = value
        return shared, kept

    def _memory(self, value: tf.Tensor) -> tf.Tensor:
        """Return the tensor in whose memory a value lies."""
        inner = self.inner(value.op)
        known = inner.loop or inner.branches
        if known is None or value.value_index not in known.shares:
            return value
        return value.op.outputs[known.shares[value.value_index]]

    def _inner(self, op: tf.Operation) -> Inner:
        from tfckpt.capture.loops.lists import bytes_outside_loops, kept_lists  # which asks here

        if is_call(op):
            return call_of(op, self._known)
        if record(op.type).is_loop:
            return kept_lists(op, self._known).known
        if record(op.type).lists.rows:
            return Inner(bytes_outside_loops(op, self._known, {}))
        if not record(op.type).chooses:
            return Inner()
        handed_out = {origin(tensor).op.name for tensor in self.graph.outputs}
        read = {origin(self.graph.outputs[slot]).op.name for slot in self.slots}
        return branches_of(op, self._known, handed_out - read - {
            origin(tensor).op.name for tensor in self.graph.outputs if tensor.dtype != tf.variant})

    def _known(self, op: tf.Operation) -> tf.Operation:
        return self._in_bodies()(self._inferred().get_operation_by_name(op.name))

    def bytes(self, tensor: tf.Tensor) -> int:
        """Return the size of a tensor; 0 where it is not known."""
        if tensor.dtype == tf.variant:
            return self.inner(tensor.op).bytes.get(tensor.value_index, 0)
        shape = self.shape(tensor)
        return (math.prod(shape.as_list()) * int(tensor.dtype.size)
                if shape.is_fully_defined() else 0)

    def pieces(self, tensor: tf.Tensor) -> int:
        """Return how many tensors there are in what is handed out, at least one."""
        known = self.inner(tensor.op) if tensor.dtype == tf.variant else Inner()
        if known.loop is not None:
            return max(known.loop.trips, 1)
        return known.branches.pieces if known.branches is not None else 1

    def shape(self, tensor: tf.Tensor) -> tf.TensorShape:
        """Return what is known of a shape, in the trace and from what the branch is given.

        Values of variables are known in the trace alone.
        """
        shape: tf.TensorShape = tensor.shape
        if shape.is_fully_defined():
            return shape
        place = self._arguments.get(tensor.name)  # an argument may be called otherwise there
        other = (self._known(tensor.op).outputs[tensor.value_index].shape if place is None
                 else self._inferred().inputs[place].shape)
        return shape.merge_with(other) if shape.is_compatible_with(other) else shape


def _read_slots(op: tf.Operation, unread: Collection[str]) -> list[int]:
    """Return which optionals of branches something reads, once branches are lowered."""
    needed = functools.cache(needed_inputs)

    def is_read(tensor: tf.Tensor) -> bool:
        for reader in tensor.consumers():
            places = [i for i, read in enumerate(reader.inputs) if read is tensor]
            if record(reader.type).passes_on:
                if any(is_read(reader.outputs[i]) for i in places):
                    return True
            elif reader.name not in unread and any(i in needed(reader) for i in places):
                return True
        return False

    return [slot for slot, tensor in enumerate(op.outputs)
            if tensor.dtype == tf.variant and is_read(tensor)]


def _filled_slots(op: tf.Operation) -> list[int]:
    """Return the results like which optionals of zeros are made.

    A second gradient of branches begins with such, of all that they hand out for the first.
    """
    def makes_zeros(tensor: tf.Tensor) -> bool:
        return any(record(reader.type).fills == 0.0 or record(reader.type).passes_on and any(
            read is tensor and makes_zeros(reader.outputs[n])
            for n, read in enumerate(reader.inputs)) for reader in tensor.consumers())

    return [slot for slot, tensor in enumerate(op.outputs)
            if tensor.dtype == tf.variant and makes_zeros(tensor)]


def needed_inputs(op: tf.Operation, whole: bool = False) -> frozenset[int]:
    """Return which inputs an op needs: of lowered branches what decides, and what is read of.

    Args:
      op: of any type; all inputs are needed of those that are no lowered branches.
      whole: whether branches make results that nothing reads as well.
    """
    kind = record(op.type)
    if not kind.chooses or not is_lowered(op):
        return frozenset(range(len(op.inputs)))
    found = frozenset[int]().union(*(needed_arguments(op, name, whole)
                                     for name in tf_adapter.called_functions(op)))
    return frozenset((*range(kind.first_argument), *(kind.first_argument + n for n in found)))


def needed_arguments(op: tf.Operation, name: str, whole: bool = False) -> frozenset[int]:
    """Return which of its arguments one of the branches of an op needs.

    Args:
      op: lowered branches.
      name: of the branch.
      whole: whether it makes results that nothing reads as well.
    """
    slots = tuple(slot for slot, tensor in enumerate(op.outputs)
                  if whole or tensor.consumers()
                  or any(tensor is t for t in getattr(op.graph, "outputs", ())))
    branch = tf_adapter.graph_called(op, name)
    known = _NEEDED.setdefault(branch, {})
    if (slots, whole) not in known:
        known[slots, whole] = _needed_for(branch, slots, whole)
    return known[slots, whole]


_NEEDED: weakref.WeakKeyDictionary[
    tf_adapter.FuncGraph, dict[tuple[tuple[int, ...], bool], frozenset[int]]
] = weakref.WeakKeyDictionary()
"""What branches were found to need, by results and whether whole: of branches in branches that is
asked for each result of each of those around them."""


def _needed_for(branch: tf_adapter.FuncGraph, slots: Iterable[int], whole: bool) -> frozenset[int]:
    """Return which arguments a branch needs for some of its results and for its effects."""
    pending = [origin(branch.outputs[slot]).op for slot in slots]
    pending += [inner for inner in branch.get_operations() if tf_adapter.is_stateful(inner)]
    needed = set(pending)
    while pending:
        inner = pending.pop()
        before = {*(inner.inputs[i].op for i in needed_inputs(inner, whole)),
                  *inner.control_inputs} - needed
        needed |= before
        pending += before
    return frozenset(n for n, tensor in enumerate(branch.inputs) if tensor.op in needed)


def _wrapped(tensor: tf.Tensor) -> list[tf.Tensor]:
    """Return what is in an optional; nothing where it is empty, or is none."""
    optional = origin(tensor).op
    return [origin(value) for value in optional.inputs] if record(optional.type).wraps else []
