"""Element-wise ops that have no memory of their own under XLA: each reader computes them again.

XLA for GPUs fuses an element-wise op with all ops that read it, in the forward and in the backward,
where each of them is element-wise or reduces: of a GELU only what goes in and what comes out is
ever in memory. Such an op is a view of the one tensor of its size that it reads. An op that reads
two of them is none, nor one that makes fewer bytes of it (a mask): these would take more in its
place.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from tfckpt.ir.graph import Graph, Op, TensorId
from tfckpt.ops import record

RESIDENT: TensorId = (-1, -1)
"""Root of every tensor that is allocated before the step (constants, variables, fed inputs)."""
_SMALL = 16
"""How many times smaller than its result what else a view reads must be, at least."""


def is_element_wise(op: Op) -> bool:
    """Return whether XLA computes an op in the loop of one that reads it.

    Args:
      op: of the joint graph.
    """
    known = record(op.type)
    return (len(op.outputs) == 1 and op.pure and not op.bodies and not known.aliases
            and not op.conditional and (known.evaluate is not None or known.spreads))


def is_written(op: Op, in_memory: Mapping[str, int]) -> bool:
    """Return whether XLA is known to write an op's result to memory, and no part of it alone.

    Of a mean's gradient the numbers that are spread over all elements may be, under its name.

    Args:
      op: of the joint graph.
      in_memory: ops whose results XLA is known to write to memory, by name, and their elements.
    """
    return 0 < _elements(op, 0) <= in_memory.get(op.name, 0)


def fuses(op: Op, reader: Op) -> bool:
    """Return whether XLA computes an element-wise op within another that reads it.

    Args:
      op: an element-wise op.
      reader: an op that reads its result.
    """
    return reader.device == op.device and reader.pure and (
        is_element_wise(reader) or record(reader.type).reduces)


def read_through(graph: Graph, readers: Sequence[Sequence[int]], start: TensorId,
                 passes: Callable[[int], bool]) -> tuple[list[TensorId], list[int]]:
    """Return the tensors in which one is handed on, it first, and the ops that read one of them.

    Ops that read shapes alone do not count.

    Args:
      graph: the captured step.
      readers: as `Graph.consumers`.
      start: the tensor.
      passes: whether an op hands on what it reads.
    """
    tensors: dict[TensorId, None] = {start: None}
    found: dict[int, None] = {}
    pending = [start]
    while pending:
        tensor = pending.pop()
        for r in readers[tensor[0]]:
            reader = graph.ops[r]
            slots = [n for n, read in enumerate(reader.inputs) if read == tensor]
            if not slots or record(reader.type).shape_only:
                continue
            if not passes(r):
                found[r] = None
                continue
            passed = [(r, n) for n in (slots if record(reader.type).aliases else (0,))]
            pending += [t for t in passed if t not in tensors]
            tensors.update(dict.fromkeys(passed))
    return list(tensors), list(found)


class Views:
    """Finds the views of a graph, in the order of its ops.

    Args:
      in_memory: names of ops that are known to be none, and the elements of their results.
    """

    def __init__(self, graph: Graph, in_memory: Mapping[str, int]) -> None:
        self.graph, self.in_memory = graph, in_memory
        self.readers = graph.consumers()
        self.fetched = frozenset(graph.fetches)

    def root_of(self, tensor: TensorId, root: Sequence[tuple[TensorId, ...]]) -> TensorId:
        """Return the tensor in whose memory a result of an op lies: its own, but for views.

        Args:
          tensor: index of the op and slot of the result.
          root: that of each op before.
        """
        op = self.graph.ops[tensor[0]]
        known = record(op.type)
        if known.fused_from is not None:
            source = self._of_input(op, tensor[1], root)
        elif is_element_wise(op) and not known.lengthy and not is_written(op, self.in_memory):
            source = self._source(op, root)
        else:
            return tensor
        return tensor if source is None or not self._fused_everywhere(tensor) else source

    def _of_input(self, op: Op, slot: int, root: Sequence[tuple[TensorId, ...]]
                  ) -> TensorId | None:
        """Return the root of the input that a result is computed from, if it is as large."""
        source, number = op.inputs[record(op.type).fused_from or 0]
        made = self.graph.ops[source]
        return root[source][number] if _elements(made, number) == _elements(op, slot) else None

    def _source(self, op: Op, root: Sequence[tuple[TensorId, ...]]) -> TensorId | None:
        """Return the root of the one large tensor that an op reads; None where there are more.

        Where all that it reads is small, that of the largest: a scale for each channel, spread
        over a batch of images, is never in memory.
        """
        size = _elements(op, 0)
        found: TensorId | None = None
        small: dict[TensorId, int] = {}
        for source, slot in op.inputs:
            tensor = root[source][slot]
            if tensor == RESIDENT or self._elements(tensor) * _SMALL <= size:
                small[tensor] = 0 if tensor == RESIDENT else self._bytes(tensor)
            elif found not in (None, tensor):
                return None
            else:
                found = tensor
        if not size:
            return None
        if found is None:
            return max(small, key=lambda t: small[t]) if small else None
        narrower = (op.outputs[0].bytes or 0) < self._bytes(found)
        return None if narrower or self._elements(found) != size else found

    def _elements(self, tensor: TensorId) -> int:
        return _elements(self.graph.ops[tensor[0]], tensor[1])

    def _bytes(self, tensor: TensorId) -> int:
        return self.graph.ops[tensor[0]].outputs[tensor[1]].bytes or 0

    def _fused_everywhere(self, tensor: TensorId) -> bool:
        """Return whether all that read a tensor, through views of its memory, compute it again."""
        op = self.graph.ops[tensor[0]]
        tensors, found = read_through(self.graph, self.readers, tensor,
                                      lambda r: record(self.graph.ops[r].type).aliases)
        return bool(found) and self.fetched.isdisjoint(tensors) and all(
            fuses(op, self.graph.ops[r]) for r in found)


def _elements(op: Op, slot: int) -> int:
    shape = op.outputs[slot].shape
    return 0 if shape is None or None in shape else math.prod(d for d in shape if d is not None)
