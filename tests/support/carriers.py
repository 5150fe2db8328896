"""A carrier for tests: it brings a captured graph in and remembers what comes back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from tfckpt.driver import run
from tfckpt.driving.carrier import Captured, Outcome
from tfckpt.ir.edits import Edits
from tfckpt.ir.graph import Graph
from tfckpt.request.options import Options, make_options


class Given:
    """A graph at hand.

    Attributes:
      applied: the edits that were to be applied, in turn.
    """

    kind: ClassVar[str] = "test"
    leaves_out: ClassVar[Mapping[str, str]] = {}
    optimised: ClassVar[bool] = False

    def __init__(self, graph: Graph, live=None, compiled: bool = False):
        self.graph, self.live, self.compiled = graph, live, compiled
        self.applied: list[Edits] = []

    def capture(self, options: Options) -> Captured:
        """Return the graph as a step."""
        return Captured(self.graph.name, self.graph, self.live, self.compiled)

    def apply(self, edits: Edits) -> None:
        """Remember the edits."""
        self.applied.append(edits)


def planned(graph: Graph, **options) -> Outcome:
    """Run the driver on a graph."""
    return run(Given(graph), make_options(**options))
