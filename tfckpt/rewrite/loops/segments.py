"""The functions of loops over segments, made of those of the loops whose place they take.

What a body computes stays one function, called by name: an inner loop runs it over a segment, the
outer loop over the segments. Its ops thus stand in a loop's body as before, with the same readers,
so that TensorFlow's optimizers fuse and reorder them as in the plain step. That the forward's lists
have readers, as the gradient's loop reads them in the plain step, is part of it: what is pushed
onto a list nobody reads would have a reader less. Their lengths count the segments.

Where a segment is recomputed in segments itself, the loops that are made of the two for it stand in
the place of the inner loop and of the gradient's.

Layouts of arguments and results are those of `tfckpt.plan.loops.change`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Sequence
from typing import Any

import tensorflow as tf

from tfckpt.capture import tf_adapter
from tfckpt.capture.variables import origin
from tfckpt.ir.edits import KEPT_SLOTS, TRIPS, Create, Edits
from tfckpt.ir.graph import BOUND, COUNTER
from tfckpt.ops import names, record
from tfckpt.plan.loops.segments import SEGMENTED, Again, Role, comes_first, extras, kept_slots
from tfckpt.rewrite.loops.bodies import (
    BY_PLACE,
    INT,
    VARIANT,
    FunctionBody,
    empty_function,
    is_left,
    name_of,
    named,
)
from tfckpt.rewrite.loops.entries import loop_of
from tfckpt.rewrite.loops.functions import SHAPES, TYPES, Functions
from tfckpt.rewrite.loops.spared import add_invariant

_PARALLEL = "parallel_iterations"
_FIXED = (COUNTER, BOUND)
"""Of the gradient's loop, what is the same for each segment."""


def with_functions(edits: Edits, live: tf.Graph) -> Edits:
    """Return edits whose new loops over segments have functions to call.

    Args:
      edits: what is done to the step; new loops over segments have a `Role` as an attribute.
      live: the graph that is edited.

    Raises:
      RewriteError: the functions of a loop are not known.
    """
    functions: dict[bytes, None] = dict.fromkeys(edits.functions)
    added = []
    for op in edits.added:
        role = op.attrs.get(SEGMENTED)
        if isinstance(op, Create) and isinstance(role, Role | Again):
            made = _made(role, live)
            functions.update(dict.fromkeys(made.functions))
            op = dataclasses.replace(op, attrs={
                key: ("attr", attr.SerializeToString(deterministic=True))
                for key, attr in sorted(made.attrs.items())})
        added.append(op)
    return dataclasses.replace(edits, added=tuple(added), functions=tuple(functions))


@dataclasses.dataclass(frozen=True)
class _Made:
    """Attributes of a new loop, and the functions that it calls, callees first."""

    attrs: dict[str, Any]
    functions: tuple[bytes, ...]


def _made(role: Role | Again, live: tf.Graph) -> _Made:
    if isinstance(role, Again):
        return _Made(*loop_of(role, live))
    loop = _Loops(role, live)
    return loop.gradient_loop() if role.is_gradient else loop.forward_loop()


