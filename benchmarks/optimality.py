"""How far `auto` is from the proven optimum, on forty steps of eight families.

    python -m benchmarks.optimality [--families=unet,chain]       compare, with the optima kept
    python -m benchmarks.optimality --prove [--limit=15]     prove them anew (an hour)

The graphs are those of `tests.support.families`, 54 to 116 vertices. The optimum is that of the
integer programme of `tfckpt.solvers.exact.optimal`, of which `auto` uses nothing and which
`tests/pure/test_optimal.py` compares with a search of every schedule. What is proven, then: of all
schedules that run the originals once each in the planned order, and just before every original any
set of recomputable vertices once each, in their order and with as many copies in all as they like,
none has a smaller peak, or takes less time within the bytes given. Peaks are requested bytes in the
planned order with everything that the simulator counts (workspaces, buffers taken over), before
an allocator or executor is asked. `auto` has the moves of XLA on a CPU here, none of which changes
the planned order, so both search the same class; its plans are all that its search finds.

Where a proof ran out of time the gap is to the bound, at most as large as printed, and marked "<=";
below the table such gaps are told by themselves, with those to the fastest schedule known.
The optima are kept in `benchmarks/optima.json`, each with a digest of its graph.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import pathlib
import statistics
import time
from typing import Any

from absl import app, flags

from tests.support.families import FAMILIES, graphs
from tfckpt.ir.costgraph import CostGraph
from tfckpt.ir.schedule import Schedule, copies_before
from tfckpt.ir.target import Target
from tfckpt.plan import search
from tfckpt.plan.candidates import CHEAP
from tfckpt.plan.choosing.planned import baseline
from tfckpt.plan.evaluate import Evaluator, Priced
from tfckpt.plan.rescheduling.fitting import copies_of
from tfckpt.plan.rescheduling.neighbourhood import Neighbourhood
from tfckpt.simulate.order import base_order, moves_of_xla
from tfckpt.simulate.simulate import simulate
from tfckpt.solvers.exact.cp_model import StageModel

FLAGS = flags.FLAGS
flags.DEFINE_list("families", list(FAMILIES), "Names in tests.support.families.FAMILIES.")
flags.DEFINE_bool("prove", False, "Prove the optima that are not kept yet.")
flags.DEFINE_float("limit", 15.0, "Seconds of CP-SAT's deterministic clock for each proof.")

KEPT = pathlib.Path(__file__).with_name("optima.json")
ROOMS = (0.1, 0.25, 0.5)
"""Budgets of the time, between the minimum peak and the plain one."""


def digest(graph: CostGraph) -> str:
    """Return a hash of a graph's vertices and storages; fields with their default do not count."""
    said = [[(field.name, value) for field in dataclasses.fields(entry)
             if (value := getattr(entry, field.name)) != field.default]
            for entry in (*graph.vertices, *graph.storages)]
    return hashlib.sha256(repr(said).encode()).hexdigest()[:16]


def planned_order(graph: CostGraph) -> tuple[int, ...]:
    """Return the originals in the order in which `auto` plans them for XLA on a CPU."""
    return base_order(graph, moves_of_xla(graph))


