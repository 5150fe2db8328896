"""Feng and Huang 2018, table 2, and Feng and Huang 2021, supplement, table 1.

For each network: vertices, seconds of the solver, and the theoretical cut-off, that is, by how
much equation (1) of the best checkpoints lies under the bytes of all vertices.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from benchmarks.paper_tables import nas_graphs, reforwarding_graphs
from tfckpt.solvers import acg, chen, lcg
from tfckpt.solvers.forward.forward_graph import ForwardGraph
from tfckpt.solvers.forward.reforwarding import Checkpoints

REPEATS = 3
"""The minimum time of so many runs is printed: the machine may be shared."""


class Row(NamedTuple):
    """A network and what the papers print for it.

    Attributes:
      vertices: of the paper's graph.
      seconds: solver time in 2018, None if the network is not in that table.
      seconds_later: solver time in 2021 ("preprocess time").
      cut_off: theoretical cut-off of 2018 in per cent, None if not given.
    """

    name: str
    build: Callable[[], ForwardGraph]
    vertices: int
    seconds: float | None
    seconds_later: float | None
    cut_off: int | None
    solver: Callable[[ForwardGraph], Checkpoints] = acg.solve


def _vgg(depth, *figures):
    return Row(f"VGG{depth}", partial(reforwarding_graphs.vgg, depth), *figures, lcg.solve)


def _resnet(depth, *figures):
    return Row(f"ResNet{depth}", partial(reforwarding_graphs.resnet, depth), *figures)


def _densenet(depth, *figures):
    return Row(f"DenseNet{depth}", partial(reforwarding_graphs.densenet, depth), *figures)


ROWS = (
    Row("AlexNet", reforwarding_graphs.alexnet, 12, 0.03, 0.097, 42, lcg.solve),
    _vgg(11, 17, 0.09, 0.198, 50),
    _vgg(13, 19, 0.15, 0.274, 47),
    _vgg(16, 22, 0.26, 0.416, 51),
    _vgg(19, 25, 0.44, 0.531, 53),
    _resnet(18, 51, 0.09, 0.200, 63),
    _resnet(34, 91, 0.53, 0.502, 73),
    _resnet(50, 125, 1.27, 0.910, 75),
    _resnet(101, 244, 12.40, 2.690, 81),
    _resnet(152, 363, 59.34, 6.576, 84),
    _densenet(121, 306, 293.75, 35.024, 81),
    _densenet(161, 406, 1537.82, 79.754, 84),
    _densenet(169, 426, 2356.47, 87.111, 84),
    _densenet(201, 506, 7335.35, 160.808, 86),
    Row("Inception-v3", reforwarding_graphs.inception_v3, 219, 7.68, 4.344, 76),
    Row("two streams", reforwarding_graphs.two_streams, 35, None, None, None),
    Row("NASNet", nas_graphs.nasnet, 1149, None, 39.098, None),
    Row("AmoebaNet", nas_graphs.amoebanet, 1015, None, 30.250, None),
    Row("DARTS", nas_graphs.darts, 1073, None, 28.483, None),
)

EXACT = ("lcg is optimal, so no checkpoints of this graph reach the paper's figure: its tensor "
         "sizes must differ a little from ours, but the drawings that gave them are lost")
SEARCHED = "cells as published, built by us: near the paper's number of vertices, not equal to it"

REASONS = {
    "VGG13": EXACT,
    "VGG16": EXACT,
    "two streams": ("our own graph; of the paper's CustomNet (35 vertices, 0.05 s, 68 %) only the "
                    "name is left"),
    "NASNet": SEARCHED,
    "AmoebaNet": SEARCHED,
    "DARTS": SEARCHED,
}


def solved(row: Row) -> tuple[ForwardGraph, Checkpoints, float]:
    """Return the graph, its checkpoints, and the seconds that the solver took, division tree
    included.
    """
    graph, seconds = row.build(), []
    for _ in range(REPEATS):
        began = time.perf_counter()
        found = row.solver(graph)
        seconds.append(time.perf_counter() - began)
    return graph, found, min(seconds)


def cut_off(graph: ForwardGraph, found: Checkpoints) -> float:
    """Per cent of the regular cost that checkpoints save."""
    return 100 * (1 - found.cost / sum(graph.bytes))


def print_tables() -> None:
    print("Re-forwarding: Feng and Huang 2018, table 2 (vertices, seconds, theoretical cut-off);")
    print("2021, supplement, table 1 (seconds later). 'manual': Chen on splitting vertices.")
    print()
    print(f"{'':13} {'vertices':>8} {'paper':>5} {'solver':>6} {'seconds':>8} {'paper':>8} "
          f"{'later':>8} {'cut-off %':>9} {'paper':>5} {'less':>5} {'manual':>6}  note")
    notes: dict[str, int] = {}
    for row in ROWS:
        graph, found, seconds = solved(row)
        percent = cut_off(graph, found)
        note = REASONS.get(row.name)
        mark = f"({notes.setdefault(note, len(notes) + 1)})" if note else ""
        less = f"{row.cut_off - percent:.1f}" if row.cut_off is not None else "-"
        print(f"{row.name:13} {len(graph):8} {row.vertices:5} "
              f"{row.solver.__module__.rpartition('.')[2]:>6} {seconds:8.3f} "
              f"{_or_dash(row.seconds):>8} {_or_dash(row.seconds_later):>8} {percent:9.1f} "
              f"{_or_dash(row.cut_off):>5} {less:>5} "
              f"{cut_off(graph, chen.manual(graph)):6.1f}  {mark}".rstrip())
    print()
    print("The paper's cut-offs are rounded to whole points; up to 0.5 either way is that.")
    for note, number in notes.items():
        print(f"({number}) {note}.")


def _or_dash(figure: float | None) -> str:
    return "-" if figure is None else str(figure)
