"""The properties of each op type, one record a type, in one place.

`record(op_type)` gives it. To teach tfckpt an op, add its record to the module of its theme.
"""

from __future__ import annotations

from tfckpt.ops import arithmetic, contractions, control, functions, state, tensors
from tfckpt.ops.op_record import (
           BIAS,
           REARRANGED,
           SUM,
           Access,
           Array,
           Branch,
           Broadcast,
           Calls,
           FramePart,
           ListUse,
           OpRecord,
           Shape,
           Source,
)
from tfckpt.ops.registry import families, record, register, register_families, registered

__all__ = ["BIAS", "REARRANGED", "SUM", "Access", "Array", "Branch", "Broadcast", "Calls",
           "FramePart", "ListUse", "OpRecord", "Shape", "Source", "families", "record", "register",
           "register_families", "registered"]
THEMES = (arithmetic, functions, contractions, tensors, state, control)
"""The modules with records."""
