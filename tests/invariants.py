"""What must hold of the planner on every graph, checked on many random ones.

    python -m tests.invariants [--count=10000] [--seed=0]

Each seed makes a small joint graph: random ones with every feature of the simulator, random nets,
and small members of the families of `tests.support.families`. Checked for each:

1. `auto` is never worse than a single solver, under either objective, within any budget;
2. a proposal more never makes it worse: `auto` without one of its solvers is not better;
3. a larger budget never gives a slower plan (with objective "memory": a larger one);
4. a budget that the plain step meets is met, in no more time than the plain step takes;
5. the minimum that an `InfeasibleBudgetError` names is accepted when passed back, and no solver of
   ours promises less;
6. "min" takes, of the choices, the one that its rule says, and no other plan of theirs or of a
single
   solver is both smaller and faster.

A violation is printed with its seed; `--count=1 --seed=N` runs it again.
"""

from __future__ import annotations

import dataclasses
import random
import time
from collections.abc import Iterator, Sequence
from unittest import mock

from absl import app, flags

from benchmarks.paper_tables.joint_graphs import with_backward
from tests.support import families
from tests.support.graphs import random_joint_graph, random_paper_graph
from tfckpt.errors import InfeasibleBudgetError, PlanError
from tfckpt.ir.costgraph import CostGraph
from tfckpt.ir.target import GPU, Target
from tfckpt.plan import planner
from tfckpt.plan.candidates import CHEAP, OWN, SOLVERS
from tfckpt.plan.choosing.planned import Plain, Planned, baseline
from tfckpt.plan.planner import StepPlanner

FLAGS = flags.FLAGS
flags.DEFINE_integer("count", 10_000, "Graphs.")
flags.DEFINE_integer("seed", 0, "The first graph's seed.")

FRACTIONS = (0.35, 0.5, 0.65, 0.8, 0.95, 1.03, 1.3)
EFFORT = 0.05
SCALE = 10_000
"""Bytes of a unit, so that an allocator's rounding is small."""


def graph_of(seed: int) -> CostGraph:
    """Return a small joint graph."""
    rng = random.Random(seed)
    kind = seed % 5
    if kind == 0:
        graph = random_joint_graph(seed, rng.randint(7, 18), nested=seed % 2 > 0)
    elif kind == 1:
        graph = with_backward((None, *random_paper_graph(seed, rng.randint(3, 10), 0.3)))
    elif kind == 2:
        graph = families.random_net(seed, rng.randint(3, 9))
    else:
        make, size = rng.choice((
            (families.chain, rng.randint(2, 5)), (families.two_views, rng.randint(1, 2)),
            (families.experts, 1), (families.unet, 1), (families.densenet, rng.randint(2, 3)),
            (families.inception, 1), (families.attention, 1), (families.shared, 3),
            (families.siamese, 1), (families.adversarial, 1)))
        graph = make(size, seed)
    return dataclasses.replace(graph, storages=tuple(
        dataclasses.replace(s, bytes=s.bytes * SCALE) for s in graph.storages),
        vertices=tuple(dataclasses.replace(v, workspace=v.workspace * SCALE)
                       for v in graph.vertices))


class Asked:
    """One way to plan a graph, asked for several budgets."""

    def __init__(self, graph: CostGraph, target: Target, solver: str = "auto",
                 objective: str = "time", without: object = None):
        self.name = f"{solver} {objective}" + (f" without {without.__name__}" if without else "")
        left = tuple(solve for solve in CHEAP if solve is not without)
        with mock.patch.object(planner, "CHEAP", left):
            self.planner = StepPlanner(graph, solver, objective, True, True, target,
                                       effort=EFFORT)
            self.least = self.within(1)
            self.min = next(self.planner.plans(None))

    def within(self, budget: int) -> Planned | int:
        """Return the plan, or the minimum that the error names."""
        try:
            return next(self.planner.plans(budget))
        except InfeasibleBudgetError as error:
            return error.smallest_bytes


def singles(graph: CostGraph, target: Target, objective: str) -> Iterator[Asked]:
    """Yield every single solver that takes the graph."""
    for solver in SOLVERS:
        try:
            yield Asked(graph, target, solver, objective)
        except InfeasibleBudgetError:
            raise
        except PlanError:
            assert solver in ("lcg", "exact_dp"), solver


def worse(objective: str, ours: Planned | int, theirs: Planned | int) -> bool:
    """Return whether one answer is worse than another."""
    if isinstance(theirs, int):
        return isinstance(ours, int) and ours > theirs
    if isinstance(ours, int):
        return True
    if objective == "time":
        return ours.time > theirs.time * (1 + 1e-12)
    return ours.peak_bytes > theirs.peak_bytes


