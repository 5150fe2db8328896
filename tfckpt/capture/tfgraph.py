"""Reads a `tf.Graph` (a FuncGraph, or an imported GraphDef) into a `Graph`."""

from __future__ import annotations

import heapq
from collections.abc import Collection, Mapping, Sequence

import tensorflow as tf

from tfckpt.capture import tf_adapter
from tfckpt.capture.branches import conditions
from tfckpt.capture.inline import Inlining
from tfckpt.capture.loops import LOOPS, kept_lists
from tfckpt.capture.purity import is_pure, is_write
from tfckpt.capture.regions import is_gradient_scope, regions
from tfckpt.errors import CaptureError
from tfckpt.graph import Graph, Op, Tensor, check_graph

_ATTRS: Mapping[str, tuple[str, ...]] = {
    "MatMul": ("transpose_a", "transpose_b"),
    "BatchMatMulV2": ("adj_x", "adj_y"),
    "BatchMatMulV3": ("adj_x", "adj_y"),
    "Einsum": ("equation",),
    "Conv2D": ("data_format",),
    "LeakyRelu": ("alpha",),
    "LeakyReluGrad": ("alpha",),
}
_LARGEST_COMPARED = 1024
"""Elements of a constant that are compared to find whether they are all equal."""
_LARGEST_READ = 1 << 20
"""Elements of a constant that is looked at: TensorFlow hands out copies."""


