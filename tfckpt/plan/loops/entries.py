"""Which entries of a loop's lists its gradient computes again, in the body of one iteration.

Each iteration of a loop appends to its lists what the gradient's body reads of it. What follows by
cheap operations from other entries, and from what every iteration is given alike, need not be
there: the gradient's body computes it again, one iteration at a time. So a loop keeps less for
little time where its body is large and its iterations are few, as where layers are stacked by a
loop; and what every iteration takes of the same (a layer's weights, of all layers') is not kept
once more.

Which lists stay is a minimum cut of the forward's body between what cannot be had again and the
entries: an entry that is kept costs its bytes in all iterations, an operation that runs again its
time, at a price in bytes for a second (Chen et al., "Training Deep Nets with Sublinear Memory
Cost", section 3, drops the results of cheap operations; that a cut finds the best such set is known
of partitioners of joint graphs). Plans of the whole step are then made, and compared, as of any
other graph (`tfckpt.plan.loops.again`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable

import networkx as nx

from tfckpt.cost.storage import origin
from tfckpt.cost.time import seconds
from tfckpt.errors import PlanError
from tfckpt.ir.graph import Graph, Op, TensorId, depth_first_order
from tfckpt.ir.target import Rates
from tfckpt.ops import record
from tfckpt.ops.names import PLACEHOLDER
from tfckpt.plan.loops.segments import segmentable

PRICES = tuple(10.0 ** n for n in range(12, 5, -1))
"""Bytes that a second is worth, from a high price to a low one."""
LEAST = 0.05
"""Of the bytes of its lists, what a loop has to keep less to be looked at."""
CHEAP = 0.1
"""Of the time of a loop's iterations, what may run again for its lists to be kept in part first."""
LARGEST = 2_000
"""Ops of a body that is looked at, at most."""


@dataclasses.dataclass(frozen=True)
class Entries:
    """Lists that a loop does not fill, and what that saves.

    Attributes:
      slots: of the forward's loop, ascending.
      bytes: that all iterations keep less.
      seconds: that one iteration of the gradient takes more.
    """

    slots: tuple[int, ...]
    bytes: int
    seconds: float


class Bodies:
    """The bodies of a loop of the forward and of its gradient's, and what is handed over.

    Attributes:
      entry: what an iteration appends to a list, by slot of the forward's loop.
      push, pop: the ops that append and take it, by the same slot.
      given: the slot of what every iteration is given alike, by the op that stands for it in the
        forward's body.
      states: the ops there that stand for what differs from iteration to iteration.
    """

    def __init__(self, graph: Graph, forward: Op) -> None:
        assert forward.loop is not None and forward.loop.segments is not None
        self.forward, self.segments = forward, forward.loop.segments
        self.gradient = next(op for op in graph.ops if op.name == self.segments.gradient)
        if self.gradient.loop is None or not self.gradient.loop.arguments:
            raise self._refusal(self.segments.lists[0])
        self.first, self.second = forward.loop.body, self.gradient.loop.body
        arguments = forward.loop.arguments
        changing = {*self.segments.states, *self.segments.lists, *self.segments.written}
        self.given = {arguments[slot]: slot for slot in range(len(arguments))
                      if slot not in changing}
        self.states = tuple(arguments[slot] for slot in sorted(changing) if slot < len(arguments))
        self.push: dict[int, int] = {}
        self.entry: dict[int, TensorId] = {}
        for slot in self.segments.lists:
            self.push[slot] = origin(self.first, self.first.fetches[slot])[0]
            op = self.first.ops[self.push[slot]]
            place = record(op.type).lists.entry
            if place is None:
                raise self._refusal(slot)
            self.entry[slot] = origin(self.first, op.inputs[place])
        takers = {origin(self.second, op.inputs[0])[0]: i for i, op in enumerate(self.second.ops)
                  if record(op.type).lists.removes}
        self.pop = {slot: takers[self.gradient.loop.arguments[residual]] for slot, residual in zip(
            self.segments.lists, self.segments.residuals, strict=True)}

    def needed(self, slots: Collection[int]) -> tuple[list[int], list[int]]:
        """Return the ops that compute entries again, in order, and what they are given, by slot.

        Args:
          slots: of the lists that are not filled.

        Raises:
          PlanError: what they need is not there.
        """
        kept = {tensor for slot, tensor in self.entry.items() if slot not in slots}
        given: set[int] = set()

        def makers(tensors: Iterable[TensorId]) -> list[int]:
            """Return the ops that make tensors, but for what is kept and what is given."""
            found = []
            for i, _ in (at for tensor in tensors
                         if (at := origin(self.first, tensor)) not in kept):
                if i in self.given:
                    given.add(self.given[i])
                elif i in self.states:
                    raise self._refusal(min(slots))
                else:
                    found.append(i)
            return found

        order = depth_first_order(makers(self.entry[slot] for slot in sorted(slots)),
                                  lambda i: makers(self.first.ops[i].inputs))
        return order, sorted(given)

    def _refusal(self, slot: int) -> PlanError:
        return PlanError(f"plan: list {slot} of the loop {self.forward.name!r} cannot be computed "
                         "again")


