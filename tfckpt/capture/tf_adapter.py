"""Every private TensorFlow API that tfckpt touches, in one place.

Nothing else in the package reaches into `tensorflow.python` or calls an underscored method of a
TensorFlow object. `tests/tf/test_adapter.py` exercises each function here, so that a TensorFlow
version that moved one of them says so.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import itertools
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.core.framework import attr_value_pb2
from tensorflow.core.framework.function_pb2 import FunctionDef
from tensorflow.python import pywrap_tfe
from tensorflow.python.autograph.core import ag_ctx
from tensorflow.python.client import pywrap_tf_session as c_api
from tensorflow.python.eager import cancellation, record
from tensorflow.python.eager import context as eager_context
from tensorflow.python.eager.polymorphic_function import (
    atomic_function,
    concrete_function,
    function_type_utils,
    polymorphic_function,
)
from tensorflow.python.framework import (
    c_api_util,
    function_def_to_graph,
    op_callbacks,
    op_def_registry,
    smart_cond,
)
from tensorflow.python.framework.func_graph import FuncGraph
from tensorflow.python.ops import (
    cond_v2,
    control_flow_util,
    control_flow_v2_func_graphs,
    handle_data_util,
    while_v2,
)
from tensorflow.python.util import _pywrap_util_port

from tfckpt.ops import Access, Calls, registry
from tfckpt.ops.names import CASE, CONST, ENSURE_SHAPE, STATELESS_CASE, VAR_IS_INITIALIZED

try:
    from tensorflow.python.eager.polymorphic_function.transform import FUNC_GRAPH_TRANSFORMS
except ImportError:  # steps are imported then: see `hook_problem`
    FUNC_GRAPH_TRANSFORMS = None

TESTED = ((2, 18), (2, 21))
"""The first and the last TensorFlow version of `make test-matrix`."""


def hook_problem() -> str:
    """Return why the trace hook cannot be relied on in this TensorFlow; "" where it can."""
    if FUNC_GRAPH_TRANSFORMS is None:
        return f"TensorFlow {tf.__version__} has no trace hook where tfckpt knows it"
    if not TESTED[0] <= tuple(map(int, tf.__version__.split(".")[:2])) <= TESTED[1]:
        first, last = (".".join(map(str, version)) for version in TESTED)
        return f"TensorFlow {tf.__version__} is not one that was tested ({first} to {last})"
    return ""


def install_trace_hook(callback: Callable[[FuncGraph], None]) -> None:
    """Have `callback` called with every traced FuncGraph, before its FunctionDef is made.

    Idempotent for the same callback. The list of hooks is global to the process: the callback
    must return at once for a graph that is not its own. Only where there is no `hook_problem`.

    Args:
      callback: takes the FuncGraph, which it may change; what it returns is not used.
    """
    if callback not in FUNC_GRAPH_TRANSFORMS:
        FUNC_GRAPH_TRANSFORMS.append(callback)


def before_gradients(graph: FuncGraph, callback: Callable[[], None]) -> None:
    """Have `callback` called once before gradients of a traced function are made from its graph.

    They are where a tape that is outside of the function watches a call.

    Args:
      graph: of the traced function.
      callback: takes nothing; replaces one that was set before and has not been called.
    """
    _watch_gradients()
    setattr(graph, _BEFORE_GRADIENTS, callback)


@functools.cache
def _watch_gradients() -> None:
    for kind, method in ((concrete_function._DelayedRewriteGradientFunctions,
                          "_construct_forward_backward"),
                         (concrete_function._FirstOrderTapeGradientFunctions,
                          "_forward_and_backward_functions"),
                         (concrete_function._HigherOrderTapeGradientFunctions,
                          "_forward_and_backward_functions")):
        setattr(kind, method, _watched(getattr(kind, method)))


def _watched(make: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(make)
    def called(self: Any, *args: Any, **kwargs: Any) -> Any:
        callback = getattr(self._func_graph, _BEFORE_GRADIENTS, None)
        if callback is not None:
            setattr(self._func_graph, _BEFORE_GRADIENTS, None)
            callback()
        return make(self, *args, **kwargs)

    return called


_SHAPED = "tfckpt_shaped_"
_BEFORE_GRADIENTS = "_tfckpt_before_gradients"


def is_tf_function(fn: object) -> bool:
    """Return whether `fn` is what `tf.function` returns.

    Args:
      fn: any object; a concrete function, or what wraps a `tf.function`, is none.
    """
    return issubclass(type(fn), polymorphic_function.Function)  # what looks like one is none


def clone_function(fn: polymorphic_function.Function, python_function: Callable[..., Any],
                   jit_compile: bool | None = None) -> polymorphic_function.Function:
    """Return the same `tf.function` (signature, autograph ...) over another body.

    Args:
      fn: the `tf.function`.
      python_function: what is traced in place of its body.
      jit_compile: whether XLA compiles it; None where that is to be as it was.
    """
    made = fn._clone(python_function)
    if jit_compile is not None:
        made._jit_compile = jit_compile
    return made


TfFunction: Any = polymorphic_function.Function
"""The class of what `tf.function` returns."""


def bind(fn: polymorphic_function.Function, instance: object, kind: Any) -> Any:
    """Return a `tf.function` as the method of an object, the same one each time.

    Args:
      fn: the function, whose first argument is the object.
      instance: the object.
      kind: a class derived from `TfFunction` without attributes that its `__init__` would set; what
        is returned is made to be of it.
    """
    found = fn.__get__(instance, type(instance))
    found.__class__ = kind
    return found


_CALL = polymorphic_function.Function.__call__


def watch_calls(watcher: Callable[[Any, Callable[[], Any]], Any] | None) -> None:
    """Have `watcher` run every call of a `tf.function` of this process; None ends it.

    Args:
      watcher: takes the function and what runs its call, and returns what that returns. Calls by
        which other functions are traced come too.
    """
    if watcher is None:
        polymorphic_function.Function.__call__ = _CALL
        return

    @functools.wraps(_CALL)
    def watched(self: Any, *args: Any, **kwargs: Any) -> Any:
        return watcher(self, functools.partial(_CALL, self, *args, **kwargs))

    polymorphic_function.Function.__call__ = watched


def compiles_with_xla(fn: object) -> bool:
    """Return whether a `tf.function` was made with `jit_compile=True`.

    Its context is entered by calls only: `get_concrete_function` traces outside of it.

    Args:
      fn: a `tf.function`, or what hands on its attributes; of anything else the answer is no.
    """
    return bool(getattr(fn, "_jit_compile", None))


def optimized_hlo(fn: polymorphic_function.Function, args: Sequence[Any], kwargs: Mapping[str, Any]
                  ) -> Any:
    """Return what XLA made of a `tf.function` for these arguments, as an HloProto.

    It is compiled for this; nothing runs.

    Args:
      fn: a `tf.function` with `jit_compile=True`.
      args: positional arguments of one call; its dtypes and shapes are compiled for.
      kwargs: keyword arguments of that call.

    Raises:
      ValueError: the function is not made for XLA, or an argument's shape is unknown.
    """
    from tensorflow.compiler.xla.service import hlo_pb2

    stages = fn.experimental_get_compiler_ir(*args, **kwargs)
    return hlo_pb2.HloProto.FromString(stages(stage="optimized_hlo_proto_serialized"))


def lowered_hlo(fn: polymorphic_function.Function, args: Sequence[Any], kwargs: Mapping[str, Any]
                ) -> bytes:
    """Return what XLA is given of a `tf.function`, a serialized module; as `optimized_hlo`.

    Args:
      fn: a `tf.function` with `jit_compile=True`.
      args: positional arguments of one call; its dtypes and shapes are compiled for.
      kwargs: keyword arguments of that call.

    Raises:
      ValueError: the function is not made for XLA, or an argument's shape is unknown.
    """
    return fn.experimental_get_compiler_ir(*args, **kwargs)(stage="hlo_serialized")


def compiled_graph(graph: FuncGraph, definition: tf.compat.v1.GraphDef,
                   shapes: Sequence[tf.TensorShape], device: str) -> Any:
    """Return what XLA would make of a traced graph on a device, as an HloProto; nothing runs.

    The graph may be one whose FunctionDef is not made yet. It is left as it is.

    Args:
      graph: a FuncGraph whose trace is complete.
      definition: what is compiled: the graph's own, or an edited one with its inputs and outputs.
      shapes: of each of the graph's inputs, fully defined but for resources.
      device: name of the device that it is compiled for.

    Raises:
      ValueError, tf.errors.OpError: it cannot be compiled: a variable is not known outside of the
        graph, an input is no plain tensor, or XLA refuses it.
    """
    from tensorflow.compiler.xla.service import hlo_pb2

    return hlo_pb2.HloProto.FromString(_compiler_ir(graph, definition, shapes, device,
                                                    "optimized_hlo_proto_serialized"))


def lowered_graph(graph: FuncGraph, definition: tf.compat.v1.GraphDef,
                  shapes: Sequence[tf.TensorShape], device: str) -> bytes:
    """Return what XLA is given of a traced graph, a serialized HLO module; as `compiled_graph`.

    Args:
      graph: a FuncGraph whose trace is complete.
      definition: what is compiled: the graph's own, or an edited one with its inputs and outputs.
      shapes: of each of the graph's inputs, fully defined but for resources.
      device: name of the device that it is compiled for.

    Raises:
      ValueError, tf.errors.OpError: as `compiled_graph`.
    """
    return _compiler_ir(graph, definition, shapes, device, "hlo_serialized")


def _compiler_ir(graph: FuncGraph, definition: tf.compat.v1.GraphDef,
                 shapes: Sequence[tf.TensorShape], device: str, stage: str) -> bytes:
    known = {id(inside): outside for outside, inside in graph.captures
             if isinstance(outside, tf.__internal__.EagerTensor)}
    fed = [i for i, t in enumerate(graph.inputs) if id(t) not in known]
    bad = [t.name for t in graph.inputs
           if id(t) not in known and t.dtype in (tf.resource, tf.variant)]
    if bad:
        raise ValueError(f"the value of {bad[0]} is not known outside of the graph")
    if _has_cases(definition) and not all(graph.inputs[i].shape.is_fully_defined() for i in fed):
        raise ValueError("of a step with open shapes that chooses among branches by number, XLA "
                         "reads memory that it has not written")
    captured = [i for i, t in enumerate(graph.inputs) if id(t) in known]
    copy = _copy(graph, definition, [*fed, *captured])
    specs = [tf.TensorSpec(shapes[i], graph.inputs[i].dtype) for i in fed]
    with tf.init_scope():
        if not tf.executing_eagerly():
            raise ValueError("the graph is not traced for a call")
        context = eager_context.context()
        name = f"__tfckpt_asked_{next(_asked)}"
        function = atomic_function.from_func_graph(name, copy, {})
        found = context.get_compiler_ir(
            device_name=device, platform_name=None, function_name=name, flat_args=specs,
            captured_inputs=[known[id(graph.inputs[i])] for i in captured], stage=stage)
        del function  # TensorFlow forgets it
    return found


def _has_cases(definition: tf.compat.v1.GraphDef) -> bool:
    """Return whether a graph chooses among branches by number, in its functions too.

    Where such an op reads what has an open shape, XLA ends the process or goes on by luck, when it
    is asked and when it runs the step (TensorFlow 2.21).
    """
    return any(node.op in (CASE, STATELESS_CASE) for node in nodes_with_bodies(definition))


def nodes_with_bodies(definition: tf.compat.v1.GraphDef) -> Iterator[tf.compat.v1.NodeDef]:
    """Yield the nodes of a graph, then those of its functions.

    Args:
      definition: the graph; who changes a node that is yielded changes it there.
    """
    yield from definition.node
    for function in definition.library.function:
        yield from function.node_def


_asked = itertools.count()
ADDED = "__tfckpt_"
"""Before the names of functions that edits add; what follows says what is in them."""


def with_definition(graph: FuncGraph, definition: tf.compat.v1.GraphDef) -> FuncGraph:
    """Return a graph of its own with the ops of a definition and another's inputs and outputs.

    Args:
      graph: a FuncGraph whose inputs and outputs are taken, by name; not changed.
      definition: it has ops of these names; not changed.

    Raises:
      ValueError: an op type or a called function is unknown, or the definition is malformed.
    """
    return _copy(graph, definition, range(len(graph.inputs)))


def _copy(graph: FuncGraph, definition: tf.compat.v1.GraphDef, order: Sequence[int]) -> FuncGraph:
    """Return a graph of its own with the inputs of another in a given order."""
    copy = FuncGraph("asked")
    with copy.as_default():
        tf.graph_util.import_graph_def(definition, name="")
    copy.inputs = [copy.get_tensor_by_name(graph.inputs[i].name) for i in order]
    copy.outputs = [copy.get_tensor_by_name(t.name) for t in graph.outputs]
    made = {op.name: op for op in copy.get_operations()}
    copy.control_outputs = [made[op.name] for op in graph.control_outputs if op.name in made]
    ctx = eager_context.context()
    for function in definition.library.function:
        name = function.signature.name
        if name.startswith(ADDED) and not ctx.has_function(name):
            ctx.add_function_def(function)
    return copy


def is_traced_in_control_flow(graph: FuncGraph) -> bool:
    """Return whether a function was traced where a loop or a branch of another one calls it.

    Args:
      graph: a FuncGraph.
    """
    around = graph.outer_graph
    while isinstance(around, FuncGraph):
        if isinstance(around, control_flow_v2_func_graphs.ControlFlowFuncGraph):
            return True
        around = around.outer_graph
    return False


def tracing_graph() -> FuncGraph | None:
    """Return the FuncGraph into which ops are being traced now, or None when executing eagerly."""
    if tf.executing_eagerly():
        return None
    graph = tf.compat.v1.get_default_graph()
    return graph if isinstance(graph, FuncGraph) else None


def in_xla(graph: tf.Graph) -> bool:
    """Return whether the graph is traced for compilation by XLA (`jit_compile=True`).

    Args:
      graph: of a function's body or not; a graph around it that is traced so counts as well.
    """
    return bool(control_flow_util.GraphOrParentsInXlaContext(graph))


def made_by_a_gradient(graph: tf.Graph) -> bool:
    """Return whether a graph is what the gradient of a loop or branch consists of.

    That is its bodies, and what it makes of the plain ones so that these keep what it reads. All
    have ops of gradients, and none is a step. Nor is a loop's condition, which counts as well.

    Args:
      graph: of a function's body or not.
    """
    derived = (control_flow_v2_func_graphs.WhileCondFuncGraph,
               while_v2._WhileBodyGradFuncGraph, cond_v2._CondGradFuncGraph)
    return isinstance(graph, derived) or graph.name.endswith("_rewritten") and isinstance(
        graph, control_flow_v2_func_graphs.ControlFlowFuncGraph)


def autograph_converts() -> bool:
    """Return whether autograph would convert a function that is called here."""
    return ag_ctx.control_status_ctx().status == ag_ctx.Status.ENABLED


def op_definition(op_type: str) -> Any:
    """Return the registered OpDef of an op type; None where TensorFlow knows no such op.

    Args:
      op_type: TensorFlow op type.
    """
    return op_def_registry.get(op_type)


def function_graph(function: Any, graph_def: tf.compat.v1.GraphDef) -> FuncGraph:
    """Return the body of a FunctionDef as a FuncGraph; op names are those of its nodes.

    Its arguments are placeholders, its outputs and control outputs those of the function.

    Args:
      function: a FunctionDef.
      graph_def: has the library with the functions that it calls, and the version it was
        written for.

    Raises:
      ValueError: an op type or a called function is unknown, or the definition is malformed.
    """
    around = tf.compat.v1.GraphDef(library=graph_def.library, versions=graph_def.versions)
    outer = tf.Graph()
    with outer.as_default():
        tf.graph_util.import_graph_def(around, name="")
        return function_def_to_graph.function_def_to_graph(function)


def find_function(graph: tf.Graph, name: str) -> Any:
    """Return the FunctionDef that a graph calls by a name; None where there is none.

    Args:
      graph: that calls it; graphs around it, and then the process, are asked as well.
      name: of the function, as an attribute of the op has it.
    """
    function = _function(graph, name)
    if function is not None:
        return _definition(function)
    ctx = eager_context.context()
    return ctx.get_function_def(name) if ctx.has_function(name) else None


def _definition(function: Any) -> Any:
    """Return the FunctionDef of a function of a graph.

    TensorFlow would also register one that was imported, and fail where the process knows another
    of its name, as one that has saved a model does of each function in the file.
    """
    if isinstance(function, atomic_function.AtomicFunction) or function._c_func is None:
        return function.cached_definition
    with c_api_util.tf_buffer() as buffer, function._c_func.get() as handle:
        c_api.TF_FunctionToFunctionDef(handle, buffer)
        return FunctionDef.FromString(c_api.TF_GetBuffer(buffer))


def _function(graph: Any, name: str) -> Any:
    """Return what a graph, or one around it, knows by a name; None where none does."""
    while graph is not None:
        function = graph._get_function(name)
        if function is not None:
            return function
        graph = getattr(graph, "outer_graph", None)
    return None


def called_function(call: tf.Operation) -> str:
    """Return the name of the function that a PartitionedCall or StatefulPartitionedCall calls.

    Args:
      call: an op of one of these types, in a live graph.
    """
    return str(call.get_attr("f").name)


def called_functions(op: tf.Operation) -> list[str]:
    """Return the names of all functions that an op calls.

    These are branches, condition and body, or a call's own. What TensorFlow has made by `Defun`,
    such as the steps of a CTC loss, is called by an op of its name.

    Args:
      op: of any type; none are returned where it calls none.
    """
    if op_def_registry.get(op.type) is None and _function(op.graph, op.type) is not None:
        return [op.type]
    return [name for names in functions_of(op).values() for name in names]


def called_graph(call: tf.Operation, attr: str,
                 shapes: Sequence[tf.TensorShape] | None = None,
                 entries: Mapping[int, tf.TensorShape] | None = None) -> FuncGraph:
    """Return the graph of a function that an op calls.

    Args:
      call: the op.
      attr: of the op, which names the function ("body" of a loop).
      shapes: what the arguments are given; default what they were traced with. With shapes, ops
        keep their names; variables among the arguments are those that the op is given.
      entries: with shapes, those of the entries of arguments that are lists, by argument.
    """
    return graph_called(call, call.get_attr(attr).name, shapes, entries)


def graph_called(call: tf.Operation, name: str,
                 shapes: Sequence[tf.TensorShape] | None = None,
                 entries: Mapping[int, tf.TensorShape] | None = None) -> FuncGraph:
    """Return the same by the function's name, one of `called_functions(call)`.

    Args:
      call: the op; the function is looked up in its graph.
      name: of the function, as `called_functions` returns it.
      shapes: what the arguments are given; default what they were traced with. With shapes, ops
        keep their names; variables among the arguments are those that the op is given.
      entries: with shapes, those of the entries of arguments that are lists, by argument.

    Returns:
      The same graph for the same call and shapes: it is not to be changed.
    """
    graph: Any = call.graph
    function = _function(graph, name)
    if shapes is None and isinstance(function, atomic_function.AtomicFunction):
        return function.graph
    known: dict[tuple, FuncGraph] = getattr(graph, _CALLED, {})
    key = (call.name, name, tuple(tensor.name for tensor in call.inputs),
           None if shapes is None else tuple(map(_dimensions, shapes)),
           tuple((number, _dimensions(shape)) for number, shape in (entries or {}).items()))
    if key not in known:
        known[key] = _graph_called(call, name, shapes, entries or {})
        setattr(graph, _CALLED, known)
    return known[key]


_CALLED = "_tfckpt_called"
"""Attribute of a graph: what `graph_called` has returned. The same is asked for again and again,
and to make a graph of a function that Grappler or a file has takes its time."""


def _dimensions(shape: tf.TensorShape) -> tuple[int | None, ...] | None:
    return None if shape.rank is None else tuple(shape.as_list())


def _graph_called(call: tf.Operation, name: str, shapes: Sequence[tf.TensorShape] | None,
                  entries: Mapping[int, tf.TensorShape]) -> FuncGraph:
    """Return a graph made of a function's definition, as `graph_called`."""
    with call.graph.as_default():
        definition = find_function(call.graph, name)
        given = type(definition)()
        given.CopyFrom(definition)
        for argument in given.arg_attr.values():  # what was traced would go before what is given
            argument.attr.pop("_output_shapes", None)
        variables = _tell_variables(given, call)
        if shapes is not None:
            say_shapes(given.node_def, {
                f"{node.name}:value:0": variables[node.input[0]] for node in given.node_def
                if registry.record(node.op).access is Access.VALUE and node.input[0] in variables})
        popped = {}
        for number, shape in entries.items():
            popped.update(_tell_entries(given, given.signature.input_arg[number].name, shape))
        made = function_def_to_graph.function_def_to_graph(given, input_shapes=shapes)
        for name, shape in popped.items():
            made.get_operation_by_name(name).outputs[1].set_shape(shape)
        return made


