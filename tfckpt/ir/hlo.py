"""A compiled step's memory, from XLA's buffer assignment: bytes, and what is live when."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

_ALLOC, _FREE, _SHARE = range(3)
_RUN_ALONE = ("call", "while", "conditional", "async-start")
"""Instructions whose computations are run as they stand, not within a loop of the instruction."""
_REARRANGING = ("bitcast", "copy", "reshape", "transpose")
"""Instructions that hand on the values that they read, perhaps in another order."""


@dataclasses.dataclass(frozen=True)
class XlaBuffer:
    """A buffer that is live at the peak of XLA's schedule.

    Attributes:
      bytes: its size.
      op: the TensorFlow op that it comes from; the instruction's name where XLA names none.
      opcode: of the HLO instruction.
    """

    bytes: int
    op: str
    opcode: str


@dataclasses.dataclass(frozen=True)
class XlaMemory:
    """Memory of a step that XLA compiles; or, by `temp_bytes` alone, that the executor runs.

    Attributes:
      temp_bytes: buffers of neither arguments nor results nor constants, packed. On the
        executor: the simulated peak of what Grappler makes of the step.
      result_bytes: results that take no argument's place.
      live_bytes: sum of the temporary buffers that are live after each of XLA's allocations and
        releases, in the order of its schedule.
      held: those live at the highest of these sums, largest first.
      in_memory: TensorFlow ops whose results XLA writes to memory, by name, ascending, each with
        the elements of the largest; others are computed within the loops of what reads them.
      most_bytes: on the executor, the most that was simulated, with other memory before the step
        and at other paces; 0 where nothing is uncertain.
    """

    temp_bytes: int
    result_bytes: int = 0
    live_bytes: tuple[int, ...] = ()
    held: tuple[XlaBuffer, ...] = ()
    in_memory: tuple[tuple[str, int], ...] = ()
    most_bytes: int = 0

    @property
    def bound(self) -> int:
        """Return the bytes that are not passed, as far as is known."""
        return max(self.temp_bytes, self.most_bytes)


def memory_of(hlo: Any) -> XlaMemory:
    """Return what an HloProto's buffer assignment says.

    Args:
      hlo: an `HloProto` of a compiled step, with its module and its buffer assignment.
    """
    results = sum(b.size for b in hlo.buffer_assignment.buffer_allocations
                  if b.maybe_live_out and not b.is_entry_computation_parameter)
    return XlaMemory(temp_bytes(hlo), results, *_liveness(hlo), _in_memory(hlo))


def temp_bytes(hlo: Any) -> int:
    """Return the bytes of an HloProto's temporary buffers, as XLA's own statistics count them.

    Args:
      hlo: an `HloProto` of a compiled step, with its buffer assignment.
    """
    return sum(b.size for b in hlo.buffer_assignment.buffer_allocations if _is_temporary(b))


def _is_temporary(allocation: Any) -> bool:
    return not (allocation.is_entry_computation_parameter or allocation.is_constant
                or allocation.maybe_live_out or allocation.is_thread_local)


def _liveness(hlo: Any) -> tuple[tuple[int, ...], tuple[XlaBuffer, ...]]:
    """Return live bytes along the longest of XLA's traces, and what is live at its highest."""
    assignment = hlo.buffer_assignment
    # whose allocation a trace is of cannot be read: TensorFlow 2.21 numbers allocations later
    traces = [t.events for t in assignment.heap_simulator_traces if t.events]
    if not traces:
        return (), ()
    events = max(traces, key=len)
    size = {b.id: b.size for b in assignment.logical_buffers}
    root: dict[int, int] = {}  # the buffer whose memory a buffer shares
    users: dict[int, int] = {}
    live, sums, highest, at_peak = 0, [], -1, 0
    for number, event in enumerate(events):
        live += _applied(event, size, root, users)
        sums.append(live)
        if live > highest:
            highest, at_peak = live, number
    root, users = {}, {}
    for event in events[:at_peak + 1]:
        _applied(event, size, root, users)
    made = {e.buffer_id: e.instruction_name for e in events if e.kind == _ALLOC}
    return tuple(sums), _held(hlo, [(size[b], made[b]) for b, count in users.items() if count])


