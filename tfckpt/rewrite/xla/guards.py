"""Guards: they delay a recomputation segment under XLA, which ignores control edges.

Every input of a segment passes a guard, which depends on a trigger, the incoming gradient. So the
copies come after it, and are not merged with the originals. Element-wise ops of the backward
read what the forward kept through one that their own gradient triggers (`XlaDelays`).

The *data guard* is `select(armed, 0, x)`, where `armed` asks whether the bits of one element of the
trigger equal a NaN payload that no kernel produces. No compiler can see through it, and no value
changes: not for an infinite gradient, not on empty tensors (any() of nothing is false), not for
integers or booleans. It is what is used.

The *barrier* is XLA's own, of x and the trigger. It says what is meant and costs nothing, but
TensorFlow's XLA on a CPU takes barriers out before it merges equal instructions, unless told not
to (`CSE_FLAG`). It is here to be compared with (`python -m benchmarks.xla_guards`), and for tables
that are gathered from.
"""

from __future__ import annotations

import abc
import dataclasses

from tfckpt.ir.edits import Create, slice_attrs
from tfckpt.ops import names, record

_PAYLOAD = {
    "float32": ("int32", 0x7FADBEEF),
    "float64": ("int64", 0x7FF4DEADBEEF0BAD),
    "float16": ("int16", 0x7D5B),
    "bfloat16": ("int16", 0x7FAB),
}


CSE_FLAG = "--xla_disable_hlo_passes=cse_barrier_expander"


@dataclasses.dataclass(frozen=True)
class Guard(abc.ABC):
    """Delays what reads through it until a trigger exists.

    Attributes:
      name: name scope.
      trigger: tensor that must exist first.
      dtype: its dtype: float32, float64, float16 or bfloat16.
    """

    name: str
    trigger: str
    dtype: str

    @abc.abstractmethod
    def trigger_ops(self) -> list[Create]:
        """Return the ops that compute what `pass_through` depends on."""

    @abc.abstractmethod
    def pass_through(self, name: str, tensor: str, dtype: str) -> list[Create]:
        """Return ops that make `{name}:0` equal to `tensor`, but dependent on the trigger.

        Args:
          name: of the op that hands the tensor on, and the scope of the others.
          tensor: what is passed, named `op:slot`.
          dtype: of the tensor.
        """


class DataGuard(Guard):
    """A select whose condition is never true."""

    def trigger_ops(self) -> list[Create]:
        """Return the ops that compute the scalar `armed`."""
        scope, dtype = self.name, self.dtype
        bits, payload = _PAYLOAD[dtype]
        return self._first_element() + [
            Create(f"{scope}/bits", names.BITCAST, (f"{scope}/first:0",), (), (bits,),
                   {"T": f"dtype:{dtype}", "type": f"dtype:{bits}"}),
            const(f"{scope}/payload", bits, payload),
            Create(f"{scope}/equal", names.EQUAL, (f"{scope}/bits:0", f"{scope}/payload:0"), (),
                   ("bool",), {"T": f"dtype:{bits}", **dict(record(names.EQUAL).made_with)}),
            Create(f"{scope}/armed", names.ANY, (f"{scope}/equal:0", f"{scope}/begin:0"), (),
                   ("bool",), {"keep_dims": False, "Tidx": "dtype:int32"}),
        ]

    def pass_through(self, name: str, tensor: str, dtype: str) -> list[Create]:
        """Return a select between zero and the tensor.

        Args:
          name: of the op that hands the tensor on, and the scope of the others.
          tensor: what is passed, named `op:slot`.
          dtype: of the tensor.
        """
        return [
            const(f"{name}/zero", dtype, False if dtype == "bool" else 0),
            Create(name, names.SELECT, (f"{self.name}/armed:0", f"{name}/zero:0", tensor), (),
                   (dtype,), {"T": f"dtype:{dtype}"}),
        ]

    def _first_element(self) -> list[Create]:
        """Ops that make `{name}/first:0`: the trigger's first element as a vector of one.

        Of none where the trigger is empty.
        """
        scope, dtype = self.name, f"dtype:{self.dtype}"
        return [
            const(f"{scope}/flat", "int32", [-1]), const(f"{scope}/begin", "int32", [0]),
            const(f"{scope}/end", "int32", [1]), const(f"{scope}/step", "int32", [1]),
            Create(f"{scope}/reshape", names.RESHAPE, (self.trigger, f"{scope}/flat:0"), (),
                   (self.dtype,), {"T": dtype, "Tshape": "dtype:int32"}),
            Create(f"{scope}/first", names.STRIDED_SLICE,
                   (f"{scope}/reshape:0", f"{scope}/begin:0", f"{scope}/end:0", f"{scope}/step:0"),
                   (), (self.dtype,), slice_attrs(self.dtype)),
        ]


class BarrierGuard(Guard):
    """XLA's optimization barrier, twice.

    XLA takes out of a barrier what only that barrier reads and whose result nobody reads, as is a
    trigger's; so another barrier reads it, too. The trigger is passed whole: a slice of it could
    be computed without it, from slices of what it is made of.
    """

    def trigger_ops(self) -> list[Create]:
        """Return none: the barriers are of the trigger itself."""
        return []

    def pass_through(self, name: str, tensor: str, dtype: str) -> list[Create]:
        """Return two barriers of the tensor and the trigger, one after the other.

        Args:
          name: of the op that hands the tensor on, and the scope of the others.
          tensor: what is passed, named `op:slot`.
          dtype: of the tensor.
        """
        return [Create(made, names.XLA_BARRIER, (read, self.trigger), (), (dtype, self.dtype),
                       {"T": ("types", dtype, self.dtype)})
                for made, read in ((f"{name}/inner", tensor), (name, f"{name}/inner:0"))]


XLA_GUARDS: dict[str, type[Guard]] = {"data": DataGuard, "barrier": BarrierGuard}


def const(name: str, dtype: str, value: object) -> Create:
    """Return an op that makes a constant: a number, or a list of numbers.

    Args:
      name: of the op.
      dtype: of the constant.
      value: a bool or a number for a scalar, a list of numbers for a vector.
    """
    return Create(name, names.CONST, (), (), (dtype,),
                  {"dtype": f"dtype:{dtype}", "value": ("const", dtype, value)})