def function_copied(call: tf.Operation, name: str) -> FuncGraph:
    """Return a graph of its own of a function that an op calls; its ops keep their names.

    It knows the functions that it calls by itself, as a traced graph does.

    Args:
      call: the op; the function is looked up in its graph.
      name: of the function, as `called_functions` returns it.
    """
    graph: Any = call.graph
    definition = find_function(graph, name)
    given = type(definition)()
    given.CopyFrom(definition)
    _tell_variables(given, call)
    with graph.as_default():
        made = function_def_to_graph.function_def_to_graph(given)
    setattr(made, _ATTRIBUTES, dict(definition.attr))
    pending = list(definition.node_def)
    while pending:
        for called in functions_named(pending.pop()):
            function = None if made._is_function(called) else _function(graph, called)
            if function is not None:
                made._add_function(function)
                pending += _definition(function).node_def
    return made


def define_function(body: FuncGraph, graph: tf.Graph, wanted: str) -> str:
    """Make a function of a graph that `function_copied` returned, and return its name.

    Args:
      body: the graph.
      graph: that may call it from now on.
      wanted: the name; followed by a number where the process has a function of that name.

    Raises:
      ValueError: TensorFlow refuses the graph.
    """
    ctx = eager_context.context()
    names = itertools.chain([wanted], (f"{wanted}_{n}" for n in itertools.count(1)))
    name = next(name for name in names if not ctx.has_function(name))
    graph._add_function_recursive(atomic_function.from_func_graph(
        name, body, getattr(body, _ATTRIBUTES)))
    return name


