"""`OpRecord`: all that tfckpt knows of one op type; the defaults are what it assumes of any other.

A stage asks the record for the fact it needs and never compares an op's type with a name. The
records stand in the other modules of this package, each op type in one place.
"""

from __future__ import annotations

import dataclasses
import enum
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from tfckpt.ops.tangents import TangentRule

Array = np.ndarray
Shape = tuple[int, ...]
"""Unknown dimensions count as 1, an unknown rank as none."""
Flops = Callable[[Sequence[Shape], Shape, Mapping[str, object]], float]
"""Takes the shapes of all inputs and of the first output, and the captured attributes."""
Copies = Callable[[Mapping[str, object], Sequence[int]], tuple[tuple[int, ...], bool]]
"""Takes the captured attributes and the ranks of all inputs."""

SUM, PRODUCT, UNARY, BIAS = "sum", "product", "unary", "bias"
"""Kinds of ops as Grappler's arithmetic optimizer and remapper tell them apart. A bias is a sum
that may add a bias: of two terms. Written in lower case, so that no op type is called that."""
REARRANGED = frozenset({SUM, PRODUCT, UNARY})
"""Kinds that the arithmetic optimizer rearranges."""
NONE: frozenset[str] = frozenset()
_GRADIENT_KERNEL = re.compile(r"Grad(V\d+)?$")


class Source(enum.Enum):
    """Source of a result that no op of the step computes."""

    CONSTANT = "constant"  # it is part of the graph
    ARGUMENT = "argument"  # the caller passes it, or the traced function captures it
    DEFAULT = "default"  # the caller may pass it; otherwise it is the op's input
    ELEMENT = "element"  # the next element of a dataset
    HANDLE = "handle"  # the handle of a resource variable
    HANDLES = "handles"  # the handles of several
    REFERENCE = "reference"  # a TF1 variable: a buffer that changes in place, between steps too
    TEMPORARY = "temporary"  # a TF1 variable that the step makes and destroys
    ELSEWHERE = "elsewhere"  # another device, in the part of one device


class Access(enum.Enum):
    """Access of an op to the variable that its first input refers to."""

    VALUE = "value"  # hands out the value, in the variable's own memory
    READ = "read"  # computes from the value, or from what is known of it
    ASSIGN = "assign"  # has a resource variable take over the buffer of another value
    ASSIGN_REFERENCE = "assign reference"  # writes into the buffer, and hands the reference on
    CHANGE_REFERENCE = "change reference"  # the same, with a value made from the present one
    DESTROY_REFERENCE = "destroy reference"  # hands out the last value


class Calls(enum.Enum):
    """The functions that an op calls."""

    FUNCTION = "function"  # one, once: the call is what its body is
    BRANCHES = "branches"  # one of several
    LOOP = "loop"  # a condition and a body, in turns
    DATASET = "dataset"  # one for each element, by itself: what stands around it is not lowered


class Branch(enum.Enum):
    """The part of an op in branches that are not functions."""

    SWITCH = "switch"
    MERGE = "merge"


class FramePart(enum.Enum):
    """The part of an op at the border of a loop that is no function."""

    ENTER = "enter"
    EXIT = "exit"


class Broadcast(enum.Enum):
    """The part of an op in undoing a broadcast: Reshape(Sum(gradient, axes), shape)."""

    SHAPE = "shape"  # the shape of an operand
    AXES = "axes"  # the axes over which the gradient of each operand is summed
    SUM = "sum"
    RESHAPE = "reshape"


_FED = (Source.ARGUMENT, Source.DEFAULT, Source.ELEMENT, Source.ELSEWHERE)


