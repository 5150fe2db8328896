"""Edits: what to change in a graph, as a value, how such values are combined, and their checker.

Tensors are named `op:slot`, so the same edits apply to a live FuncGraph and to a GraphDef. A
live graph cannot delete ops: what nothing reads any more is pruned by TensorFlow itself.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence

from tfckpt.errors import RewriteError
from tfckpt.ir.branches import conditions, has_branches
from tfckpt.ir.graph import Graph, depth_first_order, topological_order

COPY = "_tfckpt_copy"
"""Attribute of copies: TensorFlow merges equal ops, and a copy is not equal to its original."""
PROTECTED = "_grappler_do_not_remove"
"""Attribute of what Grappler would replace by control edges on its readers."""

TRIPS = "_tfckpt_trips"
"""Attribute of loops that run over segments, or over one: how often they run, at most."""
KEPT_SLOTS = "_tfckpt_kept_slots"
"""Attribute of a loop over segments: of each of its first slots, which one that was of the loop
whose place it took; -1 of a new one."""

TAKES = "_tfckpt_takes"
"""Attribute of loops and branches: the bytes that each of their functions was planned to take while
it runs; 0 of those that are as they were."""

FACTOR = "/tfckpt_factor_"
"""In the names of pass-throughs without which Grappler would merge a product with a function of a
factor; copies of the product read through copies of them."""

OPTIMIZED = "optimized"
"""The scope of what Grappler makes of a step while it is traced."""
_OPTIMIZED = re.compile(rf"^{OPTIMIZED}(_\d+)?/")


def traced(name: str) -> str:
    """Return what an op is called in the trace, where Grappler's ops took the place of those.

    Args:
      name: of an op of the graph that is planned; one outside of `OPTIMIZED` comes back as it is.
    """
    return _OPTIMIZED.sub("", name)


@dataclasses.dataclass(frozen=True, slots=True)
class Create:
    """A new op that is no copy of another (a fence, a guard).

    Attributes:
      dtypes: output dtypes by name, as in `Tensor.dtype`.
      attrs: plain attribute values: bool, int, str (a dtype is written "dtype:float32"), or a
        constant ("const", dtype name, value) for the `value` of a Const, a list of dtypes
        ("types", name, name ...), or any other as a serialised proto ("attr", bytes).
    """

    name: str
    type: str
    inputs: tuple[str, ...]
    controls: tuple[str, ...]
    dtypes: tuple[str, ...]
    attrs: Mapping[str, object]
    device: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Clone:
    """A copy of `source` that reads `inputs` instead and waits only for `controls`.

    Attributes:
      alone: the original has several readers, so that nothing merges it into one of them.
      attrs: what it gets beside the original's attributes, as in `Create.attrs`.
    """

    name: str
    source: str
    inputs: tuple[str, ...]
    controls: tuple[str, ...] = ()
    alone: bool = False
    attrs: Mapping[str, object] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, slots=True)
class Rewire:
    """Input `index` of an existing op reads `tensor` from now on."""

    op: str
    index: int
    tensor: str


@dataclasses.dataclass(frozen=True, slots=True)
class AddControl:
    """An existing op waits for another from now on."""

    op: str
    control: str


@dataclasses.dataclass(frozen=True, slots=True)
class Replace:
    """Makes what waits for the op `old` wait for the new op `new`; nothing reads `old`."""

    old: str
    new: str


@dataclasses.dataclass(frozen=True)
class Edits:
    """Everything a plan changes.

    Attributes:
      added: new ops, each after what it reads among the new ones.
      rewires, controls: changes to existing ops.
      dropped: ops whose work new ops do; a definition loses those that nothing reads any more, a
        live graph keeps them, unread.
      replaced: ops that have effects, or are awaited, and do not run any more.
      functions: FunctionDefs that new ops call, serialised.
    """

    added: tuple[Create | Clone, ...] = ()
    rewires: tuple[Rewire, ...] = ()
    controls: tuple[AddControl, ...] = ()
    dropped: tuple[str, ...] = ()
    replaced: tuple[Replace, ...] = ()
    functions: tuple[bytes, ...] = ()

    @property
    def clones(self) -> tuple[Clone, ...]:
        """Return the copies among the added ops."""
        return tuple(op for op in self.added if isinstance(op, Clone))

    @property
    def renamed(self) -> dict[str, str]:
        """Return the ops that have the places of others, by the names of these."""
        return {entry.old: entry.new for entry in self.replaced}

    def then(self, second: Edits) -> Edits:
        """Return these edits, and edits made for the graph that they give, as one value.

        What the second rewires among the ops that the first creates is written into their
        creation.

        Args:
          second: edits of the graph that these edits give; they may name the ops that these create.

        Raises:
          CaptureError: new ops of the two need each other.
        """
        created = {op.name: n for n, op in enumerate(self.added)}
        renamed = second.renamed
        added: list[Create | Clone] = [
            dataclasses.replace(op, controls=tuple(renamed.get(c, c) for c in op.controls))
            if renamed else op for op in self.added]
        rewires: dict[tuple[str, int], Rewire] = {(r.op, r.index): r for r in self.rewires}
        for rewire in second.rewires:
            if rewire.op not in created:
                rewires[(rewire.op, rewire.index)] = rewire
                continue
            op = added[created[rewire.op]]
            inputs = list(op.inputs)
            inputs[rewire.index] = rewire.tensor
            added[created[rewire.op]] = dataclasses.replace(op, inputs=tuple(inputs))
        controls = tuple(AddControl(c.op, renamed.get(c.control, c.control))
                         for c in self.controls) if renamed else self.controls
        return Edits(_in_order([*added, *second.added]), tuple(rewires.values()),
                     (*controls, *second.controls), (*self.dropped, *second.dropped),
                     (*self.replaced, *second.replaced),
                     tuple(dict.fromkeys((*self.functions, *second.functions))))


def together(several: Iterable[Edits]) -> Edits:
    """Return edits of different ops of one graph, such as its devices' parts, as one value.

    Args:
      several: edits of one graph, of which no two change the same op; their order is kept.
    """
    found = tuple(several)
    return Edits(tuple(new for edits in found for new in edits.added),
                 tuple(rewire for edits in found for rewire in edits.rewires),
                 tuple(control for edits in found for control in edits.controls),
                 tuple(name for edits in found for name in edits.dropped),
                 tuple(entry for edits in found for entry in edits.replaced),
                 tuple(dict.fromkeys(f for edits in found for f in edits.functions)))


def slice_attrs(dtype: str, **masks: int) -> dict[str, object]:
    """Return the attributes of a StridedSlice with bounds in int32.

    Args:
      dtype: of what is sliced.
      **masks: those that are not 0, such as `end_mask=1`.
    """
    none = dict.fromkeys(("begin_mask", "end_mask", "ellipsis_mask", "new_axis_mask",
                          "shrink_axis_mask"), 0)
    return {"T": f"dtype:{dtype}", "Index": "dtype:int32", **none, **masks}


def op_of(tensor: str) -> str:
    """Return the op that a tensor name refers to.

    Args:
      tensor: a tensor, named `op:slot`.
    """
    return tensor.rpartition(":")[0]


def check_edits(graph: Graph, edits: Edits) -> None:
    """Raise `RewriteError` unless the edited graph exists, has no cycle and runs what it ran.

    Derived from the edits alone, without the plan: every name resolves, no name is taken twice,
    each new op stands after the new ones that it reads, a topological order of data and control
    edges exists, and no op of a branch takes an op with it that ran whichever branch is taken.

    Args:
      graph: the captured step, which the edits are for; not changed.
      edits: everything that is done to it.

    Raises:
      RewriteError: the edited graph is not well formed, or runs less than the step does.
    """
    tensors, waits, kinds = edited(graph, edits)
    _check_creation(edits.added)
    order = _order({name: {*map(op_of, tensors[name]), *waits[name]} for name in tensors})
    if has_branches(kinds.values()):
        needed = conditions((name, kinds[name], tensors[name], waits[name]) for name in order)
        for op in graph.ops:
            if needed[op.name] and not op.conditional:
                raise RewriteError(f"rewrite: {op.name!r} would run in one branch only; "
                                   "the graph is left as it was")


def edited(graph: Graph, edits: Edits) -> tuple[dict[str, list[str]], dict[str, list[str]],
                                                dict[str, str]]:
    """Return the edited graph: what each op reads, the ops that it waits for, and its type.

    Each is a dict by the name of the op; what is read is named `op:slot`.

    Args:
      graph: the captured step, which the edits are for; not changed.
      edits: everything that is done to it.

    Raises:
      RewriteError: an edit names what does not exist, or a name that is taken.
    """
    tensors = {op.name: [f"{graph.ops[s].name}:{slot}" for s, slot in op.inputs]
               for op in graph.ops}
    waits = {op.name: [graph.ops[c].name for c in op.controls] for op in graph.ops}
    kinds = {op.name: op.type for op in graph.ops}
    for new in edits.added:
        if new.name in tensors:
            raise RewriteError(f"rewrite: two ops would be named {new.name!r}")
        if isinstance(new, Clone) and new.source not in kinds:
            raise RewriteError(f"rewrite: {new.name!r} copies {new.source!r}, which does not exist")
        kinds[new.name] = kinds[new.source] if isinstance(new, Clone) else new.type
        tensors[new.name] = list(new.inputs)
        waits[new.name] = list(new.controls)
    for rewire in edits.rewires:
        if rewire.op not in tensors or not 0 <= rewire.index < len(tensors[rewire.op]):
            raise RewriteError(f"rewrite: {rewire.op!r} has no input {rewire.index}")
        tensors[rewire.op][rewire.index] = rewire.tensor
    for control in edits.controls:
        if control.op not in tensors:
            raise RewriteError(f"rewrite: {control.op!r}, which is to wait, does not exist")
        waits[control.op].append(control.control)
    _take_away(edits.replaced, tensors, waits, kinds)
    return tensors, waits, kinds


def _take_away(replaced: Sequence[Replace], tensors: dict[str, list[str]],
               waits: dict[str, list[str]], kinds: dict[str, str]) -> None:
    """Take ops away that others have the place of.

    Raises:
      RewriteError: something still reads one.
    """
    renamed = {entry.old: entry.new for entry in replaced}
    for old in renamed:
        if old not in tensors:
            raise RewriteError(f"rewrite: {old!r}, which is to be replaced, does not exist")
        for known in (tensors, waits, kinds):
            del known[old]
    for name in tensors if renamed else ():
        waits[name] = [renamed.get(c, c) for c in waits[name]]
        for tensor in tensors[name]:
            if op_of(tensor) in renamed:
                raise RewriteError(f"rewrite: {name!r} reads {tensor!r}, which is replaced")


def _check_creation(added: Sequence[Create | Clone]) -> None:
    """Raise `RewriteError` unless new ops can be made one after the other."""
    later = {op.name for op in added}
    for op in added:
        for name in (*map(op_of, op.inputs), *op.controls):
            if name in later:
                raise RewriteError(f"rewrite: {op.name!r} is made before {name!r}, which it needs")
        later.remove(op.name)


def _order(before: dict[str, set[str]]) -> list[str]:
    """Return the names in a topological order."""
    for name, entries in before.items():
        missing = sorted(entry for entry in entries if entry not in before)
        if missing:
            raise RewriteError(f"rewrite: {name!r} reads {missing[0]!r}, which does not exist")
    order = topological_order(before)
    if len(order) != len(before):
        done = frozenset(order)
        stuck = next(name for name in before if name not in done)
        raise RewriteError(f"rewrite: the edits close a cycle through {stuck!r}; "
                           "the graph is left as it was")
    return order


def _in_order(ops: Sequence[Create | Clone]) -> tuple[Create | Clone, ...]:
    """Return new ops, each after the new ops that it reads or waits for."""
    known = {op.name: op for op in ops}

    def needs(name: str) -> list[str]:
        op = known[name]
        return [n for n in [*reversed(op.controls), *map(op_of, reversed(op.inputs))] if n in known]

    return tuple(known[name] for name in depth_first_order(known, needs))