def capture(graph: tf.Graph, *, fetches: Sequence[tf.Tensor] | None = None,
            shapes: tf.Graph | None = None, name: str = "graph",
            inlining: Inlining | None = None) -> Graph:
    """Reads a TensorFlow graph as plain data.

    Args:
      graph: the graph; a FuncGraph's outputs are its fetches.
      fetches: tensors that leave the step; default `graph.outputs`.
      shapes: a graph with the same op names whose shapes are fully known, where `graph` itself
        has unknown dimensions (see `concrete_shapes`).
      name: of a graph that has none of its own.
      inlining: what was done to the graph's nested calls before.

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
    index = {op.name: i for i, op in enumerate(operations)}
    inputs = [[(index[t.op.name], t.value_index) for t in op.inputs] for op in operations]
    controls = [[index[c.name] for c in op.control_inputs] for op in operations]
    known = (lambda op: op) if shapes is None else (
        lambda op: shapes.get_operation_by_name(op.name))
    lists = {i: kept_lists(op, known) for i, op in enumerate(operations) if op.type in LOOPS}
    outputs = [_outputs(known(op), lists[i].bytes if i in lists else {})
               for i, op in enumerate(operations)]
    writes = [op.name in writing for op in operations]
    region = regions([op.name for op in operations],
                     [[source for source, _ in entry] for entry in inputs], controls, writes)
    needed = conditions((op.name, op.type, [t.name for t in op.inputs],
                         [c.name for c in op.control_inputs]) for op in operations)
    ops = tuple(
        Op(op.name, op.type, tuple(inputs[i]), tuple(controls[i]), outputs[i], region[i],
           not (writes[i] or needed[op.name]) and is_pure(op.type, stateful[op.name],
                                                          tuple(t.dtype for t in outputs[i])),
           op.device, _attrs(op), bool(needed[op.name]))
        for i, op in enumerate(operations)
    )
    ids = tuple((index[t.op.name], t.value_index) for t in fetched)
    sinks = tuple(i for i, op in enumerate(ops) if op.name in must_run or writes[i])
    refused = tuple(f"{ops[i].name}: what the loop keeps for each iteration is not counted: "
                    f"{kept.unknown}" for i, kept in lists.items() if kept.unknown)
    result = Graph(getattr(graph, "name", name), ops, ids, sinks, tf_adapter.in_xla(graph),
                   inlining.functions if inlining is not None else (),
                   (inlining.refused if inlining is not None else ()) + refused)
    check_graph(result)
    return result


def _live(operations: Sequence[tf.Operation], wanted: Collection[str]) -> list[tf.Operation]:
    """Arguments, ops without results, and the ops that run: those wanted and what they need.

    TensorFlow leaves out the others (gradients of constants, say) before it runs or optimises a
    graph, so they read nothing and keep nothing.
    """
    needed = set(wanted)
    live = []
    for op in reversed(operations):
        if op.name in needed or op.type == "Placeholder" or not op.outputs:
            live.append(op)
            needed.update(t.op.name for t in op.inputs)
            needed.update(c.name for c in op.control_inputs)
    return live[::-1]


def gradient_inside(graph: tf.Graph) -> str:
    """The first op that calls a function which computes a gradient; "" where none does."""
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
    """Whether an op writes a variable. What writes a reference is not registered as stateful."""
    if any(tf_adapter.is_reference(t) for t in op.inputs):
        return is_write(op.type, True, True)
    return is_write(op.type, any(t.dtype == tf.resource for t in op.inputs), stateful)


def _attrs(op: tf.Operation) -> dict[str, object]:
    """What later stages read of an op; of a constant the value, if all its elements share it."""
    if op.type == "Const":
        made = op.outputs[0]
        if not (made.dtype.is_floating or made.dtype.is_bool) or (
                made.shape.num_elements() or 0) > _LARGEST_READ:
            return {}
        value = _common_value(op.get_attr("value"))
        return {} if value is None else {"value": value}
    return {key: op.get_attr(key) for key in _ATTRS.get(op.type, ())}


def _common_value(proto) -> float | None:
    count = 1
    for dimension in proto.tensor_shape.dim:
        count *= dimension.size
    repeated = len(proto.tensor_content) == 0  # the last value given stands for the rest
    if not count or (count > _LARGEST_COMPARED and not repeated):
        return None
    if repeated and count > _LARGEST_COMPARED:
        proto = type(proto)(dtype=proto.dtype, float_val=proto.float_val,
                            half_val=proto.half_val, double_val=proto.double_val,
                            bool_val=proto.bool_val)
        given = max(len(proto.float_val), len(proto.half_val), len(proto.double_val),
                    len(proto.bool_val))
        if given > 1:
            return None
    values = tf.make_ndarray(proto).astype(float).ravel()
    return float(values[0]) if len(values) and (values == values[0]).all() else None


def _outputs(op: tf.Operation, lists: Mapping[int, int]) -> tuple[Tensor, ...]:
    return tuple(_tensor(tensor, lists.get(slot, 0)) for slot, tensor in enumerate(op.outputs))


def _tensor(tensor: tf.Tensor, of_list: int = 0) -> Tensor:
    dtype = tensor.dtype.base_dtype
    shape = tuple(tensor.shape.as_list()) if tensor.shape.rank is not None else None
    if dtype in (tf.resource, tf.variant, tf.string):
        return Tensor(dtype.name, shape, of_list)
    if shape is None or None in shape:
        return Tensor(dtype.name, shape, None)
    count = 1
    for dimension in shape:
        count *= dimension
    return Tensor(dtype.name, shape, count * dtype.size)


def _sorted(operations: Sequence[tf.Operation]) -> list[tf.Operation]:
    """Operations in a topological order that stays as close to creation order as it can."""
    index = {op.name: i for i, op in enumerate(operations)}
    sources = [
        {index[t.op.name] for t in op.inputs} | {index[c.name] for c in op.control_inputs}
        for op in operations
    ]
    if all(not s or max(s) < i for i, s in enumerate(sources)):
        return list(operations)
    waiting = [len(s) for s in sources]
    readers: list[list[int]] = [[] for _ in operations]
    for i, entry in enumerate(sources):
        for source in sorted(entry):
            readers[source].append(i)
    ready = [i for i, count in enumerate(waiting) if not count]
    order = []
    while ready:
        current = heapq.heappop(ready)
        order.append(operations[current])
        for reader in readers[current]:
            waiting[reader] -= 1
            if not waiting[reader]:
                heapq.heappush(ready, reader)
    if len(order) != len(operations):
        stuck = next(op.name for i, op in enumerate(operations) if waiting[i])
        raise CaptureError(f"capture: the graph has a cycle through {stuck!r} (a TF1 while loop?); "
                           "tfckpt reads while loops only in their functional form")
    return order
