"""Finds the training steps inside a document: functions that train, and graphs that do.

A SavedModel has its functions in the library of each meta graph. A step is a function that
computes a gradient itself, however it is called (a signature calls it through a wrapper, which
stays as it is). A TF1 graph has everything at its top level, initialisers and savers too; its
step is what the gradients need, what follows from them, and what follows from the forward.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfckpt.capture import tf_adapter
from tfckpt.capture.files import Document
from tfckpt.capture.grappler.question import Question, question
from tfckpt.capture.grappler.terms import has_calls, terms_of_datasets
from tfckpt.capture.inlining.compiled_calls import is_compiled
from tfckpt.capture.inlining.inline import Inlining, is_rewritten, readable
from tfckpt.capture.regions import is_gradient_scope
from tfckpt.capture.shapes import concrete_shapes, planned_shapes
from tfckpt.capture.tfgraph import capture
from tfckpt.errors import CaptureError, TfckptError
from tfckpt.ir.graph import BACKWARD, FORWARD, Graph, Op, ancestors
from tfckpt.ir.layers import LayerNames
from tfckpt.ops import Access, Source, record

_FED = (Source.ARGUMENT, Source.DEFAULT, Source.ELEMENT)
_FOR_ELEMENTS = "_tf_data_function"
"""Attribute of functions that datasets call."""
_UNKNOWN_OP = re.compile(r"Op type not registered '([^']+)'")


@dataclasses.dataclass(frozen=True)
class Step:
    """A training step in a document.

    Attributes:
      name: as a person would call it.
      graph: the captured step.
      meta: index in `Document.graph_defs()`.
      function: name of its FunctionDef; empty for the graph itself.
      inlining: of the functions that the step called; None where there is none. Then the
        document's definition has to be made anew.
      live: TensorFlow's graph that the step was read from.
      compiled: whether XLA compiles the step.
      plain: the function as it was read, before anything was inlined; None at the top level.
      layers: names of layers that the document tells of.
    """

    name: str
    graph: Graph
    meta: int
    function: str = ""
    inlining: Inlining | None = None
    live: Any = None
    compiled: bool = False
    plain: Question | None = None
    layers: tuple[str, ...] = ()

    @property
    def inlined_late(self) -> bool:
        """Return whether Grappler itself inlines functions that it calls, for a dataset."""
        return self.plain is not None and not self.plain.terms.inlines and (
            has_calls(self.plain.definition))

    @property
    def leaves_open(self) -> bool:
        """Return whether the first dimension of something that is fed has no size."""
        return self.live is None or any(
            tensor.shape.rank is None or tensor.shape.rank and tensor.shape[0] is None
            for op in self.live.get_operations() if record(op.type).source in _FED
            for tensor in op.outputs)

    @functools.cached_property
    def names(self) -> LayerNames:
        """Return the layers of the step, as far as the document tells of them."""
        ops = (op.name for op in self.graph.ops)
        return LayerNames.of(self.layers, ops).with_gradients(self.graph)


def training_steps(document: Document, *, batch_size: int | None = None,
                   fetches: Sequence[str] = (), rewritten: bool = False) -> list[Step]:
    """Return the training steps of a document, in the order in which they stand in it.

    Args:
      document: what was read.
      batch_size: what an unknown leading dimension stands for.
      fetches: what a session runs of a step at the top level of a graph: tensors ("op:0") and
        ops ("op"). Without them the step is found by `training_part`, and every tensor that
        nothing reads or waits for leaves it.
      rewritten: whether a graph that tfckpt rewrote before is welcome.

    Raises:
      CaptureError: TensorFlow refuses the graph, it trains nothing, or it was rewritten before.
    """
    found: list[Step] = []
    for meta, definition in enumerate(document.graph_defs()):
        if not rewritten:
            _refuse_rewritten(document.source, definition)
        try:
            if any(is_gradient_scope(node.name) for node in definition.node):
                found += _main_step(document, meta, definition, batch_size, fetches)
            for function in definition.library.function:
                if any(map(computes_gradient, function.node_def)):
                    found += _function_step(meta, definition, function, batch_size)
        except TfckptError:
            raise
        except Exception as error:  # whatever TensorFlow makes of a file that anyone may have made
            raise _refusal(document.source, error) from error
    if not found:
        raise CaptureError(
            f"capture: {document.source!r} computes no gradient for which it keeps anything: it "
            "is an inference graph, or its gradient lies in a nested function; save the function "
            "that trains")
    return [dataclasses.replace(step, layers=document.layers(step.meta)) for step in found]


def step_definition(document: Document, step: Step,
                    batch_size: int | None = None) -> tf.compat.v1.GraphDef:
    """Return the graph of a step by itself, as TensorFlow can import it.

    Ops have the names that they have in `step.graph`; as many shapes are known as can be, and
    variables are handles with shapes.

    Args:
      document: what was read; not changed.
      step: one of its `training_steps`.
      batch_size: what an unknown leading dimension stands for; None: it stays unknown.

    Raises:
      CostError: no batch of that size can pass through the graph.
    """
    definition = document.graph_defs()[step.meta]
    if step.inlining is not None:
        live = step.inlining.graph
    elif step.function:
        function = next(f for f in definition.library.function
                        if f.signature.name == step.function)
        live = tf_adapter.function_graph(function, definition)
    else:
        live = imported(definition)
    return concrete_shapes(live, batch_size, {}, library=definition.library).as_graph_def()


def imported(definition: tf.compat.v1.GraphDef) -> tf.Graph:
    """Return a definition as a live graph of its own, ops named as they are.

    Args:
      definition: the graph, and in its library the functions that it calls; not changed.

    Raises:
      ValueError: an op type or a called function is unknown, or the definition is malformed.
    """
    live = tf.Graph()
    with live.as_default():
        tf.graph_util.import_graph_def(definition, name="")
    return live


def computes_gradient(node: Any) -> bool:
    """Return whether a node is of a gradient, and more than what a loop's body keeps for one.

    Args:
      node: NodeDef.
    """
    known = record(node.op)
    return is_gradient_scope(node.name) and not (
        known.holds_values or known.shape_only or known.is_constant or known.passes_on)


def _refusal(source: str, error: Exception) -> CaptureError:
    unknown = _UNKNOWN_OP.search(str(error))
    if unknown:
        return CaptureError(f"capture: {source!r} uses the op {unknown[1]!r}, which is not "
                            "registered; load its library first (tf.load_op_library, or "
                            "--op_library on the command line)")
    return CaptureError(f"capture: TensorFlow does not accept {source!r}: "
                        f"{type(error).__name__}: {error}")


def _refuse_rewritten(source: str, definition: tf.compat.v1.GraphDef) -> None:
    if any(is_rewritten(node.name) for node in tf_adapter.nodes_with_bodies(definition)):
        raise CaptureError(f"capture: {source!r} was rewritten by tfckpt before; start from the "
                           "original")


def _function_step(meta: int, definition: tf.compat.v1.GraphDef, function: Any,
                   batch_size: int | None) -> list[Step]:
    live = tf_adapter.function_graph(function, definition)
    plain = question(live, (), tf_adapter.shown_definition(live),
                     terms=terms_of_datasets() if _FOR_ELEMENTS in function.attr else None)
    inlining = Inlining(live, definition.library.function)
    name = readable(function.signature.name)
    compiled = is_compiled(function.attr)
    graph = capture(live, shapes=known_shapes(live, batch_size, definition.library),
                    inlining=inlining, compiled=compiled)
    graph = dataclasses.replace(graph, name=name)
    if not trains(graph):
        return []
    return [Step(name, graph, meta, function.signature.name,
                 inlining if inlining.results else None, live, compiled, plain)]


def _main_step(document: Document, meta: int, definition: tf.compat.v1.GraphDef,
               batch_size: int | None, fetches: Sequence[str]) -> list[Step]:
    live = imported(definition)
    inlining = Inlining(live, definition.library.function)
    wanted = [inlining.tensor(live.get_tensor_by_name(name)) for name in fetches if ":" in name]
    graph = capture(live, fetches=wanted if fetches else _unread(live), name=document.source,
                    shapes=known_shapes(live, batch_size, definition.library), inlining=inlining)
    named = {op.name for name in fetches
             for op in inlining.ops(live.get_operation_by_name(name.partition(":")[0]))}
    graph = (_needed(graph, [op.name in named for op in graph.ops]) if fetches
             else training_part(graph))
    return [Step(document.source, graph, meta, "", inlining if inlining.results else None,
                 live)] if trains(graph) else []


def known_shapes(live: tf.Graph, batch_size: int | None, library: Any) -> tf.Graph | None:
    """Return the graph with its unknown dimensions filled in; None where none is unknown.

    Args:
      live: FuncGraph or imported graph; not changed.
      batch_size: what an unknown leading dimension stands for; None: it stays unknown.
      library: the functions that the graph calls, where it does not have them itself; else None.

    Raises:
      CostError: no batch of that size can pass through the graph.
    """
    return planned_shapes(live, batch_size, may_assume=False, library=library)[0]


def _unread(live: tf.Graph) -> list[tf.Tensor]:
    awaited = {c.name for op in live.get_operations() for c in op.control_inputs}
    return [t for op in live.get_operations() if op.name not in awaited for t in op.outputs
            if not t.consumers() and t.dtype not in (tf.resource, tf.variant)]


def trains(graph: Graph) -> bool:
    """Return whether the backward reads what the forward computed.

    Args:
      graph: the captured step; not changed.
    """
    ops = graph.ops
    return any(op.region == BACKWARD and any(
        ops[source].region == FORWARD and ops[source].pure for source, _ in op.inputs)
        for op in ops)


def training_part(graph: Graph) -> Graph:
    """Return the graph without what is no part of the step: initialisers, savers and the like.

    Kept are the gradients, what follows from them (the updates) or from the forward's results,
    and whatever those need, in the order of the graph. State alone leads nowhere: initialisers
    and savers start from it too.

    Args:
      graph: the captured graph, with all that is in a file; not changed.
    """
    ops = graph.ops
    follows = [False] * len(ops)
    for i, op in enumerate(ops):
        seed = op.region == BACKWARD or (
            op.region == FORWARD and not _is_state(op) and bool(op.inputs))
        follows[i] = seed or any(follows[s] for s, _ in op.inputs) or any(
            follows[c] for c in op.controls)
    return _needed(graph, follows)


def _is_state(op: Op) -> bool:
    known = record(op.type)
    return known.access is Access.VALUE or known.source in (
        Source.CONSTANT, Source.HANDLE, Source.REFERENCE)


def _needed(graph: Graph, wanted: Sequence[bool]) -> Graph:
    """Return the graph with only the wanted ops and what they need, by data or by control."""
    chosen = {i for i, is_wanted in enumerate(wanted) if is_wanted}
    return graph.part(sorted(chosen | ancestors(graph.ops, chosen)))
