"""`Graph`: a training step as plain data, without TensorFlow.

Capture makes it, every later stage reads it. Ops are stored in a topological order of data
and control edges, so an op's index is also a valid position in the original execution.
"""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TypeVar

from tfckpt.errors import CaptureError

Key = TypeVar("Key", int, str, tuple[str, int])

FORWARD, BACKWARD, UPDATE, OTHER = "forward", "backward", "update", "other"
REGIONS = (FORWARD, BACKWARD, UPDATE, OTHER)
KEEP, RECOMPUTE = "keep", "recompute"

TensorId = tuple[int, int]
"""(op index, output slot)."""


@dataclasses.dataclass(frozen=True, slots=True)
class Tensor:
    """One output of an op. `shape` has no unknown dimension once costs are computed.

    Attributes:
      variable_bytes: of a handle, the size of the variable that it refers to, if that is known.
    """

    dtype: str
    shape: tuple[int | None, ...] | None
    bytes: int | None
    variable_bytes: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class OpenList:
    """A list with entries of an open size that a loop is given empty.

    Attributes:
      gradient: whether it is given to the gradient's loop, not to the forward's.
      slot: of that loop.
      maker: name of the op that makes it.
      dtype: of its entries.
      dims: shape of an entry; -1 for the open size.
    """

    gradient: bool
    slot: int
    maker: str
    dtype: str
    dims: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class OpenSizes:
    """What of a loop has a size that differs from call to call.

    Attributes:
      size: a state of the forward's loop, by slot, and which of its dimensions is that size; None
        where every size is known, and the trace does not say it of a list.
      states: slots of states that have it, or another that is open.
      lists: what has it in its entries.
    """

    size: tuple[int, int] | None
    states: tuple[int, ...]
    lists: tuple[OpenList, ...]


COUNTER, BOUND = 0, 1
"""Slots of a loop: its iterations so far, and how many there are at most."""


@dataclasses.dataclass(frozen=True, slots=True)
class Segments:
    """How a loop of the forward can be run again segment by segment, in the loop of its gradient.

    Slots are positions among the inputs and outputs of a loop.

    Attributes:
      gradient: name of the gradient's loop, the only reader of the lists.
      bounded: whether the loop's condition compares its counter with the bound in slot 1.
      states: slots that an iteration hands on to the next, the counter (slot 0) among them.
      lists: slots of the lists that the gradient's loop empties.
      residuals: the slots of these lists in the gradient's loop.
      trips: the slot of the gradient's loop that says how often the loop has run.
      written: slots of lists in which iterations set entries.
      sized: those of `written` whose length the body reads, as it does where a list grows with its
        entries: the length is kept with the states.
      unread: those of `lists` whose entries nothing needs and of whose loops nothing waits:
        TensorFlow leaves these lists out.
      idle: slots of the gradient's loop that its body hands on as they are, or that nothing needs:
        TensorFlow leaves those out.
      open: sizes that XLA has to be told; None where there are none, or XLA is not asked.
      read_once: slots of the gradient's loop with lists of which it reads each entry once and then
        puts zeros there, which nothing reads; none where XLA is not asked.
      invariant: those of `lists` that have the same entry from each iteration, which XLA would keep
        for each; none where XLA is not asked.
    """

    gradient: str
    bounded: bool
    states: tuple[int, ...]
    lists: tuple[int, ...]
    residuals: tuple[int, ...]
    trips: int
    written: tuple[int, ...] = ()
    idle: tuple[int, ...] = ()
    open: OpenSizes | None = None
    read_once: tuple[int, ...] = ()
    invariant: tuple[int, ...] = ()
    sized: tuple[int, ...] = ()
    unread: tuple[int, ...] = ()

    @property
    def kept(self) -> tuple[int, ...]:
        """Return the slots of which something is kept for each segment, states first."""
        return (*self.states, *self.sized)


