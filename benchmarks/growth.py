"""How planning time grows with the size of the step.

    python -m benchmarks.growth [--sizes=1000,10000,50000,100000]

Traces a training step of residual blocks (normalisation, two matrix products, an activation, a
dropout mask; one optimizer slot per variable) with about the wanted number of operations,
captures it and plans it with `auto`. Nothing is executed. Printed are seconds of each stage.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from absl import app, flags

FLAGS = flags.FLAGS
flags.DEFINE_list("sizes", ["1000", "10000", "50000", "100000"], "Operations, about.")
flags.DEFINE_string("solver", "auto", "A name in tfckpt.plan.candidates.SOLVERS.")
flags.DEFINE_string("budget", "min", "'min' or a fraction of the plain peak.")

OPERATIONS_PER_BLOCK = 187
WIDTH, BATCH, TOKENS = 64, 8, 64


def training_step(blocks: int) -> Callable:
    """Return a step over `blocks` residual blocks; takes float32 (BATCH, TOKENS, WIDTH)."""
    import tensorflow as tf

    variables = [[tf.Variable(tf.random.stateless_normal(shape, (block, i)) * 0.05)
                  for i, shape in enumerate([(WIDTH,), (WIDTH, 2 * WIDTH), (2 * WIDTH, WIDTH)])]
                 for block in range(blocks)]
    slots = [[tf.Variable(tf.zeros_like(v)) for v in block] for block in variables]

    def block(h, scale, first, second, seed):
        mean = tf.reduce_mean(h, -1, keepdims=True)
        variance = tf.reduce_mean(tf.math.squared_difference(h, mean), -1, keepdims=True)
        normal = (h - mean) * tf.math.rsqrt(variance + 1e-6) * scale
        m = tf.nn.gelu(normal @ first, approximate=True)
        mask = tf.random.stateless_uniform(tf.shape(m), (seed, 1)) > 0.1
        return h + tf.where(mask, m / 0.9, tf.zeros_like(m)) @ second

    def step(x):
        with tf.GradientTape() as tape:
            h = x
            for number, weights in enumerate(variables):
                h = block(h, *weights, number)
            loss = tf.reduce_mean(h * h)
        flat = [v for weights in variables for v in weights]
        for v, slot, g in zip(flat, [s for b in slots for s in b], tape.gradient(loss, flat),
                              strict=True):
            slot.assign(0.9 * slot + g)
            v.assign_sub(0.01 * slot)
        return loss

    return step


def measure(size: int) -> list[str]:
    """One row of the table: operations, vertices, seconds to capture, to cost and to plan."""
    import tensorflow as tf

    from tfckpt.capture.tfgraph import capture
    from tfckpt.common.collector import collector_paused, older_objects_set_aside
    from tfckpt.cost.build import build_cost_graph
    from tfckpt.ir.target import GPU, Target
    from tfckpt.plan.choosing.planned import baseline
    from tfckpt.plan.planner import plan_step
    from tfckpt.request.budget import parse_budget

    step = tf.function(training_step(max(size // OPERATIONS_PER_BLOCK, 1)))
    traced = step.get_concrete_function(tf.zeros((BATCH, TOKENS, WIDTH))).graph
    clock = [time.perf_counter()]
    with collector_paused():  # as `tfckpt.driver` does, and likewise below
        graph = capture(traced)
        clock.append(time.perf_counter())
        cost = build_cost_graph(graph)
    clock.append(time.perf_counter())
    budget = parse_budget(FLAGS.budget if FLAGS.budget == "min" else float(FLAGS.budget))
    with older_objects_set_aside():
        plain = baseline(cost, Target(device=GPU))
        planned = plan_step(cost, budget.dynamic(plain.peak_bytes, 0), solver=FLAGS.solver,
                            target=Target(device=GPU), plain=plain)
    clock.append(time.perf_counter())
    seconds = [f"{b - a:.1f}" for a, b in zip(clock, clock[1:], strict=False)]
    return [str(len(graph.ops)), str(len(cost.vertices)), *seconds,
            f"{planned.peak_bytes / planned.baseline_bytes:.2f}",
            f"{planned.time / planned.baseline.time:.2f}"]


def main(argv: list[str]) -> None:
    """Print one line per size."""
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {argv[1:]}")
    print("| operations | vertices | capture s | cost s | plan s | planned peak / plain "
          "| planned time / plain |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for size in map(int, FLAGS.sizes):
        print("| " + " | ".join(measure(size)) + " |", flush=True)


if __name__ == "__main__":
    app.run(main)
