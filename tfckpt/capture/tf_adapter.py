"""Every private TensorFlow API that tfckpt touches, in one place.

Nothing else in the package reaches into `tensorflow.python` or calls an underscored method of a
TensorFlow object. `tests/tf/test_adapter.py` exercises each function here, so that a TensorFlow
version that moved one of them says so.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import tensorflow as tf
from tensorflow.python.eager.polymorphic_function import polymorphic_function, transform
from tensorflow.python.framework.func_graph import FuncGraph
from tensorflow.python.ops import control_flow_util, handle_data_util


def install_trace_hook(callback: Callable[[FuncGraph], None]) -> None:
    """Has `callback` called with every traced FuncGraph, before its FunctionDef is made.

    Idempotent for the same callback. The list of hooks is global to the process: the callback
    must return at once for a graph that is not its own.
    """
    if callback not in transform.FUNC_GRAPH_TRANSFORMS:
        transform.FUNC_GRAPH_TRANSFORMS.append(callback)


def is_tf_function(fn: object) -> bool:
    """Whether `fn` is what `tf.function` returns."""
    return isinstance(fn, polymorphic_function.Function)


def clone_function(fn, python_function: Callable):
    """The same `tf.function` (signature, jit_compile, autograph ...) over another body."""
    return fn._clone(python_function)


def compiles_with_xla(fn) -> bool:
    """Whether a `tf.function` was made with `jit_compile=True`.

    Its context is entered by calls only: `get_concrete_function` traces outside of it.
    """
    return bool(getattr(fn, "_jit_compile", None))


def tracing_graph() -> FuncGraph | None:
    """The FuncGraph into which ops are being traced now, or None when executing eagerly."""
    if tf.executing_eagerly():
        return None
    graph = tf.compat.v1.get_default_graph()
    return graph if isinstance(graph, FuncGraph) else None


def in_xla(graph: tf.Graph) -> bool:
    """Whether the graph is traced for compilation by XLA (`jit_compile=True`)."""
    return bool(control_flow_util.GraphOrParentsInXlaContext(graph))


def is_stateful(op: tf.Operation) -> bool:
    """What the op's registration says about state."""
    return bool(op._is_stateful)


def handle_shape(resource: tf.Tensor) -> tuple[tf.TensorShape, tf.DType] | None:
    """Shape and dtype of the variable behind a resource tensor, where TensorFlow knows them."""
    if hasattr(resource, "numpy"):  # an eager handle, as a concrete function captures it
        data = getattr(resource, "_handle_data", None)
    else:
        data = handle_data_util.get_resource_handle_data(resource)
    if data is None or not data.is_set or len(data.shape_and_type) != 1:
        return None
    entry = data.shape_and_type[0]
    return tf.TensorShape(entry.shape), tf.dtypes.as_dtype(entry.dtype)


def control_outputs(graph: tf.Graph) -> list[tf.Operation]:
    """Ops that must run before a FuncGraph returns."""
    return list(getattr(graph, "control_outputs", ()))


def create_op(graph: tf.Graph, op_type: str, inputs: Sequence[tf.Tensor],
              dtypes: Sequence[tf.DType], name: str, attrs: dict, device: str) -> tf.Operation:
    """Creates one op in `graph` with exactly these inputs and attributes, on `device`."""
    with graph.as_default(), tf.device(None):
        op = graph._create_op_internal(
            op_type, list(inputs), dtypes=list(dtypes), name=name, attrs=attrs,
            compute_device=False)
    if device:
        op._set_device(device)
    return op


def node_attrs(op: tf.Operation) -> dict:
    """The op's NodeDef attributes by name, as AttrValue protos."""
    return dict(op.node_def.attr)


def set_attr(op: tf.Operation, name: str, value: tf.compat.v1.AttrValue) -> None:
    """Sets one NodeDef attribute of a live op."""
    op._set_attr(name, value)


def clear_attr(op: tf.Operation, name: str) -> None:
    """Removes one NodeDef attribute of a live op."""
    op._clear_attr(name)


def update_input(op: tf.Operation, index: int, tensor: tf.Tensor) -> None:
    """Makes input `index` of a live op read `tensor`."""
    op._update_input(index, tensor)


def add_control_input(op: tf.Operation, control: tf.Operation) -> None:
    """Makes a live op wait for another."""
    op._add_control_input(control)


def replace_control_inputs(op: tf.Operation, controls: Sequence[tf.Operation]) -> None:
    """Makes a live op wait for exactly these ops."""
    op._remove_all_control_inputs()
    if controls:
        op._add_control_inputs(list(controls))


def record_executed_graphs(run: Callable[[], object]) -> list:
    """Runs a callable; returns the GraphDefs of the partitions of the largest function run."""
    from tensorflow.python.eager import context as eager_context

    ctx = eager_context.context()
    ctx.ensure_initialized()
    ctx.enable_run_metadata()
    ctx.export_run_metadata()  # drops what was collected before: disabling does not stop it
    try:
        run()
        metadata = ctx.export_run_metadata()
    finally:
        ctx.disable_run_metadata()
    # helper functions (datasets, initialisers) are recorded beside the step, which is the largest
    largest = max(metadata.function_graphs, default=None,
                  key=lambda f: sum(len(p.node) for p in f.partition_graphs))
    return list(largest.partition_graphs) if largest is not None else []