_ATTRIBUTES = "_tfckpt_attributes"


def set_functions(op: tf.Operation, attr: str, names: Sequence[str]) -> None:
    """Have an op call other functions.

    Args:
      op: of a graph that knows them; they take and return what those do that it calls.
      attr: of the op, which names the functions.
      names: one, or as many as it calls by this attribute.
    """
    value = node_attrs(op)[attr]
    called = value.list.func or [value.func]
    for function, name in zip(called, names, strict=True):
        function.name = name
    op._set_attr(attr, value)


def set_attribute(op: tf.Operation, attr: str, value: Any) -> None:
    """Set an attribute of an op, or take it away.

    Args:
      op: of a live graph.
      attr: of the op's definition, or any name that begins with "_".
      value: an AttrValue; None to take the attribute away.
    """
    if value is None:
        op._clear_attr(attr)
    else:
        op._set_attr(attr, value)


def integers(values: Sequence[int]) -> Any:
    """Return a list of integers as the value of an attribute.

    Args:
      values: the integers.
    """
    return attr_value_pb2.AttrValue(list=attr_value_pb2.AttrValue.ListValue(i=values))


def integer(value: int) -> Any:
    """Return an integer as the value of an attribute.

    Args:
      value: the integer.
    """
    return attr_value_pb2.AttrValue(i=value)


