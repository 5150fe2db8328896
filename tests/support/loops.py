"""Loops that are recomputed segment by segment whether that saves anything or not."""

from __future__ import annotations

import pytest

from tfckpt.driving import proposals
from tfckpt.driving.parts import Proposal
from tfckpt.plan.loops import choice
from tfckpt.plan.loops.segments import Cut, may_keep_last, segmentable

SEGMENT = 4
"""Iterations of a segment."""


@pytest.fixture(params=[0, 2], ids=["all", "but two"])
def forced(monkeypatch, request):
    """All loops that can be are recomputed in segments, whether that saves anything or not."""
    def decisions(graph, cost, plans, *, target, **options):
        cuts = {op.name: Cut(SEGMENT, request.param if may_keep_last(op) else 0)
                for op in segmentable(graph)}
        return choice._decisions(graph, cost, cuts, plans=plans, target=target)

    monkeypatch.setattr(proposals, "with_loops_in_segments", decisions)
    monkeypatch.setattr(proposals.Search, "_proposal",
                        lambda self, part, decision: Proposal(part, decision))
    return decisions
