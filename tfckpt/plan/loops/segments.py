"""Loops that can be recomputed segment by segment: how long segments are, and what they take."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from tfckpt.ir.graph import Graph, Op, Segments

SEGMENTED = "segments"
"""Attribute of a new loop until its functions are made: see `Role`."""
MARK = "-tfckpt_segments"
"""Suffix of the names of loops over segments."""
LAST = "-tfckpt_last"
"""Suffix of the names of loops over the last iterations, which are in no segment."""

AGAIN = "-tfckpt_again"
"""Suffix of the names of loops of which the gradient's computes entries again, and of that one."""
PREFIX = "tfckpt_again/"
"""Of the names, in the body of such a gradient's loop, of ops of the forward's body."""
HANDED = "handed/"
"""After that, of what an iteration was handed, and appended to a list."""
RESULT = "-tfckpt_result"
"""In such names, before which of the op's results it is, where that is not the first."""


class Cut(NamedTuple):
    """How a loop is cut, or a sum.

    Attributes:
      length: iterations of a segment; 0 where it is in none.
      last: iterations at the end that are in no segment: their lists are kept, as in the plain
        step, and they run once.
      within: where a segment is itself recomputed in segments, the length of these, and of those
        in them, ever shorter.
      entries: where it is in no segments, the lists that it does not fill: the gradient's body
        computes their entries again.
      together: of a sum, whether its terms are put side by side (`tfckpt.plan.sums`).
    """

    length: int
    last: int = 0
    within: tuple[int, ...] = ()
    entries: tuple[int, ...] = ()
    together: bool = False

    @property
    def lengths(self) -> tuple[int, ...]:
        """Return the iterations of a segment, of one in it, and so on."""
        return (self.length, *self.within)

    @property
    def is_valid(self) -> bool:
        """Return whether each segment is longer than those in it, and these are not empty."""
        return self.last >= 0 and all(long > short for long, short in itertools.pairwise(
            (*self.lengths, 0)))


Cuts = Mapping[str, Cut]
"""How loops and sums are cut, by the name of the forward's loop, or of the sum."""


@dataclasses.dataclass(frozen=True)
class Role:
    """The task of a new loop.

    Attributes:
      forward, gradient: names of the two loops that are replaced.
      length: iterations of a segment.
      count: how many segments there are, at most, in a call of the planned sizes.
      within: as in `Cut`.
      bounded: whether it ends at its bound, be it that the loop which is replaced does not.
      is_gradient: whether it takes the place of the gradient's loop.
      compiled: whether XLA compiles it, which is given no lists that stay empty.
      segments: how the loops belong together.
    """

    forward: str
    gradient: str
    length: int
    count: int
    within: tuple[int, ...]
    bounded: bool
    is_gradient: bool
    compiled: bool
    segments: Segments


@dataclasses.dataclass(frozen=True)
class Again:
    """The task of a new loop that is in no segments.

    Attributes:
      forward, gradient: names of the two loops that are replaced.
      slots: lists of the forward's loop that are not filled.
      given: slots of the forward's loop whose inputs the gradient's is given besides.
      is_gradient: whether it takes the place of the gradient's loop.
      segments: how the loops belong together.
    """

    forward: str
    gradient: str
    slots: tuple[int, ...]
    given: tuple[int, ...]
    is_gradient: bool
    segments: Segments


def new_name(loop: str) -> str:
    """Return the name of the loop over segments that is made of a loop.

    Args:
      loop: name of the op that is replaced, of the forward's loop or the gradient's.
    """
    return loop + MARK


def comes_first(name: str) -> bool:
    """Return whether what a loop is given stands before what its body computes, by name.

    Grappler adds in the order of names, and a body's ops are in the scope "body".

    Args:
      name: of the op, or of its result.
    """
    return name < "body"


def last_name(loop: str) -> str:
    """Return the name of the loop over the last iterations that is made of a loop.

    Args:
      loop: as for `new_name`.
    """
    return loop + LAST


def extras(segments: Segments, count: int) -> tuple[int, ...]:
    """Return the slots of the forward's loop that the gradient's new loop is given.

    Args:
      segments: how the forward's loop and the gradient's belong together.
      count: how many slots it has.
    """
    states = frozenset(segments.states)
    return tuple(n for n in range(count) if n not in states)


def kept_slots(segments: Segments, count: int) -> tuple[int, ...]:
    """Return the slots of the gradient's loop that its new loop has too, in order.

    Args:
      segments: how the forward's loop and the gradient's belong together.
      count: how many slots the gradient's loop has.
    """
    gone = frozenset(segments.residuals)
    return tuple(n for n in range(count) if n not in gone)


def may_keep_last(op: Op) -> bool:
    """Return whether the last iterations of a loop may be in no segment: it says when they begin.

    That is what the bound says, or how often the loop runs in any call at most.

    Args:
      op: a loop of the forward that can be recomputed segment by segment.
    """
    loop = op.loop
    return loop is not None and loop.segments is not None and (
        loop.segments.bounded or loop.bound is not None)


