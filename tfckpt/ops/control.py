"""Calls, branches and loops, and the lists in which loops keep what their gradients read."""

from __future__ import annotations

import functools

from tfckpt.ops.names import LOOP, WRITING_LOOP
from tfckpt.ops.op_record import Branch, Calls, FramePart, ListUse, OpRecord
from tfckpt.ops.registry import register, register_families

_ONCE = functools.partial(OpRecord, repeatable=False)

# Calls of functions. Loops may run twice where their bodies may: see `tfckpt.capture.loops.purity`.
_BRANCHES = functools.partial(_ONCE, calls=Calls.BRANCHES, first_argument=1)
_ELEMENTS = functools.partial(_ONCE, calls=Calls.DATASET, first_argument=1)
register(
    OpRecord("PartitionedCall", calls=Calls.FUNCTION),
    OpRecord("StatefulPartitionedCall", calls=Calls.FUNCTION),
    _BRANCHES("If"), _BRANCHES("StatelessIf"), _BRANCHES("Case"), _BRANCHES("StatelessCase"),
    _ONCE("While", calls=Calls.LOOP), _ONCE("StatelessWhile", calls=Calls.LOOP),
    _ELEMENTS("ScanDataset"), _ELEMENTS("ReduceDataset"),
)

# Branches and loops whose ops stand in the graph itself.
_SWITCH = functools.partial(_ONCE, branch=Branch.SWITCH)
_MERGE = functools.partial(_ONCE, branch=Branch.MERGE)
register(
    _SWITCH("Switch"), _SWITCH("RefSwitch"), _SWITCH("_SwitchN"),
    _MERGE("Merge"), _MERGE("RefMerge"), _MERGE("_XlaMerge"),
    _ONCE("Enter", frame=FramePart.ENTER), _ONCE("Exit", frame=FramePart.EXIT),
    _ONCE("NextIteration"), _ONCE("LoopCond"),
    _ONCE(LOOP), _ONCE(WRITING_LOOP, writes=True),
    _ONCE("ControlTrigger"), _ONCE("NoOp", does_nothing=True), _ONCE("_Retval", does_nothing=True),
)

# Lists, and what a branch keeps.
_LIST = functools.partial(OpRecord, holds_values=True)
register(
    _LIST("EmptyTensorList", lists=ListUse(empty=True)),
    _LIST("TensorListReserve", lists=ListUse(reserves=True)),
    _LIST("TensorListFromTensor", lists=ListUse(rows=True), aliases=True),
    _LIST("TensorListPushBack", lists=ListUse(entry=1)),
    _LIST("TensorListSetItem", lists=ListUse(entry=2, index=1)),
    _LIST("TensorListGetItem", lists=ListUse(reads=1, shape=2)),
    _LIST("TensorListPopBack", lists=ListUse(shape=1, removes=True)),
    _LIST("TensorListStack", lists=ListUse(stacks=True)),
    _LIST("TensorListLength", lists=ListUse(counts=True)),
    _LIST("OptionalFromValue", wraps=True), _LIST("OptionalNone"),
)
register_families(_LIST("TensorList"))
