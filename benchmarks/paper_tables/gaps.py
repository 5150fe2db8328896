"""How far each solver is from the proven optimum, on small training steps.

    python -m benchmarks.paper_tables.gaps [--graphs=chain12,unet3] [--time_limit=60]

Like is compared with like: every plan runs the originals in one order, its peak is what the
simulator counts in requested bytes in the planned order, its time is that of the whole step.
`plan_step` for XLA plans just so (no waits or allocator; `optimal`, too, has the moves that
XLA makes by itself); of the budget that it is given it uses `SAFETY`, which is undone here. The gap
is the time of the step over the optimum's, less one. The optimum is over the class that
`tfckpt.solvers.exact.optimal` names; where its proof ran out of time, the gap is to its bound and
marked with "<=".
"""

from __future__ import annotations

import math
import time

from absl import app, flags

from benchmarks.paper_tables.gap_graphs import GRAPHS
from tfckpt.errors import InfeasibleBudgetError, PlanError
from tfckpt.ir.costgraph import CostGraph
from tfckpt.ir.schedule import plain_plan
from tfckpt.ir.target import SAFETY, Target
from tfckpt.plan.candidates import SOLVERS
from tfckpt.plan.names import AUTO
from tfckpt.plan.planner import plan_step
from tfckpt.simulate.simulate import simulate
from tfckpt.solvers.exact import optimal

FLAGS = flags.FLAGS
flags.DEFINE_list("graphs", list(GRAPHS), "Names in benchmarks.paper_tables.gap_graphs.GRAPHS.")
flags.DEFINE_float("time_limit", 60.0, "Seconds of CP-SAT's deterministic clock for each proof.")

BUDGETS = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3)


def planned_time(graph: CostGraph, solver: str, room: int) -> float | None:
    """Time of a solver's plan whose simulated peak is at most `room` bytes.

    None if it has none, or refuses the graph (`lcg` takes chains only).
    """
    budget = math.ceil(room / SAFETY)
    while int(budget * SAFETY) < room:
        budget += 1
    try:
        planned = plan_step(graph, budget, solver=solver, target=Target().compiled())
    except PlanError:
        return None
    assert planned.timeline.peak_bytes <= int(budget * SAFETY)
    return planned.time


def print_tables(names: list[str] | None = None, time_limit: float = 60.0) -> None:
    """Print one table for each graph, then the worst gap of each solver."""
    solvers = [AUTO, *SOLVERS]
    gaps: dict[str, list[float]] = {solver: [] for solver in solvers}
    missed = dict.fromkeys(solvers, 0)
    for name in names or list(GRAPHS):
        graph = GRAPHS[name]()
        plain = simulate(graph, plain_plan(graph).schedule).peak_bytes
        print(f"\n{name}: {len(graph.vertices)} vertices, plain peak {plain} bytes\n")
        print(f"| budget | optimum's time | proof s | {' | '.join(solvers)} |")
        print("| --- " * (3 + len(solvers)) + "|")
        for fraction in BUDGETS:
            room = int(fraction * plain)
            began = time.process_time()
            try:
                best = optimal.solve(graph, room, time_limit=time_limit)
            except InfeasibleBudgetError as error:
                print(f"| {fraction} | infeasible: the minimum is "
                      f"{error.smallest_bytes / plain:.3f} |")
                break
            spent = time.process_time() - began
            cells = []
            for solver in solvers:
                found = planned_time(graph, solver, room)
                if found is None:
                    missed[solver] += 1
                    cells.append("no plan")
                    continue
                gap = 100 * (found / best.bound - 1)
                if best.status == optimal.OPTIMAL:
                    gaps[solver].append(gap)
                cells.append(("" if best.status == optimal.OPTIMAL else "<= ") + f"{gap:.2f} %")
            print(f"| {fraction} | {best.time / graph.total_time:.3f} | {spent:.1f} "
                  f"| {' | '.join(cells)} |", flush=True)
    print("\nWhere the optimum is proven:\n")
    print("| solver | mean gap | worst gap | within 3 % | no plan where there is one |")
    print("| --- | --- | --- | --- | --- |")
    for solver, found in gaps.items():
        figures = f"{sum(found) / len(found):.2f} % | {max(found):.2f} %" if found else "- | -"
        print(f"| {solver} | {figures} | {sum(gap <= 3 for gap in found)} of {len(found)} "
              f"| {missed[solver]} |")


def main(argv: list[str]) -> None:
    """Print the tables."""
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {argv[1:]}")
    print_tables(FLAGS.graphs, FLAGS.time_limit)


if __name__ == "__main__":
    app.run(main)
