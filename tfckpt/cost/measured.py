"""The rates of a machine, and seconds of single ops, from what a profile says of a step.

A profile is of what ran: ops that Grappler has made of others have names that begin with the name
of the one they stand for, and what a kernel computes with others has the name of the last of them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from tfckpt.cost.time import is_expensive, seconds
from tfckpt.ir.edits import traced
from tfckpt.ir.graph import Graph, Op
from tfckpt.ir.target import Rates
from tfckpt.ops import record

FAR = 30.0
"""How many times faster or slower than it is described a machine may be found."""
FUSED = 3
"""Cheap ops that a kernel computes at most with a convolution or product."""
SEVERAL = 10
"""Multiple of any op's minimum time from which its seconds say something about the rates."""


def measured_rates(graph: Graph, profile: Mapping[str, float], rates: Rates) -> Rates:
    """Return rates with the seconds of a profile, and without one for an op, adjusted to it.

    Args:
      graph: the step, or a part of it.
      profile: seconds by the name of what ran (`tfckpt.op_seconds`).
      rates: those that the device is described with.
    """
    known = _fused_given_back(graph, by_op(graph, profile), rates)
    slower = {heavy: _ratio(graph, known, rates, heavy) for heavy in (False, True)}
    return dataclasses.replace(
        rates, flops_per_second=rates.flops_per_second / slower[True],
        bytes_per_second=rates.bytes_per_second / slower[False], known=known)


def by_op(graph: Graph, profile: Mapping[str, float]) -> dict[str, float]:
    """Return a profile's seconds by op; what stands for an op, or is inside of it, counts as it.

    Args:
      graph: the captured step.
      profile: seconds by the name of what ran; names that stand for no op of the graph are left
        out.

    Returns:
      Seconds by op name, added up; ops that the profile does not name are missing.
    """
    names = {traced(op.name): op.name for op in graph.ops} | {op.name: op.name for op in graph.ops}
    found: dict[str, float] = {}
    for name, taken in profile.items():
        own = name
        while own and own not in names:
            own = own.rpartition("/")[0]
        if own:
            found[names[own]] = found.get(names[own], 0.0) + taken
    return found


def _fused_given_back(graph: Graph, known: dict[str, float], rates: Rates) -> dict[str, float]:
    """Return the same with the time of a fused kernel at the op that computes.

    That is a convolution or product that did not run by itself, and is read, through cheap ops that
    did not either, by a cheap one that did.
    """
    readers = [[r for r in found if not (record(graph.ops[r].type).shape_only
                                         or is_expensive(graph.ops[r]))]
               for found in graph.consumers()]
    found = dict(known)
    for i, op in enumerate(graph.ops):
        if op.name in known or not is_expensive(op):
            continue
        last = _ran_after(graph, readers, i, known)
        if last is None:
            continue
        alone = seconds(graph, last, rates)
        if found[last.name] > alone:
            found[op.name], found[last.name] = found[last.name] - alone, alone
    return found


def _ran_after(graph: Graph, readers: Sequence[Sequence[int]], op: int, known: Mapping[str, float]
               ) -> Op | None:
    """Return the next op after `op` that was timed; None where a kernel has not so many ops."""
    for _ in range(FUSED):
        following = next(iter(readers[op]), None)
        if following is None or graph.ops[following].name in known:
            return None if following is None else graph.ops[following]
        op = following
    return None


def _ratio(graph: Graph, known: Mapping[str, float], rates: Rates, heavy: bool) -> float:
    """Return how many times longer than described ops take that compute, or that move bytes."""
    measured = described = 0.0
    for op in graph.ops:
        if op.name not in known or op.loop is not None or is_expensive(op) != heavy:
            continue
        expected = seconds(graph, op, rates)
        if expected > SEVERAL * rates.overhead_seconds:
            measured, described = measured + known[op.name], described + expected
    return min(FAR, max(1 / FAR, measured / described)) if measured and described else 1.0
