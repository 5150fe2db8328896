"""The memory of plain steps: tfckpt's simulator, Grappler's estimate and what is measured.

    python -m benchmarks.estimates --model vgg16
    python -m benchmarks.estimates --all              ten models, one process each

Measured peaks are allocator statistics on this machine's CPU (or GPU) above what was allocated
when the step began, medians; so is what tfckpt predicts. Grappler's figures are those of its
virtual cluster: first all that it counts, then what is not resident, each storage once. The CPU
that Grappler is told of has the rates of tfckpt's own time model.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

from absl import app, flags

from benchmarks import rows

FLAGS = flags.FLAGS
MB = 1_000_000
flags.DEFINE_string("model", "vgg16", "A name in benchmarks.estimates.models().")
flags.DEFINE_string("device", "H100-80GB", "The device of the last columns.")
flags.DEFINE_integer("steps", 8, "Measured steps.", lower_bound=1)
flags.DEFINE_integer("warmup", 3, "Steps before measuring.", lower_bound=1)
flags.DEFINE_bool("tiny", False, "Very small models, to try this program out.")
flags.DEFINE_bool("all", False, "Every model, one process each.")

NAMES = ("resnet50", "vgg16", "densenet121", "inception_v3", "xception", "mobilenet_v3",
         "convnext_tiny", "unet", "transformer", "bert_mish")


def models() -> dict[str, Callable[[], Any]]:
    """Jobs by name."""
    import keras

    from benchmarks import activations, jobs

    families = {"vgg16": keras.applications.VGG16, "densenet121": keras.applications.DenseNet121,
                "inception_v3": keras.applications.InceptionV3,
                "xception": keras.applications.Xception,
                "mobilenet_v3": keras.applications.MobileNetV3Small,
                "convnext_tiny": keras.applications.ConvNeXtTiny}
    batch, size = (2, 75) if FLAGS.tiny else (8, 96)

    def family(builder: Callable[..., Any]) -> Any:
        keras.utils.set_random_seed(0)
        body = builder(weights=None, include_top=False, pooling="avg", input_shape=(size, size, 3))
        return jobs.finish(
            keras.Sequential([body, keras.layers.Dense(10, activation="softmax")]),
            keras.optimizers.SGD(0.01, momentum=0.9), "sparse_categorical_crossentropy",
            jobs.image_batch(0, batch, size), jobs.labels(0, 10, (batch,)))

    small = jobs.TINY if FLAGS.tiny else {
        "resnet50": {"batch": 8, "size": 96}, "unet": {"filters": 16, "size": 96, "batch": 8},
        "transformer": {"layers": 4, "d": 128, "mlp": 512, "seq": 128, "batch": 16}}
    bert = {"layers": 2, "d": 64 if FLAGS.tiny else 256, "heads": 4, "seq": 64}
    made: dict[str, Callable[[], Any]] = {
        "resnet50": lambda: jobs.resnet50(**small["resnet50"]),
        "unet": lambda: jobs.unet(**small["unet"]),
        "transformer": lambda: jobs.transformer(**small["transformer"]),
        "bert_mish": lambda: activations.bert(activations.COMPOSED["mish"], batch=16, **bert)}
    for name, builder in families.items():
        made[name] = lambda builder=builder: family(builder)
    return {name: made[name] for name in NAMES}


def row(name: str) -> list[str]:
    """Return the cells of a model."""
    import tensorflow as tf

    from benchmarks import measure
    from grappler_ext.estimates import costs_of, inlined_graph
    from tfckpt.capture.tfgraph import capture
    from tfckpt.cost.build import build_cost_graph
    from tfckpt.driving.parts import price_plain
    from tfckpt.ir.target import CPU, SMALL_CPU, Target
    from tfckpt.request.devices import Device, find_device

    job = models()[name]()
    step = tf.function(job.train_step, autograph=False)
    traced = step.get_concrete_function(job.x, job.y)
    graph = capture(traced.graph)
    cost = build_cost_graph(graph)
    ours = price_plain(cost, Target())[1].peak_bytes
    lanes = 32
    here = Device("CPU", 1 << 40, SMALL_CPU.bytes_per_second,
                  SMALL_CPU.flops_per_second / 2 / lanes, lanes, kind=CPU)
    definition, inlined = inlined_graph(traced, (job.x, job.y))
    cpu, gpu = (costs_of(definition, inlined, d) for d in (here, find_device(FLAGS.device)))
    samples = [s for s, in measure.take_turns([(step, (job.x, job.y))], FLAGS.steps, FLAGS.warmup)]
    peak = statistics.median(s.peak for s in samples)
    seconds = statistics.median(s.seconds for s in samples)

    def ratio(found: float, measured: float) -> str:
        return f"{found / measured:.2f}" if measured else "-"

    return [name, f"{peak / MB:.1f}", ratio(ours, peak), ratio(cpu.peak_bytes, peak),
            ratio(cpu.dynamic_bytes, peak), f"{gpu.peak_bytes / MB:.1f}",
            f"{gpu.dynamic_bytes / MB:.1f}", f"{1e3 * seconds:.0f}",
            ratio(cost.total_time, seconds), ratio(cpu.seconds, seconds),
            f"{1e3 * gpu.seconds:.2f}"]


def header() -> str:
    """Return the head of the table."""
    cells = ("model", "measured MB", "ours / measured", "Grappler / measured",
             "each storage once", f"Grappler, {FLAGS.device}, MB", "each storage once, MB",
             "step ms", "ours / measured", "Grappler / measured", f"{FLAGS.device} ms")
    return rows.head(cells)


def run_all() -> int:
    """Run every model in a process of its own; return how many failed."""
    failed = 0
    for name in NAMES:
        output = rows.in_own_process(name, "benchmarks.estimates", [
            f"--model={name}", f"--device={FLAGS.device}", f"--steps={FLAGS.steps}",
            f"--warmup={FLAGS.warmup}", f"--tiny={FLAGS.tiny}"])
        if output is None:
            failed += 1
        else:
            print(output.splitlines()[-1], flush=True)
    return failed


def main(argv: list[str]) -> int:
    """Print one line, or all."""
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {argv[1:]}")
    if FLAGS.model not in NAMES:
        raise app.UsageError(f"--model must be one of {', '.join(NAMES)}")
    print(header(), flush=True)
    if FLAGS.all:
        return 1 if run_all() else 0
    import tensorflow as tf

    tf.config.threading.set_inter_op_parallelism_threads(1)
    print(rows.line(row(FLAGS.model)))
    return 0


if __name__ == "__main__":
    app.run(main)
