"""The parts of a step that runs on several devices: one graph for each, planned by itself.

Under a distribution strategy all replicas are traced into one graph, one after the other. A
schedule over all of it would have one replica wait for another, so each device gets a schedule of
its own. The part of a device has the ops of the whole graph, at the same indices, but those of
other devices are opaque sources: they cannot be repeated, moved or waited for, and only say in
which order the device's own ops may run.
"""

from __future__ import annotations

import dataclasses

from tfckpt.ir.graph import BACKWARD, FORWARD, Graph, Op, Tensor
from tfckpt.ir.target import HERE, Target
from tfckpt.ops import record
from tfckpt.ops.names import ELSEWHERE


def device_key(device: str) -> str:
    """Return a device's name, the same for all spellings of it that one graph may contain.

    Args:
      device: as an op names it ("/job:worker/task:1/device:GPU:0", "gpu:1"); "" is a CPU.
    """
    said = {"job": "localhost", "task": "0", "type": "CPU", "index": "0"}
    for field in device.split("/"):
        name, *values = field.split(":")
        if name in said:
            said[name] = values[0]
        elif name == "device":
            said["type"], said["index"] = values
        elif name and name != "replica":  # "gpu:1", "/cpu:0"
            said["type"], said["index"] = name.upper(), *(values or ["0"])
    place = "" if said["job"] == "localhost" else f"/job:{said['job']}/task:{said['task']}"
    return f"{place}/device:{said['type']}:{said['index'].replace('*', '0')}"


def device_parts(graph: Graph, target: Target = HERE) -> dict[str, Graph]:
    """Return the part of each device that computes gradients, by the device's name.

    Names are spelt as ops spell them, if they do. A single entry, the graph itself, where all ops
    run on one device.

    Args:
      graph: the captured step; not changed.
      target: what runs the step; under XLA, which compiles for one device, the step is one part.
    """
    placed = _placed(graph)
    names: dict[str, str] = {}
    for op, key in zip(graph.ops, placed, strict=True):
        if key and op.region == BACKWARD:
            names.setdefault(key, op.device or key)
    if len({key for key in placed if key}) <= 1 or not target.spans_devices:
        return {next(iter(names.values()), ""): graph}
    readers = graph.consumers()
    return {names[key]: _part(graph, placed, readers, key) for key in names}


def has_inner_collective(graph: Graph) -> bool:
    """Return whether replicas exchange something before the update (synchronised statistics).

    Args:
      graph: the captured step; not changed.
    """
    return any(record(op.type).collective and op.region in (FORWARD, BACKWARD)
               for op in graph.ops)


def _placed(graph: Graph) -> list[str]:
    """Return the device of each op.

    An op without one is where its only readers are, or its inputs.
    """
    keys: dict[str, str] = {"": ""}
    for op in graph.ops:
        if op.device not in keys:
            keys[op.device] = device_key(op.device)
    placed = [keys[op.device] for op in graph.ops]
    unplaced = [not key for key in placed]
    wanted: list[str | None] = [None] * len(placed)  # by readers; "" where they disagree
    for index in range(len(placed) - 1, -1, -1):
        if unplaced[index]:
            placed[index] = wanted[index] or ""
        for source, _ in graph.ops[index].inputs:
            if unplaced[source] and placed[index]:
                agree = wanted[source] in (None, placed[index])
                wanted[source] = placed[index] if agree else ""
    for index, op in enumerate(graph.ops):
        if unplaced[index] and not placed[index] and op.inputs:
            found = {placed[source] for source, _ in op.inputs}
            placed[index] = next(iter(found)) if len(found) == 1 else ""
    return placed


def _part(graph: Graph, placed: list[str], readers: list[list[int]], key: str) -> Graph:
    own = [place == key for place in placed]
    ops = tuple(op if own[i] else _foreign(op, any(own[r] for r in readers[i]))
                for i, op in enumerate(graph.ops))
    leaving = [tensor for i, op in enumerate(graph.ops) if not own[i]
               for tensor in op.inputs if own[tensor[0]]]
    fetches = dict.fromkeys([t for t in graph.fetches if own[t[0]]] + leaving)
    sinks = tuple(i for i in graph.sinks if own[i])
    return Graph(graph.name, ops, tuple(fetches), sinks)


def _foreign(op: Op, read_here: bool) -> Op:
    sources = tuple(dict.fromkeys((*(source for source, _ in op.inputs), *op.controls)))
    outputs = op.outputs if read_here else tuple(
        Tensor(t.dtype, t.shape, 0) for t in op.outputs)
    return dataclasses.replace(op, type=ELSEWHERE, inputs=(), controls=sources, outputs=outputs,
                               pure=False, attrs={}, loop=None)
