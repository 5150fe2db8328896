"""The functions of loops over segments, made of those of the loops whose place they take.

What a body computes stays one function, called by name: an inner loop runs it over a segment, the
outer loop over the segments. Its ops thus stand in a loop's body as before, with the same readers,
so that TensorFlow's optimizers fuse and reorder them as in the plain step. That the forward's lists
have readers, as the gradient's loop reads them in the plain step, is part of it: what is pushed
onto a list nobody reads would have a reader less. Their lengths count the segments.

Layouts of arguments and results are those of `tfckpt.plan.loops.change`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfckpt.capture import tf_adapter
from tfckpt.capture.variables import origin
from tfckpt.errors import RewriteError
from tfckpt.ir.edits import KEPT_SLOTS, TRIPS, Create, Edits
from tfckpt.ir.graph import BOUND, COUNTER
from tfckpt.ops import names, record
from tfckpt.plan.loops.segments import SEGMENTED, Role, comes_first, extras, kept_slots
from tfckpt.rewrite.loops.bodies import INT, VARIANT, FunctionBody, name_of, named, with_own_calls
from tfckpt.rewrite.loops.spared import Spared, add_invariant, spared

_PARALLEL, _SHAPES, _TYPES = "parallel_iterations", "output_shapes", "T"
_FIXED = (COUNTER, BOUND)
"""Of the gradient's loop, what is the same for each segment."""
_BY_PLACE = ("_num_original_outputs", "_read_only_resource_inputs", "_output_shapes", "_class")
"""Attributes of a loop that count its inputs or outputs, or that tie it to others."""


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
        if isinstance(op, Create) and isinstance(role, Role):
            loop = _Loops(role, live)
            made = loop.gradient_loop() if role.is_gradient else loop.forward_loop()
            functions.update(dict.fromkeys(made.functions))
            op = dataclasses.replace(op, attrs=made.attrs)
        added.append(op)
    return dataclasses.replace(edits, added=tuple(added), functions=tuple(functions))


@dataclasses.dataclass(frozen=True)
class _Made:
    """Attributes of a new loop, and the functions that it calls."""

    attrs: dict[str, object]
    functions: tuple[bytes, ...]