def _applied(event: Any, size: dict[int, int], root: dict[int, int],
             users: dict[int, int]) -> int:
    """Apply an event to what is live; return by how many bytes that grows."""
    buffer = event.buffer_id
    if event.kind == _ALLOC:
        root[buffer], users[buffer] = buffer, 1
        return size[buffer]
    if event.kind == _SHARE:
        root[buffer] = shared = root.get(event.share_with_canonical_id,
                                         event.share_with_canonical_id)
        users[shared] = users.get(shared, 0) + 1
        return size[shared] if users[shared] == 1 else 0
    shared = root.get(buffer, buffer)
    users[shared] = users.get(shared, 1) - 1
    return 0 if users[shared] else -size[shared]


def _held(hlo: Any, live: list[tuple[int, str]]) -> tuple[XlaBuffer, ...]:
    parts = {c.id: c for c in hlo.hlo_module.computations}
    made = [i for part in parts.values() for i in part.instructions]
    named, by_id = {i.name: i for i in made}, {i.id: i for i in made}
    found = []
    for size, name in live:
        instruction = named.get(name)
        op = "" if instruction is None else _op_of(instruction, parts, by_id)
        found.append(XlaBuffer(size, op or name, instruction.opcode if instruction else ""))
    return tuple(sorted(found, key=lambda b: (-b.bytes, b.op)))


def _op_of(made: Any, parts: Mapping[int, Any], by_id: Mapping[int, Any]) -> str:
    """Return the op that an instruction's values come from; "" where XLA names none.

    That is its own; of a fusion, that of a result, or else of the last that is fused; of what
    only hands values on, that of what it reads.
    """
    while not made.metadata.op_name:
        if made.opcode == "fusion":
            fused = parts[made.called_computation_ids[0]]
            inside = [i.metadata.op_name for i in (*_results(fused), *reversed(fused.instructions))]
            if any(inside):
                return str(next(filter(None, inside)))
        elif made.opcode not in _REARRANGING:
            return ""
        if not made.operand_ids:
            return ""
        made = by_id[made.operand_ids[0]]
    return str(made.metadata.op_name)


def _in_memory(hlo: Any) -> tuple[tuple[str, int], ...]:
    """Return the ops that an instruction by itself computes, or one that is fused, and elements."""
    parts = {c.id: c for c in hlo.hlo_module.computations}
    pending, seen = [hlo.hlo_module.entry_computation_id], set[int]()
    found: dict[str, int] = {}
    while pending:
        number = pending.pop()
        if number in seen:
            continue
        seen.add(number)
        for made in parts[number].instructions:
            results = [made]
            if made.opcode == "fusion":
                results += _results(parts[made.called_computation_ids[0]])
            elif made.opcode in _RUN_ALONE:
                pending += made.called_computation_ids
            for result in results:
                name = result.metadata.op_name
                found[name] = max(found.get(name, 0), _elements(result.shape))
    found.pop("", None)
    return tuple(sorted(found.items()))


def _results(part: Any) -> list[Any]:
    """Return the instructions whose results a fused computation hands out."""
    by_id = {i.id: i for i in part.instructions}
    root = by_id[part.root_id]
    found = []
    for made in [by_id[n] for n in root.operand_ids] if root.opcode == "tuple" else [root]:
        found.append(made)
        while made.opcode in _REARRANGING and made.operand_ids:
            made = by_id[made.operand_ids[0]]
            found.append(made)
    return found


def _elements(shape: Any) -> int:
    """Return the elements of an array, or of the largest of several."""
    own: int = math.prod(shape.dimensions)
    return max([own, *map(_elements, shape.tuple_shapes)])
