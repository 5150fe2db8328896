"""One hash of all that a plan depends on.

It has all of the step that planning reads, and no names: Keras numbers layers anew in each process,
and ops are named after layers. Where a name decides something, what it decided is part of the graph
(the region of an op), or the op's index stands for it (seconds that were given by name).
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tfckpt.driving.parts import DevicePart
from tfckpt.ir.graph import Graph, Loop, Op
from tfckpt.request.options import Options

NOT_OF_THE_PLAN = ("budgets", "batch_size", "target", "time_limit", "op_seconds", "keep",
                   "recompute")
"""Options that say nothing beside the parts and the shapes; of a search that the time limit has cut
short nothing is kept."""


def key_of(graph: Graph, parts: Sequence[DevicePart], options: Options,
           others: Mapping[str, object]) -> str:
    """Return the key of a step's plan, in hexadecimal.

    Args:
      graph: the whole step.
      parts: of its devices, with their budgets and targets.
      options: all but those of `NOT_OF_THE_PLAN` go into the key.
      others: what else it depends on: the process, and what XLA is asked about.
    """
    index = {op.name: i for i, op in enumerate(graph.ops)}
    chosen = {field.name: getattr(options, field.name) for field in dataclasses.fields(options)
              if field.name not in NOT_OF_THE_PLAN}
    what = [graph_digest(graph), [_part(part, index) for part in parts], plain(chosen),
            plain(others)]
    return hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()


def graph_digest(graph: Graph) -> str:
    """Return a hash of a graph without its names.

    Args:
      graph: a captured step, or the part of one.

    Returns:
      64 hexadecimal digits.
    """
    digest = hashlib.sha256()
    for line in _lines(graph):
        digest.update(repr(line).encode())
    return digest.hexdigest()


def _lines(graph: Graph) -> Iterable[tuple]:
    """Yield what is hashed of a graph: a tuple for each op, and what leaves it."""
    index = {op.name: i for i, op in enumerate(graph.ops)}
    for op in graph.ops:
        yield _op(op, index)
    yield graph.fetches, graph.sinks


def _op(op: Op, index: Mapping[str, int]) -> tuple:
    outputs = tuple((t.dtype, t.shape, t.bytes, t.variable_bytes) for t in op.outputs)
    attrs = tuple((name, repr(plain(op.attrs[name]))) for name in sorted(op.attrs))
    controls = tuple(sorted(op.controls))  # TensorFlow traces them in another order each time
    return (op.type, op.inputs, controls, outputs, op.region, op.pure, op.device, attrs,
            op.conditional, op.policy, op.workspace, tuple(map(graph_digest, op.bodies)),
            tuple(sorted(op.shares.items())), tuple(index[name] for name in op.later_writes),
            None if op.loop is None else _loop(op.loop, index))


def _loop(loop: Loop, index: Mapping[str, int]) -> tuple:
    return (loop.trips, loop.bound, loop.at_once, loop.arguments, tuple(sorted(loop.takes.items())),
            loop.segments and (index[loop.segments.gradient],
                               *dataclasses.astuple(loop.segments)[1:]))


def _part(part: DevicePart, index: Mapping[str, int]) -> list:
    """Return what is asked for on a device. Its graph is a part of the step's by its device."""
    target = plain(dataclasses.replace(part.target, rates=dataclasses.replace(
        part.target.rates, known={})))
    known = sorted((index[name], seconds) for name, seconds in part.target.rates.known.items()
                   if name in index)
    return [part.device, part.number, plain(part.budget), target, known]


def plain(value: Any) -> Any:
    """Return a value as JSON can write it, equal for equal values.

    Args:
      value: of basic types, sequences, mappings and dataclasses; of anything else its `repr`
        counts.
    """
    if value is None or isinstance(value, bool | int | float | str) and not isinstance(
            value, enum.Enum):
        return value
    if dataclasses.is_dataclass(value):
        return {field.name: plain(getattr(value, field.name))
                for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return [[plain(name), plain(value[name])] for name in sorted(value)]
    if isinstance(value, Sequence) and not isinstance(value, bytes):
        return [plain(entry) for entry in value]
    return repr(value)
