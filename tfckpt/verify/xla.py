"""What XLA made of a step: instructions, recomputations that are left, bytes of its buffers."""

from __future__ import annotations

import collections
import dataclasses
import re
from collections.abc import Callable, Iterable
from typing import Any

from tfckpt.capture import tf_adapter
from tfckpt.errors import VerificationError
from tfckpt.ir.hlo import temp_bytes
from tfckpt.verify.asking.elsewhere import compiled_elsewhere
from tfckpt.verify.recomputed import COMPUTED, FOLDED, MERGED, fates

_HEAVY = ("dot", "convolution")
_LIBRARY = re.compile(r"__(?:cublas|cudnn|onednn)\$")


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A step as XLA would run it.

    Attributes:
      instructions: number of instructions by HLO opcode, those inside of fusions too.
      planned: number of recomputed ops by type in the traced step, without those that only
        reshape, which are no instructions.
      copies: those of them that the optimized HLO computes beside their originals.
      merged: those of which it computes one only, the original or the copy.
      folded: those that are no instructions of their own: XLA knows the value, makes a view of
        it, or computes it as part of another op, such as a library call with a bias. Each of
        `planned` is among the copies, the merged or the folded ones.
      temp_bytes: bytes of the buffers of all but arguments, results and constants.
      heavy_count: matrix products and convolutions (XLA turns one into the other).
    """

    instructions: dict[str, int]
    planned: dict[str, int]
    copies: dict[str, int]
    merged: dict[str, int]
    folded: dict[str, int]
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

    @property
    def folded_count(self) -> int:
        """Recomputed ops that are no instructions of their own."""
        return sum(self.folded.values())


def compiled(fn: Callable, *args: Any, **kwargs: Any) -> Compiled:
    """Compile a step for these arguments, without running it, and look at the result.

    Args:
      fn: a `tf.function` with `jit_compile=True`, or one decorated with `tfckpt.checkpoint`.
      *args: positional arguments of one call; its dtypes and shapes are compiled for.
      **kwargs: keyword arguments of that call.

    Returns:
      Instructions by opcode, what became of recomputed ops, and bytes of temporary buffers.

    Raises:
      VerificationError: the step is not compiled by XLA.
    """
    _check_compiled(fn)
    return _looked_at(fn, args, kwargs, tf_adapter.optimized_hlo(fn, args, kwargs))


def compiled_for(model: str, fn: Callable, *args: Any, **kwargs: Any) -> Compiled:
    """Compile a step for a GPU that is not here, without running it; else as `compiled`.

    Args:
      model: which GPU: "h100".
      fn: a `tf.function` with `jit_compile=True`, or one decorated with `tfckpt.checkpoint`.
      *args: positional arguments of one call; its dtypes and shapes are compiled for.
      **kwargs: keyword arguments of that call.

    Returns:
      What the compiler for that GPU makes of the step.

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
    fate = fates(graph, hlo.hlo_module)
    kind = {op.name: op.type for op in graph.get_operations()}
    by_fate = {wanted: _counted(kind[name] for name, made in fate.items() if made == wanted)
               for wanted in (COMPUTED, MERGED, FOLDED)}
    return Compiled(_counted(i.opcode for i in found), _counted(kind[name] for name in fate),
                    by_fate[COMPUTED], by_fate[MERGED], by_fate[FOLDED], temp_bytes(hlo),
                    sum(i.opcode in _HEAVY or bool(_LIBRARY.match(i.custom_call_target))
                        for i in found))


def _counted(kinds: Iterable[str]) -> dict[str, int]:
    return dict(sorted(collections.Counter(kinds).items()))
