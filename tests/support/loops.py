"""Loops that are recomputed segment by segment whether that saves anything or not."""

from __future__ import annotations

import pytest

from tfckpt.driving import proposals
from tfckpt.driving.parts import Proposal
from tfckpt.plan.loops import choice
from tfckpt.plan.loops.segments import Cut, may_keep_last, segmentable

SEGMENT = 4
"""Iterations of a segment."""


@pytest.fixture(params=[
    pytest.param(Cut(SEGMENT), id="all"), pytest.param(Cut(SEGMENT, last=2), id="but two"),
    pytest.param(Cut(SEGMENT, last=1, within=(3,)), id="inside", marks=pytest.mark.nightly)])
def forced(monkeypatch, request):
    """All loops that can be are recomputed in segments, whether that saves anything or not."""
    def decisions(graph, cost, plans, *, target, **options):
        cuts = {op.name: request.param if may_keep_last(op) else request.param._replace(last=0)
                for op in segmentable(graph)}
        return choice._decisions(graph, cost, cuts, plans=plans, target=target)

    monkeypatch.setattr(proposals, "with_loops_in_segments", decisions)
    monkeypatch.setattr(proposals.Search, "_proposal",
                        lambda self, part, decision: Proposal(part, decision))
    return decisions
