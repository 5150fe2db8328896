"""Runs the training steps of two documents on the same made-up data, where they can be run."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from tfckpt.capture.files import SAVED_MODEL, Document
from tfckpt.capture.steps import Step, imported
from tfckpt.errors import VerificationError
from tfckpt.ops import Access, Source, record
from tfckpt.verify.memory import default_device, memory_info

_INITIALISERS = ("init", "init_all_vars", "init/NoOp")


@dataclasses.dataclass(frozen=True)
class Measured:
    """Measurements of a step that was run.

    Attributes:
      peak_bytes: minimum of several runs, above what was allocated before; None without
        statistics.
      seconds: minimum of several runs.
      values: results and variables after one step, by name.
      start: variables before it, by name; of graphs alone, whose initialisers may be random.
      names: what people call those of `values` that are named by a number.
    """

    peak_bytes: int | None
    seconds: float
    values: dict[str, np.ndarray]
    start: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)
    names: dict[str, str] = dataclasses.field(default_factory=dict)


def run_step(document: Document, step: Step, batch_size: int | None, repeats: int,
             start: Mapping[str, np.ndarray] | None = None) -> Measured:
    """Run one step once for its results and then `repeats` times for peak and time.

    Args:
      document: what the step was read from; not changed.
      step: one of the training steps of the document.
      batch_size: what an unknown leading dimension stands for; None where it was not given.
      repeats: how many measured runs are made, of which the lowest values count.
      start: what another run of the like began with (`Measured.start`), to begin with as well.

    Returns:
      What the runs showed.

    Raises:
      VerificationError: the step cannot be run; says why.
    """
    try:
        if document.kind == SAVED_MODEL:
            return _run_saved_model(document, step, batch_size, repeats)
        return _run_graph(document, step, batch_size, repeats, start or {})
    except VerificationError:
        raise
    except Exception as error:  # whatever a foreign graph does when it runs
        first = str(error).strip().splitlines() or [type(error).__name__]
        raise VerificationError(f"verify: {step.name} cannot be run: {first[0]}") from error


_NOISE = 1e-2
"""Below this fraction of the largest entry of its kind a tensor has rounding errors only (the
gradient of a bias before a normalisation is zero in exact arithmetic)."""


def largest_difference(first: Measured, second: Measured) -> tuple[float, str] | None:
    """Return the largest difference, and the name of its tensor.

    Differences are relative to the tensor's largest entry; where that is noise, to the noise
    floor of results or variables, whichever the tensor is.

    Args:
      first: the step of one document.
      second: the same step of the other document.

    Returns:
      None where nothing can be compared.
    """
    names = [name for name in sorted(first.values.keys() & second.values.keys())
             if _comparable(first.values[name], second.values[name])]
    largest: dict[str, float] = {}
    for name in names:
        if np.issubdtype(first.values[name].dtype, np.inexact):  # no counts, no seeds
            kind = name.partition(" ")[0]
            largest[kind] = max(largest.get(kind, 0.0), _most(first.values[name]))
    found = [(_difference(first.values[name], second.values[name],
                          _NOISE * largest.get(name.partition(" ")[0], 0.0)), name)
             for name in names]
    most = max(found, key=lambda entry: entry[0], default=None)
    return None if most is None else (most[0], first.names.get(most[1], most[1]))


def _comparable(a: np.ndarray, b: np.ndarray) -> bool:
    return a.shape == b.shape and a.size > 0 and np.issubdtype(a.dtype, np.number)


def _most(a: np.ndarray) -> float:
    finite = np.abs(a.astype(np.float64))[np.isfinite(a.astype(np.float64))]
    return float(finite.max()) if finite.size else 0.0


def _difference(a: np.ndarray, b: np.ndarray, floor: float) -> float:
    """0 for equal bits; infinite where one is not a number and the other is."""
    if a.tobytes() == b.tobytes():
        return 0.0
    found = float(np.abs(a.astype(np.float64) - b).max()) / (max(_most(a), floor) or 1.0)
    return float("inf") if np.isnan(found) else found


def _measure(call: Callable[[], object], repeats: int) -> tuple[int | None, float]:
    device = default_device()
    peaks: list[int] = []
    times: list[float] = []
    for _ in range(repeats):
        try:
            before = memory_info(device, reset=True)["current"]
        except VerificationError:
            before = None
        started = time.perf_counter()
        call()
        times.append(time.perf_counter() - started)
        if before is not None:
            peaks.append(memory_info(device)["peak"] - before)
    return (min(peaks) if peaks else None), min(times)


def _made_up(dtype: tf.DType, shape: tf.TensorShape, batch_size: int | None,
             seed: int) -> np.ndarray:
    """Values for an input: normal floats, zeros and ones as integers."""
    if shape.rank is None:
        raise VerificationError("verify: an input of unknown rank cannot be made up")
    sizes: list[Any] = [batch_size if i == 0 and size is None else size
                        for i, size in enumerate(shape)]
    if None in sizes:
        raise VerificationError(f"verify: an input has the unknown shape {shape}; "
                                "pass --batch_size")
    made = np.random.default_rng(seed)
    if dtype.is_floating:
        return made.standard_normal(sizes).astype(dtype.as_numpy_dtype)
    if dtype.is_integer or dtype.is_bool:
        return made.integers(0, 2, sizes).astype(dtype.as_numpy_dtype)
    raise VerificationError(f"verify: no values can be made up for inputs of type {dtype.name}")


# SavedModels: the function is found in the object graph and called.


def _run_saved_model(document: Document, step: Step, batch_size: int | None,
                     repeats: int) -> Measured:
    if not step.function:
        raise VerificationError("verify: the step is the graph of a TF1 SavedModel; compare its "
                                "MetaGraphDefs to have them run")
    loaded = tf.saved_model.load(document.source)
    function, names = _callable(document.meta_graphs()[step.meta], loaded, step.function)
    specs, keywords = function.structured_input_signature
    flat = [_made_up(s.dtype, s.shape, batch_size, i)
            for i, s in enumerate(tf.nest.flatten((specs, keywords)))
            if isinstance(s, tf.TensorSpec)]
    made = iter([tf.constant(value) for value in flat])
    args, kwargs = tf.nest.map_structure(
        lambda s: next(made) if isinstance(s, tf.TensorSpec) else s, (specs, keywords))
    call = loaded_call(loaded, names, function)
    results = call(*args, **kwargs)
    values = {f"result {i}": tensor.numpy() for i, tensor in enumerate(tf.nest.flatten(results))
              if hasattr(tensor, "numpy")}
    values |= {f"variable {i}": v.numpy() for i, v in enumerate(function.variables)}
    known_as = {f"variable {i}": f"variable {v.name.partition(':')[0]}"
                for i, v in enumerate(function.variables)}
    peak, seconds = _measure(lambda: tf.nest.map_structure(
        lambda t: t.numpy() if hasattr(t, "numpy") else t, call(*args, **kwargs)), repeats)
    return Measured(peak, seconds, values, names=known_as)


def loaded_call(loaded: Any, names: tuple[str, ...], function: Any) -> Any:
    """Return what to call: the object's own function, which fills in what is no tensor.

    Args:
      loaded: a SavedModel as `tf.saved_model.load` returns it.
      names: the attributes that lead from it to the object's own function; empty where none does.
      function: the concrete function, which is called where there are no names.
    """
    return functools.reduce(getattr, names, loaded) if names else function


def _callable(meta: Any, loaded: Any, wanted: str) -> tuple[Any, tuple[str, ...]]:
    """Return the concrete function that runs a FunctionDef, and the attributes that lead to it."""
    nodes = meta.object_graph_def.nodes
    pending: deque[tuple[int, tuple[str, ...]]] = deque([(0, ())])
    seen = {0}
    while pending and nodes:
        number, names = pending.popleft()
        node = nodes[number]
        if node.WhichOneof("kind") == "function" and wanted in node.function.concrete_functions:
            found = functools.reduce(getattr, names, loaded)
            index = list(node.function.concrete_functions).index(wanted)
            return found.concrete_functions[index], names
        for child in node.children:
            if child.node_id not in seen and child.local_name.isidentifier():
                seen.add(child.node_id)
                pending.append((child.node_id, (*names, child.local_name)))
    for key in sorted(loaded.signatures):
        signature = loaded.signatures[key]
        if _wrapper_calls(meta, key, wanted):
            return signature, ()
    raise VerificationError(f"verify: nothing in the SavedModel leads to {wanted!r}")


def _wrapper_calls(meta: Any, key: str, wanted: str) -> bool:
    """Return whether the function of a signature is, or calls, a FunctionDef."""
    prefix = f"__inference_signature_wrapper_{key}"
    return any("f" in node.attr and node.attr["f"].func.name == wanted
               for function in meta.graph_def.library.function
               if function.signature.name.startswith(prefix) for node in function.node_def)


# Graphs: a session feeds the placeholders.


def _run_graph(document: Document, step: Step, batch_size: int | None, repeats: int,
               start: Mapping[str, np.ndarray]) -> Measured:
    definition = document.graph_defs()[step.meta]
    graph = imported(definition)
    inside = {op.name for op in step.graph.ops}
    feeds: dict[Any, np.ndarray] = {}
    for op in graph.get_operations():
        if record(op.type).source is Source.ARGUMENT and op.name in inside:
            tensor = op.outputs[0]
            feeds[tensor] = _made_up(tensor.dtype, tensor.shape, batch_size, len(feeds))
    readers = step.graph.consumers()
    waited = {c for op in step.graph.ops for c in op.controls}
    last = [graph.get_operation_by_name(op.name) for i, op in enumerate(step.graph.ops)
            if not readers[i] and i not in waited]
    fetches = {t.name: t for op in last for t in op.outputs if t.dtype.is_floating}
    targets = [op for op in last if not op.outputs]
    config = tf.compat.v1.ConfigProto(inter_op_parallelism_threads=1)
    with tf.compat.v1.Session(graph=graph, config=config) as session:
        _initialise(session, graph, inside)
        variables = _variables(graph)
        assigns = _assigns(graph, variables)
        session.run([assigns[name] for name in start if name in assigns], {
            assigns[name].inputs[1]: value for name, value in start.items() if name in assigns})
        current = {name: op.outputs[0] for name, op in variables.items()}
        begun = session.run(current)
        values = {f"result {name}": value
                  for name, value in session.run((fetches, targets), feeds)[0].items()}
        values |= {f"variable {name}": value for name, value in session.run(current).items()}
        peak, seconds = _measure(lambda: session.run((fetches, targets), feeds), repeats)
    return Measured(peak, seconds, values, begun)


def _variables(graph: tf.Graph) -> dict[str, tf.Operation]:
    """Return what gives the value of each variable, by name."""
    return {op.name: op for op in graph.get_operations()
            if record(op.type).source is Source.REFERENCE
            or record(op.type).access is Access.VALUE and not op.control_inputs
            and record(op.inputs[0].op.type).source is Source.HANDLE}


def _assigns(graph: tf.Graph, variables: Mapping[str, tf.Operation]
             ) -> dict[str, tf.Operation]:
    """Return what can give a variable another value, by the names of `variables`."""
    by_handle = {op.inputs[0].op.name: op for op in _assigning(graph)}
    found = {}
    for name, op in variables.items():
        variable = op if record(op.type).source is Source.REFERENCE else op.inputs[0].op
        if variable.name in by_handle:
            found[name] = by_handle[variable.name]
    return found


def _assigning(graph: tf.Graph) -> list[tf.Operation]:
    """Return what assigns a variable the value that it begins with."""
    return [op for op in graph.get_operations()
            if record(op.type).access in (Access.ASSIGN, Access.ASSIGN_REFERENCE)
            and op.name.endswith("/Assign")]


def _initialise(session: tf.compat.v1.Session, graph: tf.Graph, inside: set[str]) -> None:
    """Run the graph's initialiser: the op `init`, or what assigns to variables once."""
    names = {op.name for op in graph.get_operations()}
    known = next((name for name in _INITIALISERS if name in names), None)
    if known is not None:
        session.run(graph.get_operation_by_name(known))
        return
    handles = [op for op in graph.get_operations()
               if record(op.type).source in (Source.HANDLE, Source.REFERENCE)]
    assigns = [op for op in _assigning(graph) if op.name not in inside]
    if handles and not assigns:
        raise VerificationError("verify: its variables have no values and it has no initialiser")
    session.run(assigns)