def state_bytes(op: Op) -> int:
    """Return the bytes of a loop's states.

    Args:
      op: a loop of the forward that can be recomputed segment by segment.
    """
    assert op.loop is not None and op.loop.segments is not None
    return sum(op.outputs[slot].bytes or 0 for slot in op.loop.segments.states)


def list_bytes(op: Op) -> int:
    """Return the bytes of the lists that a loop fills.

    Args:
      op: a loop of the forward that can be recomputed segment by segment.
    """
    loop = op.loop
    assert loop is not None and loop.segments is not None
    return sum(op.outputs[slot].bytes or 0 for slot in loop.segments.lists
               if slot not in loop.shares)


def entry_bytes(op: Op) -> float:
    """Return the bytes that an iteration of a loop adds to its lists when a segment runs again.

    Args:
      op: a loop of the forward that can be recomputed segment by segment.
    """
    loop = op.loop
    assert loop is not None and loop.segments is not None
    alike = sum(op.outputs[slot].bytes or 0 for slot in loop.segments.invariant
                if slot not in loop.shares)
    return (list_bytes(op) - alike) / max(loop.trips, 1)


def held_bytes(op: Op, lengths: Sequence[int]) -> float:
    """Return the bytes that are kept while a segment is computed again, and its gradient.

    Of the innermost segment these are the lists, of others the states before each one in them.

    Args:
      op: a loop of the forward that can be recomputed segment by segment.
      lengths: as `Cut.lengths`.
    """
    return _Loop.of(op).held(lengths)


def kept_bytes(op: Op, cut: Cut, share: float = 1.0) -> float:
    """Return the bytes that a loop keeps with all iterations in segments, one of them running.

    Args:
      op: a loop of the forward that can be recomputed segment by segment.
      cut: how it is cut.
      share: factor by which the states before its segments count more: they stay allocated while
        other loops run.
    """
    return _Loop.of(op).kept(cut.lengths, share)


def best_length(op: Op, share: float = 1.0) -> int:
    """Return the length of a loop's segments with which it keeps the fewest bytes.

    Args:
      op: a loop that can be recomputed segment by segment.
      share: as for `kept_bytes`.
    """
    loop = _Loop.of(op)
    return min(range(1, max(loop.trips, 1) + 1), key=lambda k: loop.kept((k,), share))


def best_lengths(op: Op, share: float = 1.0) -> tuple[int, int]:
    """Return lengths of segments, and of segments in these, with which the fewest bytes are kept.

    About the cube root of what a loop takes that is not cut is kept so, for one run of it more.

    Args:
      op: a loop of at least four iterations that can be recomputed segment by segment.
      share: as for `kept_bytes`.
    """
    loop = _Loop.of(op)
    each = max(loop.state, 1) / max(loop.entry, 1)
    shorts = _near((share * loop.trips * each**2) ** (1 / 3), 1, loop.trips // 2)
    return min(((times * short, short) for short in shorts for times in _near(
        math.sqrt(share * loop.trips / short), 2, loop.trips // short)),
        key=lambda lengths: loop.kept(lengths, share))


@dataclasses.dataclass(frozen=True)
class _Loop:
    """Iterations of a loop, the bytes of its states, and those that one adds to its lists."""

    trips: int
    state: int
    entry: float

    @staticmethod
    def of(op: Op) -> _Loop:
        assert op.loop is not None
        return _Loop(op.loop.trips, state_bytes(op), entry_bytes(op))

    def held(self, lengths: Sequence[int]) -> float:
        """Return what `held_bytes` does."""
        states = sum(math.ceil(long / short) for long, short in itertools.pairwise(lengths))
        return states * self.state + lengths[-1] * self.entry

    def kept(self, lengths: Sequence[int], share: float) -> float:
        """Return what `kept_bytes` does."""
        return share * math.ceil(self.trips / lengths[0]) * self.state + self.held(lengths)


def _near(number: float, least: int, most: int) -> range:
    """Return whole numbers from half of a number to twice it."""
    return range(max(least, min(most, int(number / 2))), min(most, int(2 * number) + 1) + 1)


def segmentable(graph: Graph) -> tuple[Op, ...]:
    """Return the loops that can be recomputed segment by segment, in the order of the graph.

    Args:
      graph: the step.

    Returns:
      Loops of the forward, of more than one iteration, whose gradient's loop is in the graph and
      whose lists nothing fetches.
    """
    by_name = {op.name: op for op in graph.ops}
    fetched = {(graph.ops[i].name, slot) for i, slot in graph.fetches}
    found = []
    for op in graph.ops:
        segments = op.loop.segments if op.loop is not None else None
        if segments is None or segments.gradient not in by_name:
            continue
        hidden = {*((op.name, slot) for slot in segments.lists),
                  *((segments.gradient, slot) for slot in (0, *segments.residuals))}
        if hidden.isdisjoint(fetched) and op.loop is not None and op.loop.trips > 1:
            found.append(op)
    return tuple(found)