class _Loops:
    """A loop of the forward and its gradient's, and how they become loops over segments."""

    def __init__(self, role: Role, live: tf.Graph) -> None:
        self.role, self.segments, self.live = role, role.segments, live
        self.called: list[bytes] = []  # copies of what the functions call, callees first
        operations = {op.name: op for op in live.get_operations()}
        self.forward = operations[role.forward]
        self.gradient = operations[role.gradient]
        self.f, self.g = (tf_adapter.node_attrs(op) for op in (self.forward, self.gradient))
        self.count = len(self.forward.inputs)
        empty = self.segments.lists if role.compiled else ()  # a number stands for them
        self.kinds = [INT if n in empty else kind
                      for n, kind in enumerate(self.f[_TYPES].list.type)]
        self.shapes = [tf.TensorShape([]).as_proto() if n in empty else shape
                       for n, shape in enumerate(self.f[_SHAPES].list.shape)]
        opened = self.segments.open
        self.told: dict[int, int | list[int]] = {
            one.slot: list(one.dims) for one in (opened.lists if opened else ())
            if not one.gradient}
        self.states = len(role.segments.kept)
        self.inner_cond = self._inner_cond()
        self.again = self._again()
        self.spared = self._spared() if role.is_gradient else None

    def _definition(self, attrs: dict, key: str, what: str) -> Any:
        """Return a function of a loop.

        XLA reads a function once and changes what it has read: it calls copies there, which are
        named by what they are for.
        """
        made = self._found(attrs[key].func.name)
        if self.role.compiled:
            self.called += with_own_calls(made, self._found, what)
        return made

    def _found(self, name: str) -> Any:
        found = tf_adapter.find_function(self.live, name)
        if found is None:
            raise RewriteError(f"rewrite: {name!r}, which a loop calls, is not known")
        made = type(found)()
        made.CopyFrom(found)
        return made

    def _again(self) -> bytes:
        """Return the forward's body under a name of its own."""
        what = "gradient" if self.role.is_gradient else "forward"
        return named(self._definition(self.f, "body", what), what)

    def _spared(self) -> Spared | None:
        """Return the gradient's loop without what XLA is spared; None where there is nothing."""
        segments = self.segments
        if not segments.read_once and not segments.invariant:
            return None
        kinds = {residual: self._kind(slot) for residual, slot in zip(
            segments.residuals, segments.lists, strict=True) if slot in segments.invariant}
        return spared(self.g, self._found(self.g["cond"].func.name),
                      self._found(self.g["body"].func.name), segments.read_once, kinds)

    def _kind(self, slot: int) -> int:
        """Return the dtype of the entries of one of the forward's lists."""
        made = origin(self.forward.inputs[slot]).op
        return int(made.get_attr("element_dtype").as_datatype_enum)

    def _inner_cond(self) -> bytes:
        """Return the forward's condition, and that the segment is not over."""
        what = "again" if self.role.is_gradient else "cond"
        made = self._definition(self.f, "cond", what)
        if self.segments.bounded:
            return named(made, what)
        counter, bound = (made.signature.input_arg[n].name for n in (0, 1))
        (result,) = (output.name for output in made.signature.output_arg)
        body = FunctionBody(made)
        less = body.node("Less", (counter, bound), "z", T=made.signature.input_arg[0].type)
        made.ret[result] = body.node("LogicalAnd", (less, made.ret[result]), "z")
        return named(made, what)

    def _outer_cond(self, more: Sequence[int]) -> bytes:
        """Return the forward's condition, of a loop with further variables."""
        made = self._definition(self.f, "cond", "outer")
        made.attr.pop("_input_shapes", None)  # which a SavedModel's functions have: of the others
        for argument, kind in zip(made.signature.input_arg, self.kinds, strict=True):
            argument.type = kind
        for n, kind in enumerate(more):
            made.signature.input_arg.add(name=f"tfckpt_more_{n}", type=kind)
        return named(made, "cond")

    def forward_loop(self) -> _Made:
        """Return the forward's loop: before each segment it puts its states away."""
        kinds = [*self.kinds, *[VARIANT] * self.states, INT]
        function, names_in = _function(self.forward, kinds)
        body = FunctionBody(function)
        given, lists, segment = (names_in[:self.count], names_in[self.count:-1], names_in[-1])
        pushed = [body.node("TensorListPushBack", (handle, (
            body.node("TensorListLength", (given[slot],), "length")
            if slot in self.segments.sized else given[slot])), "output_handle",
                            element_dtype=self._kept_kind(slot))
                  for handle, slot in zip(lists, self.segments.kept, strict=True)]
        made = self._run(body, [
            body.shaped(name, self.f[_SHAPES].list.shape[slot], kinds[slot])
            if slot in self.segments.states else name for slot, name in enumerate(given)])
        # the lists have to be there until the last iteration is over: a sum in it might else begin
        # with a term that lists keep in the plain step; but who waits for all of a loop has it fill
        # lists that nothing needs
        over = [body.node(names.IDENTITY, (made[slot],), "output", T=kinds[slot])
                for slot in self.segments.states]
        whole = [f"^{name.partition(':')[0]}" for name in over]
        lengths = [body.node("TensorListLength", (made[slot], *whole), "length")
                   for slot in self.segments.lists if slot not in self.segments.unread]
        one = body.constant(1)
        for length in lengths:
            one = body.node("Minimum", (one, length), "z", T=INT)
        number = body.node("AddV2", (segment, one), "z", T=INT)
        changing = (*self.segments.states, *self.segments.written)
        kept = [made[n] if n in changing else given[n] for n in range(self.count)]
        body.returns((*kept, *pushed, number))
        return self._loop(self.forward, self.f, range(self.count), kinds, function,
                          self._outer_cond([*[VARIANT] * self.states, INT]),
                          [*self.shapes, *_scalars(self.states + 1)])

    def _kept_kind(self, slot: int) -> int:
        """Return the dtype of what is kept of a slot for each segment."""
        return INT if slot in self.segments.sized else self.f[_TYPES].list.type[slot]

    def _as_long(self, body: FunctionBody, slot: int, length: str) -> str:
        """Return a list of a length, for entries to be set in: what was in it nothing reads."""
        made = origin(tf_adapter.called_graph(self.forward, "body").outputs[slot]).op
        return body.node("TensorListReserve", (body.constant(-1), length), "handle", shape_type=INT,
                         element_dtype=made.get_attr("element_dtype").as_datatype_enum)

    def _run(self, body: FunctionBody, given: Sequence[str]) -> list[str]:
        """Return the forward's loop over one segment, from what it is given; its results."""
        kind = self.f[_TYPES].list.type[0]
        end = body.node("AddV2", (given[0], body.constant(self.role.length, kind)), "z", T=kind)
        if self.segments.bounded:
            end = body.node("Minimum", (end, given[1]), "z", T=kind)
        inputs = [given[0], end, *given[2:]]
        for slot in self.segments.lists:
            inputs[slot] = self._empty(body, slot, given) or inputs[slot]
        return body.loop(self.forward, self.f, inputs,
                         name_of(self.inner_cond), name_of(self.again), self.role.length)

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
        sizes = body.node(names.SHAPE, (given[slot],), "output", T=self.f[_TYPES].list.type[slot],
                          out_type=INT)
        size = body.node(names.STRIDED_SLICE, (sizes, *(
            body.constant([n]) for n in (d, d + 1, 1))), "output", {"shrink_axis_mask": 1},
            T=INT, Index=INT)
        return body.node(names.PACK, [size if n < 0 else body.constant(n) for n in shape],
                         "output", {"N": len(shape)}, T=INT)

    def gradient_loop(self) -> _Made:
        """Return the gradient's loop over segments, the last first."""
        own = list(self.g[_TYPES].list.type)
        kept = kept_slots(self.segments, len(own))
        given = extras(self.segments, self.count)
        kinds = [INT, *(own[n] for n in kept), *[VARIANT] * self.states,
                 *(self.kinds[n] for n in given)]
        function, names_in = _function(self.gradient, kinds)
        body = FunctionBody(function)
        left, old = names_in[0], dict(zip(kept, names_in[1:], strict=False))
        lists = names_in[1 + len(kept):1 + len(kept) + self.states]
        passed = names_in[1 + len(kept) + self.states:]
        start = dict(zip(given, passed, strict=True))
        popped = []
        for slot, handle in zip(self.segments.kept, lists, strict=True):
            known = self.f[_SHAPES].list.shape[slot]
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
        kind = self.f[_TYPES].list.type[0]
        trips = body.node("Sub", (made[0], start[0]), "z", T=kind)
        shapes = list(self.g[_SHAPES].list.shape)
        first = [n for n in old if n not in (*_FIXED, self.segments.trips)
                 and not _is_passed(own[n]) and comes_first(self.gradient.inputs[n].op.name)]
        inputs = {n: name if n in (*_FIXED, *first) or _is_passed(own[n]) else body.shaped(
            name, shapes[n], own[n]) for n, name in old.items()}
        inputs[self.segments.trips] = trips
        invariant = self.segments.invariant
        forward = self._found(self.f["body"].func.name) if invariant else None
        for emptied, filled in zip(self.segments.residuals, self.segments.lists, strict=True):
            inputs[emptied] = add_invariant(body, forward, filled, begun) if (
                filled in invariant) else made[filled]
        attrs = self.spared.attrs if self.spared else self.g
        results = body.loop(self.gradient, attrs, [inputs[n] for n in range(len(own))],
                            attrs["cond"].func.name, attrs["body"].func.name, self.role.length,
                            first)
        fewer = body.node("Sub", (left, body.constant(1)), "z", T=INT)
        fixed = (*_FIXED, self.segments.trips, *self.segments.idle, *self.segments.read_once)
        body.returns((fewer, *(old[n] if n in fixed else results[n] for n in kept), *popped,
                      *passed))
        return self._loop(self.gradient, self.g, [-1, *kept], kinds, function, _is_left(kinds), [
            *_scalars(1), *(shapes[n] for n in kept), *_scalars(self.states),
            *(self.shapes[n] for n in given)])

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
        if self._only_reads(attrs) and resources:
            made["_read_only_resource_inputs"] = tf.compat.v1.AttrValue(
                list=tf.compat.v1.AttrValue.ListValue(i=resources))
        return _Made({key: ("attr", made[key].SerializeToString(deterministic=True))
                      for key in sorted(made)},
                     (*self.called, self.inner_cond, self.again,  # what is called stands first
                      *(self.spared.functions if self.spared else ()), cond, body))

    def _only_reads(self, attrs: dict) -> bool:
        """Return whether both loops, or the forward's, are known to write nothing they are given.

        Both are looked at unless the attributes are the forward loop's.
        """
        loops = [self.f] if attrs is self.f else [self.f, self.g]
        return all(set(_resources(loop)) <= set(loop["_read_only_resource_inputs"].list.i)
                   for loop in loops)


