"""What becomes of tensors, and what is live at a peak, in the names that people know them by."""

from __future__ import annotations

import re

from tfckpt.fad.transform import MARK as FORWARD_AD
from tfckpt.ir.costgraph import CostGraph
from tfckpt.ir.graph import BACKWARD, FORWARD, KEEP, RECOMPUTE, Graph, Tensor
from tfckpt.ir.hlo import XlaBuffer, XlaMemory
from tfckpt.ir.layers import UNKNOWN, LayerNames
from tfckpt.ir.schedule import Schedule, resolve
from tfckpt.report.values import RECOMPUTED, Curve, Fate, LiveTensor
from tfckpt.simulate.simulate import Live, Timeline

_GRADIENT = re.compile(r"(?:^|(?<=/))(?:gradient_tape|gradients(?:_\d+)?)/")
_ARGUMENT = "XLA_Args"
"""What XLA calls an argument of the step."""
_COPY = re.compile(r"-tfckpt\d+$")
_AROUND = re.compile(r"-tfckpt_[a-z]+\d+(_\d+)?$")
"""Of a guard or a fence, which is called after what it hands on."""


def fates_of(graph: Graph, cost: CostGraph, schedule: Schedule, names: LayerNames
             ) -> tuple[Fate, ...]:
    """Return what a schedule does with each forward storage that the backward reads.

    Args:
      graph: the step as captured.
      cost: the same, priced.
      schedule: of the priced step.
      names: its layers.

    Returns:
      One for each such storage, largest first.
    """
    resolved = resolve(cost, schedule)
    kept: dict[int, bool] = {}
    for position, (v, copy) in enumerate(schedule):
        if cost.vertices[v].region == FORWARD and not copy:
            continue
        for instance in resolved.reads[position]:
            s = resolved.storage[instance]
            if cost.vertices[cost.storages[s].producer].region == FORWARD and (
                    not copy or not resolved.copy[instance]):
                kept[s] = kept.get(s, False) or not resolved.copy[instance]
    return tuple(sorted((_fate_of(graph, cost, s, original, names)
                         for s, original in kept.items()), key=lambda f: (-f.bytes, f.op)))


def _fate_of(graph: Graph, cost: CostGraph, s: int, original: bool, names: LayerNames) -> Fate:
    """Return the fate of a storage; `original` says whether the original is read."""
    storage = cost.storages[s]
    vertex = cost.vertices[storage.producer]
    op, slot = storage.tensor
    tensor = graph.ops[op].outputs[slot] if op >= 0 else Tensor("", (), storage.bytes)
    asked = {graph.ops[i].policy for i in vertex.ops}
    return Fate(names.layer(vertex.name), names.shown(vertex.name), storage.bytes,
                _fate(vertex.name, original), tensor.dtype, tensor.shape or (),
                next((policy for policy in (KEEP, RECOMPUTE) if policy in asked), ""))


def _fate(op: str, kept: bool) -> str:
    if not kept:
        return RECOMPUTED
    return "derivative" if FORWARD_AD in op else "kept"


def tensors_at_peak(cost: CostGraph, timeline: Timeline, names: LayerNames = UNKNOWN
                    ) -> tuple[LiveTensor, ...]:
    """Return what is live at a timeline's peak, largest first.

    Args:
      cost: the priced step that the timeline is of.
      timeline: simulated live bytes, with the storages at its peak.
      names: the step's layers.

    Returns:
      Tensors, and the workspace of what runs at the peak.
    """
    found = [LiveTensor(live.bytes, names.shown(maker), names.layer(maker), _why(cost, live, names))
             for live in timeline.live_at_peak
             for maker in [cost.vertices[cost.storages[live.storage].producer].name]]
    working = cost.vertices[timeline.working] if timeline.working >= 0 else None
    if working is not None and working.workspace:
        found.append(LiveTensor(working.workspace, names.shown(working.name),
                                names.layer(working.name), "workspace while it runs"))
    return tuple(sorted(found, key=lambda tensor: -tensor.bytes))


def _why(cost: CostGraph, live: Live, names: LayerNames) -> str:
    """Return why a tensor is live."""
    if live.copy:
        return "recomputed for the backward"
    producer = cost.vertices[cost.storages[live.storage].producer]
    if producer.region != FORWARD:
        return "gradient" if producer.region == BACKWARD else "update"
    later = [cost.vertices[r].name for r in cost.readers[live.storage]
             if cost.vertices[r].region != FORWARD]
    if not later:
        return "in use by the forward"
    # some gradients stand outside of all layers, as that of tf.nn.silu
    known = next(filter(names.knows, later), producer.name if names.knows(producer.name) else "")
    return f"kept for {names.layer(known or later[0])}'s gradient"


def xla_curve(memory: XlaMemory, names: LayerNames) -> Curve:
    """Return live bytes over the step as XLA has scheduled it.

    Args:
      memory: XLA's answer.
      names: the step's layers.
    """
    return Curve(memory.live_bytes, tuple(_xla_tensor(held, names) for held in memory.held),
                 memory.temp_bytes, by_xla=True)


def _xla_tensor(buffer: XlaBuffer, names: LayerNames) -> LiveTensor:
    """Return a buffer as people know it: by the layer of the op that it comes from."""
    if buffer.op == _ARGUMENT:
        return LiveTensor(buffer.bytes, "argument", "variables and inputs",
                          f"XLA's {buffer.opcode}")
    op = _AROUND.sub("", buffer.op)
    if _COPY.search(op):
        why = "recomputed for the backward"
    elif _GRADIENT.search(op) or op in names.beside:
        why = "gradient"
    elif "/" in op:
        why = "of the forward"
    else:  # XLA made it of several, or moved it
        why = f"XLA's {buffer.opcode}"
    return LiveTensor(buffer.bytes, names.shown(op), names.layer(op), why)
