"""Reads a `tf.Graph` (a FuncGraph, or an imported GraphDef) into a `Graph`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

import tensorflow as tf

from tfckpt.capture import tf_adapter
from tfckpt.capture.inlining.compiled_calls import call_workspace, is_compiled_call
from tfckpt.capture.inlining.inline import Inlining
from tfckpt.capture.later_passes import with_later_passes
from tfckpt.capture.loops.branch_values import branches_of
from tfckpt.capture.loops.lists import Kept, bytes_outside_loops, kept_lists
from tfckpt.capture.loops.priced import Inner
from tfckpt.capture.loops.purity import reads_counted_list
from tfckpt.capture.loops.repeated import repeat_branches, repeat_loops
from tfckpt.capture.op_attributes import attrs_of, results_of
from tfckpt.capture.purity import is_pure, is_write
from tfckpt.capture.regions import gradient_scopes, is_gradient_scope, regions
from tfckpt.capture.variables import may_write, origin
from tfckpt.errors import CaptureError
from tfckpt.ir.branches import conditions, has_branches
from tfckpt.ir.graph import FORWARD, Graph, Op, Tensor, check_graph, topological_order
from tfckpt.ir.target import Target
from tfckpt.ops import Access, Source, record

_LARGE_CONSTANT = 10 << 20
"""Bytes above which an op that makes less of a constant than it reads is not repeated.

