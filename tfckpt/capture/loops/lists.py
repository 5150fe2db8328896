"""Lists that while loops keep, with an entry for each iteration, which the backward reads.

A loop's gradient needs what the loop computed, so TensorFlow has the body push that onto lists.
A list is one tensor without a size; here it gets one: iterations times the bytes of an entry.
TensorFlow's executor puts no copy of a tensor into a list, so lists of the same tensors share
their memory, a list of a variable's value takes none, and one of the entries of a list that the
loop only reads takes over the memory of that. A list that a loop fills while it empties another
of the same size needs no more than that one. Compiled by XLA each list has memory of its own.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence

import tensorflow as tf

from tfckpt.capture import tf_adapter
from tfckpt.capture.loops.branch_values import branches_of, call_of, inferred_in_bodies
from tfckpt.capture.loops.comparisons import is_call
from tfckpt.capture.loops.iterations import known_number, most_iterations, told_iterations
from tfckpt.capture.loops.priced import Inner, priced_body
from tfckpt.capture.regions import is_gradient_scope
from tfckpt.capture.variables import may_write, number_origin
from tfckpt.ir.graph import Branches, Graph, Loop
from tfckpt.ir.target import HERE, Target
from tfckpt.ops import Access, record


@dataclasses.dataclass(frozen=True)
class Kept:
    """The size of a loop's lists when it ends.

    Attributes:
      bytes: of each output that is a list, by slot; 0 where the loop only reads the list.
      unknown: what could not be found out, in words; "" where all is known.
      loop: what later stages read of the loop; None where its number of iterations is not known.
      workspace: bytes of lists that loops in its body fill and that do not leave an iteration.
      body: what an iteration does, where the number of iterations is not known.
    """

    bytes: dict[int, int]
    unknown: str = ""
    loop: Loop | None = None
    workspace: int = 0
    body: Graph | None = None

    @property
    def known(self) -> Inner:
        """Return what is known of the loop; without a number of iterations it is priced as one."""
        return Inner(self.bytes, self.loop,
                     None if self.body is None else Branches((self.body,)))


def kept_lists(loop: tf.Operation, known: Callable[[tf.Operation], tf.Operation],
               target: Target = HERE) -> Kept:
    """Return the bytes of a loop's lists.

    Args:
      loop: a While or StatelessWhile.
      known: gives an op of the graph with as much known of its shapes as can be.
      target: what runs the loop.
    """
    try:
        return _Loop(loop, known, target).kept()
    except (KeyError, ValueError, TypeError, tf.errors.OpError) as error:  # a body unlike any known
        return Kept({}, f"{type(error).__name__}: {error}")


def result_shapes(loop: tf.Operation, known: Callable[[tf.Operation], tf.Operation]
                  ) -> dict[int, tf.TensorShape]:
    """Return the shapes of a loop's results that no iteration changes, by slot; as `kept_lists`.

    The gradient of what a loop computes has the same shape before and after the gradient's loop.

    Args:
      loop: a While or StatelessWhile.
      known: gives an op of the graph with as much known of its shapes as can be.

    Raises:
      ValueError: the body cannot be read.
    """
    this = _Loop(loop, known)
    found = {}
    for slot, (given, made) in enumerate(zip(known(loop).inputs, this.body.outputs, strict=True)):
        if made.dtype not in (tf.resource, tf.variant) and given.shape.is_fully_defined():
            shape = this.shape(made)
            if not shape.is_fully_defined() and is_gradient_scope(loop.name):
                shape = shape.merge_with(given.shape)
            if shape.is_fully_defined() and shape == given.shape:
                found[slot] = shape
    return found


def entries_shape(tensor: tf.Tensor, known: Callable[[tf.Operation], tf.Operation]
                  ) -> tf.TensorShape:
    """Return the shape of a list's entries; as `kept_lists`.

    Args:
      tensor: the list, of the graph that is captured.
      known: gives an op of the graph with as much known of its shapes as can be.

    Returns:
      A shape of unknown rank where nothing is known of it.

    Raises:
      ValueError: the body of a loop that makes it cannot be read.
    """
    made = _like(number_origin(tensor))
    if record(made.op.type).lists.rows:
        shape = known(made.op).inputs[0].shape
        return shape[1:] if shape.rank else tf.TensorShape(None)
    if not record(made.op.type).is_loop:
        return tf.TensorShape(None)
    loop, slot = _Loop(made.op, known), made.value_index
    entry = _entry(loop.body.outputs[slot])
    if entry is not None:
        return loop.shape(entry)
    return entries_shape(made.op.inputs[slot], known) if loop.keeps_length(slot) else (
        tf.TensorShape(None))


def list_length(tensor: tf.Tensor, known: Callable[[tf.Operation], tf.Operation]) -> int | None:
    """Return how many entries a list has that nothing appends to; as `kept_lists`.

    Args:
      tensor: the list, of the graph that is captured.
      known: gives an op of the graph with as much known of its shapes as can be.

    Returns:
      None where that is not known.

    Raises:
      ValueError: the body of a loop that hands it on cannot be read.
    """
    tensor = _like(number_origin(tensor))
    op, use = tensor.op, record(tensor.op.type).lists
    if use.rows:
        shape = known(op).inputs[0].shape
        return shape[0] if shape.rank else None
    if use.reserves:
        count = number_origin(op.inputs[1]).op
        if record(count.type).lists.counts:
            return list_length(count.inputs[0], known)
        return known_number(known(op).inputs[1])
    if record(op.type).is_loop and _Loop(op, known).keeps_length(tensor.value_index):
        return list_length(op.inputs[tensor.value_index], known)
    return None


def bytes_outside_loops(op: tf.Operation, known: Callable[[tf.Operation], tf.Operation],
                        loops: Mapping[str, Kept]) -> dict[int, int]:
    """Return the bytes of a list that no loop makes, on TensorFlow's executor.

    That is a list of the rows of a tensor, each of which is copied; or a list of zeros, which has
    as many entries as the list it is made like: the gradient of what a loop reads from a list
    begins with one. Entries that were never set take none.

    Args:
      op: any op of the graph that is captured.
      known: gives an op of the graph with as much known of its shapes as can be.
      loops: what the loops of the graph keep, by name.

    Returns:
      By slot; empty where the op makes no such list, and where the size is not known.
    """
    made = op
    if record(op.type).fills == 0.0 and op.outputs[0].dtype == tf.variant:
        source = _like(op.inputs[0])
        while source.op.name in loops:
            size = loops[source.op.name].bytes.get(source.value_index)
            if size is not None:
                return {0: size}
            # handed through the loop
            source = _like(number_origin(source.op.inputs[source.value_index]))
        made = source.op
    if not record(made.type).lists.rows:
        return {}
    rows = known(made).inputs[0]
    count = rows.shape.num_elements()
    return {} if count is None else {0: count * rows.dtype.size}


class _Loop:
    """A loop, its body and its condition."""

    def __init__(self, loop: tf.Operation, known: Callable[[tf.Operation], tf.Operation],
                 target: Target = HERE) -> None:
        self.op, self.known, self.target = loop, known, target
        self.body = tf_adapter.called_graph(loop, "body")

    def kept(self) -> Kept:
        lists = [(slot, entry) for slot, tensor in enumerate(self.body.outputs)
                 if tensor.dtype == tf.variant and (entry := _entry(tensor)) is not None]
        trips = most_iterations(self.op, self.known)
        if trips is None:
            return Kept({}, "its number of iterations is not known" if lists else "",
                        body=self._priced())
        found: dict[int, int] = {}
        unknown = ""
        for slot, entry in lists:
            size = self._bytes(entry)
            if size is None:
                size = self._bytes_of_others(slot, entry.dtype)
            if size is None:
                unknown = f"the size of {entry.name} in its body is not known"
            found[slot] = self._times(trips, slot, entry) * (size or 0)
        shares, takes, entries = self._shared(lists, found) if (
            self.target.shares_list_entries) else ({}, {}, {})
        workspace = 0
        if told_iterations(self.op) is not None:
            passed, workspace = self._of_segments(trips)
            found.update(passed)
        bound = most_iterations(self.op, lambda op: op)
        place = {op.name: i for i, op in enumerate(self.body.get_operations())}
        return Kept(found, unknown, Loop(
            trips, self._priced(), shares, takes, entries, bound=bound,
            at_once=max(1, min(trips, self._at_once())),
            arguments=tuple(place[given.op.name] for given in self.body.inputs)), workspace)

    def _at_once(self) -> int:
        """Return how many iterations TensorFlow lets run together.

        One that writes variables is over before the next one reads them.
        """
        attr = tf_adapter.node_attrs(self.op).get("parallel_iterations")
        writes = any(may_write(op) for op in self.body.get_operations())
        return 1 if writes or attr is None else int(attr.i)

    def _of_segments(self, trips: int) -> tuple[dict[int, int], int]:
        """Return, for a loop over segments, the bytes of lists that the loops inside make.

        First of those that they hand on, by slot, then of those that they fill and leave.
        """
        passed: dict[int, int] = {}
        filled = 0
        for op in self.body.get_operations():
            if not record(op.type).is_loop:
                continue
            kept = _Loop(op, self._in_body, self.target).kept()
            if kept.loop is None:
                continue
            handed = {number_origin(made).value_index: slot
                      for slot, made in enumerate(self.body.outputs)
                      if made.dtype == tf.variant and number_origin(made).op is op}
            sizes = {n: size for n, size in kept.bytes.items() if n not in kept.loop.shares}
            passed.update({slot: trips * sizes.get(n, 0) for n, slot in handed.items()})
            filled = max(filled, kept.workspace + sum(
                size for n, size in sizes.items() if n not in handed))
        return passed, filled

    def _times(self, trips: int, slot: int, entry: tf.Tensor) -> int:
        """Return how many entries of a list have memory of their own."""
        if not self.target.shares_list_entries:
            return trips
        memory = self._memory(entry)
        if record(memory.op.type).access is Access.VALUE:
            return 0
        return 1 if self._is_fixed(memory) or self._overwrites(slot) else trips

    def keeps_length(self, slot: int) -> bool:
        """Return whether the body hands a list on in its own slot, at most with entries set.

        Setting an entry may make a list longer, as that of a `TensorArray` of dynamic size.
        """
        tensor = number_origin(self.body.outputs[slot])
        while record(tensor.op.type).lists.index is not None or (
                record(tensor.op.type).adds and tensor.dtype == tf.variant):
            grows = tf_adapter.node_attrs(tensor.op).get("resize_if_index_out_of_bounds")
            if grows is not None and grows.b:
                return False
            tensor = number_origin(tensor.op.inputs[0])
        return self._slots.get(tensor.name) == slot

    def _emptied(self) -> tuple[int, ...]:
        """Return the lists from which each iteration takes an entry, by input."""
        popped = [number_origin(t).op if t.dtype == tf.variant else None for t in self.body.outputs]
        return tuple(k for k, op in enumerate(popped)
                     if op is not None and record(op.type).lists.removes
                     and self._slots.get(number_origin(op.inputs[0]).name) == k)

    def _is_fixed(self, memory: tf.Tensor) -> bool:
        """Return whether every iteration finds the same tensor."""
        return record(memory.op.type).is_constant or memory.name in self._slots

    def _overwrites(self, slot: int) -> bool:
        """Return whether every iteration writes the same entry of a list."""
        op = _setting(self.body.outputs[slot])
        index = None if op is None else record(op.type).lists.index
        return op is not None and index is not None and self._is_fixed(
            self._memory(op.inputs[index]))

    def _shared(self, lists: Sequence[tuple[int, tf.Tensor]], sizes: Mapping[int, int]
                ) -> tuple[dict[int, int], dict[int, tuple[int, ...]], dict[int, int]]:
        """`Loop.shares`, `takes` and `entries`; of lists of the same the largest counts."""
        alike: dict[str, list[int]] = {}
        entries: dict[int, int] = {}
        takes = dict.fromkeys((slot for slot, _ in lists), self._emptied())
        for slot, entry in lists:
            memory = self._memory(entry)
            alike.setdefault(memory.name, []).append(slot)
            use = record(memory.op.type).lists
            if use.shape is not None and not use.removes and (
                    source := self._memory(memory.op.inputs[0]).name) in self._slots:
                entries[slot] = self._slots[source]
            if self.keeps_length(slot):  # what it sets stands where another entry stood
                takes[slot] = (slot, *takes[slot])
        shares = {}
        for slots in alike.values():
            root = max(slots, key=lambda slot: sizes[slot])
            shares.update({slot: root for slot in slots if slot != root})
        return shares, takes, entries

    def _memory(self, tensor: tf.Tensor) -> tf.Tensor:
        """Return the tensor of the body in whose memory another lies, be it an iteration earlier.

        An argument is one only where no iteration changes it.
        """
        seen: set[str] = set()
        while True:
            while (known := record(tensor.op.type)).aliases and not known.lists.rows:
                tensor = tensor.op.inputs[tensor.value_index]
            slot = self._slots.get(tensor.name)
            if known.chooses and (branches := self._chosen(tensor.op).branches) is not None:
                tensor = tensor.op.outputs[branches.shares.get(
                    tensor.value_index, tensor.value_index)]
            if slot is None or tensor.name in seen:
                return tensor
            seen.add(tensor.name)
            tensor = self.body.outputs[slot]

    @functools.cached_property
    def _slots(self) -> dict[str, int]:
        """Return the place of each argument of the body."""
        return {given.name: i for i, given in enumerate(self.body.inputs)}

    def _priced(self) -> Graph:
        """Return the body as plain data, with the shapes that its tensors really have."""
        return priced_body(self.body.name, self.body, self.shape, self._inner)

    def _inner(self, op: tf.Operation) -> Inner:
        if record(op.type).chooses:
            return self._chosen(op)
        if is_call(op):
            return call_of(op, self._in_body)
        if not record(op.type).is_loop:
            return Inner()
        return _Loop(op, self._in_body, self.target).kept().known

    @functools.cached_property
    def _chosen(self) -> Callable[[tf.Operation], Inner]:
        """Return what tells of branches in the body."""
        return functools.cache(functools.partial(branches_of, known=self._in_body))

    @functools.cached_property
    def _inferred(self) -> tf_adapter.FuncGraph:
        """Return the body with the shapes that the arguments really have."""
        return tf_adapter.called_graph(self.op, "body",
                                       [t.shape for t in self.known(self.op).inputs],
                                       self._given_entries)

    @functools.cached_property
    def _given_entries(self) -> dict[int, tf.TensorShape]:
        """Return the shapes of the entries of lists that the loop is given, where known."""
        found = {}
        for k, tensor in enumerate(self.op.inputs):
            if tensor.dtype == tf.variant:
                shape = entries_shape(tensor, self.known)
                if shape.is_fully_defined():
                    found[k] = shape
        return found

    def _bytes(self, entry: tf.Tensor) -> int | None:
        """Return the bytes of an entry.

        Of a list in a list they are those that its own loop gives it; of what branches keep, those
        of the branch that keeps most.
        """
        if entry.dtype == tf.variant and record(number_origin(entry).op.type).chooses:
            entry = self._memory(entry)
            if entry.dtype == tf.variant:
                return self._chosen(entry.op).bytes.get(entry.value_index, 0)
        if entry.dtype == tf.variant:
            inner = number_origin(entry)
            if not record(inner.op.type).is_loop:
                return 0
            kept = _Loop(inner.op, self._in_body, self.target).kept()
            if kept.unknown:
                return None
            if kept.loop is not None and inner.value_index in kept.loop.shares:
                return 0
            return kept.bytes.get(inner.value_index, 0)
        shape = self.shape(entry)
        return shape.num_elements() * entry.dtype.size if shape.is_fully_defined() else None

    def _bytes_of_others(self, slot: int, dtype: tf.DType) -> int | None:
        """Return the bytes of the entries that a list had before the loop.

        An entry that the loop sets replaces one of them.
        """
        op = number_origin(self.body.outputs[slot]).op
        argument = self._slots.get(number_origin(op.inputs[0]).name)
        shape = self._given_entries.get(-1 if argument is None else argument)
        return None if shape is None else shape.num_elements() * dtype.size

    def shape(self, tensor: tf.Tensor) -> tf.TensorShape:
        """Return what is known of the shape of a tensor of the body."""
        if tensor.shape.is_fully_defined() or tensor.dtype in (tf.resource, tf.variant):
            return tensor.shape
        return tensor.shape.merge_with(self._as_given(tensor).shape)

    def _as_given(self, tensor: tf.Tensor) -> tf.Tensor:
        """Return a tensor of the body, with the shape that the loop's real arguments give it."""
        slot = self._slots.get(tensor.name)
        given = self._inferred.inputs
        if slot is not None and len(given) == len(self.body.inputs):  # a call may have lost some
            return given[slot]
        return self._in_body(tensor.op).outputs[tensor.value_index]

    def _in_body(self, op: tf.Operation) -> tf.Operation:
        try:
            found = self._inferred.get_operation_by_name(op.name)
        except KeyError:
            return op
        return self._inferred_in_bodies(found)

    @functools.cached_property
    def _inferred_in_bodies(self) -> Callable[[tf.Operation], tf.Operation]:
        return inferred_in_bodies(self._inferred)


def _like(tensor: tf.Tensor) -> tf.Tensor:
    """Return the list of which a list of zeros, with which sums of gradients begin, is made."""
    while record(tensor.op.type).fills == 0.0 and tensor.dtype == tf.variant:
        tensor = number_origin(tensor.op.inputs[0])
    return tensor


def _entry(tensor: tf.Tensor) -> tf.Tensor | None:
    """Return what an iteration puts into a list; None where it puts nothing there."""
    op = _setting(tensor)
    return None if op is None else op.inputs[record(op.type).lists.entry]


def _setting(tensor: tf.Tensor) -> tf.Operation | None:
    """Return the op that puts an entry into a list.

    The gradient of an entry that was read is put into an empty list, and that added to the list of
    all gradients so far: entry by entry, so that it has one more.
    """
    op = number_origin(tensor).op
    if record(op.type).adds and tensor.dtype == tf.variant:
        return next((found for t in op.inputs if (found := _setting(t)) is not None), None)
    return op if record(op.type).lists.entry is not None else None
