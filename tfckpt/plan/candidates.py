"""Proposals of each solver: keep sets on the joint graph, cheap to enumerate.

A solver searches under its paper's own cost model; what its proposal is worth is what the
simulator says. `recursive` proposes what later runs of the forward keep as well, as a `Recursion`.
`SOLVERS` is the ordered table of all of them; `auto` draws on every one (on `lcg` through `acg`,
which finds the same on a chain).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

from tfckpt.ir.costgraph import FORWARD, CostGraph
from tfckpt.plan.evaluate import Candidate, Evaluator
from tfckpt.simulate.order import moves_of_xla
from tfckpt.solvers import acg as acg_solver
from tfckpt.solvers import approx_dp as approx_dp_solver
from tfckpt.solvers import chen as chen_solver
from tfckpt.solvers import exact_dp as exact_dp_solver
from tfckpt.solvers import lcg as lcg_solver
from tfckpt.solvers import recursive_front as recursive_times
from tfckpt.solvers.forward.cuts import narrow_cuts
from tfckpt.solvers.forward.division_tree import division_tree
from tfckpt.solvers.forward.forward import forward_view
from tfckpt.solvers.forward.forward_graph import ForwardGraph
from tfckpt.solvers.forward.lower_sets import kept_storages
from tfckpt.solvers.forward.main_path import main_path
from tfckpt.solvers.forward.reforwarding import Checkpoints
from tfckpt.solvers.forward.stage_costs import stages_of
from tfckpt.solvers.recursion import Recursion, turning_point

INNER_BUDGETS = (0.0, 0.02, 0.05, 0.1, 0.2, 0.35, 0.5)
"""Budgets tried with a paper's solver, by its own count of bytes: fractions of the way from the
smallest budget that it can meet to the peak without recomputation."""

MAX_TERM_SHARES = (1, 2, 4, 8)
"""Largest segments that `acg` allows, in quarters of the one that its paper's cost favours."""

FINE, COARSE = 256, 128
"""Stages into which `recursive` divides the forward at most: for minimum peaks, for all budgets."""
BUDGETS, FEWEST, MOST = 30_000, 6, 48
"""Budgets for which `recursive` asks: the first divided by the graph's vertices, within the others.
"""

Proposals = Iterator[frozenset[int]]

Solver = Callable[[Evaluator, str], Iterator[frozenset[int] | Recursion]]
"""Takes what prices candidates, and an objective; yields proposals."""


class _LowerSetSolver(Protocol):
    """A module that searches sequences of lower sets."""

    def smallest_budget(self, forward: ForwardGraph) -> int:
        """Return the minimum budget in bytes for which `lower_sets` has an answer."""

    def lower_sets(self, forward: ForwardGraph, budget: int, *, objective: str = "time"
                   ) -> tuple[int, ...]:
        """Return the best sequence of lower sets within a budget in bytes, as bitmasks."""


def store_all(evaluator: Evaluator, objective: str) -> Proposals:
    """Keep everything: what remains are the free moves.

    Args:
      evaluator: gives the joint graph; nothing is priced here.
      objective: "time" or "memory"; it makes no difference here.

    Yields:
      The set of all forward storages.
    """
    yield evaluator.everything()


