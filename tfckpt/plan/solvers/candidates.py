"""What each solver proposes: keep sets on the joint graph, cheap to enumerate.

A solver searches under its paper's own cost model; what its proposal is worth is what the
simulator says. `SOLVERS` is the ordered table of all of them; `auto` draws on every one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from tfckpt.cost.costgraph import FORWARD
from tfckpt.errors import InfeasibleBudgetError
from tfckpt.plan.cuts import narrow_cuts
from tfckpt.plan.evaluate import Evaluator
from tfckpt.plan.forward import forward_view
from tfckpt.plan.lower_sets import kept_storages
from tfckpt.plan.solvers import approx_dp as approx_dp_solver
from tfckpt.plan.solvers import chen as chen_solver

INNER_BUDGETS = (0.0, 0.02, 0.05, 0.1, 0.2, 0.35, 0.5)
"""Where between the least and the whole of the paper's peak its budget is tried."""

Proposals = Iterator[frozenset[int]]


def store_all(evaluator: Evaluator, objective: str) -> Proposals:
    """Keeps everything: what remains are the free moves."""
    yield evaluator.everything()


def elementwise(evaluator: Evaluator, objective: str) -> Proposals:
    """Keeps what convolutions and matrix products make, recomputes what only moves bytes.

    Kept besides: what the first element-wise vertex after an expensive one hands on, where the
    expensive result itself is not read by the backward.
    """
    graph = evaluator.graph
    residual = frozenset(graph.residuals)
    expensive = frozenset(s for s, storage in enumerate(graph.storages)
                          if not graph.vertices[storage.producer].cheap)
    first: set[int] = set()
    for s in sorted(expensive - residual):
        for reader in graph.readers[s]:
            if graph.vertices[reader].region == FORWARD:
                first.update(w for w in graph.vertices[reader].writes if w in residual)
    yield (expensive & residual) | frozenset(first)
    yield (expensive & residual) | frozenset(first) | frozenset(
        s for cut in narrow_cuts(graph) for s in cut.storages)


def cuts(evaluator: Evaluator, objective: str) -> Proposals:
    """Keeps the storages of every, every second ... narrow cut (see `tfckpt.plan.cuts`)."""
    graph = evaluator.graph
    found = narrow_cuts(graph)
    for stride in (1, 2, 3, 4, 6):
        if stride == 1 or len(found) >= 2 * stride:
            yield frozenset(s for cut in found[stride - 1::stride] for s in cut.storages)
    residual = frozenset(graph.residuals)
    yield frozenset(s for cut in found for s in cut.storages if s in residual)


def chen(evaluator: Evaluator, objective: str) -> Proposals:
    """sqrt(n) segments over articulation points (Kusumoto et al. 2019, appendix B)."""
    forward = forward_view(evaluator.graph)
    if len(forward):
        yield kept_storages(forward, chen_solver.lower_sets(forward))


def approx_dp(evaluator: Evaluator, objective: str) -> Proposals:
    """Lower sets L^v by dynamic programming (Kusumoto et al. 2019, section 4.3)."""
    forward = forward_view(evaluator.graph)
    if not len(forward):
        return
    least, most = approx_dp_solver.smallest_budget(forward), 2 * sum(forward.bytes)
    for fraction in INNER_BUDGETS:
        budget = least + int((most - least) * fraction)
        try:
            found = approx_dp_solver.lower_sets(forward, budget, objective=objective)
        except InfeasibleBudgetError:
            continue
        yield kept_storages(forward, found)


SOLVERS: dict[str, Callable[[Evaluator, str], Proposals]] = {
    "store_all": store_all,
    "chen": chen,
    "approx_dp": approx_dp,
}
"""Solvers a user may name besides `auto`, in the order of the design's table."""

CHEAP: tuple[Callable[[Evaluator, str], Proposals], ...] = (
    store_all, elementwise, cuts, chen, approx_dp)
"""What `auto` starts from."""
