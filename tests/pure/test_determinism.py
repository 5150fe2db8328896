"""The same plans under any PYTHONHASHSEED: no set is ever iterated into a result."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).parents[2]

SCRIPT = """
from tests.support.graphs import random_joint_graph, random_paper_graph, residual_network
from tfckpt.cost.with_backward import from_edges, with_backward
from tfckpt.plan.division_tree import division_tree
from tfckpt.plan.forward import forward_view
from tfckpt.plan.lower_sets import kept_storages
from tfckpt.plan.reforwarding import segments
from tfckpt.plan.solvers import acg, approx_dp, chen, exact_dp, exhaustive
from tfckpt.plan.trunk import trunk

graphs = [random_paper_graph(seed, 9) for seed in range(6)] + [residual_network(30)]
for number, graph in enumerate(graphs):
    names = [f"node {i}" for i in range(len(graph[0]))]
    joint = with_backward((names, *graph))
    print(joint)
    for limit in (160, 20, 5):
        view = forward_view(joint, limit)
        print(view)
        least = approx_dp.smallest_budget(view)
        for objective in ("time", "memory"):
            for budget in (least, 2 * least):
                masks = approx_dp.lower_sets(view, budget, objective=objective)
                print(masks, sorted(kept_storages(view, masks)))
        if limit < 160 or len(view) < 10:
            for objective in ("time", "memory"):
                for budget in (exact_dp.smallest_budget(view), least, 2 * least):
                    print(exact_dp.lower_sets(view, budget, objective=objective))
        if len(view) < 7:
            print(exhaustive.lower_sets(view, least))
        print(chen.lower_sets(view), chen.lower_sets(view, least // 4), chen.manual(view))
        print(trunk(view), division_tree(view), repr(division_tree(view)))
        print(acg.solve(view), segments(view, acg.solve(view).vertices))
        print(acg.solve(view, needs_inputs=range(0, len(view), 3)))
for seed in range(20):
    print(forward_view(random_joint_graph(seed, 30), 6))
"""


def output(seed: str) -> str:
    environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", SCRIPT], cwd=ROOT, env=environment,
                          capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_solvers_do_not_depend_on_the_hash_seed():
    first = output("0")
    assert len(first) > 10_000
    assert output("1") == first
    assert output("4242") == first