class _Programme:
    """One graph in its planned order, as programmes of `tfckpt.solvers.exact.cp_model`."""

    def __init__(self, graph: CostGraph, limit: float):
        from ortools.sat.python import cp_model
        self.cp, self.graph, self.limit = cp_model, graph, limit
        self.order = planned_order(graph)
        self.plain = simulate(graph, tuple((v, 0) for v in self.order))

    def smallest(self, known: Schedule) -> tuple[Schedule, float]:
        """Return a schedule of the smallest peak, and the bound on it; `known` is one to beat."""
        stages = StageModel(self.cp, self.graph, self.order, None)
        peak = stages.model.new_int_var(
            0, simulate(self.graph, known).peak_bytes // stages.unit, "peak")
        stages.limit(peak)
        stages.model.minimize(peak)
        best, bound = self._solve(stages, known)
        return best, round(bound) * stages.unit

    def fastest(self, budget: int, known: Schedule) -> tuple[Schedule, float]:
        """Return the fastest schedule within a budget, and the bound on its time."""
        stages = StageModel(self.cp, self.graph, self.order, None)
        stages.limit(budget // stages.unit)
        extra = sum(int(self.graph.vertices[v].time) * run
                    for row in stages.runs for v, run in row.items())
        stages.model.add(extra <= int(simulate(self.graph, known).time - self.plain.time))
        stages.model.minimize(extra)
        best, bound = self._solve(stages, known)
        return best, self.plain.time + bound

    def _solve(self, stages: StageModel, known: Schedule) -> tuple[Schedule, float]:
        for row, made in zip(stages.runs, copies_before(known), strict=True):
            for v, run in row.items():
                stages.model.add_hint(run, v in made)
        solver = self.cp.CpSolver()
        solver.parameters.num_workers = 1
        solver.parameters.random_seed = 1
        solver.parameters.linearization_level = 2
        solver.parameters.max_deterministic_time = self.limit
        status = solver.solve(stages.model)
        if status not in (self.cp.OPTIMAL, self.cp.FEASIBLE):
            return known, 0.0
        return stages.schedule(solver.boolean_value), solver.best_objective_bound


def prove(graph: CostGraph, limit: float) -> dict[str, Any]:
    """Return the minimum peak and the minimum times, each with its bound.

    The schedules to improve on come from `tfckpt.plan.rescheduling.neighbourhood`: they shorten the
    proof, which does not rely on them.
    """
    programme = _Programme(graph, limit)
    plain = programme.plain.peak_bytes
    search = Neighbourhood(graph, tuple((v, 0) for v in programme.order))
    search.keep()
    search.lower(10_000)
    low, bound = programme.smallest(search.state.schedule())
    peak = simulate(graph, low).peak_bytes
    budgets = [peak + int(share * (plain - peak)) for share in ROOMS]
    search.goto(copies_of(low))
    search.keep()
    search.sweep([peak, *budgets], 10_000)
    times = []
    for budget in budgets:
        best, proven = programme.fastest(budget, search.fastest(budget))
        times.append({"budget": budget, "time": simulate(graph, best).time, "bound": proven})
    return {"digest": digest(graph), "plain": plain, "peak": peak, "bound": int(bound),
            "times": times}


def prove_all(chosen: dict[str, CostGraph], limit: float) -> None:
    """Prove the graphs whose results are not stored yet, and store each when it is done."""
    kept = json.loads(KEPT.read_text()) if KEPT.exists() else {}
    for name, graph in sorted(chosen.items(), key=lambda entry: entry[0][-1]):
        if kept.get(name, {}).get("digest") != digest(graph):
            began = time.process_time()
            kept[name] = prove(graph, limit)
            print(name, kept[name], f"{time.process_time() - began:.0f} s", flush=True)
            KEPT.write_text(json.dumps(dict(sorted(kept.items())), indent=1) + "\n")


def shown(gap: float, proven: bool) -> str:
    """Return a gap in percent."""
    return ("" if proven else "<= ") + f"{100 * gap:.2f} %"


def searched(graph: CostGraph) -> tuple[Priced, ...]:
    """Return all plans that `auto` finds where the step runs in the planned order."""
    target, evaluator = Target().compiled(), Evaluator(graph)
    plain = baseline(graph, target).timeline.peak_bytes
    patterns = search.templates(evaluator, True, target)
    return search.explore(evaluator, patterns, CHEAP, plain).priced


def compare(chosen: dict[str, CostGraph]) -> None:
    """Print the table, a mean and a worst gap, and the processor time of planning."""
    kept = json.loads(KEPT.read_text())
    peaks: list[float] = []
    times: list[tuple[float, float, bool]] = []  # above the bound, the best known; if it is proven
    seconds = 0.0
    print("| graph | vertices | minimum peak / plain | peak | "
          + " | ".join(f"time at {room:g}" for room in ROOMS) + " | planning s |")
    print("| --- " * (5 + len(ROOMS)) + "|")
    for name, graph in chosen.items():
        best = kept.get(name)
        if best is None or best["digest"] != digest(graph):
            print(f"| {name} | {len(graph.vertices)} | not proven yet |")
            continue
        began = time.process_time()
        front = searched(graph)
        spent = time.process_time() - began
        seconds += spent
        peak = min(p.peak for p in front)
        peaks.append(peak / best["bound"] - 1)
        cells = [shown(peaks[-1], best["bound"] == best["peak"])]
        for entry in best["times"]:
            taken = min((p.time for p in front if p.peak <= entry["budget"]),
                        default=float("inf"))
            proven = entry["time"] <= entry["bound"] * (1 + 1e-9)
            times.append((taken / entry["bound"] - 1, taken / entry["time"] - 1, proven))
            cells.append(shown(times[-1][0], proven))
        print(f"| {name} | {len(graph.vertices)} | {best['peak'] / best['plain']:.3f} | "
              f"{' | '.join(cells)} | {spent:.2f} |", flush=True)
    print()
    for what, gaps in (
            ("minimum peak, above the proven optimum", peaks),
            ("time at the same peak, above the proven optimum", [
                bound for bound, _, proven in times if proven]),
            ("... above the fastest schedule known, proven or not", [best for _, best, _ in times]),
            ("... above the bound, proven or not", [bound for bound, *_ in times])):
        print(f"{what}: mean {100 * statistics.fmean(gaps):.2f} %, worst {100 * max(gaps):.2f} %"
              f" of {len(gaps)}")
    print(f"\nplanning: {seconds:.1f} s of the processor")


def main(argv: list[str]) -> None:
    """Prove or compare."""
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {argv[1:]}")
    chosen = graphs({family: FAMILIES[family] for family in FLAGS.families})
    if FLAGS.prove:
        prove_all(chosen, FLAGS.limit)
    else:
        compare(chosen)


if __name__ == "__main__":
    app.run(main)
