"""The same plans under any PYTHONHASHSEED: no set is ever iterated into a result."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]

SCRIPT = """
from tests.support.graphs import random_joint_graph, random_paper_graph, residual_network
from benchmarks.paper_tables.joint_graphs import from_edges, with_backward
from tfckpt.solvers.forward.division_tree import division_tree
from tfckpt.solvers.forward.forward import forward_view
from tfckpt.solvers.forward.lower_sets import kept_storages
from tfckpt.solvers.forward.reforwarding import segments
from tfckpt.plan.planner import plan_step
from tfckpt.ir.target import Target
from tests.support import exhaustive
from tfckpt.solvers import acg, approx_dp, chen, exact_dp, lcg
from tfckpt.solvers.forward.main_path import main_path

graphs = [random_paper_graph(seed, 9) for seed in range(6)] + [residual_network(30)]
for number, graph in enumerate(graphs):
    names = [f"node {i}" for i in range(len(graph[0]))]
    joint = with_backward((names, *graph))
    print(joint)
    for limit in (160, 20, 5):
        view = forward_view(joint, limit)
        print(view)
        minimum = approx_dp.smallest_budget(view)
        for objective in ("time", "memory"):
            for budget in (minimum, 2 * minimum):
                masks = approx_dp.lower_sets(view, budget, objective=objective)
                print(masks, sorted(kept_storages(view, masks)))
        if limit < 160 or len(view) < 10:
            for objective in ("time", "memory"):
                for budget in (exact_dp.smallest_budget(view), minimum, 2 * minimum):
                    print(exact_dp.lower_sets(view, budget, objective=objective))
        if len(view) < 7:
            print(exhaustive.lower_sets(view, minimum))
        print(chen.lower_sets(view), chen.lower_sets(view, minimum // 4), chen.manual(view))
        print(main_path(view), division_tree(view), repr(division_tree(view)))
        print(acg.solve(view), segments(view, acg.solve(view).vertices))
        print(acg.solve(view, needs_inputs=range(0, len(view), 3)))
for seed in range(20):
    print(forward_view(random_joint_graph(seed, 30), 6))
for seed in range(4):
    costs = random_paper_graph(seed, 30)[0]
    edges = [(i, i + 1) for i in range(len(costs) - 1)]
    print(lcg.solve(from_edges(costs, [1] * len(costs), edges)))
    for free_moves in (True, False):
        print(plan_step(random_joint_graph(seed, 10), free_moves=free_moves))
        print(plan_step(with_backward((None, *random_paper_graph(seed, 6))),
                        target=Target().compiled()))
"""

THOUSANDS = """
from tests.support.graphs import random_paper_graph
from benchmarks.paper_tables.joint_graphs import from_edges
from tfckpt.solvers.forward.division_tree import division_tree
from tfckpt.solvers import acg, approx_dp, chen, exact_dp
for seed in range(2_000):
    forward = from_edges(*random_paper_graph(seed, 3 + seed % 10, 0.1 + seed % 7 / 10))
    minimum = approx_dp.smallest_budget(forward)
    for objective in ("time", "memory"):
        for solver in (approx_dp, exact_dp):
            print(solver.lower_sets(forward, minimum + seed % 5, objective=objective))
    print(chen.lower_sets(forward), acg.solve(forward), division_tree(forward))
"""


def output(script: str, seed: str) -> str:
    environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, env=environment,
                          capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_solvers_do_not_depend_on_the_hash_seed():
    first = output(SCRIPT, "0")
    assert len(first) > 10_000
    assert output(SCRIPT, "1") == first
    assert output(SCRIPT, "4242") == first


@pytest.mark.nightly
def test_thousands_of_graphs_under_other_hash_seeds():
    first = output(THOUSANDS, "0")
    assert len(first.splitlines()) > 10_000
    for seed in ("1", "4242", "99"):
        assert output(THOUSANDS, seed) == first