def _resources(attrs: dict) -> list[int]:
    return [n for n, kind in enumerate(attrs[_TYPES].list.type)
            if kind == tf.resource.as_datatype_enum]


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
            if key.startswith("_") and key not in _BY_PLACE}
    made.update({_TYPES: value(list=several(type=kinds)), _SHAPES: value(list=several(
        shape=shapes)), _PARALLEL: value(i=1), "cond": _call(cond), "body": _call(body)})
    return made


def _call(function: str) -> Any:
    made = tf.compat.v1.AttrValue()
    made.func.name = function
    return made


def _is_left(kinds: Sequence[int]) -> bytes:
    """Return the condition that the first of some arguments is above 0."""
    made = tf_adapter.FunctionDef()
    for n, kind in enumerate(kinds):
        made.signature.input_arg.add(name=f"arg{n}", type=kind)
    made.signature.output_arg.add(name="result0", type=tf.bool.as_datatype_enum)
    body = FunctionBody(made)
    made.ret["result0"] = body.node("Greater", ("arg0", body.constant(0)), "z", T=INT)
    return named(made, "cond")


def _function(like: tf.Operation, kinds: Sequence[int]) -> tuple[Any, list[str]]:
    """Return a FunctionDef without ops, results as its arguments, and the arguments' names."""
    made = tf_adapter.FunctionDef()
    made.signature.is_stateful = tf_adapter.is_stateful(like)
    found = [f"arg{n}" for n in range(len(kinds))]
    for n, kind in enumerate(kinds):
        made.signature.input_arg.add(name=found[n], type=kind)
        made.signature.output_arg.add(name=f"result{n}", type=kind)
    return made, found