def beats(one: tuple[int, float], other: tuple[int, float]) -> bool:
    """Return whether (peak, time) is smaller and no slower, or faster and no larger."""
    return one[0] <= other[0] and one[1] <= other[1] * (1 - 1e-12) or (
        one[0] < other[0] and one[1] <= other[1])


def violations(graph: CostGraph, target: Target) -> Iterator[str]:
    """Yield what does not hold."""
    plain = baseline(graph, target)
    budgets = [int(fraction * plain.peak_bytes) for fraction in FRACTIONS]
    for objective in ("time", "memory"):
        auto = Asked(graph, target, objective=objective)
        answers = [auto.within(budget) for budget in budgets]
        yield from _of_budgets(auto, plain, budgets, answers, objective)
        yield from _of_min(auto, objective)
        fewer = [Asked(graph, target, objective=objective, without=solve)
                 for solve in CHEAP if solve not in OWN] if objective == "time" else []
        for other in (*singles(graph, target, objective), *fewer):
            for budget, ours in zip((1, *budgets), (auto.least, *answers), strict=True):
                theirs = other.within(budget)
                if worse(objective, ours, theirs):
                    yield f"{auto.name} is worse than {other.name} within {budget}"
            mine, its = ((p.peak_bytes, p.time) for p in (auto.min, other.min))
            if beats(its, mine):
                yield f"min of {auto.name} is beaten by that of {other.name}: {mine} by {its}"


def _of_budgets(auto: Asked, plain: Plain, budgets: Sequence[int],
                answers: Sequence[Planned | int], objective: str) -> Iterator[str]:
    """Yield what does not hold of one planner's answers to rising budgets."""
    before: Planned | None = None
    for budget, answer in zip(budgets, answers, strict=True):
        if isinstance(answer, int):
            if before is not None or budget >= plain.peak_bytes:
                yield f"{auto.name}: {budget} is refused"
            continue
        if answer.peak_bytes > budget:
            yield f"{auto.name}: {answer.peak_bytes} for a budget of {budget}"
        if before is not None and worse(objective, answer, before):
            yield f"{auto.name}: worse within {budget} than with less"
        if objective == "time" and budget >= plain.peak_bytes and (
                answer.time > plain.timeline.time * (1 + 1e-12)):
            yield f"{auto.name}: slower than the plain step, which fits {budget}"
        before = answer
    if isinstance(auto.least, int) and isinstance(auto.within(auto.least), int):
        yield f"{auto.name}: refuses the minimum {auto.least} that it named"


def _of_min(auto: Asked, objective: str) -> Iterator[str]:
    """Yield what does not hold of "min": its rule over all choices, each of them finished."""
    mine = auto.planner
    finished = [mine._finish(p) for p in mine._pool.choices]
    plain_peak, plain_time = mine.plain.peak_bytes, mine.plain.timeline.time
    worth, tail = (0.75, 0.1) if objective == "time" else (0.0, 0.0)
    least = min((f.peak / plain_peak + tail * f.priced.time / max(plain_time, 1e-12), f.peak)
                for f in finished)[1]

    def cost(peak: int, time: float) -> float:
        return peak / plain_peak + worth * time / max(plain_time, 1e-12)

    best = min(cost(f.peak, f.priced.time) for f in finished
               if least <= f.peak <= least + 0.045 * plain_peak)
    if cost(auto.min.peak_bytes, auto.min.time) > best + 1e-9:
        yield (f"min of {auto.name}: ({auto.min.peak_bytes}, {auto.min.time}) costs more than "
               f"{best:.4f}")


def check(seed: int) -> list[str]:
    """Return the violations on one graph, planned for the executor of a GPU or for XLA."""
    target = Target(device=GPU).compiled(seed // 5 % 4 > 0)
    return list(violations(graph_of(seed), target))


def main(argv: list[str]) -> None:
    """Check seeds one after the other."""
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {argv[1:]}")
    began, bad = time.process_time(), 0
    for number in range(FLAGS.count):
        seed = FLAGS.seed + number
        found = check(seed)
        bad += bool(found)
        for what in found:
            print(f"seed {seed}: {what}", flush=True)
        if (number + 1) % 500 == 0:
            print(f"{number + 1} graphs, {bad} with violations, "
                  f"{time.process_time() - began:.0f} s", flush=True)
    print(f"{FLAGS.count} graphs from seed {FLAGS.seed}: {bad} with violations")
    raise SystemExit(bad > 0)


if __name__ == "__main__":
    app.run(main)
