"""What XLA made of a step: instructions, recomputations that are left, bytes of its buffers."""

from __future__ import annotations

import collections
import dataclasses
import re
from collections.abc import Callable, Iterable
from typing import Any

from tfckpt.capture import tf_adapter
from tfckpt.errors import VerificationError
from tfckpt.hlo import temp_bytes
from tfckpt.ops import record
from tfckpt.verify.elsewhere import compiled_elsewhere

_HEAVY = ("dot", "convolution")
_LIBRARY = re.compile(r"__(?:cublas|cudnn|onednn)\$")
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
      heavy_count: matrix products and convolutions (XLA turns one into the other).
    """

    instructions: dict[str, int]
    planned: dict[str, int]
    copies: dict[str, int]
    merged: dict[str, int]
    temp_bytes: int
    heavy_count: int

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


def compiled(fn: Callable, *args, **kwargs) -> Compiled:
    """Compiles a step for these arguments, without running it, and looks at the result.

    Instructions carry the names of the ops that they came from; two that XLA merged leave the
    name of one.

    Args:
      fn: a `tf.function` with `jit_compile=True`, or one decorated with `tfckpt.checkpoint`.

    Raises:
      VerificationError: the step is not compiled by XLA.
    """
    _check_compiled(fn)
    return _looked_at(fn, args, kwargs, tf_adapter.optimized_hlo(fn, args, kwargs))


def compiled_for(model: str, fn: Callable, *args, **kwargs) -> Compiled:
    """Compiles a step for a GPU that is not here, without running it; else as `compiled`.

    Args:
      model: which GPU: "h100".

    Raises:
      VerificationError: the step is not compiled by XLA, or there is no compiler for the device.
    """
    _check_compiled(fn)
    module = tf_adapter.lowered_hlo(fn, args, kwargs)
    try:
        return _looked_at(fn, args, kwargs, compiled_elsewhere(module, model))
    except RuntimeError as error:
        raise VerificationError(f"verify: nothing is compiled for a GPU that is not here: {error}"
                                ) from error


def _check_compiled(fn: Callable) -> None:
    if not tf_adapter.compiles_with_xla(fn):
        raise VerificationError("verify: the step is not compiled by XLA; make it with "
                                "tf.function(jit_compile=True)")


def _looked_at(fn: Callable, args: tuple, kwargs: dict, hlo: Any) -> Compiled:
    graph = fn.get_concrete_function(*args, **kwargs).graph  # type: ignore[attr-defined]
    found = [i for part in hlo.hlo_module.computations for i in part.instructions]
    names = {i.metadata.op_name for i in found}
    made = [op for op in graph.get_operations()
            if _COPY.search(op.name) and not record(op.type).aliases]
    needed = _needed(graph)
    of = {op.name: _COPY.sub("", op.name) for op in made}
    left = {copy: (copy in names) + ((name if name in needed else copy) in names)
            for copy, name in of.items()}
    return Compiled(_counted(i.opcode for i in found), _counted(op.type for op in made),
                    _counted(op.type for op in made if left[op.name] == 2),
                    _counted(op.type for op in made if left[op.name] == 1), temp_bytes(hlo),
                    sum(i.opcode in _HEAVY or bool(_LIBRARY.match(i.custom_call_target))
                        for i in found))


def _needed(graph: Any) -> set[str]:
    """Return the ops that a graph's results and effects need, by name."""
    pending = [*(t.op for t in graph.outputs), *graph.control_outputs]
    found = {op.name for op in pending}
    while pending:
        op = pending.pop()
        for source in (*(t.op for t in op.inputs), *op.control_inputs):
            if source.name not in found:
                found.add(source.name)
                pending.append(source)
    return found


def _counted(kinds: Iterable[str]) -> dict[str, int]:
    return dict(sorted(collections.Counter(kinds).items()))
