"""What is known of each op type: one record a type, in one place.

`record(op_type)` gives it. To teach tfckpt an op, add its record to the module of its theme.
"""

from __future__ import annotations

from tfckpt.ops import arithmetic, contractions, control, functions, state, tensors
from tfckpt.ops.record import OpRecord
from tfckpt.ops.registry import record, register

__all__ = ["OpRecord", "record", "register"]
THEMES = (arithmetic, functions, contractions, tensors, state, control)