def choices_of_entries(graph: Graph, rates: Rates) -> list[dict[str, tuple[int, ...]]]:
    """Return which lists loops may compute again, those that cost little time first.

    Args:
      graph: the step.
      rates: of what runs it.

    Returns:
      Slots by the name of the forward's loop: none, one or two such choices for all loops.
    """
    cheap, most = dict[str, tuple[int, ...]](), dict[str, tuple[int, ...]]()
    for op in segmentable(graph):
        found = _choices(graph, op, rates)
        if found:
            assert op.loop is not None
            once = sum(_seconds(op.loop.body, rates))
            little = [one for one in found if one.seconds <= CHEAP * once]
            cheap |= {op.name: max(little, key=lambda one: one.bytes).slots} if little else {}
            most[op.name] = max(found, key=lambda one: one.bytes).slots
    return [entry for n, entry in enumerate((cheap, most))
            if entry and entry not in (cheap, most)[:n]]


def _choices(graph: Graph, op: Op, rates: Rates) -> list[Entries]:
    """Return what a loop may compute again, by price; nothing where that saves little."""
    if op.loop is None or not op.loop.arguments or len(op.loop.body.ops) > LARGEST:
        return []
    try:
        bodies = Bodies(graph, op)
    except (PlanError, KeyError):
        return []  # lists that are filled or read in another way than is known
    flows, found = _Flows(bodies, rates), list[Entries]()
    for price in PRICES:
        slots = flows.dropped(price)
        saved = flows.saved(slots)
        if slots and saved >= LEAST * flows.saved(bodies.segments.lists):
            again, _ = bodies.needed(slots)
            found.append(Entries(slots, saved, sum(flows.seconds[i] for i in again)))
    return list(dict.fromkeys(found))


def _seconds(body: Graph, rates: Rates) -> list[float]:
    return [0.0 if record(op.type).does_nothing or record(op.type).is_constant
            or op.type == PLACEHOLDER else seconds(body, op, rates) for op in body.ops]


class _Flows:
    """The forward's body as a network whose minimum cuts say which entries are kept.

    An op after the cut runs again: it costs its time, and so do those that it reads, up to entries.
    One before the cut does not, and its entries are kept. Lists with the same entries cost once.
    """

    def __init__(self, bodies: Bodies, rates: Rates) -> None:
        self.bodies, self.seconds = bodies, _seconds(bodies.first, rates)
        loop = bodies.forward.loop
        assert loop is not None
        self.trips = loop.trips
        self.group = {slot: loop.shares.get(slot, slot) for slot in bodies.segments.lists}
        self.bytes = {root: bodies.forward.outputs[root].bytes or 0
                      for root in self.group.values()}
        self.movable: list[int] = []
        self.network = self._network()

    def saved(self, slots: Collection[int]) -> int:
        """Return the bytes that are not kept where some lists are not filled."""
        left = {root for slot, root in self.group.items() if slot not in slots}
        return sum(size for root, size in self.bytes.items() if root not in left)

    def dropped(self, price: float) -> tuple[int, ...]:
        """Return the slots of the lists that are not filled, where a second is worth some bytes."""
        for i in self.movable:
            self.network["before"][i]["capacity"] = price * self.trips * self.seconds[i]
        _, (before, _) = nx.minimum_cut(self.network, "before", "after")
        return tuple(slot for slot, (i, _) in sorted(self.bodies.entry.items())
                     if i not in before)

    def _network(self) -> nx.DiGraph:
        """Return the network, where what runs again costs nothing yet; notes what may."""
        bodies, network = self.bodies, nx.DiGraph()
        entries = frozenset(bodies.entry.values())
        for i, op in enumerate(bodies.first.ops):
            known = record(op.type)
            # a sum of several begins with a term that nothing else needs: another one, elsewhere
            if (op.bodies or known.calls or known.lists.entry is not None or i in bodies.states
                    or any(made.dtype == "variant" for made in op.outputs)
                    or known.adds and len(op.inputs) > 2):
                network.add_edge("before", i)
            elif i not in bodies.given:
                network.add_edge("before", i, capacity=0.0)
                self.movable.append(i)
            for tensor in op.inputs:
                at = origin(bodies.first, tensor)
                if at not in entries and at[0] not in bodies.given:
                    network.add_edge(at[0], i)
        for slot, (i, _) in bodies.entry.items():
            root = "list", self.group[slot]
            if i not in bodies.given:
                network.add_edge(i, root)
            network.add_edge(root, "after", capacity=self.bytes[self.group[slot]] + 1)
        return network
