"""Loops that are recomputed segment by segment whether that saves anything or not."""

from __future__ import annotations

import pytest

from tfckpt.driving import proposals
from tfckpt.driving.parts import Proposal
from tfckpt.plan.loops import choice
from tfckpt.plan.loops.segments import segmentable

SEGMENT = 4
"""Iterations of a segment."""


@pytest.fixture
def forced(monkeypatch):
    """All loops that can be are recomputed in segments, whether that saves anything or not."""
    def decisions(graph, cost, plans, *, target, **options):
        lengths = {op.name: SEGMENT for op in segmentable(graph)}
        return choice._decisions(graph, cost, lengths, plans, target)

    monkeypatch.setattr(proposals, "with_loops_in_segments", decisions)
    monkeypatch.setattr(proposals.Search, "_proposal",
                        lambda self, part, decision: Proposal(part, decision))
    return decisions
