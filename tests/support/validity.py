"""A check that a schedule can be executed, derived again from the graph alone.

Shares no code with `tfckpt.ir.schedule.check_schedule`.
"""

from __future__ import annotations

from collections import Counter


def assert_executable(graph, schedule) -> None:
    """Every read was made before, every wait is over, and only what is pure runs twice."""
    ran: Counter[int] = Counter()
    made: set[int] = set()
    for vertex, copy in schedule:
        entry = graph.vertices[vertex]
        assert copy == ran[vertex], f"copy {copy} of {entry.name} after {ran[vertex]} runs"
        assert not copy or entry.recomputable, f"{entry.name} runs twice"
        assert set(entry.reads) <= made, f"{entry.name} reads what is not there"
        assert all(ran[other] for other in entry.after), f"{entry.name} does not wait"
        ran[vertex] += 1
        made.update(entry.writes)
    assert sorted(ran) == list(range(len(graph.vertices))), "some vertex never runs"
