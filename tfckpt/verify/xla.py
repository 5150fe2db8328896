"""What XLA made of a step: instructions, recomputations that are left, bytes of its buffers."""

from __future__ import annotations

import collections
import dataclasses
import re
from collections.abc import Callable, Iterable

from tfckpt.capture import tf_adapter
from tfckpt.errors import VerificationError
from tfckpt.hlo import temp_bytes
from tfckpt.ops import record

_HEAVY = ("dot", "convolution", "custom-call")
_COPY = re.compile(r"-tfckpt\d+$")


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A step as XLA would run it.

    Attributes:
      instructions: number of instructions by HLO opcode, those inside of fusions too.
      planned: number of recomputed ops by type in the traced step, without those that only
        reshape, which are no instructions.
      copies: those of them that the optimized HLO computes beside their originals.
      merged: those of which it computes one only, the original or the copy. What is left of
        `planned` goes by another name, as does its original (XLA rewrites some products).
      temp_bytes: bytes of the buffers that hold neither arguments nor results nor constants.
    """

    instructions: dict[str, int]
    planned: dict[str, int]
    copies: dict[str, int]
    merged: dict[str, int]
    temp_bytes: int

    @property
    def planned_count(self) -> int:
        """Recomputed ops in the traced step."""
        return sum(self.planned.values())

    @property
    def copy_count(self) -> int:
        """Recomputed ops that XLA computes."""
        return sum(self.copies.values())

    @property
    def merged_count(self) -> int:
        """Recomputed ops that XLA merged with their originals."""
        return sum(self.merged.values())

    @property
    def heavy_count(self) -> int:
        """Matrix products and convolutions (XLA turns one into the other)."""
        return sum(self.instructions.get(opcode, 0) for opcode in _HEAVY)


def compiled(fn: Callable, *args, **kwargs) -> Compiled:
    """Compiles a step for these arguments, without running it, and looks at the result.

    Instructions carry the names of the ops that they came from; two that XLA merged leave the
    name of one.

    Args:
      fn: a `tf.function` with `jit_compile=True`, or one decorated with `tfckpt.checkpoint`.

    Raises:
      VerificationError: the step is not compiled by XLA.
    """
    if not tf_adapter.compiles_with_xla(fn):
        raise VerificationError("verify: the step is not compiled by XLA; make it with "
                                "tf.function(jit_compile=True)")
    graph = fn.get_concrete_function(*args, **kwargs).graph  # type: ignore[attr-defined]
    hlo = tf_adapter.optimized_hlo(fn, args, kwargs)
    found = [i for part in hlo.hlo_module.computations for i in part.instructions]
    names = {i.metadata.op_name for i in found}
    made = [op for op in graph.get_operations()
            if _COPY.search(op.name) and not record(op.type).aliases]
    left = {op.name: (op.name in names) + (_COPY.sub("", op.name) in names) for op in made}
    return Compiled(_counted(i.opcode for i in found), _counted(op.type for op in made),
                    _counted(op.type for op in made if left[op.name] == 2),
                    _counted(op.type for op in made if left[op.name] == 1), temp_bytes(hlo))


def _counted(kinds: Iterable[str]) -> dict[str, int]:
    return dict(sorted(collections.Counter(kinds).items()))