def functions_of(op: tf.Operation) -> dict[str, list[str]]:
    """Return the names of the functions that an op calls by the attributes that name them.

    Args:
      op: of any type; nothing is returned where it calls none.
    """
    found = {}
    for attr in _function_attrs(op.type):
        value = op.get_attr(attr)
        found[attr] = [f.name for f in value] if isinstance(value, list) else [value.name]
    return found


def make_constant(node: tf.compat.v1.NodeDef, value: np.ndarray) -> None:
    """Make a NodeDef a constant, under its name.

    Args:
      node: changed in place.
      value: of the constant.
    """
    proto = tf.make_tensor_proto(value)
    node.op = CONST
    node.ClearField("attr")
    node.ClearField("input")
    node.attr["dtype"].type = proto.dtype
    node.attr["value"].tensor.CopyFrom(proto)


def handed(call: tf.Operation, count: int) -> list[tf.Tensor | None]:
    """Return what an op hands to a function that it calls, argument by argument.

    Args:
      call: the op.
      count: arguments of the function.

    Returns:
      None for what a dataset hands over: the parts of an element.
    """
    known = registry.record(call.type)
    given = list(call.inputs[known.first_argument:])
    carried = len(call.get_attr("Tstate")) if known.calls is Calls.DATASET else len(given)
    return [*given[:carried], *[None] * (count - len(given)), *given[carried:]]


def _tell_variables(function: Any, call: tf.Operation) -> dict[str, tf.TensorSpec]:
    """Have a FunctionDef say of what shape the variables are that it is given; return it too."""
    arguments, known = function.signature.input_arg, {}
    for argument, tensor in zip(arguments, handed(call, len(arguments)), strict=True):
        handle = (handle_shape(tensor) if tensor is not None and tensor.dtype == tf.resource
                  else None)
        if handle is not None:
            known[argument.name] = tf.TensorSpec(*handle)
            del argument.handle_data[:]
            argument.handle_data.add(shape=handle[0].as_proto(), dtype=handle[1].as_datatype_enum)
    return known


def _tell_entries(function: Any, argument: str, shape: tf.TensorShape
                  ) -> dict[str, tf.TensorShape]:
    """Have a FunctionDef say what shape the entries of a list among its arguments have.

    TensorFlow's inference looks at what an op that leaves the entry in the list is told, not one
    that removes it: what reads that reads it through an op that says the shape.

    Returns:
      The shape, by the names of the ops that remove an entry.
    """
    reads = [(node, position) for node in function.node_def if node.input[:1] == [argument]
             and (position := registry.record(node.op).lists.shape) is not None]
    if not reads:
        return {}
    constant = add_shape(function.node_def, f"{argument}_entry_shape", shape)
    for node, position in reads:
        node.input[position] = f"{constant}:output:0"
    pops = [node for node, _ in reads if registry.record(node.op).lists.removes]
    for node in pops:
        dtype = tf.dtypes.as_dtype(node.attr["element_dtype"].type)
        say_shapes(function.node_def, {f"{node.name}:tensor:0": tf.TensorSpec(shape, dtype)})
    return {node.name: shape for node in pops}


def say_shapes(nodes: Any, shapes: Mapping[str, tf.TensorSpec]) -> None:
    """Have nodes read some tensors through ops that say their shapes.

    Scalars are left alone: others learn nothing of theirs, and a list does not take one for the
    shape of its entries whose value TensorFlow does not know.

    Args:
      nodes: the field of a GraphDef or FunctionDef with its nodes; changed in place.
      shapes: with the dtypes, by the name of the tensor: as a FunctionDef has it
        ("op:result:number"), or a GraphDef ("op:number").
    """
    shapes = {tensor: spec for tensor, spec in shapes.items() if spec.shape.rank != 0}
    said: dict[str, str] = {}
    for tensor in shapes:
        op, *_, number = parts = tensor.split(":")
        name = f"{op}/{_SHAPED}{number}"
        said[tensor] = name if len(parts) == 2 else f"{name}:output:0"
        if parts[1:] == ["0"]:
            said[op] = name
    for node in nodes:
        for i, read in enumerate(node.input):
            node.input[i] = said.get(read, read)
    for tensor, spec in shapes.items():
        node = nodes.add(name=said[tensor].partition(":")[0], op=ENSURE_SHAPE, input=[tensor])
        node.attr["T"].type = spec.dtype.as_datatype_enum
        node.attr["shape"].shape.CopyFrom(spec.shape.as_proto())


def add_shape(nodes: Any, name: str, shape: tf.TensorShape) -> str:
    """Add a constant with the dimensions of a shape to NodeDefs, and return its name.

    Args:
      nodes: the field of a GraphDef or FunctionDef with its nodes; changed in place.
      name: of the constant, which no other node has.
      shape: fully defined.
    """
    nodes.add(name=name)
    make_constant(nodes[-1], np.array(shape.as_list(), np.int32))
    return name


def flat_function(graph: tf.Graph, function: Any) -> tuple[tf.compat.v1.GraphDef, dict[str, str]]:
    """Return a FunctionDef's nodes as a GraphDef, and what its tensors are called there.

    The first nodes are placeholders for the arguments. `graph` knows the functions that it calls.

    Args:
      graph: the caller's, which knows the functions that the body calls.
      function: the FunctionDef; not changed.

    Returns:
      The GraphDef, and the names there by those in the FunctionDef.

    Raises:
      ValueError: an op type is unknown, or the definition is malformed.
    """
    with graph.as_default():
        return function_def_to_graph.function_def_to_graph_def(function)


def make_importable(node: tf.compat.v1.NodeDef) -> None:
    """Change a node that may not be imported into what oneDNN's layout pass makes of it.

    Grappler fuses convolutions in bfloat16, which the fused op may not have until that pass has
    renamed it, just before it runs.

    Args:
      node: of any type; left as it is where the type may have its attribute T, or nothing may.
    """
    native = f"_MklNative{node.op.removeprefix('_')}"
    if not _takes_type(node.op, node) and _takes_type(native, node):
        node.op = native
        node.attr["_kernel"].s = b"MklNameChangeOp"


def _takes_type(op_type: str, node: tf.compat.v1.NodeDef) -> bool:
    """Return whether an op type is known that may have the attribute T of a node."""
    known = op_definition(op_type)
    return known is not None and all(
        node.attr["T"].type in attr.allowed_values.list.type for attr in known.attr
        if attr.name == "T" and "T" in node.attr and attr.HasField("allowed_values"))


def import_nodes(graph: tf.Graph, definition: tf.compat.v1.GraphDef,
                 inputs: Mapping[str, tf.Tensor], scope: str) -> list[tf.Operation]:
    """Add nodes to a graph.

    Args:
      graph: the graph.
      definition: the nodes; those that `inputs` names are missing.
      inputs: tensors of the graph, by the op whose only output they stand for.
      scope: name scope, with a slash at its end.

    Returns:
      The new ops, in the order of the nodes.
    """
    read = {name.partition(":")[0] for node in definition.node for name in node.input}
    with graph.as_default(), tf.device(None), tf.control_dependencies(None):
        return list(tf.graph_util.import_graph_def(
            definition, {f"{name}:0": inputs[name] for name in sorted(read & inputs.keys())},
            [node.name for node in definition.node], name=scope))


