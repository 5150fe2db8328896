"""Recursive checkpoints: how much they improve the plans of `auto`, and the time to find them.

    python -m benchmarks.recursive
    python -m benchmarks.recursive --chains=100,1000 --networks=mlp,resnet50

First, unit chains (each value one byte, each forward and backward one second):
the peak of the smallest plan with and without recursive proposals, how often a vertex of it runs at
most, and its time as a multiple of the plain step's. Then networks of `benchmarks.measured`, traced
and priced but not run: the minimum simulated peak in the planned order, as a fraction of the plain
step's, of the plans that take at most 10, 20, 33 ... percent more time. All plans are those of one
search; recursive ones come last and do not influence the others. Seconds are processor time.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Sequence

from absl import app, flags

from benchmarks.paper_tables.joint_graphs import with_backward
from benchmarks.rows import head, line
from tfckpt.ir.costgraph import CostGraph
from tfckpt.ir.target import GPU, Target
from tfckpt.plan import search
from tfckpt.plan.candidates import CHEAP
from tfckpt.plan.choosing.planned import Plain, baseline
from tfckpt.plan.evaluate import Evaluator, Priced, non_dominated

FLAGS = flags.FLAGS
flags.DEFINE_list("chains", ["16", "32", "48", "64", "100", "200", "1000"], "Lengths.")
flags.DEFINE_list("networks", [], "Names in benchmarks.measured.NETWORKS; default all; 'none'.")

EXTRA = (0.1, 0.2, 0.33, 0.5, 1.0)


@dataclasses.dataclass(frozen=True)
class Searched:
    """The pools of a search without and with recursive proposals, and seconds for each part."""

    plain: Plain
    before: Sequence[Priced]
    after: Sequence[Priced]
    seconds: tuple[float, float]

    def smallest(self, pool: Sequence[Priced], extra: float) -> float:
        """Return the minimum peak within so much more time, as a fraction of the plain one."""
        limit = (1 + extra) * self.plain.timeline.time
        peak = min((p.peak for p in pool if p.time <= limit), default=math.nan)
        return peak / self.plain.timeline.peak_bytes


def searched(graph: CostGraph, target: Target) -> Searched:
    """Return what `auto` finds for a graph."""
    plain = baseline(graph, target)
    peak = plain.timeline.peak_bytes
    evaluator = Evaluator(graph)
    patterns = search.templates(evaluator, True, target)
    began = time.process_time()
    recurse, search.recurse = search.recurse, lambda *_: ()
    try:
        before = search.explore(evaluator, patterns, CHEAP, peak).priced
    finally:
        search.recurse = recurse
    between = time.process_time()
    search.recurse(evaluator, patterns, peak, 1.0)
    return Searched(plain, before, list(evaluator.priced),
                    (between - began, time.process_time() - between))


def chains() -> None:
    """Print the table of unit chains."""
    print(head(("length", "without", "with", "runs", "time", "search s", "recursive s")))
    for count in map(int, FLAGS.chains):
        graph = with_backward((None, [1] * count, [1] * count,
                               [(v, v + 1) for v in range(count - 1)]))
        found = searched(graph, Target(device=GPU).compiled())
        before, after = (min(pool, key=lambda p: (p.peak, p.time))
                         for pool in (found.before, found.after))
        print(line([str(count), str(before.peak), str(after.peak),
                    str(1 + max(copy for _, copy in after.schedule)),
                    f"{after.time / found.plain.timeline.time:.2f}",
                    *(f"{s:.1f}" for s in found.seconds)]), flush=True)


def graph_of(name: str) -> CostGraph:
    """Return the cost graph of a network's traced step."""
    import tensorflow as tf

    from benchmarks.measured import NETWORKS
    from tfckpt.capture.tfgraph import capture
    from tfckpt.cost.build import build_cost_graph

    body, args = NETWORKS[name]()
    return build_cost_graph(capture(tf.function(body).get_concrete_function(*args).graph))


def networks(names: Sequence[str]) -> None:
    """Print the table of networks, and geometric means of peaks with over without recursion."""
    columns = [f"+{extra:.0%}" for extra in EXTRA]
    print(head(("network", "vertices", *columns, "search s", "recursive s", "runs")))
    ratios = []
    for name in names:
        graph = graph_of(name)
        found = searched(graph, Target(device=GPU))
        before, after = ([found.smallest(pool, extra) for extra in EXTRA]
                         for pool in (found.before, found.after))
        ratios.append([b / a for a, b in zip(before, after, strict=True)])
        runs = 1 + max(copy for p in non_dominated(found.after) for _, copy in p.schedule)
        print(line([name, str(len(graph.vertices)),
                    *(f"{a:.3f} -> {b:.3f}" for a, b in zip(before, after, strict=True)),
                    *(f"{s:.1f}" for s in found.seconds), str(runs)]), flush=True)
    means = [math.exp(sum(map(math.log, column)) / len(ratios))
             for column in zip(*ratios, strict=True)]
    print(line(["geometric mean", "", *(f"{mean:.3f}" for mean in means), "", "", ""]))


def main(argv: list[str]) -> None:
    """Print both tables."""
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {argv[1:]}")
    if FLAGS.chains:
        chains()
    if FLAGS.networks != ["none"]:
        from benchmarks.measured import NETWORKS

        networks(FLAGS.networks or list(NETWORKS))


if __name__ == "__main__":
    app.run(main)
