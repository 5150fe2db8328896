"""Bytes of an element-wise region's tensors that are kept for the backward."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tfckpt.fad.liveness import Liveness
from tfckpt.fad.regions import Constants, Region
from tfckpt.ir.graph import BACKWARD, UPDATE, Graph, TensorId
from tfckpt.ops import record

DTYPE_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8, "bool": 1}


def elements(graph: Graph, tensor: TensorId) -> int:
    """Return the number of elements of a float tensor of known shape.

    Args:
      graph: joint graph.
      tensor: index of its op, and number of its output; 0 where its bytes are unknown.
    """
    output = graph.ops[tensor[0]].outputs[tensor[1]]
    return (output.bytes or 0) // DTYPE_BYTES[output.dtype]


class Residuals:
    """The tensors of a region, and its input x, that the backward reads.

    Args:
      root: for each output of each op the tensor that allocates its memory; resident memory has a
        negative op index and is not counted.
    """

    def __init__(self, graph: Graph, region: Region, live: Liveness,
                 root: Sequence[tuple[TensorId, ...]], known: Constants) -> None:
        self.graph, self.live, self.root = graph, live, root
        x = root[region.source[0]][region.source[1]]
        self.storage: dict[TensorId, TensorId] = {x: x}
        for i in region.ops:
            for slot, _ in enumerate(graph.ops[i].outputs):
                tensor = root[i][slot]
                same = self._unchanged(i, known)
                self.storage[tensor] = self.storage.get(same, same) if same else (
                    self.storage.get(tensor, tensor))
        self.readers = {t: tuple(self._readers(t)) for t in self.storage if t[0] >= 0}

    def _unchanged(self, i: int, known: Constants) -> TensorId | None:
        """Return the storage that an op copies unchanged, if it does: TensorFlow leaves it out."""
        op = self.graph.ops[i]
        made = record(op.type)
        if made.neutral is None:
            return None
        for n, (source, slot) in enumerate(op.inputs):
            other = op.inputs[1 - n][0]
            if known.get(other) == made.neutral and (n == 0 or made.commutative):
                return self.root[source][slot]
        return None

    def bytes(self, removed: Sequence[int] = (), read: Sequence[TensorId] = ()) -> int:
        """Return bytes kept once these ops are removed and the backward reads these tensors.

        Args:
          removed: indices of ops that no longer run.
          read: tensors that the backward reads besides.
        """
        gone = frozenset(removed)
        kept = {self.storage[t] for t, readers in self.readers.items()
                if any(r not in gone for r in readers)}
        roots = (self.root[op][slot] for op, slot in read)
        kept |= {self.storage.get(t, t) for t in roots}
        return sum(self.graph.ops[op].outputs[slot].bytes or 0 for op, slot in sorted(kept)
                   if op >= 0)

    def _readers(self, tensor: TensorId) -> Iterator[int]:
        """Live ops of the backward and the update that read a storage, through its views."""
        graph = self.graph
        stack, seen = [tensor[0]], {tensor[0]}
        while stack:
            for r in self.live.readers[stack.pop()]:
                op = graph.ops[r]
                if r in seen or not any(self.root[s][slot] == tensor for s, slot in op.inputs):
                    continue
                seen.add(r)
                if self.live.alive[r] and op.region in (BACKWARD, UPDATE) and (
                        not record(op.type).shape_only):
                    yield r
                if tensor in self.root[r]:
                    stack.append(r)