def add_functions(graph: tf.Graph, functions: Sequence[bytes]) -> None:
    """Add FunctionDefs, serialised, to those that a graph knows and may call; no op changes.

    Args:
      graph: the graph.
      functions: each after those among them that it calls.
    """
    ctx = eager_context.context()
    ctx.ensure_initialized()
    with graph.as_default():
        for text in functions:
            definition = FunctionDef.FromString(text)
            name = definition.signature.name
            if _function(graph, name) is not None:
                continue
            body = function_def_to_graph.function_def_to_graph(definition)
            if not ctx.has_function(name):
                ctx.add_function_def(definition)
            graph._add_function_recursive(atomic_function.AtomicFunction(
                name, ctx, function_type_utils.derive_from_graph(body),
                list(graph._functions.values()), cached_graph=body))


def free_scope(graph: tf.Graph, scope: str) -> str:
    """Return a name scope that no op is in yet, with a slash at its end.

    An op may have its name.

    Args:
      graph: FuncGraph or imported graph; it takes the scope for used from now on.
      scope: the name that is wanted, without a slash at its end.
    """
    names, wanted = graph._names_in_use, scope
    while any(name.startswith(f"{scope.lower()}/") for name in names):
        scope = graph.unique_name(wanted)
    names[f"{scope.lower()}/"] = 1  # what is imported into it is not known there
    return f"{scope}/"


def every_operation(graph: tf.Graph) -> list[tf.Operation]:
    """Return all ops of a graph as they were made, hidden ones too (see `show_operations`).

    Args:
      graph: FuncGraph or imported graph.
    """
    return list(type(graph).get_operations(graph))


def show_operations(graph: tf.Graph, order: Sequence[str], hidden: Collection[str]) -> None:
    """Have `graph.get_operations()` give ops in another order, and some of them not at all.

    A live graph cannot delete ops. What is hidden becomes no part of the function that TensorFlow
    makes of the graph, even where it is stateful.

    Args:
      graph: the graph.
      order: names of ops; those without a place come last, in the order in which they were made.
      hidden: names of ops that nothing reads or waits for.
    """
    place = {name: i for i, name in enumerate(order)}
    gone = frozenset(hidden)
    of = weakref.ref(graph)

    def get_operations() -> list[tf.Operation]:
        live: Any = of()
        return sorted((op for op in every_operation(live) if op.name not in gone),
                      key=lambda op: place.get(op.name, len(place)))

    setattr(graph, "get_operations", get_operations)  # noqa: B010 (a method, to a type checker)
    setattr(graph, _SHOWN, (tuple(order), gone))


def shown_definition(graph: tf.Graph) -> tf.compat.v1.GraphDef:
    """Return the definition of the ops that a graph shows, in their order, and its library.

    All functions that these call are in the library, also where only a graph around, or the
    process, knows them, as those of a loaded model: Grappler dies of one that it does not find.

    Args:
      graph: FuncGraph or imported graph; not changed.
    """
    definition = graph.as_graph_def()
    nodes = {node.name: node for node in definition.node}
    kept = [nodes[op.name] for op in graph.get_operations()]
    del definition.node[:]
    definition.node.extend(kept)
    known = {function.signature.name for function in definition.library.function}
    pending = list(nodes_with_bodies(definition))
    while pending:
        for name in functions_named(pending.pop()):
            found = None if name in known else find_function(graph, name)
            if found is not None:
                known.add(name)
                definition.library.function.append(found)
                pending += found.node_def
    return definition


def functions_named(node: tf.compat.v1.NodeDef) -> Iterator[str]:
    """Yield the names of the functions that a node calls.

    Args:
      node: of a graph or of a function's body.
    """
    for key in _function_attrs(node.op):
        if key in node.attr:
            yield node.attr[key].func.name
            yield from (function.name for function in node.attr[key].list.func)


@functools.cache
def _function_attrs(op_type: str) -> tuple[str, ...]:
    """Return the attributes of an op type that name functions."""
    known = op_definition(op_type)
    return () if known is None else tuple(
        attr.name for attr in known.attr if attr.type in ("func", "list(func)"))


_ALIVE = "_tfckpt_alive"


def keep_alive(graph: FuncGraph, value: object) -> None:
    """Have a value live as long as a graph does.

    Args:
      graph: a graph that is being traced.
      value: what the graph needs, such as a function that owns functions which its ops call.
    """
    setattr(graph, _ALIVE, (*getattr(graph, _ALIVE, ()), value))


def uses_custom_device(graph: tf.Graph) -> bool:
    """Return whether a graph captures what lies on a custom device: variables of DTensor.

    Args:
      graph: a FuncGraph; any other graph captures nothing.
    """
    return any("device:CUSTOM" in (getattr(tensor, "device", "") or "")
               for tensor, _ in getattr(graph, "captures", ()))


def definition_of(graph: tf.Graph, name: str) -> tf.compat.v1.NodeDef:
    """Return the definition of an op, whether the graph shows it or not.

    Args:
      graph: FuncGraph or imported graph.
      name: of the op.

    Raises:
      KeyError: the graph has no op of that name.
    """
    return graph.get_operation_by_name(name).node_def


_SHOWN = "_tfckpt_shown"


def how_shown(graph: tf.Graph) -> tuple[tuple[str, ...], frozenset[str]]:
    """Return the order in which ops of a graph are shown, and the names of those that are not.

    They are what `show_operations` was given.

    Args:
      graph: FuncGraph or imported graph.

    Returns:
      Nothing of either where the graph shows all ops as they were made.
    """
    return getattr(graph, _SHOWN, ((), frozenset()))


def waiting_for(op: tf.Operation) -> list[tf.Operation]:
    """Return the ops that wait for an op by a control edge.

    Args:
      op: of a live graph.
    """
    return list(op._control_outputs)


def is_stateful(op: tf.Operation) -> bool:
    """Return what the op's registration says about state.

    Args:
      op: of a live graph.
    """
    return bool(op._is_stateful)


def is_stateful_type(op_type: str) -> bool:
    """Return what the registration of an op type says about state; False if there is none.

    Args:
      op_type: TensorFlow op type.
    """
    known = op_def_registry.get(op_type)
    return known is not None and known.is_stateful


def static_value(tensor: tf.Tensor) -> np.ndarray | None:
    """Return the value of a tensor that constants and known shapes decide.

    Unlike `tf.get_static_value` this computes with them, so that a slice of a shape is known too.
    Nothing is added to the graph.

    Args:
      tensor: of any graph.

    Returns:
      None where the value is not known, and for what is no number: a handle, a list.
    """
    if tensor.dtype in (tf.resource, tf.variant):
        return None
    value = smart_cond.smart_constant_value(tensor)
    return None if value is None else np.asarray(value)


def handle_shape(resource: tf.Tensor) -> tuple[tf.TensorShape, tf.DType] | None:
    """Return shape and dtype of a resource tensor's variable, where TensorFlow knows them.

    Args:
      resource: of a graph, or an eager one as a concrete function captures it.

    Returns:
      None where they are not known, and where the resource is no single variable.
    """
    if hasattr(resource, "numpy"):  # an eager handle, as a concrete function captures it
        data = getattr(resource, "_handle_data", None)
    else:
        data = handle_data_util.get_resource_handle_data(resource)
    if data is None or not data.is_set or len(data.shape_and_type) != 1:
        return None
    entry = data.shape_and_type[0]
    return tf.TensorShape(entry.shape), tf.dtypes.as_dtype(entry.dtype)


def makes_variables(graph: FuncGraph) -> bool:
    """Return whether a trace makes variables that do not have their first values yet.

    TensorFlow gives them those after the trace, throws it away, and traces again.

    Args:
      graph: a FuncGraph whose trace is complete.
    """
    outside = {id(inner): outer for outer, inner in graph.captures}
    handles = [outside.get(id(op.inputs[0])) for op in graph.get_operations()
               if op.type == VAR_IS_INITIALIZED]
    with tf.init_scope():
        return any(not tf.raw_ops.VarIsInitializedOp(resource=handle)
                   for handle in map(_outermost, handles) if handle is not None)


