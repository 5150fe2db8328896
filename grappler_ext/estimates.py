"""Grappler's estimate of a step on a device that need not be there: peak bytes and time.

Grappler simulates the graph op by op, the first ready first, with times from the device's rates,
and counts the outputs that are still to be read. It counts as it is written: a pass-through such
as Identity or Reshape is a tensor of its own, no kernel writes into its input, and there is no
allocator. It sees a loop as one op that makes next to nothing, so time and lists of loops are ours.
`docs/estimates.md` compares it with tfckpt's simulator and with measured peaks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from tfckpt.capture import tf_adapter
from tfckpt.capture.devices import device_parts
from tfckpt.capture.inlining.inline import readable
from tfckpt.capture.shapes import CallSizes, concrete_shapes, to_variable, uncaptured_inputs
from tfckpt.capture.steps import imported
from tfckpt.capture.tfgraph import capture
from tfckpt.carriers.checkpointed import CheckpointedStep
from tfckpt.cost.storage import RESIDENT, roots, storage_bytes
from tfckpt.cost.time import seconds as op_seconds
from tfckpt.errors import CaptureError, CostError
from tfckpt.ir.graph import Graph, TensorId
from tfckpt.ops import Source, record
from tfckpt.request.budget import format_bytes
from tfckpt.request.devices import Device, find_device
from tfckpt.request.options import make_options

_VARIABLES = (Source.HANDLE, Source.REFERENCE)
_GIVEN = (Source.ARGUMENT, Source.CONSTANT, Source.ELEMENT)


@dataclasses.dataclass(frozen=True)
class Live:
    """A tensor at the peak.

    Attributes:
      name: "op:output".
      bytes: of it.
      storage: the tensor whose memory it is, itself unless it passes on another; empty for a
        variable's value, an input or a constant, whose memory is there before the step.
    """

    name: str
    bytes: int
    storage: str

    @property
    def resident(self) -> bool:
        """Return whether its memory is there before the step."""
        return not self.storage


@dataclasses.dataclass(frozen=True)
class Costs:
    """The memory and time that a graph needs on a device.

    Attributes:
      peak_bytes: highest sum of live tensors as Grappler counts it: resident ones are part of it
        while something is to read them, and memory that has two names counts twice.
      live: what is live then, the largest first.
      seconds: of one step, op after op.
      op_seconds: by op name.
      resident_bytes: all variables, inputs and constants of the graph.
      list_bytes: what loops put into lists, all of them together; no part of the peak.
    """

    peak_bytes: int
    live: tuple[Live, ...]
    seconds: float
    op_seconds: Mapping[str, float] = dataclasses.field(repr=False)
    resident_bytes: int = 0
    list_bytes: int = 0

    @property
    def dynamic_bytes(self) -> int:
        """Of the peak, what was not there before the step, each storage once."""
        return sum({t.storage: t.bytes for t in reversed(self.live) if t.storage}.values())

    @property
    def device_bytes(self) -> int:
        """Return the bytes that the device needs: resident, the peak's dynamic part, lists."""
        return self.resident_bytes + self.dynamic_bytes + self.list_bytes


