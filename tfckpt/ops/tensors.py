"""Ops that pass tensors on, give them another shape, describe them, or make them from nothing."""

from __future__ import annotations

import functools

import numpy as np

from tfckpt.ops.op_record import Broadcast, OpRecord
from tfckpt.ops.registry import register
from tfckpt.ops.slices import MASKS
from tfckpt.ops.tangents import same, zero

# What a tensor passes through. Grappler removes these four, but where something waits for them.
_PASSES = functools.partial(OpRecord, aliases=True, passes_on=True, keeps_number=True)
register(
    _PASSES("Identity", lambda x: x, (same,), linear=(0,), scales=True, does_nothing=True,
            holds_values=True),
    _PASSES("IdentityN", tangents=(same,), variadic=True, holds_values=True),
    _PASSES("StopGradient", lambda x: x, (zero,)),
    _PASSES("PreventGradient", lambda x: x, linear=(0,)),
    # Grappler's own, which may copy
    OpRecord("Snapshot", lambda x: x, linear=(0,)),
)

# The same memory in another shape, or read in another way.
_VIEW = functools.partial(OpRecord, aliases=True, keeps_number=True)
register(
    _VIEW("Reshape", elements_of=0, broadcast=Broadcast.RESHAPE),
    _VIEW("Squeeze", elements_of=0), _VIEW("ExpandDims", elements_of=0), _VIEW("EnsureShape"),
    OpRecord("Bitcast", aliases=True),
)

# Some of the elements. Of whole rows the executor's kernels make no copy.
register(
    OpRecord("StridedSlice", slices=0, attrs=("shrink_axis_mask", "new_axis_mask")),
    OpRecord("Slice", slices=0), OpRecord("Unpack", slices=0, attrs=("axis",)),
    OpRecord("Split", slices=1), OpRecord("SplitV", slices=0),
)

# The same elements, more often or elsewhere.
register(
    OpRecord("Fill", elements_of=1, spreads=True),
    OpRecord("PadV2", pads=True),
    OpRecord("StridedSliceGrad", pads=True, slice_gradient=True, attrs=MASKS),
    OpRecord("BroadcastTo", elements_of=0, spreads=True),
    OpRecord("Tile", elements_of=0, spreads=True), OpRecord("Transpose", per_byte=2.0),
    OpRecord("Sum", broadcast=Broadcast.SUM, reduces=True),
    *(OpRecord(kind, reduces=True) for kind in ("Mean", "Max", "Min", "Prod", "All", "Any")),
    OpRecord("Gather", gathers=True), OpRecord("GatherV2", gathers=True),
    # the indices of what is not zero: as many int64 as there are dimensions
    OpRecord("Where", growth=8),
)

# What follows from a shape.
_OF_SHAPE = functools.partial(OpRecord, shape_only=True, folded_by_shape=True)
_FILLED = functools.partial(OpRecord, tangents=(zero,), folded_by_shape=True)
register(
    _OF_SHAPE("Shape", broadcast=Broadcast.SHAPE), _OF_SHAPE("Size"), _OF_SHAPE("Rank"),
    # of several shapes: not folded as one
    OpRecord("ShapeN", shape_only=True),
    OpRecord("BroadcastGradientArgs", shape_only=True, broadcast=Broadcast.AXES),
    _FILLED("ZerosLike", np.zeros_like, fills=0.0, holds_values=True),
    _FILLED("OnesLike", np.ones_like, fills=1.0),
)

# Random numbers from a seed that is given: the same each time.
register(
    OpRecord("StatelessRandomUniformV2", per_byte=12.0),
    OpRecord("StatelessRandomNormalV2", per_byte=20.0),
)