@dataclasses.dataclass(frozen=True, slots=True)
class ListUse:
    """Use of a list of tensors (a variant) by an op; most ops use none. Inputs are positions.

    Attributes:
      empty: it makes a list without entries.
      reserves: it makes a list of empty entries.
      rows: it makes a list of the rows of its first input.
      entry: the input that it puts into the list.
      index: the input that says which entry that replaces; None appends it.
      reads: the input that says which entry it takes and leaves there.
      shape: the input that says which shape the entry has that it takes.
      removes: what it takes leaves the list.
      stacks: it makes one tensor of all entries.
      counts: it gives the number of entries.
    """

    empty: bool = False
    reserves: bool = False
    rows: bool = False
    entry: int | None = None
    index: int | None = None
    reads: int | None = None
    shape: int | None = None
    removes: bool = False
    stacks: bool = False
    counts: bool = False

    @property
    def begins(self) -> bool:
        """Return whether it makes a list that an op or a loop is to fill."""
        return self.empty or self.reserves


class Convolves(NamedTuple):
    """What a convolution reads and writes: inputs by position; None is the output.

    Attributes:
      kernel: what has the shape of the kernel: window, channels in, channels out.
      data: what has images, of the channels that come in and of those that go out.
      twice: whether the result is computed in memory of its own before it is written.
    """

    kernel: int | None
    data: tuple[int | None, int | None]
    twice: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class OpRecord:
    """The properties of one op type. Inputs and outputs are given by position.

    In `merges_into`, `rounds_with` and `one_with` a name is an op type or one of the kinds above.
    """

    type: str

    # What it computes, where it is element-wise.
    evaluate: Callable[..., Any] | None = None
    """On numpy arrays in float64, captured attributes by keyword."""
    tangents: tuple[TangentRule, ...] = ()
    """The tangent rule of each input; empty where there is none."""
    _: dataclasses.KW_ONLY
    variadic: bool = False  # takes any number of inputs; the one tangent rule is that of each
    linear: tuple[int, ...] = ()  # inputs in one of which it is linear, the others fixed
    scales: bool = False  # linear, and with constants for its other inputs a constant multiple
    commutative: bool = False
    subtracts: bool = False  # its second operand is taken off the first
    neutral: float | None = None  # this second operand (first too if commutative) changes nothing
    selects: bool = False  # chooses between its second and third input by the first
    fills: float | None = None  # the value of every element of its result
    pads: bool = False  # elements of its result, the first perhaps, are the same whatever it reads
    elements_of: int | None = None  # the result has the elements of this input, in another shape
    compares: str = ""  # how, as Python writes it, where loops are bounded by it
    conjunction: bool = False  # is true where both operands are
    broadcast: Broadcast | None = None

    # Running it a second time.
    repeatable: bool = True  # False: it must not, though TensorFlow may not mark it as stateful
    writes: bool = False  # writes the resource or reference that it reads, if it reads one
    collective: bool = False  # exchanges something with other replicas
    runs_python: bool = False  # does whatever a Python function does
    does_nothing: bool = False  # computes nothing and takes no time
    observes: bool = False  # shows what its input is, and belongs to the part that computes that
    no_variables: bool = False  # the resources that it reads or makes are no variables
    transient: bool = False  # stateful, and nothing of that is left when the step ends
    draws: bool = False  # draws random numbers from a generator of its own, made with each trace
    wraps: bool = False  # its result is a value that keeps its inputs alive
    holds_values: bool = False  # its variants are values (lists, what branches keep), no state

    # Variables, arguments, constants.
    source: Source | None = None
    access: Access | None = None

    # Memory.
    resident: bool = False  # its results are there before the step starts
    aliases: bool = False  # each output lies in the memory of the input at its place
    slices: int | None = None  # takes slices of this input, whose rows may lie in its memory
    passes_on: bool = False  # an alias that is the same tensor, and that TensorFlow removes
    keeps_number: bool = False  # a single number comes out as it went in, be it in another dtype
    reuses_input: bool = False  # its kernel may write into an input that dies
    writes_over: tuple[int, int] | None = None  # one result of several may, and which input
    shape_only: bool = False  # reads shapes alone: it runs at once and keeps nothing alive
    growth: int = 1  # bytes of a result of unknown size for each byte read, at most

    # Time.
    flops: Flops | None = None  # None: it moves bytes rather than computes
    multiplies_matrices: bool = False  # XLA calls a library of the GPU for it, with a workspace
    copies: Copies | None = None  # what its kernel copies in another order, by the attributes
    convolves: Convolves | None = None  # a library of the GPU's computes it, perhaps on copies
    per_byte: float = 1.0  # how much slower than a plain copy it moves a byte

    # What TensorFlow makes of it.
    kinds: frozenset[str] = NONE
    merges_into: frozenset[str] = NONE  # only readers into which Grappler or oneDNN may merge it
    rounds_with: frozenset[str] = NONE  # activations that round otherwise in one kernel with it
    one_with: frozenset[str] = NONE  # inputs with which it becomes one op, if that adds or is 1
    gates: bool = False  # x * f(x) becomes one op where both read the same x
    cube: tuple[str, str] | None = None  # what Grappler makes of x^3: a product, and a square
    folded_by_shape: bool = False  # Grappler folds it where it knows the shape that it reads
    fused_by_xla: bool = False  # element-wise in the backward, fused with what it reads
    lengthy: bool = False  # so many instructions that XLA computes it once for all its readers
    gathers: bool = False  # takes some of its first input's rows
    reduces: bool = False  # XLA computes what it reads, where that is element-wise, with it
    slice_gradient: bool = False  # of a strided slice: zero but for what was sliced
    spreads: bool = False  # not element-wise, but XLA computes it with what reads it, as if it were
    fused_from: int | None = None  # XLA computes results as large as this input where they are read
    filter_gradient_of: int | None = None  # of this input's bias oneDNN makes the gradient as well
    bias_gradient: bool = False  # makes the gradient of a bias by itself

    # Graphs.
    attrs: tuple[str, ...] = ()  # attributes that capture reads
    calls: Calls | None = None
    first_argument: int = 0  # the input that is the called functions' first argument
    branch: Branch | None = None
    frame: FramePart | None = None
    lists: ListUse = ListUse()
    typed: bool = True  # has the attribute T, the dtype of its first input
    made_with: tuple[tuple[str, object], ...] = ()  # further attributes of one that is made

    @property
    def fed(self) -> bool:
        """Return whether its shape is the caller's, not what the graph makes of it."""
        return self.source in _FED

    @property
    def rearranged(self) -> bool:
        """Return whether Grappler's arithmetic optimizer rearranges it with others."""
        return not self.kinds.isdisjoint(REARRANGED)

    @property
    def adds(self) -> bool:
        """Return whether it is the sum of its inputs."""
        return self.commutative and SUM in self.kinds

    @property
    def multiplies(self) -> bool:
        """Return whether it is the product of its two inputs."""
        return self.commutative and PRODUCT in self.kinds

    @property
    def scales_gradients(self) -> bool:
        """Return whether, in a backward pass, it multiplies a gradient by what an input holds."""
        return (self.flops is not None or self.selects or PRODUCT in self.kinds
                or bool(_GRADIENT_KERNEL.search(self.type)))

    @property
    def joins(self) -> bool:
        """Return whether it passes on any number of tensors, none before all are there."""
        return self.passes_on and self.variadic

    @property
    def is_loop(self) -> bool:
        """Return whether it is a loop."""
        return self.calls is Calls.LOOP

    @property
    def has_bodies(self) -> bool:
        """Return whether it is a loop or runs one of several branches."""
        return self.calls in (Calls.LOOP, Calls.BRANCHES)

    @property
    def chooses(self) -> bool:
        """Return whether it runs one of several branches; its first input says which."""
        return self.calls is Calls.BRANCHES

    @property
    def is_constant(self) -> bool:
        """Return whether it is a constant of the graph."""
        return self.source is Source.CONSTANT

    def tangent(self, position: int) -> TangentRule:
        """Return the rule of an input.

        Args:
          position: of the input; not looked at where the op is variadic.

        Raises:
          IndexError: there is no rule for the input.
        """
        return self.tangents[0 if self.variadic else position]

    def is_among(self, names: frozenset[str]) -> bool:
        """Return whether op types and kinds include this op.

        Args:
          names: op types and kinds, as in `merges_into`.
        """
        return self.type in names or not self.kinds.isdisjoint(names)
