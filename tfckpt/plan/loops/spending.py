"""What a budget leaves is spent on lists: as many of the last iterations keep theirs as it allows.

Each iteration in no segment saves as much time as any other of its loop, as it need not run again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from tfckpt.cost.time import seconds
from tfckpt.ir.graph import Graph, Op
from tfckpt.ir.target import Rates
from tfckpt.plan.loops.decided import OTHERS, Decisions
from tfckpt.plan.loops.segments import Cut, Cuts, list_bytes, may_keep_last, segmentable

SPENT = 3
"""How often lists are kept of more iterations, or of fewer."""


def spend(found: Decisions, graph: Graph, budget: int, rates: Rates) -> None:
    """Have as many of the last iterations keep their lists as a budget has room for.

    What fits is planned again with what it leaves, what does not with less. Neither does what fits
    and is no faster, since another loop is computed again for it.

    Args:
      found: what was decided so far; more decisions are added.
      graph: the step.
      budget: dynamic bytes.
      rates: of the target.
    """
    loops = {op.name: op for op in segmentable(graph) if may_keep_last(op)}
    best = found.best(lambda cuts: any(name in loops and cut.length for name, cut in cuts.items()))
    if best is None:
        return
    base, cuts = best.planned, dict(best.segments)
    room = budget - base.peak_bytes
    order = _by_worth([loops[name] for name in cuts if name in loops], graph, rates)
    entry = math.ceil(max(list_bytes(op) / max(op.loop.trips, 1) for op in order if op.loop))
    kept, least, too_much = 0, base.time, math.inf
    tried = cuts
    for _ in range(SPENT):
        before, tried = tried, _keeping(cuts, order, room)
        if room <= kept or tried in (before, cuts):
            return
        decision = found.add(tried, OTHERS)
        if decision is None:
            too_much, room = room, room - max(found.missing(budget), 0) - entry
        elif decision.planned.time >= least:
            too_much, room = room, (kept + room) // 2
        else:
            kept, least = room, decision.planned.time
            room = int(min(room + budget - decision.planned.peak_bytes, too_much - entry))


def _by_worth(loops: Sequence[Op], graph: Graph, rates: Rates) -> list[Op]:
    """Return loops in the order in which room is best spent on their lists.

    First those that take long for what they keep; of others that are about alike the last, whose
    lists are gone first.
    """
    worth = [round(math.log2(seconds(graph, op, rates) / list_bytes(op))) for op in loops]
    return [loops[n] for n in sorted(range(len(loops)), key=lambda n: (-worth[n], -n))]


def _keeping(cuts: Cuts, order: Sequence[Op], room: int) -> dict[str, Cut]:
    """Return cuts with which some bytes more of lists are kept; what is kept whole is in none.

    Args:
      cuts: how loops are cut.
      order: which of them keep more, first those on which it is spent first.
      room: bytes.
    """
    found = dict(cuts)
    for op in order:
        assert op.loop is not None
        cut = cuts[op.name]
        entry = list_bytes(op) / op.loop.trips
        more = min(int(max(room, 0) / entry), op.loop.trips - cut.last)
        room -= int(more * entry)
        found[op.name] = cut._replace(last=cut.last + more)
        if cut.last + more > op.loop.trips - cut.length:
            del found[op.name]
    return found