While Grappler optimises a graph it keeps several copies of a constant for each of its readers: that
may be far more than the op's result takes.
"""

_FED = (Source.ARGUMENT, Source.DEFAULT, Source.ELEMENT)


def capture(graph: tf.Graph, *, fetches: Sequence[tf.Tensor] | None = None,
            shapes: tf.Graph | None = None, name: str = "graph",
            inlining: Inlining | None = None, compiled: bool = False,
            forward: Collection[str] = (), later: Collection[str] = (),
            others: Callable[[], tf.Graph | None] = lambda: None) -> Graph:
    """Read a TensorFlow graph as plain data.

    Args:
      graph: the graph; a FuncGraph's outputs are its fetches.
      fetches: tensors that leave the step; default `graph.outputs`.
      shapes: a graph with the same op names that knows the shapes that `graph` leaves open (see
        `planned_shapes`).
      name: of a graph that has none of its own.
      inlining: what was done to the graph's nested calls before.
      compiled: whether XLA will compile the graph.
      forward: names of ops that are known to follow no gradient.
      later: names of ops that are known to follow one.
      others: returns the like of `shapes` for other sizes, if there are any.

    Returns:
      The step, with the region of each op, its ops in an order in which they can run.

    Raises:
      CaptureError: the graph has a cycle outside of while loops, or is malformed.
    """
    wanted = graph.outputs if fetches is None else fetches
    fetched = [t for t in wanted if t is not None]
    must_run = {op.name for op in tf_adapter.control_outputs(graph)}
    every = _sorted(graph.get_operations())
    stateful = {op.name: tf_adapter.is_stateful(op) for op in every}
    writing = frozenset(op.name for op in every if _writes(op, stateful[op.name]))
    operations = _live(every, {t.op.name for t in fetched} | must_run | writing)
    index = {op: i for i, op in enumerate(operations)}
    inputs = [[(index[t.op], t.value_index) for t in op.inputs] for op in operations]
    controls = [[index[c] for c in op.control_inputs] for op in operations]
    known = _known_in(shapes)
    target = Target().compiled(compiled)
    lists = {i: kept_lists(op, known, target) for i, op in enumerate(operations)
             if record(op.type).is_loop}
    kept = {operations[i].name: found for i, found in lists.items()}
    chosen = {op.name: branches_of(op, known) for op in operations if record(op.type).chooses}
    outputs = [results_of(op, _lists_of(op, known, kept, chosen, target), _best(op, known))
               for op in operations]
    large = _large_constants(operations, outputs)
    writes = [op.name in writing for op in operations]
    sources = [[source for source, _ in entry] for entry in inputs]
    region = regions([op.name for op in operations], sources, controls, writes,
                     {i for i, op in enumerate(operations) if record(op.type).lists.empty},
                     {i for i, op in enumerate(operations) if op.name in forward},
                     {i for i, op in enumerate(operations) if op.name in later},
                     {i for i, op in enumerate(operations) if _is_fed(op)},
                     {i for i, op in enumerate(operations) if _reads_variable(op)})
    depth = [gradient_scopes(op.name) * (r != FORWARD)
             for op, r in zip(operations, region, strict=True)]
    region = with_later_passes(
        region, [read if _reads_values(op) else []
                 for op, read in zip(operations, sources, strict=True)], depth,
        [record(op.type).scales_gradients for op in operations], writes)
    _place_observers(operations, inputs, region)
    needed = conditions(
        (op.name, op.type, [t.name for t in op.inputs], [c.name for c in op.control_inputs])
        for op in operations) if has_branches(op.type for op in operations) else {}
    workspaces, unknown = _call_workspaces(operations, known) if not compiled else ({}, ())
    ops = tuple(
        Op(op.name, op.type, tuple(inputs[i]), tuple(controls[i]), outputs[i], region[i],
           not writes[i] and not needed.get(op.name)
           and not _shrinks_large_constant(large, outputs, inputs[i], i)
           and is_pure(op.type, stateful[op.name], tuple(t.dtype for t in outputs[i]))
           and reads_counted_list(op),
           op.device, attrs_of(op), bool(needed.get(op.name)),
           lists[i].loop if i in lists else None,
           workspaces.get(op.name, 0) + (lists[i].workspace if i in lists else 0),
           branches=chosen[op.name].branches if op.name in chosen else (
               lists[i].known.branches if i in lists else None))
        for i, op in enumerate(operations)
    )
    ids = tuple((index[t.op], t.value_index) for t in fetched)
    sinks = tuple(i for i, op in enumerate(ops) if op.name in must_run or writes[i])
    larger = others() if compiled and lists and shapes is not None else None
    ops, refused = repeat_loops(graph, operations, ops, lists, target, ids,
                                [known] if larger is None else [known, _known_in(larger)])
    ops, unrepeated = repeat_branches(graph, operations, ops, target)
    result = Graph(getattr(graph, "name", name), ops, ids, sinks,
                   inlining.functions if inlining is not None else (),
                   (inlining.refused if inlining is not None else ()) + refused + unknown
                   + unrepeated)
    check_graph(result)
    return result


def _reads_values(op: tf.Operation) -> bool:
    known = record(op.type)
    return not known.shape_only and known.fills is None


def _lists_of(op: tf.Operation, known: Callable[[tf.Operation], tf.Operation],
              loops: Mapping[str, Kept], chosen: Mapping[str, Inner], target: Target
              ) -> Mapping[int, int]:
    """Return the bytes of what an op makes without a size of its own, by slot."""
    if op.name in loops:
        return loops[op.name].bytes
    if op.name in chosen:
        return chosen[op.name].bytes
    if record(op.type).fills == 0.0 and op.outputs[0].dtype == tf.variant:
        like = origin(op.inputs[0])
        if like.op.name in chosen:
            return {0: chosen[like.op.name].zeros.get(like.value_index, 0)}
    return bytes_outside_loops(op, known, loops) if (
        target.shares_list_entries and op.outputs) else {}


def _known_in(shapes: tf.Graph | None) -> Callable[[tf.Operation], tf.Operation]:
    """Return a function from an op to the one of its name in `shapes`, or itself without one."""
    if shapes is None:
        return lambda op: op
    others = {op.name: op for op in shapes.get_operations()}
    return lambda op: others.get(op.name, op)


def _call_workspaces(operations: Sequence[tf.Operation],
                     known: Callable[[tf.Operation], tf.Operation]
                     ) -> tuple[dict[str, int], tuple[str, ...]]:
    """Return the workspace bytes of calls that XLA compiles by themselves, by name.

    Also return a line for each call whose workspace XLA does not tell.
    """
    found, refused = {}, []
    for op in operations:
        if is_compiled_call(op):
            found[op.name], reason = call_workspace(op, known(op))
            if reason:
                refused.append(f"{op.name}: its workspace under XLA is not counted: {reason}")
    return found, tuple(refused)


def _live(operations: Sequence[tf.Operation], wanted: Collection[str]) -> list[tf.Operation]:
    """Arguments, ops without results, and the ops that run: those wanted and what they need.

    TensorFlow leaves out the others (gradients of constants, say) before it runs or optimises a
    graph, so they read nothing and keep nothing.
    """
    needed = set(wanted)
    live = []
    for op in reversed(operations):
        if op.name in needed or record(op.type).source is Source.ARGUMENT or not op.outputs:
            live.append(op)
            needed.update(t.op.name for t in op.inputs)
            needed.update(c.name for c in op.control_inputs)
    return live[::-1]


def _best(op: tf.Operation, known: Callable[[tf.Operation], tf.Operation]
          ) -> list[tf.TensorShape]:
    """Return the shapes of an op's results: what the trace knows is not always inferred again.

    `set_shape` on what a Python function returns leaves no mark in a graph's definition.

    Args:
      op: the op.
      known: gives the op in a graph in which more shapes are known; where none is open, the op
        need not be looked for.
    """
    shapes = [t.shape for t in op.outputs]
    if all(shape.is_fully_defined() for shape in shapes):
        return shapes
    return [here.shape if here.shape.is_fully_defined() else there
            for here, there in zip(known(op).outputs, shapes, strict=True)]


def _place_observers(operations: Sequence[tf.Operation],
                     inputs: Sequence[Sequence[tuple[int, int]]], region: list[str]) -> None:
    """Put what a debugger reads of the forward into the forward, so that plans order it there.

    Elsewhere nothing waits for it, and it may keep what it reads alive for any length of time.
    """
    for i, op in enumerate(operations):
        if record(op.type).observes and region[inputs[i][0][0]] == FORWARD:
            region[i] = FORWARD


def gradient_inside(graph: tf.Graph) -> str:
    """Return the first op that calls a function which computes a gradient; "" where none does.

    Args:
      graph: FuncGraph or imported graph; what its functions call in turn is not looked at.
    """
    trains: dict[str, bool] = {}
    for op in graph.get_operations():
        for name in tf_adapter.called_functions(op):
            if name not in trains:
                function = tf_adapter.find_function(graph, name)
                trains[name] = function is not None and any(
                    is_gradient_scope(node.name) for node in function.node_def)
            if trains[name]:
                return str(op.name)
    return ""


def _writes(op: tf.Operation, stateful: bool) -> bool:
    """Return whether an op writes a variable.

    What writes a reference is not registered as stateful. A branch or a function writes what its
    ops do: optimizers that scale losses update the weights in a branch. A loop that only reads
    variables need not say so, and is no write.
    """
    if any(map(tf_adapter.is_reference, op.inputs)):
        return is_write(op.type, True, True)
    if stateful and tf_adapter.called_functions(op) and not record(op.type).is_loop:
        return bool(may_write(op))
    return is_write(op.type, stateful and any(t.dtype == tf.resource for t in op.inputs), stateful)


def _is_fed(op: tf.Operation) -> bool:
    """Return whether an op hands in what a call gives the step, variables apart."""
    return record(op.type).source in _FED and all(
        t.dtype not in (tf.resource, tf.variant) for t in op.outputs)


def _reads_variable(op: tf.Operation) -> bool:
    known = record(op.type)
    return known.access in (Access.VALUE, Access.READ) or known.source is Source.REFERENCE


def _large_constants(operations: Sequence[tf.Operation], outputs: Sequence[tuple[Tensor, ...]]
                     ) -> frozenset[tuple[int, int]]:
    """Return the tensors that are large constants (see `_LARGE_CONSTANT`)."""
    return frozenset((i, slot) for i, op in enumerate(operations) if record(op.type).is_constant
                     for slot, t in enumerate(outputs[i]) if (t.bytes or 0) > _LARGE_CONSTANT)


def _shrinks_large_constant(large: Collection[tuple[int, int]],
                            outputs: Sequence[tuple[Tensor, ...]],
                            inputs: Sequence[tuple[int, int]], index: int) -> bool:
    """Return whether an op makes less of a large constant than it reads."""
    read = [outputs[source][slot].bytes or 0 for source, slot in inputs
            if (source, slot) in large] if large else []
    return bool(read) and max(read) > sum(t.bytes or 0 for t in outputs[index])


def _sorted(operations: Sequence[tf.Operation]) -> list[tf.Operation]:
    """Operations in a topological order that stays as close to creation order as it can.

    Arguments stand behind the ops that Grappler made of a trace; they count as created before.
    """
    index = {op: i for i, op in enumerate(operations)}
    sources = {i: {index[t.op] for t in op.inputs}.union(index[c] for c in op.control_inputs)
               for i, op in enumerate(operations)}
    if all(not s or max(s) < i for i, s in sources.items()):
        return list(operations)
    fed = {i for i, op in enumerate(operations) if _is_fed(op) and not sources[i]}
    order = [*sorted(fed), *topological_order({i: s - fed for i, s in sources.items()
                                               if i not in fed})]
    if len(order) != len(operations):
        done = frozenset(order)
        stuck = next(op.name for i, op in enumerate(operations) if i not in done)
        raise CaptureError(f"capture: the graph has a cycle through {stuck!r} (a TF1 while loop?); "
                           "tfckpt reads while loops only in their functional form")
    return [operations[i] for i in order]