def _outermost(handle: Any) -> Any:
    """Return what a captured tensor is where TensorFlow runs eagerly.

    None where it is made in a graph.
    """
    while handle is not None and not hasattr(handle, "numpy"):
        around = getattr(handle.graph, "captures", ())
        handle = next((outer for outer, inner in around if inner is handle), None)
    return handle


def batch_size(dataset: tf.data.Dataset | tf.data.Iterator) -> int | None:
    """Return the batch size of the last batching step of a dataset.

    None where there is no such step, or its size is not known.

    Args:
      dataset: or its iterator. No element is read; only the steps that it is made of are looked at.
    """
    pending: list[Any] = [getattr(dataset, "_dataset", dataset)]
    while pending:
        current = pending.pop(0)
        size = getattr(current, "_batch_size", None)
        if size is not None:
            value = tf.get_static_value(size)
            return None if value is None else int(value)
        pending.extend(current._inputs())
    return None


def default_device() -> str:
    """Return the device whose memory counts: the first GPU, or the CPU where there is none."""
    return "GPU:0" if tf.config.list_logical_devices("GPU") else "CPU:0"


def device_of_calls() -> str:
    """Return the device on which ops without one run that this thread calls.

    It is the default device, unless `tf.device` says another around the call.

    Returns:
      Such as "CPU:0" or "GPU:1".
    """
    spec = tf.DeviceSpec.from_string(f"/{default_device()}").make_merged_spec(
        tf.DeviceSpec.from_string(eager_context.context().device_name or ""))
    return f"{spec.device_type}:{spec.device_index or 0}"


def layers_in(layer: Any) -> Sequence[Any]:
    """Return a Keras layer and all layers inside of it, at any depth; none of what is no layer.

    Args:
      layer: a layer or model of Keras 3 or of tf_keras, or any other object.
    """
    flatten = getattr(type(layer), "_flatten_layers", None)
    return tuple(flatten(layer)) if callable(flatten) else ()


def layers_directly_in(layer: Any) -> Sequence[Any]:
    """Return the layers that a Keras layer or model has itself, not those inside of them.

    Args:
      layer: as of `layers_in`.
    """
    flatten = getattr(type(layer), "_flatten_layers", None)
    return tuple(flatten(layer, include_self=False, recursive=False)) if callable(flatten) else ()


def uses_onednn() -> bool:
    """Return whether oneDNN's kernels run on the CPU.

    The processor decides that, or `TF_ENABLE_ONEDNN_OPTS`.
    """
    return bool(_pywrap_util_port.IsMklEnabled())


def memory_limit(device: str) -> int:
    """Return the bytes that TensorFlow's allocator may take of a device such as "GPU:0".

    Args:
      device: type and number, as `default_device` returns them.

    Raises:
      ValueError: there is no such device.
    """
    from tensorflow.python.client import device_lib

    limits = {found.name: int(found.memory_limit) for found in device_lib.list_local_devices()}
    if f"/device:{device}" not in limits:
        raise ValueError(f"there is no device {device}")
    # devices are made anew to be listed, without the limits that the program gave them
    kind, _, number = device.partition(":")
    given: list[int | None] = []
    for physical in tf.config.list_physical_devices(kind):
        parts = tf.config.get_logical_device_configuration(physical) or []
        given += [part.memory_limit for part in parts] or [None]
    own = given[int(number)] if int(number) < len(given) else None
    return min(limits[f"/device:{device}"], own << 20) if own else limits[f"/device:{device}"]


def is_reference(tensor: tf.Tensor) -> bool:
    """Return whether a tensor is a TF1 reference variable, which changes in place.

    Args:
      tensor: of a graph.
    """
    return bool(tensor.dtype._is_ref_dtype)


def control_outputs(graph: tf.Graph) -> list[tf.Operation]:
    """Return the ops that must run before a FuncGraph returns.

    Args:
      graph: a FuncGraph; of any other graph there are none.
    """
    return list(getattr(graph, "control_outputs", ()))


def create_op(graph: tf.Graph, op_type: str, inputs: Sequence[tf.Tensor],
              dtypes: Sequence[tf.DType], name: str, attrs: dict[str, Any], device: str
              ) -> tf.Operation:
    """Create one op in `graph` with exactly these inputs and attributes, on `device`.

    Args:
      graph: FuncGraph or imported graph; the op is added to it.
      op_type: TensorFlow op type.
      inputs: tensors of the graph, in the order of the op's inputs.
      dtypes: of the op's outputs.
      name: wanted for the op; TensorFlow adds a number where it is taken.
      attrs: AttrValue protos by name.
      device: name of the device; "" for none.

    Returns:
      The new op, whose name may differ from `name`.
    """
    with graph.as_default(), tf.device(None):
        op = graph._create_op_internal(
            op_type, list(inputs), dtypes=list(dtypes), name=name, attrs=attrs,
            compute_device=False)
    if device:
        op._set_device(device)
    return op


def node_attrs(op: tf.Operation) -> dict[str, Any]:
    """Return the op's NodeDef attributes by name, as AttrValue protos.

    Args:
      op: of a live graph; to change what is returned does not change it.
    """
    return dict(op.node_def.attr)


def update_input(op: tf.Operation, index: int, tensor: tf.Tensor) -> None:
    """Make input `index` of a live op read `tensor`.

    Args:
      op: of a live graph.
      index: position of the input, control inputs not counted.
      tensor: of the graph; it has the dtype of the input.
    """
    op._update_input(index, tensor)


def add_control_input(op: tf.Operation, control: tf.Operation) -> None:
    """Make a live op wait for another.

    Args:
      op: of a live graph; it waits.
      control: of the graph; it is waited for.
    """
    op._add_control_input(control)


def replace_control_inputs(op: tf.Operation, controls: Sequence[tf.Operation]) -> None:
    """Make a live op wait for exactly these ops.

    Args:
      op: of a live graph; it waits.
      controls: of the graph; all that the op waits for from now on, where empty nothing.
    """
    op._remove_all_control_inputs()
    if controls:
        op._add_control_inputs(list(controls))


def record_executed_graphs(run: Callable[[], object]) -> list[Any]:
    """Run a callable; return the GraphDefs of the partitions of the largest function run.

    Args:
      run: takes nothing; only functions count that it is the first to call.

    Returns:
      No graphs where it calls no such function.
    """
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