class _Loops(Functions):
    """How a loop and its gradient's become loops over segments, from what `Functions` takes."""

    def _inside(self, is_gradient: bool) -> _Loops:
        """Return the loops over the segments of a segment."""
        role = self.role
        return _Loops(dataclasses.replace(
            role, length=role.within[0], count=math.ceil(role.length / role.within[0]),
            within=role.within[1:], bounded=True, is_gradient=is_gradient),
            self.live, f"{self.where}{'gradient' if role.is_gradient else 'forward'}_")

    def forward_loop(self) -> _Made:
        """Return the forward's loop: before each segment it puts its states away."""
        kinds = [*self.kinds, *[VARIANT] * self.states, INT]
        function, names_in = empty_function(self.forward, kinds)
        body = FunctionBody(function)
        given, lists, segment = (names_in[:self.count], names_in[self.count:-1], names_in[-1])
        pushed = [body.node("TensorListPushBack", (handle, (
            body.node("TensorListLength", (given[slot],), "length")
            if slot in self.segments.sized else given[slot])), "output_handle",
                            element_dtype=self._kept_kind(slot))
                  for handle, slot in zip(lists, self.segments.kept, strict=True)]
        made = self._run(body, [
            body.shaped(name, self.known[slot], kinds[slot])
            if slot in self.segments.states else name for slot, name in enumerate(given)])
        # the lists have to be there until the last iteration is over: a sum in it might else begin
        # with a term that lists keep in the plain step; but who waits for all of a loop has it fill
        # lists that nothing needs
        over = [body.node(names.IDENTITY, (made[slot],), "output", T=kinds[slot])
                for slot in self.segments.states]
        whole = [f"^{name.partition(':')[0]}" for name in over]
        counts = made[-1:] if self.role.within else self._lengths(body, made, whole)
        one = body.constant(1)
        for count in counts:
            one = body.node("Minimum", (one, count), "z", T=INT)
        number = body.node("AddV2", (segment, one), "z", T=INT)
        changing = (*self.segments.states, *self.segments.written)
        kept = [made[n] if n in changing else given[n] for n in range(self.count)]
        body.returns((*kept, *pushed, number))
        return self._loop(self.forward, self.f, range(self.count), kinds, function,
                          self.outer_cond([*[VARIANT] * self.states, INT]),
                          [*self.shapes, *_scalars(self.states + 1)])

    def _lengths(self, body: FunctionBody, made: Sequence[str], controls: Sequence[str] = ()
                 ) -> list[str]:
        """Return the lengths of the lists that one segment filled and the plain loop fills too."""
        return [body.node("TensorListLength", (made[slot], *controls), "length")
                for slot in self.segments.lists if slot not in self.segments.unread]

    def _kept_kind(self, slot: int) -> int:
        """Return the dtype of what is kept of a slot for each segment."""
        return INT if slot in self.segments.sized else self.f[TYPES].list.type[slot]

    def _as_long(self, body: FunctionBody, slot: int, length: str) -> str:
        """Return a list of a length, for entries to be set in: what was in it nothing reads."""
        made = origin(tf_adapter.called_graph(self.forward, "body").outputs[slot]).op
        return body.node("TensorListReserve", (body.constant(-1), length), "handle", shape_type=INT,
                         element_dtype=made.get_attr("element_dtype").as_datatype_enum)

    def _run(self, body: FunctionBody, given: Sequence[str]) -> list[str]:
        """Return the forward's loop over one segment, from what it is given; its results.

        Of a segment in segments these are the lists of states too, and how many there are.
        """
        inputs = self._of_one_segment(body, given)
        if self.role.within:
            stored = self._inside(False).forward_loop()
            lists = [self._states(body, slot, given[slot]) for slot in self.segments.kept]
            return self._loop_inside(body, self.forward, stored,
                                     [*inputs, *lists, body.constant(0)])
        for slot in self.segments.lists:
            inputs[slot] = self._empty(body, slot, given) or inputs[slot]
        return body.loop(self.forward, self.f, inputs,
                         name_of(self.inner_cond), name_of(self.again), self.role.length)

    def _of_one_segment(self, body: FunctionBody, given: Sequence[str]) -> list[str]:
        """Return what the forward's loop is given for one segment: another bound."""
        kind = self.f[TYPES].list.type[0]
        end = body.node("AddV2", (given[0], body.constant(self.role.length, kind)), "z", T=kind)
        if self.role.bounded:
            end = body.node("Minimum", (end, given[1]), "z", T=kind)
        return [given[0], end, *given[2:]]

    def _loop_inside(self, body: FunctionBody, like: tf.Operation, made: _Made,
                     inputs: Sequence[str], first: Collection[int] = ()) -> list[str]:
        """Add a loop over the segments of a segment, and return its results."""
        self.called += made.functions
        attrs = {key: attr for key, attr in made.attrs.items() if key != KEPT_SLOTS}
        return body.loop(like, attrs, inputs, attrs["cond"].func.name, attrs["body"].func.name,
                         attrs[TRIPS].i, first)

    def _states(self, body: FunctionBody, slot: int, state: str) -> str:
        """Return an empty list for a state before each segment of a segment."""
        kind, shape, count = self._kept_kind(slot), body.constant(-1), body.constant(-1)
        if self.role.compiled:
            count = body.constant(math.ceil(self.role.length / self.role.within[0]))
            shape = body.constant([]) if slot in self.segments.sized else body.node(
                names.SHAPE, (state,), "output", T=kind, out_type=INT)
        return body.node(names.EMPTY_LIST, (shape, count), "handle", shape_type=INT,
                         element_dtype=kind)

    def _empty(self, body: FunctionBody, slot: int, given: Sequence[str]) -> str:
        """Return a list for the entries of one segment; "" where the shape of these is not known.

        XLA makes it as long as it may become.
        """
        list_op = origin(self.forward.inputs[slot]).op
        if not record(list_op.type).lists.empty:
            return ""
        size = self.told.get(slot)
        if size is None:
            shape = tf.get_static_value(origin(list_op.inputs[0]))
            if shape is None:
                return ""
            size = shape.tolist()
        read = self._told(body, size, given), body.constant(self.role.length)
        return body.node(names.EMPTY_LIST, read, "handle", shape_type=INT,
                         element_dtype=list_op.get_attr("element_dtype").as_datatype_enum)

    def _told(self, body: FunctionBody, shape: int | list[int], given: Sequence[str]) -> str:
        """Return the shape of a list's entries; an open size is one of the forward's state."""
        opened = self.segments.open
        if opened is None or opened.size is None or isinstance(shape, int) or -1 not in shape:
            return body.constant(shape)
        slot, d = opened.size
        sizes = body.node(names.SHAPE, (given[slot],), "output", T=self.f[TYPES].list.type[slot],
                          out_type=INT)
        size = body.node(names.STRIDED_SLICE, (sizes, *(
            body.constant([n]) for n in (d, d + 1, 1))), "output", {"shrink_axis_mask": 1},
            T=INT, Index=INT)
        return body.node(names.PACK, [size if n < 0 else body.constant(n) for n in shape],
                         "output", {"N": len(shape)}, T=INT)

    def gradient_loop(self) -> _Made:
        """Return the gradient's loop over segments, the last first."""
        own = list(self.g[TYPES].list.type)
        kept = kept_slots(self.segments, len(own))
        given = extras(self.segments, self.count)
        kinds = [INT, *(own[n] for n in kept), *[VARIANT] * self.states,
                 *(self.kinds[n] for n in given)]
        function, names_in = empty_function(self.gradient, kinds)
        body = FunctionBody(function)
        left, old = names_in[0], dict(zip(kept, names_in[1:], strict=False))
        lists = names_in[1 + len(kept):1 + len(kept) + self.states]
        passed = names_in[1 + len(kept) + self.states:]
        start = dict(zip(given, passed, strict=True))
        popped = []
        for slot, handle in zip(self.segments.kept, lists, strict=True):
            known = self.known[slot]
            shape = body.constant(-1 if slot in self.segments.sized else _dimensions(known))
            kind = self._kept_kind(slot)
            pop = body.node("TensorListPopBack", (handle, shape), "output_handle",
                            element_dtype=kind)
            popped.append(pop)
            kept_there = pop.replace(":output_handle:", ":tensor:")
            start[slot] = self._as_long(body, slot, kept_there) if (
                slot in self.segments.sized) else body.shaped(kept_there, known, kind)
        begun = [start[n] for n in range(self.count)]
        made = self._run(body, begun)
        kind = self.f[TYPES].list.type[0]
        trips = body.node("Sub", (made[0], start[0]), "z", T=kind)
        shapes = list(self.g[SHAPES].list.shape)
        first = [n for n in old if n not in (*_FIXED, self.segments.trips)
                 and not _is_passed(own[n]) and comes_first(self.gradient.inputs[n].op.name)]
        inputs = {n: name if n in (*_FIXED, *first) or _is_passed(own[n]) else body.shaped(
            name, shapes[n], own[n]) for n, name in old.items()}
        inputs[self.segments.trips] = trips
        if self.role.within:
            bounded = self._of_one_segment(body, begun)
            results = dict(zip([-1, *kept], self._loop_inside(
                body, self.gradient, self._inside(True).gradient_loop(),
                [made[-1], *(inputs[n] for n in kept), *made[self.count:-1],
                 *(bounded[n] for n in given)], [kept.index(n) + 1 for n in first]), strict=False))
        else:
            results = dict(enumerate(self._backward(body, inputs, begun, made, first)))
        # a product that a list keeps is no part of a longer one, even where nothing needs the list
        # in the end: in the plain loop Grappler finds that out last, and would here at once
        filled = [] if self.role.within or self.role.compiled else self._lengths(body, made)
        fewer = body.node("Sub", (left, body.constant(1), *(
            f"^{name.partition(':')[0]}" for name in filled)), "z", T=INT)
        fixed = (*_FIXED, self.segments.trips, *self.segments.idle, *self.segments.read_once)
        body.returns((fewer, *(old[n] if n in fixed else results[n] for n in kept), *popped,
                      *passed))
        return self._loop(self.gradient, self.g, [-1, *kept], kinds, function, is_left(kinds), [
            *_scalars(1), *(shapes[n] for n in kept), *_scalars(self.states),
            *(self.shapes[n] for n in given)])

    def _backward(self, body: FunctionBody, inputs: dict[int, str], begun: Sequence[str],
                  made: Sequence[str], first: Collection[int]) -> list[str]:
        """Return the gradient's loop over one segment; its results.

        Args:
          body: of the function to which it is added.
          inputs: what it is given, but for the lists that it empties.
          begun: what the forward's loop over the segment was given.
          made: the results of that.
          first: see `FunctionBody.loop`.
        """
        invariant = self.segments.invariant
        forward = self.found(self.f["body"].func.name) if invariant else None
        for emptied, filled in zip(self.segments.residuals, self.segments.lists, strict=True):
            inputs[emptied] = add_invariant(body, forward, filled, begun) if (
                filled in invariant) else made[filled]
        attrs = self.spared.attrs if self.spared else self.g
        return body.loop(self.gradient, attrs, [inputs[n] for n in range(len(inputs))],
                         attrs["cond"].func.name, attrs["body"].func.name, self.role.length, first)

    def _loop(self, op: tf.Operation, attrs: dict, kept: Sequence[int], kinds: Sequence[int],
              function: Any, cond: bytes, shapes: Sequence[Any]) -> _Made:
        body = named(function, "body")
        made = _loop_attrs(attrs, kinds, name_of(cond), name_of(body), shapes)
        made["_num_original_outputs"] = tf.compat.v1.AttrValue(i=len(kinds))
        made[TRIPS] = tf.compat.v1.AttrValue(i=self.role.count)
        empty = self.segments.lists if self.role.compiled and attrs is self.f else ()
        made[KEPT_SLOTS] = tf.compat.v1.AttrValue(list=tf.compat.v1.AttrValue.ListValue(
            i=[-1 if n in empty else n for n in kept]))
        resources = [n for n, kind in enumerate(kinds) if kind == tf.resource.as_datatype_enum]
        if self.only_reads(attrs) and resources:
            made["_read_only_resource_inputs"] = tf.compat.v1.AttrValue(
                list=tf.compat.v1.AttrValue.ListValue(i=resources))
        return _Made(made, (*self.called, cond, body))


def _is_passed(kind: int) -> bool:
    """Return whether a tensor of a dtype has no shape that says anything: a handle, or a list."""
    return kind in (VARIANT, tf.resource.as_datatype_enum)


def _dimensions(shape: Any) -> int | list[int]:
    return -1 if shape.unknown_rank else [dimension.size for dimension in shape.dim]


def _scalars(count: int) -> list[Any]:
    return [tf.TensorShape([]).as_proto() for _ in range(count)]


def _loop_attrs(attrs: dict, kinds: Sequence[int], cond: str, body: str, shapes: Sequence[Any]
                ) -> dict[str, Any]:
    """Return attributes of a loop over segments: run one at a time, so that one is in memory."""
    value, several = tf.compat.v1.AttrValue, tf.compat.v1.AttrValue.ListValue
    made = {key: attr for key, attr in attrs.items()
            if key.startswith("_") and key not in BY_PLACE}
    made.update({TYPES: value(list=several(type=kinds)), SHAPES: value(list=several(
        shape=shapes)), _PARALLEL: value(i=1), "cond": _call(cond), "body": _call(body)})
    return made


def _call(function: str) -> Any:
    made = tf.compat.v1.AttrValue()
    made.func.name = function
    return made