@dataclasses.dataclass(frozen=True)
class Estimate:
    """A step on a device.

    Attributes:
      name: of the step.
      device: for which it was estimated.
      plain: the step as it was written.
      rewritten: the step with tfckpt; None where that was not asked for.
    """

    name: str
    device: Device
    plain: Costs
    rewritten: Costs | None = None

    def fits(self, costs: Costs) -> bool:
        """Return whether one of the two fits on the device.

        Args:
          costs: `plain` or `rewritten`.

        Returns:
          Whether its bytes are within those of the device that can be used.
        """
        return costs.device_bytes <= self.device.usable_bytes

    def __str__(self) -> str:
        columns = [("plain", self.plain)]
        if self.rewritten is not None:
            columns.append(("with tfckpt", self.rewritten))
        rows: list[tuple[str, Callable[[Costs], str]]] = [
            ("", lambda c: next(name for name, costs in columns if costs is c)),
            ("needs", lambda c: format_bytes(c.device_bytes)),
            ("  resident", lambda c: format_bytes(c.resident_bytes)),
            ("  peak above that", lambda c: format_bytes(c.dynamic_bytes)),
            *([("  lists of loops", lambda c: format_bytes(c.list_bytes))]
              if any(costs.list_bytes for _, costs in columns) else []),
            ("fits", lambda c: "yes" if self.fits(c) else "no"),
            ("Grappler's sum", lambda c: format_bytes(c.peak_bytes)),
            ("time of a step", lambda c: f"{1e3 * c.seconds:.3f} ms")]
        lines = [f"{self.name} on {self.device.name}, by Grappler's virtual cluster "
                 f"({format_bytes(self.device.usable_bytes)} usable)"]
        lines += [f"  {label:<18}" + "".join(f"{cell(c):>14}" for _, c in columns)
                  for label, cell in rows]
        for name, costs in columns:
            lines.append(f"  live at the peak, {name}: {len(costs.live)} tensors")
            lines += [f"  {format_bytes(t.bytes):>12}  {t.name}{'  (resident)' * t.resident}"
                      for t in costs.live[:8]]
        return "\n".join(lines)


def estimate(function: Any, *args: Any, device: str | Device = "H100-80GB",
             budget: object = None, **options: Any) -> Estimate:
    """Estimate a step's memory and time on a device.

    Nothing runs: the function is traced for these arguments, functions that it calls are inlined,
    and Grappler simulates the result.

    Args:
      function: a `tf.function`, or a step under `tfckpt.checkpoint`; of the latter both what it
        was made of and what it is are estimated.
      *args: what it would be called with; `tf.TensorSpec` stands for a tensor.
      device: a preset's name, its figures as text (see `find_device`), or a `Device`.
      budget: for a `tf.function`: also estimate it under `tfckpt.checkpoint` with this budget,
        planned with the device's times.
      **options: further ones of `tfckpt.checkpoint`; `batch_size` also says what dimensions that
        a signature leaves open stand for.

    Returns:
      Bytes and seconds of the plain step and, where it was asked for, of the rewritten one.

    Raises:
      PlanError: an unknown device, or a malformed option.
      CaptureError: not something that can be traced.
      CostError: a dimension is unknown, or several devices work on the step.
      InfeasibleBudgetError: no plan fits the budget.
    """
    found = find_device(device)
    checked = make_options("min" if budget is None else budget, **options)
    plain_function = function.plain if isinstance(function, CheckpointedStep) else function
    traced = _traced(plain_function, args)
    plain = costs_of(*inlined_graph(traced, args, checked.batch_size), found)
    ours = function if isinstance(function, CheckpointedStep) else None
    if ours is None and budget is not None:
        target = found.target(dict(plain.op_seconds))
        ours = CheckpointedStep(plain_function, dataclasses.replace(checked, target=target))
    rewritten = None if ours is None else costs_of(
        *inlined_graph(_traced(ours, args), args, checked.batch_size), found)
    return Estimate(_name(traced), found, plain, rewritten)