@dataclasses.dataclass(frozen=True, slots=True)
class Loop:
    """Properties of a while loop beyond its inputs and outputs.

    Attributes:
      trips: the most iterations of a call of the planned sizes.
      body: what an iteration does, to be priced; its ops are in the order of the body, its fetches
        are what it hands on to the next iteration.
      shares: for a list that has the entries of another, and thus its memory, the other's slot.
      takes: for a list, the inputs of the loop whose memory it can have, first wish first.
      entries: for a list of the entries that iterations read of a list, the input that this is: it
        lies in the memory of that.
      segments: how it can be recomputed segment by segment; None where it cannot.
      bound: the most iterations of any call; None where the call's sizes decide, as with sequences
        whose length the trace leaves open.
      at_once: how many iterations may run at the same time, where what they read is there.
      arguments: which ops of the body stand for what an iteration is handed, by slot; empty where
        that is not known.
    """

    trips: int
    body: Graph
    shares: Mapping[int, int] = dataclasses.field(default_factory=dict)
    takes: Mapping[int, tuple[int, ...]] = dataclasses.field(default_factory=dict)
    entries: Mapping[int, int] = dataclasses.field(default_factory=dict)
    segments: Segments | None = None
    bound: int | None = None
    at_once: int = 1
    arguments: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class Branches:
    """What is known of an op that runs one of several branches.

    Attributes:
      bodies: what each branch does, to be priced.
      shares: for what has the memory of another result the slot of that: what a branch keeps and
        returns as well, and what branches keep besides the first such value.
      pieces: of how many tensors that is what the branch keeps which keeps most.
    """

    bodies: tuple[Graph, ...]
    shares: Mapping[int, int] = dataclasses.field(default_factory=dict)
    pieces: int = 1


@dataclasses.dataclass(frozen=True, slots=True)
class Op:
    """One operation: indices refer to `Graph.ops`.

    Attributes:
      conditional: it runs in one branch of a Switch only, so that nothing outside may wait for it.
      loop: of a while loop whose number of iterations is known; None otherwise.
      branches: of an op that runs one of several, and of a loop whose number of iterations is not
        known, an iteration; None of others, and where they are not known.
      later_writes: of a loop or branches, names of the ops that may run only after the copies,
        since they may write a variable that it reads.
      workspace: bytes that it is known to allocate besides its results while it runs.
      policy: what a person asks of a forward op: `KEEP`, never to compute it again, or `RECOMPUTE`,
        to keep nothing of it for the backward; "" where nothing is asked.
    """

    name: str
    type: str
    inputs: tuple[TensorId, ...]
    controls: tuple[int, ...]
    outputs: tuple[Tensor, ...]
    region: str
    pure: bool
    device: str = ""
    attrs: Mapping[str, object] = dataclasses.field(default_factory=dict)
    conditional: bool = False
    loop: Loop | None = None
    workspace: int = 0
    policy: str = ""
    branches: Branches | None = None
    later_writes: tuple[str, ...] = ()

    @property
    def bodies(self) -> tuple[Graph, ...]:
        """Return what it does: an iteration, or one of the branches; none for other ops."""
        if self.loop is not None:
            return (self.loop.body,)
        return () if self.branches is None else self.branches.bodies

    @property
    def shares(self) -> Mapping[int, int]:
        """Return for results that have the memory of others the slots of those."""
        known = self.loop or self.branches
        return {} if known is None else known.shares


@dataclasses.dataclass(frozen=True)
class Graph:
    """A captured training step.

    Attributes:
      name: name of the captured function or file.
      ops: operations, topologically ordered over data and control edges.
      fetches: tensors that leave the step (they live until it ends).
      sinks: ops that must run although nothing reads them (control outputs, stateful ops).
      inlined: a line for each function whose calls gave way to its body.
      refused: a line for each op that is not looked into, or not wholly, with the reason.
    """

    name: str
    ops: tuple[Op, ...]
    fetches: tuple[TensorId, ...]
    sinks: tuple[int, ...]
    inlined: tuple[str, ...] = ()
    refused: tuple[str, ...] = ()

    def consumers(self) -> list[list[int]]:
        """For each op the ops that read one of its outputs, ascending, without repeats."""
        readers: list[list[int]] = [[] for _ in self.ops]
        for index, op in enumerate(self.ops):
            for source, _ in op.inputs:
                if not readers[source] or readers[source][-1] != index:
                    readers[source].append(index)
        return readers

    def part(self, kept: Sequence[int]) -> Graph:
        """Return the graph with some of its ops, in the order given.

        Args:
          kept: indices of ops, each after all that it reads or waits for.
        """
        number = {old: new for new, old in enumerate(kept)}
        ops = tuple(dataclasses.replace(
            self.ops[old], inputs=tuple((number[s], slot) for s, slot in self.ops[old].inputs),
            controls=tuple(number[c] for c in self.ops[old].controls)) for old in kept)
        return dataclasses.replace(
            self, ops=ops,
            fetches=tuple((number[i], slot) for i, slot in self.fetches if i in number),
            sinks=tuple(number[i] for i in self.sinks if i in number))

    def has_gradient(self) -> bool:
        """Return whether any op lies in the backward region."""
        return any(op.region == BACKWARD for op in self.ops)


