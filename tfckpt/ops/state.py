"""Arguments and constants, variables, and ops that do more than compute: none may run twice."""

from __future__ import annotations

import functools

from tfckpt.ops.names import ELSEWHERE
from tfckpt.ops.op_record import Access, OpRecord, Source
from tfckpt.ops.registry import register, register_families

_ONCE = functools.partial(OpRecord, repeatable=False)

# Where data comes from.
_THERE = functools.partial(_ONCE, resident=True)
register(
    _THERE("Const", source=Source.CONSTANT, does_nothing=True),
    OpRecord("GuaranteeConst", resident=True),
    _THERE("Placeholder", source=Source.ARGUMENT, does_nothing=True),
    _THERE("_Arg", source=Source.ARGUMENT, does_nothing=True),
    _THERE(ELSEWHERE, source=Source.ELSEWHERE),
    _ONCE("PlaceholderWithDefault", source=Source.DEFAULT, aliases=True),
    _THERE("IteratorGetNext", source=Source.ELEMENT, no_variables=True),
    _THERE("IteratorGetNextSync", source=Source.ELEMENT, no_variables=True),
    _THERE("OptionalGetValue", source=Source.ELEMENT),
)

# Variables.
register(
    OpRecord("VarHandleOp", source=Source.HANDLE, resident=True),
    OpRecord("_VarHandlesOp", source=Source.HANDLES),
    _THERE("ReadVariableOp", access=Access.VALUE),
    OpRecord("VariableShape", access=Access.READ), OpRecord("ResourceGather", access=Access.READ),
    OpRecord("ResourceGatherNd", access=Access.READ),
    OpRecord("VarIsInitializedOp", access=Access.READ),
    OpRecord("AssignVariableOp", access=Access.ASSIGN, writes=True),
)

# TF1 variables, which are references to a buffer. Grappler adds many gradients up in temporary
# ones; nothing reads those but the ops that fill them.
register(
    OpRecord("Variable", source=Source.REFERENCE, resident=True),
    OpRecord("VariableV2", source=Source.REFERENCE, resident=True),
    OpRecord("TemporaryVariable", source=Source.TEMPORARY, transient=True),
    _ONCE("DestroyTemporaryVariable", access=Access.DESTROY_REFERENCE, transient=True),
    OpRecord("Assign", access=Access.ASSIGN_REFERENCE, writes=True),
    OpRecord("AssignAdd", access=Access.CHANGE_REFERENCE, writes=True),
    OpRecord("AssignSub", access=Access.CHANGE_REFERENCE, writes=True),
)

# What shows when it runs.
register(
    _ONCE("PyFunc", runs_python=True), _ONCE("EagerPyFunc", runs_python=True),
    _ONCE("PyFuncStateless", runs_python=True),
    _ONCE("Assert", transient=True), _ONCE("Print"), _ONCE("PrintV2"),
    _ONCE("CheckNumerics", transient=True), _ONCE("CheckNumericsV2", transient=True),
    _ONCE("TPUReplicatedInput"), _ONCE("TPUReplicatedOutput"),
    _ONCE("RecvTPUEmbeddingActivations"),
    # what TensorFlow's debuggers add after every op: some statistics of its result, and a dump
    _ONCE("DebugNumericSummaryV2", growth=0, observes=True), _ONCE("DebugIdentityV2", aliases=True),
    _ONCE("DebugIdentity", aliases=True), _ONCE("DebugIdentityV3", aliases=True),
)

# Random numbers from a generator inside the op: TensorFlow registers them as stateful.
_DRAWS = functools.partial(OpRecord, draws=True)
register(
    _DRAWS("RandomUniform"), _DRAWS("RandomUniformInt"), _DRAWS("RandomStandardNormal"),
    _DRAWS("TruncatedNormal"), _DRAWS("ParameterizedTruncatedNormal"), _DRAWS("RandomShuffle"),
    _DRAWS("RandomGamma"), _DRAWS("RandomPoisson"), _DRAWS("RandomPoissonV2"),
    _DRAWS("Multinomial"),
)
register_families(_DRAWS("CudnnRNN"), OpRecord("StackP", transient=True))

# Exchanges between devices and processes, writes, resources that are no variables: whole families.
_WRITES = functools.partial(OpRecord, writes=True)
_OTHER = functools.partial(OpRecord, no_variables=True)
_OTHER_ONCE = functools.partial(_ONCE, no_variables=True)
register(
    _ONCE("_Send"), _ONCE("_Recv"),
    _WRITES("ResourceStridedSliceAssign"), _WRITES("ResourceCountUpTo"),
    _OTHER("OneShotIterator"), _OTHER("MakeIterator"), _OTHER("DeleteIterator"),
    _OTHER_ONCE("WriteSummary"),
)
register_families(
    _ONCE("Collective", collective=True), _ONCE("Nccl", collective=True), _ONCE("XlaSend"),
    _ONCE("XlaRecv"), _ONCE("Host"), _ONCE("TensorArray", transient=True), _ONCE("Write"),
    _WRITES("Assign"), _WRITES("Apply"), _WRITES("Scatter"), _WRITES("ResourceApply"),
    _WRITES("ResourceSparseApply"), _WRITES("ResourceScatter"), _WRITES("ResourceAccumulator"),
    _WRITES("LookupTableInsert", no_variables=True),
    _WRITES("LookupTableImport", no_variables=True),
    _WRITES("LookupTableRemove", no_variables=True),
    _OTHER("AnonymousIterator"), _OTHER("LookupTable"), _OTHER("HashTable"),
    _OTHER("MutableHashTable"), _OTHER("FlushSummary"),
    _OTHER_ONCE("Iterator"), _OTHER_ONCE("Summary"), _OTHER_ONCE("WriteScalar"),
    _OTHER_ONCE("WriteHistogram"), _OTHER_ONCE("WriteImage"),
)