def costs_of(definition: tf.compat.v1.GraphDef, graph: Graph, device: Device) -> Costs:
    """Return what a graph costs.

    Args:
      definition: with every shape known and variables as `VarHandleOp`.
      graph: the part of it that runs.
      device: for which Grappler's simulation is made: its kind and speeds.

    Returns:
      Bytes, those at the peak by tensor, and seconds, those of each op by name.

    Raises:
      CostError: a dimension is unknown, or Grappler refuses the graph.
    """
    root = roots(graph)
    sizes = storage_bytes(graph, root)  # refuses unknown dimensions: Grappler takes them for 1
    if len(device_parts(graph)) > 1:
        raise CostError(f"cost: several devices work on {graph.name!r}; estimate the step of one "
                        "replica")
    wanted = [graph.ops[i].name for i in (*(i for i, _ in graph.fetches), *graph.sinks)]
    try:
        run = tf_adapter.run_virtually(
            definition, list(dict.fromkeys(wanted)), kind=device.kind,
            flops_per_second=device.flops_per_second, bytes_per_second=device.bandwidth)
    except (ValueError, tf.errors.OpError) as error:
        raise CostError(f"cost: Grappler cannot estimate {graph.name!r}: {error}") from error
    index = {op.name: i for i, op in enumerate(graph.ops)}
    live = sorted((Live(f"{op}:{slot}", size, _storage(graph, root[index[op]][slot]))
                   for op, slot, size in run.live), key=lambda t: (-t.bytes, t.name))
    rates = device.target().rates
    seconds = {**run.seconds, **{op.name: op_seconds(graph, op, rates) for op in graph.ops
                                 if op.loop is not None}}
    lists = sum(size for (i, slot), size in sizes.items()
                if graph.ops[i].outputs[slot].dtype == "variant")
    return Costs(run.peak_bytes, tuple(live), sum(seconds.values()), seconds,
                 resident_bytes(definition, graph), lists)


def _storage(graph: Graph, root: TensorId) -> str:
    return "" if root == RESIDENT else f"{graph.ops[root[0]].name}:{root[1]}"


def resident_bytes(definition: tf.compat.v1.GraphDef, graph: Graph) -> int:
    """Return bytes of a graph's variables, inputs and constants.

    Args:
      definition: has the shapes of variables, also of those that are only written, such as the
        slots of fused updates.
      graph: what runs of it, and the shapes of inputs.

    Returns:
      Bytes; what is of unknown size counts as none.
    """
    total = sum(t.bytes or 0 for op in graph.ops if record(op.type).source in _GIVEN
                for t in op.outputs)
    names = {op.name for op in graph.ops}
    for node in definition.node:
        if record(node.op).source in _VARIABLES and node.name in names:
            shape = tf.TensorShape(node.attr["shape"].shape)
            kind = tf.dtypes.as_dtype(node.attr["dtype"].type)
            total += (shape.num_elements() or 0) * kind.size
    return total


# Functions.


def _traced(function: Any, args: Sequence[Any]) -> Any:
    """Return the concrete function for some arguments."""
    if isinstance(function, tf.types.experimental.ConcreteFunction):
        return function
    if not hasattr(function, "get_concrete_function"):
        raise CaptureError(f"capture: {function!r} is no tf.function; put tf.function around it")
    return function.get_concrete_function(*args)


def _name(traced: Any) -> str:
    return readable(tf.compat.as_str(traced.name))


def inlined_graph(traced: Any, args: Sequence[Any] = (),
                  batch_size: int | None = None) -> tuple[tf.compat.v1.GraphDef, Graph]:
    """Return a concrete function as `costs_of` takes it.

    Args:
      traced: the concrete function.
      args: the call's arguments, whose shapes count where the signature leaves them open.
      batch_size: what a leading dimension that stays unknown stands for.

    Returns:
      The definition, with calls inlined and shapes known, and the part of it that runs.
    """
    definition = tf_adapter.inlined(traced)
    nodes = {node.name: node for node in definition.node}
    for tensor in traced.inputs:
        known = tf_adapter.handle_shape(tensor) if tensor.dtype == tf.resource else None
        if known is not None:
            to_variable(nodes[tensor.op.name], *known)
    live = imported(definition)
    given = CallSizes.of(args).inputs(uncaptured_inputs(traced.graph))
    shaped = concrete_shapes(live, batch_size, given, library=definition.library)
    graph = capture(shaped, name=_name(traced),
                    fetches=[shaped.get_tensor_by_name(t.name) for t in traced.outputs])
    return shaped.as_graph_def(), graph
