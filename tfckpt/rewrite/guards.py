"""Guards: what holds a copy region back under XLA, which ignores control edges.

Every input of a region passes a guard, which depends on triggers: what a fence would await, that
is the incoming gradient and the leaves of what is scheduled before, weight gradients too. So the
copies come after them, and are not merged with the originals.

The *data guard* is `select(armed, 0, x)`, where `armed` asks whether the bits of one element of a
trigger equal a NaN payload that no kernel produces. No compiler can see through it, and no value
changes: not for an infinite gradient, not on empty tensors (any() of nothing is false), not for
integers or booleans. It is what is used.

The *barrier* is XLA's own, of x and the triggers. It says what is meant and costs nothing, but
TensorFlow's XLA on a CPU takes barriers out before it merges equal instructions, unless told not
to (`CSE_FLAG`). It is here to be compared with (`python -m benchmarks.xla_guards`).
"""

from __future__ import annotations

import abc
import dataclasses

from tfckpt.rewrite.edits import Create

_PAYLOAD = {
    "float32": ("int32", 0x7FADBEEF),
    "float64": ("int64", 0x7FF4DEADBEEF0BAD),
    "float16": ("int16", 0x7D5B),
    "bfloat16": ("int16", 0x7FAB),
}


CSE_FLAG = "--xla_disable_hlo_passes=cse_barrier_expander"


@dataclasses.dataclass(frozen=True)
class Guard(abc.ABC):
    """The guard of one region.

    Attributes:
      name: name scope.
      triggers: pairs (tensor, dtype) of what must exist first; dtypes float32, float64, float16
        or bfloat16. All of the dtype of the first are used.
    """

    name: str
    triggers: tuple[tuple[str, str], ...]

    @property
    def dtype(self) -> str:
        """Of the triggers that are used."""
        return self.triggers[0][1]

    def trigger_ops(self) -> list[Create]:
        """Ops that compute what `pass_through` depends on."""
        return self._first_elements()[0]

    @abc.abstractmethod
    def pass_through(self, name: str, tensor: str, dtype: str) -> list[Create]:
        """Ops that make `{name}:0` equal to `tensor`, but dependent on the triggers."""

    def _first_elements(self) -> tuple[list[Create], str]:
        """Ops that put the first elements of the triggers into one vector, and its name."""
        scope, dtype = self.name, self.dtype
        tensors = [t for t, d in self.triggers if d == dtype]
        made = [_const(f"{scope}/flat", "int32", [-1]), _const(f"{scope}/begin", "int32", [0]),
                _const(f"{scope}/end", "int32", [1]), _const(f"{scope}/step", "int32", [1]),
                _const(f"{scope}/axis", "int32", 0)]
        for i, tensor in enumerate(tensors):
            made += self._first(i, tensor, dtype)
        if len(tensors) == 1:
            return made, f"{scope}/first_0:0"
        inputs = [f"{scope}/first_{i}:0" for i in range(len(tensors))] + [f"{scope}/axis:0"]
        made.append(Create(f"{scope}/all", "ConcatV2", tuple(inputs), (), (dtype,),
                           {"N": len(tensors), "T": f"dtype:{dtype}", "Tidx": "dtype:int32"}))
        return made, f"{scope}/all:0"

    def _first(self, i: int, tensor: str, dtype: str) -> list[Create]:
        """The first element of a tensor as a vector of one (of none where it is empty)."""
        scope = self.name
        return [
            Create(f"{scope}/reshape_{i}", "Reshape", (tensor, f"{scope}/flat:0"), (), (dtype,),
                   {"T": f"dtype:{dtype}", "Tshape": "dtype:int32"}),
            Create(f"{scope}/first_{i}", "StridedSlice",
                   (f"{scope}/reshape_{i}:0", f"{scope}/begin:0", f"{scope}/end:0",
                    f"{scope}/step:0"), (), (dtype,),
                   {"T": f"dtype:{dtype}", "Index": "dtype:int32", "begin_mask": 0, "end_mask": 0,
                    "ellipsis_mask": 0, "new_axis_mask": 0, "shrink_axis_mask": 0}),
        ]


class DataGuard(Guard):
    """A select whose condition is never true."""

    def trigger_ops(self) -> list[Create]:
        """Ops that compute the scalar `armed`."""
        made, first = self._first_elements()
        scope, dtype = self.name, self.dtype
        bits, payload = _PAYLOAD[dtype]
        return made + [
            Create(f"{scope}/bits", "Bitcast", (first,), (), (bits,),
                   {"T": f"dtype:{dtype}", "type": f"dtype:{bits}"}),
            _const(f"{scope}/payload", bits, payload),
            Create(f"{scope}/equal", "Equal", (f"{scope}/bits:0", f"{scope}/payload:0"), (),
                   ("bool",), {"T": f"dtype:{bits}", "incompatible_shape_error": True}),
            Create(f"{scope}/armed", "Any", (f"{scope}/equal:0", f"{scope}/begin:0"), (),
                   ("bool",), {"keep_dims": False, "Tidx": "dtype:int32"}),
        ]

    def pass_through(self, name: str, tensor: str, dtype: str) -> list[Create]:
        """A select between zero and the tensor."""
        return [
            _const(f"{name}/zero", dtype, False if dtype == "bool" else 0),
            Create(name, "SelectV2", (f"{self.name}/armed:0", f"{name}/zero:0", tensor), (),
                   (dtype,), {"T": f"dtype:{dtype}"}),
        ]


class BarrierGuard(Guard):
    """XLA's optimization barrier."""

    def pass_through(self, name: str, tensor: str, dtype: str) -> list[Create]:
        """A barrier of the tensor and the triggers' first elements."""
        return [Create(name, "XlaOptimizationBarrier", (tensor, self._first_elements()[1]), (),
                       (dtype, self.dtype), {"T": ("types", dtype, self.dtype)})]


XLA_GUARDS: dict[str, type[Guard]] = {"data": DataGuard, "barrier": BarrierGuard}


def _const(name: str, dtype: str, value: object) -> Create:
    return Create(name, "Const", (), (), (dtype,),
                  {"dtype": f"dtype:{dtype}", "value": ("const", dtype, value)})