def elementwise(evaluator: Evaluator, objective: str) -> Proposals:
    """Keep what convolutions and matrix products make, recompute what only moves bytes.

    Kept besides: what the first element-wise vertex after an expensive one hands on, where the
    expensive result itself is not read by the backward.

    Args:
      evaluator: gives the joint graph; nothing is priced here.
      objective: "time" or "memory"; it makes no difference here.

    Yields:
      Keep sets: forward storages of the joint graph.
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
    """Keep the storages of every, every second ... narrow cut (`tfckpt.solvers.forward.cuts`).

    Args:
      evaluator: gives the joint graph; nothing is priced here.
      objective: "time" or "memory"; it makes no difference here.

    Yields:
      Keep sets: forward storages of the joint graph.
    """
    graph = evaluator.graph
    found = narrow_cuts(graph)
    for stride in (1, 2, 3, 4, 6):
        if stride == 1 or len(found) >= 2 * stride:
            yield frozenset(s for cut in found[stride - 1::stride] for s in cut.storages)
    residual = frozenset(graph.residuals)
    yield frozenset(s for cut in found for s in cut.storages if s in residual)


def chen(evaluator: Evaluator, objective: str) -> Proposals:
    """Cut into sqrt(n) segments at articulation points (Kusumoto et al. 2019, appendix B).

    And over splitting vertices alone (Feng and Huang 2018, "manual").

    Args:
      evaluator: gives the joint graph; nothing is priced here.
      objective: "time" or "memory"; it makes no difference here.

    Yields:
      Keep sets: forward storages of the joint graph; none where there is no forward.

    Raises:
      PlanError: the forward graph has too many nodes.
    """
    forward = forward_view(evaluator.graph)
    if len(forward):
        found = kept_storages(forward, chen_solver.lower_sets(forward))
        yield from _with_boundary(evaluator.graph, forward, found)
        stem = main_path(forward)
        found = _storages(stem, chen_solver.manual(stem))
        yield from _with_boundary(evaluator.graph, stem, found)


def lcg(evaluator: Evaluator, objective: str) -> Proposals:
    """Keep optimal checkpoints of a chain (Feng and Huang 2018, algorithm 1); refuse other graphs.

    Args:
      evaluator: gives the joint graph; nothing is priced here.
      objective: "time" or "memory"; it makes no difference here.

    Yields:
      One keep set: forward storages of the joint graph.

    Raises:
      PlanError: the main path of the forward is no chain, or too long.
    """
    forward = main_path(forward_view(evaluator.graph))
    yield _storages(forward, lcg_solver.solve(forward))


def acg(evaluator: Evaluator, objective: str) -> Proposals:
    """Keep optimal checkpoints on the division tree (Feng and Huang 2018, algorithm 5).

    Besides those of the minimum cost, those for smaller segments, which keep more (and so may cost
    less time), and for larger ones.

    Args:
      evaluator: gives the joint graph; nothing is priced here.
      objective: "time" or "memory"; it makes no difference here.

    Yields:
      Keep sets: forward storages of the joint graph.

    Raises:
      PlanError: the forward graph is too large, or too entangled for a division tree.
    """
    forward = main_path(forward_view(evaluator.graph))
    tree = division_tree(forward)
    best = acg_solver.solve(forward, tree=tree).max_term
    for quarters in MAX_TERM_SHARES:
        found = acg_solver.solve_under(forward, best * quarters // 4, tree=tree)
        yield from _with_boundary(evaluator.graph, forward, _storages(forward, found))


def _with_boundary(graph: CostGraph, forward: ForwardGraph, keep: frozenset[int]) -> Proposals:
    """Yield a proposal, and what of it crosses to another node, where that is far less.

    A node that stands for many vertices of a long chain hands all their results to the backward.
    A boundary needs the last one only; the others come with the segment that is recomputed.
    """
    yield keep
    node_of = {v: node for node, members in enumerate(forward.members) for v in members}
    boundary = frozenset(
        s for node, storages in enumerate(forward.storages) for s in storages if s in keep
        and any(node_of.get(r, node) != node for r in graph.readers[s]))
    if 0 < 2 * _bytes(graph, boundary) < _bytes(graph, keep):
        yield boundary


def _bytes(graph: CostGraph, storages: frozenset[int]) -> int:
    return sum(graph.storages[s].bytes for s in storages)


def _storages(forward: ForwardGraph, found: Checkpoints) -> frozenset[int]:
    """Return what keeping a set of checkpoints keeps in the joint graph."""
    return frozenset(s for vertex in found.vertices for s in forward.storages[vertex])


def approx_dp(evaluator: Evaluator, objective: str) -> Proposals:
    """Search lower sets L^v by dynamic programming (Kusumoto et al. 2019, section 4.3).

    Args:
      evaluator: gives the joint graph; nothing is priced here.
      objective: "time" for the minimum recomputation, "memory" for the most.

    Yields:
      Keep sets, one or two for each of `INNER_BUDGETS`; none where there is no forward.

    Raises:
      PlanError: the forward graph has too many nodes.
    """
    yield from _at_inner_budgets(approx_dp_solver, evaluator, objective)


def exact_dp(evaluator: Evaluator, objective: str) -> Proposals:
    """Search all lower sets by dynamic programming (Kusumoto et al. 2019, section 4.2).

    Args:
      evaluator: gives the joint graph; nothing is priced here.
      objective: "time" for the minimum recomputation, "memory" for the most.

    Yields:
      Keep sets, one or two for each of `INNER_BUDGETS`; none where there is no forward.

    Raises:
      PlanError: too many lower sets, or too many states at some inner budget.
    """
    yield from _at_inner_budgets(exact_dp_solver, evaluator, objective)


def _at_inner_budgets(solver: _LowerSetSolver, evaluator: Evaluator, objective: str) -> Proposals:
    forward = forward_view(evaluator.graph)
    if not len(forward):
        return
    smallest, most = solver.smallest_budget(forward), 2 * sum(forward.bytes)
    for fraction in INNER_BUDGETS:
        budget = smallest + int((most - smallest) * fraction)
        found = kept_storages(forward, solver.lower_sets(forward, budget, objective=objective))
        yield from _with_boundary(evaluator.graph, forward, found)


def recursive(evaluator: Evaluator, objective: str) -> Iterator[Recursion]:
    """Keep checkpoints within what lies between checkpoints (Griewank and Walther 2000, Rotor).

    Not keep sets: what later runs of the forward keep is part of the proposal.

    Args:
      evaluator: gives the joint graph and the order; nothing is priced here.
      objective: "time" or "memory"; it makes no difference here.

    Yields:
      What the original and each later run of the forward keeps; none where there is no forward.
    """
    pattern = Candidate(frozenset(), moves=moves_of_xla(evaluator.graph), reordered=True)
    order = evaluator.order(pattern)
    if all(evaluator.graph.vertices[v].region != FORWARD
           for v in order[:turning_point(evaluator.graph, order)]):
        return  # there are no stages
    fine = coarse = stages_of(evaluator.graph, order, FINE)
    if len(fine) > COARSE + 1:
        coarse = stages_of(evaluator.graph, order, COARSE)
    count = BUDGETS // max(len(evaluator.graph.vertices), 1)
    yield from recursive_times.proposals(fine, coarse, max(FEWEST, min(MOST, count)))


SOLVERS: dict[str, Solver] = {
    "store_all": store_all,
    "chen": chen,
    "lcg": lcg,
    "acg": acg,
    "exact_dp": exact_dp,
    "approx_dp": approx_dp,
    "recursive": recursive,
}
"""Solvers a user may name besides `auto`, in the order of the design's table."""

OWN: tuple[Callable[[Evaluator, str], Proposals], ...] = (store_all, elementwise, cuts)
"""Proposals with which the search of `auto` always begins, whichever solvers it is given."""

CHEAP: tuple[Callable[[Evaluator, str], Proposals], ...] = (
    store_all, elementwise, cuts, chen, acg, approx_dp)
"""Proposals with which `auto` starts by default."""

DEAR: tuple[Callable[[Evaluator, str], Proposals], ...] = (lcg, exact_dp)
"""Further proposals that `auto` asks for on small graphs."""
