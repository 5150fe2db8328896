"""Nested forward AD where there is no graph to rewrite: eager code, and one function by hand.

`eager_fad` follows the state machine of Guo et al., section IV, on TensorFlow's op callbacks. A
pair of an op and its input is one of NN, NY (a fad op on a tensor of an nfad one: a sequence
begins), YY (it goes on) and YN (it ends). For every fad op the tape's own entry, which keeps the
op's inputs and outputs alive, is replaced by one that multiplies by the derivative with respect to
the sequence's source. The tape drops an entry when its output is dropped unread; so what stays of
a sequence is the derivative of what is read elsewhere, as in the paper's reference counting.

What eager TensorFlow makes impossible (`tests/e2e/test_eager_fad.py` has the experiments): a
callback cannot replace an op's result, so a derivative is computed for every op of a sequence, not
for the last alone; ops inside of a custom gradient (Keras' silu) or a `tf.function` are not
recorded one by one and are left alone; an op on a tensor that Python still names keeps that tensor
whatever the tape keeps; and dispatch by type never sees plain tensors.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import tensorflow as tf

from tfckpt.capture import tf_adapter
from tfckpt.capture.tfgraph import capture
from tfckpt.errors import CaptureError
from tfckpt.fad.derivative import Derivatives
from tfckpt.fad.regions import FLOATS, constants, find_regions
from tfckpt.ir.graph import Graph, Tensor
from tfckpt.ops import record
from tfckpt.ops.tangents import At
from tfckpt.ops.terms import CAST, NUMBER, TENSOR, TWO, Builder, Program, Term, cast

_Outputs = TypeVar("_Outputs")

# One function by hand.


def nested_forward_ad(fn: Callable[[Any], _Outputs]) -> Callable[[Any], _Outputs]:
    """Wrap an element-wise function of one tensor so that a tape keeps only its derivative.

    Gradients of gradients are those of `fn`: a persistent tape, or one of several, keeps the
    input instead of the derivative, which is then computed in the backward; and a
    `tf.autodiff.ForwardAccumulator` sees `fn` itself.

    Args:
      fn: takes one float tensor and returns one or more tensors of its shape, each element of
        which depends on one element of the input alone. It may use Python numbers and constants.

    Returns:
      A function with the same results and gradients, for eager code and inside of a
      `tf.function`. Where the gradient of `fn` overflows, this one may be finite.

    Raises:
      CaptureError: when called, if `fn` is not element-wise in one tensor; names the op.
    """
    @tf.function(autograph=False)
    def pair(x: tf.Tensor) -> tuple[Any, list[tf.Tensor]]:
        outputs = fn(x)
        graph = tf_adapter.tracing_graph()
        derivatives = _derivatives(graph, x, tf.nest.flatten(outputs), fn)
        return outputs, derivatives

    @tf.custom_gradient
    def wrapped(x: tf.Tensor) -> tuple[Any, Callable[..., tf.Tensor]]:
        outputs, derivatives = _run_pair(pair, x)

        def gradient(*upstream: tf.Tensor) -> tf.Tensor:
            return tf.add_n([cast_to(g, d.dtype) * d
                             for g, d in zip(upstream, derivatives(), strict=True)])

        return outputs, gradient

    @tf.autograph.experimental.do_not_convert
    def call(x: Any) -> Any:
        x = tf.convert_to_tensor(x)
        # what a custom gradient hands to an accumulator, tapes in a graph do not look through
        return fn(x) if tf_adapter.has_tangents([x]) else wrapped(x)

    call.__name__ = getattr(fn, "__name__", "nested_forward_ad")
    call.__doc__ = fn.__doc__
    return call


def _run_pair(pair: Any, x: tf.Tensor) -> tuple[Any, Callable[[], list[tf.Tensor]]]:
    """Return a function's outputs, and what gives their derivatives in the backward.

    No tape records what runs here, since in eager code it would keep all that it records: the
    derivatives stay or, where they may have to be differentiated themselves, the input does.
    """
    # a concrete function is a graph even under `tf.config.run_functions_eagerly`
    concrete = pair.get_concrete_function(tf.TensorSpec(x.shape, x.dtype))
    with tf_adapter.stop_recording():
        outputs, derivatives = concrete(x)
    if tf_adapter.gradient_order([x]) < 2:
        return outputs, lambda: derivatives
    return outputs, lambda: concrete(x)[1]


def cast_to(tensor: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    """Return the tensor in a dtype; itself if it has it.

    Args:
      tensor: of any shape and dtype.
      dtype: that of the result.

    Returns:
      A tensor of the same shape.
    """
    return tensor if tensor.dtype == dtype else tf.cast(tensor, dtype)


def _derivatives(func_graph: Any, x: tf.Tensor, outputs: Sequence[tf.Tensor],
                 fn: Callable) -> list[tf.Tensor]:
    """dy/dx for each output, as ops of the graph being traced."""
    name = getattr(fn, "__name__", "the function")
    if func_graph is None or x.shape.rank is None or not outputs:
        raise CaptureError(f"capture: {name} must return tensors for a tensor of known rank")
    graph = _known_shapes(capture(func_graph, fetches=outputs))
    index = {op.name: i for i, op in enumerate(graph.ops)}
    source = (index[x.op.name], x.value_index)
    known = constants(graph)
    region = next((r for r in find_regions(graph, known) if r.source == source), None)
    inside = frozenset(region.ops) if region else frozenset()
    for output in outputs:
        _check_inside(graph, index[output.op.name], inside, source, name)
    assert region is not None
    derivatives = Derivatives(graph, region, known)
    result = []
    for output in outputs:
        term = derivatives.of((index[output.op.name], output.value_index))
        if term is None:
            result.append(tf.zeros_like(x))
            continue
        tensors = {t: func_graph.get_operation_by_name(graph.ops[t[0]].name).outputs[t[1]]
                   for t in (n.attr("tensor") for n in derivatives.builder.program()
                             if n.type == TENSOR)}
        result.append(tf.broadcast_to(run(derivatives.builder.program(), term.index, tensors),
                                      tf.shape(x)))
    return result


def _known_shapes(graph: Graph) -> Graph:
    """Return the graph with 3 for every unknown dimension.

    Regions compare shapes, and nothing else.
    """
    def fixed(tensor: Tensor) -> Tensor:
        if tensor.shape is None or None not in tensor.shape:
            return tensor
        shape = tuple(3 if d is None else d for d in tensor.shape)
        return dataclasses.replace(tensor, shape=shape, bytes=0)

    return dataclasses.replace(graph, ops=tuple(
        dataclasses.replace(op, outputs=tuple(map(fixed, op.outputs))) for op in graph.ops))


def _check_inside(graph: Graph, output: int, inside: frozenset[int], source: tuple[int, int],
                  name: str) -> None:
    """Raise unless an output lies in the region; name the first op on the way that does not."""
    if output in inside:
        return
    stack, seen, outside = [output], {output}, [output]
    while stack:
        for s, _ in graph.ops[stack.pop()].inputs:
            if s not in seen and s not in inside and s != source[0]:
                seen.add(s)
                stack.append(s)
                outside.append(s)
    first = graph.ops[min((i for i in outside if graph.ops[i].inputs), default=output)]
    raise CaptureError(
        f"capture: {name} is not element-wise in one tensor: {first.name!r} ({first.type}) reads "
        "something besides x and constants, changes the shape, or has no tangent rule; pass only "
        "the element-wise part of it to nested_forward_ad, or leave it as it is")


def run(program: Program, index: int, tensors: Mapping[Any, tf.Tensor]) -> tf.Tensor:
    """Execute a program's nodes up to one with TensorFlow's ops.

    Args:
      program: nodes in an order in which each comes after those that it reads.
      index: of the node whose value is asked for.
      tensors: values of the program's tensor nodes, by their attribute "tensor".

    Returns:
      The node's value, in the dtype and broadcast shape that its ops give.
    """
    values: list = []
    for node in program[:index + 1]:
        args = [values[a] for a in node.args]
        if node.type == TENSOR:
            values.append(tensors[node.attr("tensor")])
        elif node.type == NUMBER:
            values.append(tf.constant(node.attr("value"), node.dtype))
        elif node.type == TWO:
            on, off = (tf.constant(node.attr(v), node.dtype) for v in ("on", "off"))
            values.append(tf.raw_ops.SelectV2(condition=args[0], t=on, e=off))
        elif node.type == CAST:
            values.append(tf.cast(args[0], node.dtype))
        else:
            function = getattr(tf.raw_ops, node.type)
            names = [n for n in inspect.signature(function).parameters if n != "name"]
            values.append(function(**dict(zip(names, args, strict=False)), **dict(node.attrs)))
    return values[index]


# Eager code.


@dataclasses.dataclass
class _Fad:
    """A fad tensor: its source and its derivative (a number at the beginning of a sequence)."""

    source: weakref.ref
    tangent: tf.Tensor


@contextlib.contextmanager
def eager_fad() -> Iterator[Sequences]:
    """Have gradient tapes keep only derivatives of the element-wise sequences that run in it.

    Enter it inside of the tape's block, or around it. Under a persistent tape or several tapes it
    changes nothing, since the derivatives it keeps have no derivatives themselves. Inside of a
    `tf.function` it does nothing: decorate the step with `tfckpt.checkpoint` instead.

    Yields:
      Counts of what was found, which go on as ops run.
    """
    sequences = Sequences()
    tf_adapter.add_op_callback(sequences.on_op)
    try:
        yield sequences
    finally:
        tf_adapter.remove_op_callback(sequences.on_op)


class Sequences:
    """The state machine; `counts` says how often each state was seen."""

    def __init__(self) -> None:
        self.counts = {"NN": 0, "NY": 0, "YY": 0, "YN": 0}
        self._fad: dict[int, _Fad] = {}
        self._busy = False

    def on_op(self, op_type: str, inputs: Sequence[tf.Tensor], attrs: Sequence[Any] | None,
              outputs: Sequence[tf.Tensor], op_name: str | None = None,
              graph: tf.Graph | None = None) -> None:
        """Follow an op; called by TensorFlow after it ran and the tape recorded it.

        Args:
          op_type: as TensorFlow registers it, such as "Tanh".
          inputs: eager tensors that it read.
          attrs: names and values in turn; None where it has none.
          outputs: eager tensors that it made.
          op_name: None of eager ops.
          graph: that the op was added to; None of eager ops, and the others are left alone.
        """
        if self._busy or graph is not None:
            return
        self._busy = True
        try:
            if not tf_adapter.is_recording_stopped() and tf_adapter.gradient_order(inputs) < 2:
                moving = [tf_adapter.gradient_order([t]) > 0 for t in inputs]
                with tf_adapter.stop_recording():
                    entry = self._step(op_type, inputs, moving, attrs, outputs)
                source = entry.source() if entry is not None else None
                if entry is not None and source is not None:
                    tf_adapter.replace_record(outputs[0], source, _multiplier(entry.tangent))
        finally:
            self._busy = False

    def _step(self, op_type: str, inputs: Sequence[tf.Tensor], moving: Sequence[bool],
              attrs: Sequence[Any] | None, outputs: Sequence[tf.Tensor]) -> _Fad | None:
        entries = [self._fad.get(id(t)) for t in inputs]
        named = dict(zip(attrs[::2], attrs[1::2], strict=True)) if attrs else {}
        source, tangents = self._source(op_type, inputs, moving, entries, outputs)
        was = "Y" if any(entries) else "N"
        if source is None:
            self.counts[was + "N"] += 1
            return None
        self.counts[was + "Y"] += 1
        tangent = _tangent(op_type, inputs, named, outputs[0], tangents)
        return None if tangent is None else self._note(
            outputs[0], _Fad(weakref.ref(source), tangent))

    def _source(self, op_type: str, inputs: Sequence[tf.Tensor], moving: Sequence[bool],
                entries: Sequence[_Fad | None], outputs: Sequence[tf.Tensor]
                ) -> tuple[tf.Tensor | None, list]:
        """Return the one tensor that all moving inputs come from, and a tangent for each input.

        The tangent of an input that does not move is None; without such a tensor there are none.
        """
        known = record(op_type)
        if not known.tangents or len(outputs) != 1 or known.joins or (
                outputs[0].dtype.name not in FLOATS):
            return None, []
        found = None
        tangents: list = []
        for tensor, moves, entry in zip(inputs, moving, entries, strict=True):
            if entry is None and (tensor.dtype.name not in FLOATS or not moves):
                tangents.append(None)  # a constant, or a mask
                continue
            source = tensor if entry is None else entry.source()
            if source is None or (found is not None and found is not source):
                return None, []
            found = source
            tangents.append(1.0 if entry is None else entry.tangent)
        if found is None or found.shape != outputs[0].shape or found.dtype != outputs[0].dtype:
            return None, []
        return found, tangents

    def _note(self, output: tf.Tensor, entry: _Fad) -> _Fad:
        key = id(output)
        self._fad[key] = entry
        weakref.finalize(output, self._fad.pop, key, None)
        return entry


def _multiplier(tangent: tf.Tensor | float) -> Callable[[tf.Tensor], list[tf.Tensor]]:
    def backward(g: tf.Tensor) -> list[tf.Tensor]:
        return [g * tangent]
    return backward


def _tangent(op_type: str, inputs: Sequence[tf.Tensor], attrs: Mapping[str, Any], y: tf.Tensor,
             tangents: Sequence[tf.Tensor | float | None]) -> tf.Tensor | None:
    """Return the op's tangent by the rules; None where it does not move."""
    builder = Builder()
    terms = [builder.tensor((0, n), t.dtype.name) for n, t in enumerate(inputs)]
    tensors = {(0, n): t for n, t in enumerate(inputs)} | {(1, 0): y}
    total: Term | None = None
    for position, tangent in enumerate(tangents):
        if tangent is None:
            continue
        t = builder.number(1.0, y.dtype.name)
        if not isinstance(tangent, float):
            tensors[(2, position)] = tangent
            t = builder.tensor((2, position), y.dtype.name)
        part = cast(record(op_type).tangent(position)(
            At(terms, builder.tensor((1, 0), y.dtype.name), t, attrs)), y.dtype.name)
        total = part if total is None else total + part
    if total is None:
        return None
    return tf.broadcast_to(run(builder.program(), total.index, tensors), y.shape)
