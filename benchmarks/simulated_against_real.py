"""Compares the real allocations of a training step with the simulated ones, op by op.

    python -m benchmarks.simulated_against_real --network=mlp --budget=0.7
    python -m benchmarks.simulated_against_real --network=resnet50 --budget=plain --threads=2

The requests of one step come from TensorFlow's profiler: which op asked for how many bytes, which
chunk it got, when that was freed. Beside them stand the requests of what Grappler makes of the same
step, in a simulated order. Printed are both peaks; what is live at the real peak and not in the
simulation at that time, or the other way round, by op; and requests that the simulation does not
know: workspaces of kernels show there.

On a CPU TensorFlow counts requests of 256 KiB and more, and so does this program.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Sequence
from typing import Any

from absl import app, flags

from benchmarks.requests import Request, peak_of, requests_of
from benchmarks.rows import head, line
from tfckpt.ir.costgraph import CostGraph
from tfckpt.ir.schedule import Plan, plain_plan, resolve
from tfckpt.ir.target import HERE
from tfckpt.simulate.executor import ORDERS, POOL, executor_order
from tfckpt.simulate.liveness import walk

FLAGS = flags.FLAGS
flags.DEFINE_string("network", "mlp", "A name in benchmarks.measured.NETWORKS.")
flags.DEFINE_string("budget", "plain", "'plain', 'min', a fraction, or bytes.")
flags.DEFINE_integer("threads", 1, "Operations run at once (inter-op threads); 0 = default.")
flags.DEFINE_integer("warmup", 3, "Steps before the one that is looked at.", lower_bound=2)
flags.DEFINE_integer("top", 15, "Lines of each table.", lower_bound=1)
flags.DEFINE_enum("policy", POOL, ORDERS, "Which executor is simulated.")
flags.DEFINE_bool("order", False, "Print the allocations of both, in their order.")

COUNTED = 256 << 10
MB = 1e6


def simulated(cost: CostGraph, plan: Plan) -> tuple[list[Request], dict[str, str]]:
    """Return the requests of a plan in its order, and whose buffer each op writes into."""
    resolved = resolve(cost, plan.schedule)
    live: dict[int, list] = {}
    done: list[Request] = []
    buffer_of: dict[str, str] = {}
    order = plan.order or range(len(plan.schedule))
    moments = walk(cost, resolved, plan.order or None)
    for number, (position, (vertex, made, taken, freed)) in enumerate(
            zip(order, moments, strict=True)):
        copy = plan.schedule[position][1]
        suffix = f"-tfckpt{copy}" if copy else ""
        for i in made:
            storage = cost.storages[resolved.storage[i]]
            own = name = storage.name.rpartition(":")[0] + suffix
            if i in taken:
                if taken[i] in live:
                    live[i] = live.pop(taken[i])
                    name = live[i][0]
            elif storage.bytes >= COUNTED:
                live[i] = [name, storage.bytes, storage.bytes, 2 * number]
            buffer_of.setdefault(own, name)
            buffer_of.setdefault(vertex.name + suffix, name)
        if vertex.workspace >= COUNTED:
            done.append(Request(f"{vertex.name}{suffix} (workspace)", vertex.workspace,
                                vertex.workspace, 2 * number, 2 * number + 1))
        done += [Request(*live.pop(i), 2 * number + 1) for i in freed if i in live]
    done += [Request(*entry, None) for entry in live.values()]
    return sorted(done, key=lambda request: request.made), buffer_of


def live_at(requests: Sequence[Request], when: int) -> collections.Counter[str]:
    """Return the bytes that each op has live at an event."""
    found: collections.Counter[str] = collections.Counter()
    for r in requests:
        if r.made <= when and (r.freed is None or r.freed > when):
            found[r.op] += r.bytes
    return found


def show(real: Sequence[Request], ours: Sequence[Request], before: int) -> None:
    """Print the peaks and what differs at the real one."""
    chunks, _ = peak_of(real, lambda r: r.chunk)
    asked, at = peak_of(real, lambda r: r.bytes)
    planned, there = peak_of(ours, lambda r: r.bytes)
    print(f"peak of the real step: {asked / MB:.1f} MB asked for, {chunks / MB:.1f} MB in chunks; "
          f"{before / MB:.1f} MB of what was there before were freed")
    print(f"peak of the simulated step: {planned / MB:.1f} MB asked for")
    last = max((r for r in real if r.made <= at), key=lambda r: r.made)
    print(f"the real peak is reached in {last.op}, ours in "
          f"{max((r for r in ours if r.made <= there), key=lambda r: r.made).op}\n")
    twin = next((r.made for r in ours if r.op == last.op), there)
    _differences("live at the real peak, against the simulation when it makes the same",
                 live_at(real, at), live_at(ours, twin))
    _differences("live at the real peak, against the simulation at its own peak",
                 live_at(real, at), live_at(ours, there))
    known, asked_by = _total(ours), _total(real)
    _differences("all requests of a step", asked_by, known)


def _total(requests: Sequence[Request]) -> collections.Counter[str]:
    found: collections.Counter[str] = collections.Counter()
    for r in requests:
        found[r.op] += r.bytes
    return found


def _differences(title: str, real: collections.Counter[str], ours: collections.Counter[str]
                 ) -> None:
    print(title)
    print(head(["op", "real, MB", "simulated, MB"]))
    names = sorted({*real, *ours}, key=lambda n: (-abs(real[n] - ours[n]), n))
    for name in [n for n in names if real[n] != ours[n]][:FLAGS.top]:
        print(line([name, f"{real[name] / MB:.2f}", f"{ours[name] / MB:.2f}"]))
    print()


def _as_it_runs(live: Any) -> CostGraph:
    """Return the cost graph of what Grappler makes of a traced step."""
    from tfckpt.capture.tfgraph import capture
    from tfckpt.cost.build import build_cost_graph
    from tfckpt.verify.asking.grappler import Optimised

    return build_cost_graph(Optimised(live, capture(live), HERE).optimised())


def _ordered(cost: CostGraph, policy: str) -> Plan:
    """Return the step in the order of a simulated executor."""
    plan = plain_plan(cost)
    return dataclasses.replace(plan, order=tuple(executor_order(
        cost, resolve(cost, plan.schedule), plan.moves.released, (), (), policy)))


def main(_: list[str]) -> None:
    """Run one step and print both."""
    import tensorflow as tf

    import tfckpt
    from benchmarks.measured import NETWORKS

    if FLAGS.threads:
        tf.config.threading.set_inter_op_parallelism_threads(FLAGS.threads)
    step, args = NETWORKS[FLAGS.network]()
    function = tf.function(step)
    if FLAGS.budget != "plain":
        budget = FLAGS.budget if FLAGS.budget == "min" else float(FLAGS.budget)
        function = tfckpt.checkpoint(function, budget=budget)
    for _ in range(FLAGS.warmup):
        function(*args)
    real, before = requests_of(function, args)
    if FLAGS.budget != "plain":
        print(function.report)
    cost = _as_it_runs(function.get_concrete_function(*args).graph)
    ours, buffer_of = simulated(cost, _ordered(cost, FLAGS.policy))
    if not FLAGS.order:
        real = [dataclasses.replace(r, op=buffer_of.get(r.op, r.op)) for r in real]
    if FLAGS.order:
        for title, found in (("real", real), ("simulated", ours)):
            print(f"\n{title}")
            for r in found:
                print(f"{r.made:>6} {r.freed if r.freed is not None else '-':>6} "
                      f"{r.bytes / MB:8.2f} {r.chunk / MB:8.2f}  {r.op}")
    show(real, ours, before)


if __name__ == "__main__":
    app.run(main)