def instantiated(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """Return the GraphDefs that a concrete function would run, of each device; nothing runs.

    TensorFlow instantiates, inlines, places and optimises it for a call that is cancelled then.

    Args:
      function: a concrete function; a copy of it is called.
      args: positional arguments of one call.
      kwargs: keyword arguments of that call.

    Raises:
      tf.errors.OpError: TensorFlow refuses the call.
    """
    manager = cancellation.CancellationManager()
    manager.start_cancel()
    call = manager.get_cancelable_function(_made_anew(function))

    def cancelled() -> None:
        with contextlib.suppress(tf.errors.CancelledError):
            call(*args, **kwargs)
        _made_anew(_small_function())(tf.constant(0.0))  # until then nothing is recorded

    # other functions that are recorded meanwhile may be told as parts of this one
    largest: dict[str, Any] = {}
    for found in record_executed_graphs(cancelled):
        device = next((node.device for node in found.node if node.device), "")
        if device not in largest or len(largest[device].node) < len(found.node):
            largest[device] = found
    return list(largest.values())


def _made_anew(function: Any) -> Any:
    """Return a concrete function with the same graph that TensorFlow has not instantiated."""
    return concrete_function.ConcreteFunction.from_func_graph(
        function.graph, function.function_type, {})


@functools.cache
def _small_function() -> Any:
    function = tf.function(lambda x: x + 1.0, autograph=False)
    return function.get_concrete_function(tf.TensorSpec([], tf.float32))


def op_times(data: bytes) -> dict[str, list[float]]:
    """Return the seconds of every run of each op, by name, from a profile (XSpace) as bytes.

    Where a GPU ran something these are the times of its kernels, else those of the host.

    Args:
      data: the XSpace message, serialised, as TensorFlow's profiler writes it.
    """
    from tensorflow.tsl.profiler.protobuf import xplane_pb2

    space = xplane_pb2.XSpace()
    space.ParseFromString(data)
    found: dict[str, list[float]] = {}
    kernels: dict[str, list[float]] = {}
    for plane in space.planes:
        on_gpu = plane.name.startswith("/device:GPU")
        names = {key: entry.name for key, entry in plane.stat_metadata.items()}
        for event in (event for row in plane.lines for event in row.events):
            called = plane.event_metadata[event.metadata_id].name
            if on_gpu:
                called = next((names.get(s.ref_value, "") or s.str_value for s in event.stats
                               if names[s.metadata_id] == "tf_op"), "")
            name, separator, kind = called.rpartition(":")
            if separator and not kind.startswith(" "):  # else it is of the runtime
                into = kernels if on_gpu else found
                into.setdefault(name, []).append(event.duration_ps / 1e12)
    return kernels or found


def set_custom_optimizer(name: str | None, parameters: Mapping[str, str] | None = None) -> None:
    """Have Grappler run a registered optimizer last on every function called from now on.

    None restores what was configured. With other parameters than before, functions that were
    called before are optimised again.
    Other threads that have called functions before keep the configuration they began with.
    TensorFlow's runtime is not started for this: devices and threads can be configured later.

    Args:
      name: that it is registered by; None: no such optimizer.
      parameters: of the optimizer, by key; None: it has none.
    """
    ctx = eager_context.context()
    if not hasattr(ctx, "_tfckpt_config"):
        ctx._tfckpt_config = ctx._config
    if name is None:
        ctx._config = ctx._tfckpt_config
        del ctx._tfckpt_config
    else:
        config = tf.compat.v1.ConfigProto()
        if ctx._tfckpt_config is not None:
            config.CopyFrom(ctx._tfckpt_config)
        ctx._config = add_custom_optimizer(config, name, parameters or {})
    ctx.function_call_options = None


def add_custom_optimizer(config: Any, name: str, parameters: Mapping[str, str]) -> Any:
    """Add a registered Grappler optimizer to a ConfigProto, which is returned.

    Args:
      config: a ConfigProto; changed in place.
      name: that it is registered by.
      parameters: of the optimizer, by key.
    """
    added = config.graph_options.rewrite_options.custom_optimizers.add(name=name)
    for key, value in parameters.items():
        added.parameter_map[key].s = value.encode()
    return config


@contextlib.contextmanager
def memory_optimizer(mode: str, scope: str) -> Iterator[None]:
    """Have functions that this thread calls in the context pass Grappler's memory optimizer.

    Args:
      mode: a `RewriterConfig.MemOptType` by name.
      scope: what the names of backward ops begin with.
    """
    ctx = eager_context.context()
    ctx.ensure_initialized()
    before = ctx.function_call_options
    config = tf.compat.v1.ConfigProto.FromString(before.config_proto_serialized)
    rewriting = config.graph_options.rewrite_options
    rewriting.memory_optimization = rewriting.MemOptType.Value(mode)
    rewriting.memory_optimizer_target_node_name_scope = scope
    ctx.function_call_options = eager_context.FunctionCallOptions(before.executor_type, config)
    try:
        yield
    finally:
        ctx.function_call_options = before


def optimize_graph(config: Any, meta: tf.compat.v1.MetaGraphDef, gpu: bytes = b""
                   ) -> tf.compat.v1.GraphDef:
    """Return what Grappler makes of a graph; nothing runs.

    Args:
      config: a ConfigProto.
      meta: the graph; its collection `train_op` names what has to run.
      gpu: a NamedDevice, serialised, that there is beside this machine's CPU; none where empty.

    Raises:
      ValueError, tf.errors.OpError: Grappler does not accept the graph, or two ops have one name,
        for which it ends the process.
    """
    from tensorflow.core.protobuf import device_properties_pb2
    from tensorflow.python.grappler import cluster, tf_optimizer

    names = collections.Counter(node.name for node in meta.graph_def.node)
    if twice := next((name for name, count in names.items() if count > 1), ""):
        raise ValueError(f"two ops are called {twice}")
    devices = [_own_cpu(), *([device_properties_pb2.NamedDevice.FromString(gpu)] if gpu else [])]
    with cluster.Provision(devices=devices, disable_detailed_stats=True) as machine:
        return tf_optimizer.OptimizeGraph(config, meta, verbose=False, cluster=machine)


def inferred_shapes(meta: tf.compat.v1.MetaGraphDef, names: Iterable[str]
                    ) -> dict[str, list[tf.TensorShape]]:
    """Return the shapes of some ops' results, by name, as far as Grappler knows them.

    Args:
      meta: the graph; what it says of devices is not regarded.
      names: of ops of the graph.

    Returns:
      For each op a shape for each result, with unknown sizes or of unknown rank where Grappler
      knows no more.

    Raises:
      ValueError, tf.errors.OpError: Grappler does not accept the graph.
    """
    from tensorflow.python.grappler import item

    found = item.Item(meta, ignore_colocation=True, ignore_user_placement=True).GetOpProperties()
    return {name: [_shape_of(result.shape) for result in found[name]] for name in names}


def _shape_of(shape: Any) -> tf.TensorShape:
    """Return a shape in which Grappler may have numbered the sizes that it does not know."""
    return tf.TensorShape(None) if shape.unknown_rank else tf.TensorShape(
        [dim.size if dim.size >= 0 else None for dim in shape.dim])


@functools.cache
def _own_devices() -> tuple[Any, ...]:
    """Return what Grappler knows of this process's devices."""
    from tensorflow.python.grappler import cluster

    return tuple(cluster.Cluster(disable_detailed_stats=True).ListDevices())


def _own_cpu() -> Any:
    """Return what Grappler knows of this machine's CPU.

    By its memory Grappler decides how large sums are added.
    """
    return next(device for device in _own_devices() if device.properties.type == "CPU")


GPU = "/job:localhost/replica:0/task:0/device:GPU:0"


def own_gpu() -> bytes:
    """Return a NamedDevice, serialised, of the GPU that ops without a device run on.

    By its architecture Grappler decides about the layout of convolutions.

    Returns:
      What Grappler knows of it; empty where such ops run on a CPU, or on another GPU than the
      first.
    """
    return _own_gpu() if device_of_calls() == "GPU:0" else b""


@functools.cache
def _own_gpu() -> bytes:
    from tensorflow.core.protobuf import device_properties_pb2

    known = [device for device in _own_devices() if device.properties.type == "GPU"]
    found = device_properties_pb2.NamedDevice()
    found.CopyFrom(known[0] if known else found)
    details = tf.config.experimental.get_device_details(tf.config.list_physical_devices("GPU")[0])
    found.name, found.properties.type = GPU, "GPU"
    version = details.get("compute_capability")
    if version is not None:
        found.properties.environment.setdefault("architecture", "{}.{}".format(*version))
    return found.SerializeToString()


def described_gpu(architecture: str, memory_bytes: int) -> bytes:
    """Return a NamedDevice, serialised, of a GPU that need not be here.

    Args:
      architecture: its compute capability, such as "9.0".
      memory_bytes: of its memory.
    """
    from tensorflow.core.protobuf import device_properties_pb2

    return device_properties_pb2.NamedDevice(
        name=GPU, properties=device_properties_pb2.DeviceProperties(
            type="GPU", vendor="NVIDIA", memory_size=memory_bytes,
            environment={"architecture": architecture})).SerializeToString()


def has_gpu_kernel(node: tf.compat.v1.NodeDef) -> bool:
    """Return whether TensorFlow has a kernel for GPUs that an op can have.

    Args:
      node: the op; where it has no attribute that a kernel asks for, its default is not looked up.
    """
    def suits(constraints: Mapping[str, frozenset[int]]) -> bool:
        for name, allowed in constraints.items():
            value = node.attr.get(name)
            types = () if value is None else value.list.type or (value.type,)
            if any(each not in allowed for each in types):
                return False
        return True

    return any(suits(constraints) for constraints in _gpu_kernels().get(node.op, ()))


@functools.cache
def _gpu_kernels() -> Mapping[str, Sequence[Mapping[str, frozenset[int]]]]:
    """Return for each op what the kernels for GPUs ask of its attributes: which dtypes."""
    from tensorflow.python.framework import kernels

    found: dict[str, list[dict[str, frozenset[int]]]] = {}
    for kernel in kernels.get_all_registered_kernels().kernel:
        if kernel.device_type in ("GPU", "DEFAULT") and not kernel.label:
            found.setdefault(kernel.op, []).append({
                each.name: frozenset(each.allowed_values.list.type) for each in kernel.constraint})
    return found


def configured() -> Any:
    """Return a ConfigProto of what this thread calls functions with.

    Optimizers of others are left out.
    """
    ctx = eager_context.context()
    ctx.ensure_initialized()
    config = tf.compat.v1.ConfigProto.FromString(ctx.function_call_options.config_proto_serialized)
    del config.graph_options.rewrite_options.custom_optimizers[:]
    return config


HOST = "/job:localhost/replica:0/task:0/device:CPU:0"


def mark_ops(attribute: str) -> contextlib.AbstractContextManager[None]:
    """Return a context in which ops that are traced get an attribute, 1.

    Args:
      attribute: its name, such as "_recompute_hint".
    """
    graph = tf.compat.v1.get_default_graph()
    return graph._attr_scope({attribute: tf.compat.v1.AttrValue(i=1)})


# Grappler's virtual cluster (`grappler_ext.estimates`).


def inlined(function: Any) -> tf.compat.v1.GraphDef:
    """Return a concrete function's graph with the functions that it calls in place of the calls.

    Captures become placeholders without the shape of the variable whose handle they are.

    Args:
      function: the concrete function; not changed.
    """
    from tensorflow.python.framework import convert_to_constants

    definition = convert_to_constants._run_inline_graph_optimization(function, False, True)
    _, hidden = how_shown(function.graph)
    kept = [node for node in definition.node if node.name not in hidden]
    del definition.node[:]
    definition.node.extend(kept)
    for node in definition.node:
        if "_class" in node.attr:  # colocation with nodes that inlining has renamed
            del node.attr["_class"]
    return definition


@dataclasses.dataclass(frozen=True)
class VirtualRun:
    """Grappler's estimate of a graph on one device that need not exist.

    Attributes:
      peak_bytes: highest sum of live tensors.
      live: (op, output, bytes) of what is live then, in no order.
      seconds: by op, in the order of the simulated execution.
    """

    peak_bytes: int
    live: tuple[tuple[str, int, int], ...]
    seconds: Mapping[str, float]


_SLOWED = 1000
"""Grappler counts live tensors by the microsecond, in which a fast device runs many ops. It is
told of a device that is so much slower, and its times are divided."""
_LANES, _ARCHITECTURE = 64, "7"
"""Grappler has a multiprocessor of this architecture finish so many multiply-adds a cycle."""


def run_virtually(definition: tf.compat.v1.GraphDef, fetches: Sequence[str], *, kind: str,
                  flops_per_second: float, bytes_per_second: float) -> VirtualRun:
    """Have Grappler simulate a graph.

    Args:
      definition: importable, every shape known, variables as `VarHandleOp`.
      fetches: names of the ops that must run.
      kind: "GPU" or "CPU".
      flops_per_second: its floating-point operations; Grappler is told a multiple of 10^9 (of
        128 * 10^9 for a GPU).
      bytes_per_second: what it reads and writes; Grappler is told a multiple of 10^6.

    Returns:
      What memory and time Grappler expects the graph to take.

    Raises:
      ValueError, tf.errors.OpError: Grappler does not accept the graph.
    """
    from tensorflow.core.protobuf import device_properties_pb2
    from tensorflow.python.grappler import cluster, item

    meta = tf.compat.v1.MetaGraphDef(graph_def=definition)
    meta.collection_def["train_op"].node_list.value.extend(fetches)
    # Called a CPU whatever it is: Grappler asks CUDA about every device that is called a GPU. Its
    # memory is endless, since a graph that did not fit would be an error without an answer.
    megaflops = flops_per_second / 1e6 / _SLOWED
    gpu = kind == "GPU"
    device = device_properties_pb2.NamedDevice(
        name="/job:localhost/replica:0/task:0/device:CPU:0",
        properties=device_properties_pb2.DeviceProperties(
            type=kind, frequency=1, memory_size=1 << 60,
            num_cores=max(1, round(megaflops / (2 * _LANES if gpu else 1))),
            bandwidth=max(1, round(bytes_per_second / 1e3 / _SLOWED)),
            environment={"architecture": _ARCHITECTURE} if gpu else {}))
    made = item.Item(meta, ignore_user_placement=True)
    with cluster.Provision(devices=[device], disable_timeline=False) as machine:
        peak, live = machine.DeterminePeakMemoryUsage(made)[device.name]
        _, _, stats = machine.MeasureCosts(made)
    return VirtualRun(peak, tuple((name, slot, size) for name, slot, size, *_ in live),
                      {node.node_name: max(0, node.op_end_rel_nanos) / (1e9 * _SLOWED)
                       for entry in stats.dev_stats for node in entry.node_stats})


# Eager tapes (`tfckpt.forward_ad`).


def add_op_callback(callback: Callable[..., Any]) -> None:
    """Have a callable called after each op that this thread runs or create.

    Args:
      callback: takes type, inputs, attributes and outputs of the op, its name and its graph; the
        last two are None for an eager op. It returns None, so as to leave the outputs as they are.
    """
    op_callbacks.add_op_callback(callback)


def remove_op_callback(callback: Callable[..., Any]) -> None:
    """Undo `add_op_callback`.

    Args:
      callback: the one that was added, in this thread.

    Raises:
      KeyError: it was not added.
    """
    op_callbacks.remove_op_callback(callback)


def stop_recording() -> contextlib.AbstractContextManager[None]:
    """Return a context in which no tape of this thread records."""
    return record.stop_recording()


def is_recording() -> bool:
    """Return whether ops that this thread runs or creates now are recorded by a tape."""
    return bool(record.could_possibly_record())


def is_recording_stopped() -> bool:
    """Return whether the tapes of this thread are stopped."""
    return bool(pywrap_tfe.TFE_Py_TapeSetIsStopped())


def gradient_order(tensors: Sequence[tf.Tensor]) -> int:
    """Return how many tapes follow these eager tensors.

    0 is none, 1 one tape, 2 several or a persistent one. With 2, gradients of gradients may be
    asked for.

    Args:
      tensors: eager tensors; the tapes are those of this thread.
    """
    return int(pywrap_tfe.TFE_Py_TapeSetPossibleGradientTypes(list(tensors)))


def has_tangents(tensors: Sequence[tf.Tensor]) -> bool:
    """Return whether a `tf.autodiff.ForwardAccumulator` follows one of these tensors.

    Args:
      tensors: eager tensors; the accumulators are those of this thread.
    """
    return bool(pywrap_tfe.TFE_Py_PackJVPs(list(tensors))[1])


def replace_record(output: tf.Tensor, source: tf.Tensor, backward: Callable[..., Any]
                   ) -> None:
    """Have every tape forget how an eager tensor was made, and take `backward` for its gradient.

    Args:
      output: the eager tensor.
      source: the one eager tensor that it was computed from, to the tapes.
      backward: takes the gradient of `output`, and returns a list with that of `source`.
    """
    pywrap_tfe.TFE_Py_TapeSetDeleteTrace(output._id)
    record.record_operation("tfckpt_fad", [output], [source], backward)