def ancestors(ops: Sequence[Op], targets: Iterable[int]) -> set[int]:
    """Return the ops that must run before one of the targets.

    Args:
      ops: all ops of a graph, which indices refer to.
      targets: indices of ops.

    Returns:
      Indices of ops; a target is one of them only where another target needs it.
    """
    found: set[int] = set()
    pending = list(targets)
    while pending:
        op = ops[pending.pop()]
        new = {source for source, _ in op.inputs} | set(op.controls)
        pending += sorted(new - found)
        found |= new
    return found


def topological_order(sources: Mapping[Key, Collection[Key]]) -> list[Key]:
    """Return the keys, each after its sources, the smallest of those that could be next first.

    Keys on a cycle, or after one, are missing.

    Args:
      sources: by key; each is a key itself.
    """
    readers: dict[Key, list[Key]] = {key: [] for key in sources}
    for key, entries in sources.items():
        for entry in entries:
            readers[entry].append(key)
    waiting = {key: len(entries) for key, entries in sources.items()}
    ready = sorted(key for key, count in waiting.items() if not count)
    order: list[Key] = []
    while ready:
        order.append(heapq.heappop(ready))
        for key in readers[order[-1]]:
            waiting[key] -= 1
            if not waiting[key]:
                heapq.heappush(ready, key)
    return order


def depth_first_order(roots: Iterable[Key], sources: Callable[[Key], Iterable[Key]]) -> list[Key]:
    """Return the roots and all that they need, each after its sources, in the order of the roots.

    Args:
      roots: keys to begin with.
      sources: gives those of a key; the last is looked at first.

    Raises:
      CaptureError: a key needs itself.
    """
    done: dict[Key, None] = {}
    open_keys: set[Key] = set()  # those on the stack whose sources are being looked at
    for root in roots:
        stack = [root]
        while stack:
            key = stack[-1]
            missing = [source for source in sources(key) if source not in done]
            if not open_keys.isdisjoint(missing) or key in missing:
                raise CaptureError(f"capture: {key!r} is on a cycle, which no order has")
            if missing:
                open_keys.add(key)
                stack += missing
            else:
                open_keys.discard(key)
                done.setdefault(stack.pop())
    return list(done)


def check_graph(graph: Graph) -> None:
    """Raise `CaptureError` unless edges point backwards, slots exist and names are unique.

    Args:
      graph: the graph to check; not changed.

    Raises:
      CaptureError: the graph is not well formed; the message names the op or the fetch.
    """
    seen: set[str] = set()
    for index, op in enumerate(graph.ops):
        if op.name in seen:
            raise CaptureError(f"capture: two ops are named {op.name!r} in {graph.name!r}")
        seen.add(op.name)
        if op.region not in REGIONS:
            raise CaptureError(f"capture: op {op.name!r} has unknown region {op.region!r}")
        for source, slot in op.inputs:
            if not 0 <= source < index:
                raise CaptureError(
                    f"capture: op {op.name!r} reads op {source}, which does not come before it; "
                    "the graph is not topologically ordered or has a cycle"
                )
            if not 0 <= slot < len(graph.ops[source].outputs):
                raise CaptureError(
                    f"capture: op {op.name!r} reads output {slot} of {graph.ops[source].name!r}, "
                    f"which has {len(graph.ops[source].outputs)}"
                )
        for source in op.controls:
            if not 0 <= source < index:
                raise CaptureError(f"capture: op {op.name!r} waits for an op that comes after it")
    for source, slot in graph.fetches:
        if not (0 <= source < len(graph.ops) and 0 <= slot < len(graph.ops[source].outputs)):
            raise CaptureError(
                f"capture: fetch ({source}, {slot}) of {graph.name!r} does not exist")
