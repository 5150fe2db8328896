"""May this op run twice? Only if nothing but time and memory tells the two runs apart.

Stateful ops never (random generators, variable reads and writes, iterators, queues, prints,
Python calls, summaries); nor those TensorFlow does not mark as stateful although running them
twice shows. Their outputs may still be kept and read by copies. Stateless random ops with the
same seed tensor may. Loops are judged by their bodies (`tfckpt.capture.loop_purity`).
"""

from __future__ import annotations

_NEVER = frozenset({
    "Placeholder", "PlaceholderWithDefault", "Assert", "Print", "PrintV2", "PyFunc",
    "EagerPyFunc", "PyFuncStateless", "NoOp", "ReadVariableOp", "_Arg", "_Retval", "Const",
    "While", "If", "Case", "StatelessWhile", "StatelessIf", "StatelessCase",
    "CheckNumerics", "CheckNumericsV2", "ControlTrigger", "DestroyTemporaryVariable",
    "Enter", "Exit", "Switch", "Merge", "NextIteration", "LoopCond", "RefSwitch", "RefMerge",
    "TPUReplicatedInput", "TPUReplicatedOutput", "RecvTPUEmbeddingActivations",
})
_NEVER_PREFIXES = ("Collective", "Nccl", "XlaSend", "XlaRecv", "_Send", "_Recv", "TensorArray",
                   "Iterator", "OptionalGetValue", "Summary", "Write", "Host")
_WRITE_PREFIXES = ("Assign", "ResourceApply", "ResourceSparseApply", "ResourceScatter",
                   "ResourceStridedSliceAssign", "Apply", "Scatter", "LookupTableInsert",
                   "LookupTableImport", "ResourceAccumulator", "ResourceCountUpTo")


def is_pure(op_type: str, stateful: bool, dtypes: tuple[str, ...]) -> bool:
    """Whether a copy of the op computes the same and disturbs nothing.

    Args:
      op_type: TensorFlow op type.
      stateful: what the op's registration says.
      dtypes: dtypes of its outputs; resources and variants are never copied.
    """
    if stateful or op_type in _NEVER or op_type.startswith(_NEVER_PREFIXES):
        return False
    return not any(dtype in ("resource", "variant") for dtype in dtypes)


def is_write(op_type: str, reads_resource: bool, stateful: bool) -> bool:
    """Whether the op writes a resource or takes part in a collective."""
    if op_type.startswith(("Collective", "Nccl")):
        return True
    return reads_resource and stateful and op_type.startswith(_WRITE_PREFIXES)
