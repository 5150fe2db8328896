"""The data guard: what holds a copy region back under XLA, which ignores control edges.

Every input of the region passes `select(armed, 0, x)`, where `armed` asks whether the bits of
one element of a trigger equal a NaN payload that no kernel produces. The triggers are what a
fence would await: the incoming gradient and the leaves of what is scheduled before, weight
gradients too. So the copies depend on them, no compiler can merge them with the originals, and
no value changes: not for an infinite gradient, not on empty tensors (any() of nothing is false),
not for integers or booleans.
"""

from __future__ import annotations

import dataclasses

from tfckpt.rewrite.edits import Create

_PAYLOAD = {
    "float32": ("int32", 0x7FADBEEF),
    "float64": ("int64", 0x7FF4DEADBEEF0BAD),
    "float16": ("int16", 0x7D5B),
    "bfloat16": ("int16", 0x7FAB),
}


@dataclasses.dataclass(frozen=True)
class DataGuard:
    """The guard of one region.

    Attributes:
      name: name scope.
      triggers: pairs (tensor, dtype) of what must exist first; dtypes float32, float64, float16
        or bfloat16. All of the dtype of the first are used.
    """

    name: str
    triggers: tuple[tuple[str, str], ...]

    def trigger_ops(self) -> list[Create]:
        """Ops that compute the scalar `armed` from the triggers."""
        dtype = self.triggers[0][1]
        tensors = [t for t, d in self.triggers if d == dtype]
        bits, payload = _PAYLOAD[dtype]
        scope = self.name
        made = [_const(f"{scope}/flat", "int32", [-1]), _const(f"{scope}/begin", "int32", [0]),
                _const(f"{scope}/end", "int32", [1]), _const(f"{scope}/step", "int32", [1]),
                _const(f"{scope}/axis", "int32", 0)]
        for i, tensor in enumerate(tensors):
            made += self._first(i, tensor, dtype)
        first = f"{scope}/first_0:0"
        if len(tensors) > 1:
            inputs = [f"{scope}/first_{i}:0" for i in range(len(tensors))] + [f"{scope}/axis:0"]
            made.append(Create(f"{scope}/all", "ConcatV2", tuple(inputs), (), (dtype,),
                               {"N": len(tensors), "T": f"dtype:{dtype}",
                                "Tidx": "dtype:int32"}))
            first = f"{scope}/all:0"
        return made + [
            Create(f"{scope}/bits", "Bitcast", (first,), (), (bits,),
                   {"T": f"dtype:{dtype}", "type": f"dtype:{bits}"}),
            _const(f"{scope}/payload", bits, payload),
            Create(f"{scope}/equal", "Equal", (f"{scope}/bits:0", f"{scope}/payload:0"), (),
                   ("bool",), {"T": f"dtype:{bits}", "incompatible_shape_error": True}),
            Create(f"{scope}/armed", "Any", (f"{scope}/equal:0", f"{scope}/begin:0"), (),
                   ("bool",), {"keep_dims": False, "Tidx": "dtype:int32"}),
        ]

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

    def pass_through(self, name: str, tensor: str, dtype: str) -> list[Create]:
        """Ops that make `{name}:0` equal to `tensor`, but dependent on the trigger."""
        return [
            _const(f"{name}/zero", dtype, False if dtype == "bool" else 0),
            Create(name, "SelectV2", (f"{self.name}/armed:0", f"{name}/zero:0", tensor), (),
                   (dtype,), {"T": f"dtype:{dtype}"}),
        ]


def _const(name: str, dtype: str, value: object) -> Create:
    return Create(name, "Const", (), (), (dtype,),
                  {"dtype": f"dtype:{dtype}", "value": ("const", dtype, value)})
