"""The data guard: what holds a copy region back under XLA, which ignores control edges.

Every input of the region passes `select(armed, 0, x)`, where `armed` asks whether the bits of
one element of the incoming gradient equal a NaN payload that no kernel produces. So the copies
depend on the gradient, no compiler can merge them with the originals, and no value changes: not
for an infinite gradient, not on empty tensors (any() of nothing is false), not for integers or
booleans.
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
      trigger: tensor of the incoming gradient.
      dtype: its dtype, one of float32, float64, float16, bfloat16.
    """

    name: str
    trigger: str
    dtype: str

    def trigger_ops(self) -> list[Create]:
        """Ops that compute the scalar `armed` from the trigger."""
        bits, payload = _PAYLOAD[self.dtype]
        scope = self.name
        return [
            _const(f"{scope}/flat", "int32", [-1]),
            Create(f"{scope}/reshape", "Reshape", (self.trigger, f"{scope}/flat:0"), (),
                   (self.dtype,), {"T": f"dtype:{self.dtype}", "Tshape": "dtype:int32"}),
            _const(f"{scope}/begin", "int32", [0]),
            _const(f"{scope}/end", "int32", [1]),
            _const(f"{scope}/step", "int32", [1]),
            Create(f"{scope}/first", "StridedSlice",
                   (f"{scope}/reshape:0", f"{scope}/begin:0", f"{scope}/end:0", f"{scope}/step:0"),
                   (), (self.dtype,),
                   {"T": f"dtype:{self.dtype}", "Index": "dtype:int32", "begin_mask": 0,
                    "end_mask": 0, "ellipsis_mask": 0, "new_axis_mask": 0,
                    "shrink_axis_mask": 0}),
            Create(f"{scope}/bits", "Bitcast", (f"{scope}/first:0",), (), (bits,),
                   {"T": f"dtype:{self.dtype}", "type": f"dtype:{bits}"}),
            _const(f"{scope}/payload", bits, payload),
            Create(f"{scope}/equal", "Equal", (f"{scope}/bits:0", f"{scope}/payload:0"), (),
                   ("bool",), {"T": f"dtype:{bits}", "incompatible_shape_error": True}),
            _const(f"{scope}/axes", "int32", [0]),
            Create(f"{scope}/armed", "Any", (f"{scope}/equal:0", f"{scope}/axes:0"), (),
                   ("bool",), {"keep_dims": False, "Tidx": "dtype:int32"}),
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
