"""Names of the op types that edits, derivatives and definitions are made of.

What is known of an op is in its record; a name is for making one.
"""

from __future__ import annotations

ADD = "AddV2"
ADD_N = "AddN"
ANY = "Any"
ARG = "_Arg"
ASSERT = "Assert"
BITCAST = "Bitcast"
CASE = "Case"
CONST = "Const"
EMPTY_LIST = "EmptyTensorList"
ENSURE_SHAPE = "EnsureShape"
EQUAL = "Equal"
FED = "InfeedDequeue"
FILL = "Fill"
FLOOR_DIV = "FloorDiv"
IDENTITY = "Identity"
IDENTITY_N = "IdentityN"
MAXIMUM = "Maximum"
MUL = "Mul"
NO_OP = "NoOp"
PACK = "Pack"
PARTITIONED_CALL = "StatefulPartitionedCall"
PLACEHOLDER = "Placeholder"
PLACEHOLDER_WITH_DEFAULT = "PlaceholderWithDefault"
RESHAPE = "Reshape"
RETVAL = "_Retval"
SHAPE = "Shape"
SELECT = "SelectV2"
STATELESS_CASE = "StatelessCase"
STRIDED_SLICE = "StridedSlice"
SUB = "Sub"
TENSOR_SCATTER_ADD = "TensorScatterAdd"
UNSORTED_SEGMENT_SUM = "UnsortedSegmentSum"
VAR_HANDLE = "VarHandleOp"
VAR_IS_INITIALIZED = "VarIsInitializedOp"
XLA_BARRIER = "XlaOptimizationBarrier"

ENTER, EXIT, LOOP_COND, MERGE, NEXT = "Enter", "Exit", "LoopCond", "Merge", "NextIteration"
SWITCHES = frozenset(("Switch", "_SwitchN"))
LOWERED = frozenset((ENTER, EXIT, LOOP_COND, MERGE, NEXT, *SWITCHES))
"""Op types to which TensorFlow lowers loops and branches before Grappler sees them."""
LIST_OF_ROWS = "TensorListFromTensor"
LIST_LENGTH = "TensorListLength"
LOOP, WRITING_LOOP = "TfckptLoop", "TfckptWritingLoop"
"""Registered by the native pass: stand for loops that TensorFlow has lowered; one writes variables.
"""
ELSEWHERE = "tfckpt.Elsewhere"
"""Of no op of TensorFlow: stands for an op of another device in the part of one device."""
