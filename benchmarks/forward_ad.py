"""The memory that keeping derivatives (nested forward AD) saves, and its cost in time.

    python -m benchmarks.forward_ad --row peak --model resnet50 --activation mish
    python -m benchmarks.forward_ad --row peak --all        one process per line
    python -m benchmarks.forward_ad --row batch --all

The rows, for a model and an activation each:

  peak       derivatives kept, nothing recomputed, no free moves: tensors kept for each activation
             (the next layer's input included), measured peak, time
  recompute  the same peak by recomputation alone: time of each step's activation part, which is
             the step's time above that of the same model without the activation
  batch      the largest batch that fits a budget of the whole device, for the plain step and with
             derivatives kept: planned first, then run at that batch, and at one more or one less
             until what is measured fits too; the plain step is also run at the other's batch
  together   budget="min": recomputation, derivatives, both

Steps of a line take turns in one process; peaks are allocator statistics above what was
allocated when the step began, medians; time ratios are medians over neighbouring steps. Besides
wall time, the processor time of all threads is printed, which other programs disturb less.
"""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable
from typing import Any

from absl import app, flags

from benchmarks import rows

FLAGS = flags.FLAGS
MB = 1_000_000
_ROWS = ("peak", "recompute", "batch", "together")
flags.DEFINE_enum("row", "peak", _ROWS, "What to measure.")
flags.DEFINE_string("model", "resnet50", "A name in benchmarks.activations.MODELS.")
flags.DEFINE_string("activation", "mish", "A name in benchmarks.activations.ACTIVATIONS.")
flags.DEFINE_integer("steps", 8, "Measured rounds of steps.", lower_bound=1)
flags.DEFINE_integer("warmup", 3, "Rounds before measuring.", lower_bound=1)
flags.DEFINE_integer("batch", 8, "Batch of every row but `batch`.", lower_bound=1)
flags.DEFINE_string("device_bytes", "1500MB", "Budget of row `batch`, whole device.")
flags.DEFINE_bool("tiny", False, "Small models, to try this program out.")
flags.DEFINE_bool("all", False, "Every line of the row, one process each.")

SAFETY = 0.95
"""The planner leaves so much of a budget free; a given peak is asked for by its inverse."""
ALONE: dict[str, Any] = {"fad": True, "solver": "store_all", "free_moves": False}
"""Options with which derivatives are kept and nothing else changes."""
COLUMNS = {
    "peak": ("kept before", "kept after", "plain MB", "FAD MB", "peak ratio", "planned ratio",
             "time", "processor time"),
    "recompute": ("peak ratio, FAD", "peak ratio, recomputed", "FAD time", "recomputed time",
                  "activation part of plain", "FAD faster there by", "by processor time"),
    "batch": ("budget MB", "planned plain batch", "planned FAD batch", "plain batch",
              "plain MB there", "FAD batch", "FAD MB there", "plain MB at FAD's batch",
              "batch ratio"),
    "together": ("plain MB", "FAD", "recomputed", "both", "planned FAD", "planned recomputed",
                 "planned both", "time FAD", "time recomputed", "time both"),
}


class Steps:
    """The model's steps under different options, made from equal seeds."""

    def __init__(self, model: str, activation: str, small: bool):
        from benchmarks import activations

        self._build = activations.MODELS[model]
        self._activation = activations.ACTIVATIONS.get(activation)
        self._sizes = activations.TINY[model] if small else {}

    def job(self, batch: int, linear: bool = False):
        """Return a job of the model; `linear` leaves the activation out."""
        activation = (lambda x: x) if linear else self._activation
        return self._build(activation, batch=batch, **self._sizes)

    def plain(self, batch: int, linear: bool = False):
        """(step, arguments) of the plain model."""
        import tensorflow as tf

        job = self.job(batch, linear)
        return tf.function(job.train_step, autograph=False), (job.x, job.y)

    def checkpointed(self, batch: int, **options):
        """(step, arguments) under tfckpt."""
        import tensorflow as tf

        import tfckpt

        job = self.job(batch)
        step = tfckpt.checkpoint(**options)(tf.function(job.train_step, autograph=False))
        return step, (job.x, job.y)


def peak(steps: Steps) -> list[str]:
    """FAD alone against the plain step."""
    from benchmarks import measure

    plain, ours = steps.plain(FLAGS.batch), steps.checkpointed(FLAGS.batch, **ALONE)
    found = measure.summarise(_rounds(plain, ours))  # type: ignore[arg-type]
    report = ours[0].report
    return [*kept_tensors(plain), f"{found.plain_peak / MB:.0f}", f"{found.ours_peak / MB:.0f}",
            f"{found.memory_ratio:.3f}",
            f"{report.planned_peak_bytes / report.baseline_peak_bytes:.3f}",
            f"{found.time_ratio:.3f}", f"{found.processor_ratio:.3f}"]


def kept_tensors(step) -> tuple[str, str]:
    """Tensors of its size that the backward keeps per activation, without and with FAD.

    Of the regions that save anything; where they differ, every number that occurs.
    """
    from tfckpt.capture.tfgraph import capture
    from tfckpt.cost.storage import roots
    from tfckpt.fad.alternatives import find_alternatives

    function, args = step
    graph = capture(function.get_concrete_function(*args).graph)
    counts = []
    for a in find_alternatives(graph, roots(graph)).alternatives:
        op, slot = a.region.source
        size = graph.ops[op].outputs[slot].bytes or 1
        if a.saves > 0 and size > 100_000:
            counts.append((a.bytes_before / size, a.bytes_after / size))
    return tuple(" or ".join(f"{n:g}" for n in sorted({c[i] for c in counts})) or "-"
                 for i in (0, 1))  # type: ignore[return-value]


def recompute(steps: Steps) -> list[str]:
    """FAD against recomputation that plans for FAD's peak, over the activation part."""
    ours = steps.checkpointed(FLAGS.batch, **ALONE)
    _trace(ours)
    fraction = ours[0].report.planned_peak_bytes / ours[0].report.baseline_peak_bytes
    again = steps.checkpointed(FLAGS.batch, budget=min(1.0, fraction / SAFETY), free_moves=False)
    plain, linear = steps.plain(FLAGS.batch), steps.plain(FLAGS.batch, linear=True)
    rounds = _rounds(plain, ours, again, linear)
    part, faster, processor = [], [], []
    for p, o, a, e in rounds:
        part.append(1 - e.seconds / p.seconds)
        faster.append((a.seconds - e.seconds, o.seconds - e.seconds))
        processor.append((a.processor - e.processor, o.processor - e.processor))
    peaks = _peaks(rounds)
    return [_ratio(peaks[1], peaks[0]), _ratio(peaks[2], peaks[0]),
            *(f"{statistics.median(r[i].seconds / r[0].seconds for r in rounds):.3f}"
              for i in (1, 2)),
            f"{statistics.median(part):.0%}",
            *(_ratio(statistics.median(a for a, _ in t), statistics.median(o for _, o in t)) + "x"
              for t in (faster, processor))]


def batch(steps: Steps) -> list[str]:
    """Return the largest batches under one budget, planned and run."""
    from tfckpt.request.budget import parse_budget

    budget = parse_budget(FLAGS.device_bytes).device_bytes
    assert budget is not None
    price = Priced(steps)
    planned = [price.largest(budget, fad) for fad in (False, True)]
    (plain, plain_bytes), (ours, our_bytes) = (
        price.confirmed(planned[0], budget), price.confirmed(planned[1], budget, **ALONE))
    return [f"{budget / MB:.0f}", *map(str, planned), str(plain), f"{plain_bytes / MB:.0f}",
            str(ours), f"{our_bytes / MB:.0f}", f"{price.measured(ours) / MB:.0f}",
            f"{ours / plain:.2f}"]


class Priced:
    """Bytes of the whole device by batch: variables, inputs and constants, and the peak."""

    def __init__(self, steps: Steps):
        self._steps = steps
        self._reports: dict[int, Any] = {}

    def report(self, batch: int):
        """Return what is planned at a batch."""
        if batch not in self._reports:
            step = self._steps.checkpointed(batch, **ALONE)
            _trace(step)
            self._reports[batch] = step[0].report
            gc.collect()
        return self._reports[batch]

    def bytes(self, batch: int, fad: bool) -> int:
        """Planned, for the plain step or with derivatives kept."""
        report = self.report(batch)
        return report.resident_bytes + (
            report.planned_peak_bytes if fad else report.baseline_peak_bytes)

    def measured(self, batch: int, **options) -> float:
        """With the step's measured peak, plain where no options are given."""
        step = self._steps.checkpointed(batch, **options) if options else self._steps.plain(batch)
        found = _peaks(_rounds(step))[0]
        gc.collect()
        return self.report(batch).resident_bytes + found

    def confirmed(self, batch: int, budget: int, **options) -> tuple[int, float]:
        """Return the largest batch near `batch` whose measured bytes fit, and those bytes."""
        found = self.measured(batch, **options)
        if found <= budget:
            while (more := self.measured(batch + 1, **options)) <= budget:
                batch, found = batch + 1, more
        while found > budget and batch > 1:
            batch -= 1
            found = self.measured(batch, **options)
        return batch, found

    def largest(self, budget: int, fad: bool) -> int:
        """Return the largest batch that fits."""
        from tfckpt.largest import largest_batch

        return largest_batch(lambda n: self.bytes(n, fad), budget, FLAGS.batch)


def together(steps: Steps) -> list[str]:
    """Derivatives alone, recomputation alone, and both, for the minimum peak."""
    made = [steps.plain(FLAGS.batch), steps.checkpointed(FLAGS.batch, solver="store_all", fad=True),
            steps.checkpointed(FLAGS.batch), steps.checkpointed(FLAGS.batch, fad="auto")]
    rounds = _rounds(*made)
    peaks = _peaks(rounds)
    planned = [(r.planned_peak_bytes / r.baseline_peak_bytes)
               for r in (step.report for step, _ in made[1:])]  # type: ignore[attr-defined]
    return [f"{peaks[0] / MB:.0f}", *(_ratio(p, peaks[0]) for p in peaks[1:]),
            *(f"{p:.3f}" for p in planned),
            *(f"{statistics.median(r[i].seconds / r[0].seconds for r in rounds):.3f}"
              for i in (1, 2, 3))]


def _ratio(a: float, b: float) -> str:
    return f"{a / b:.3f}" if b > 0 else "-"  # small tensors are not counted, so b may be 0


def _trace(step) -> None:
    function, args = step
    function.get_concrete_function(*args)


def _rounds(*steps):
    from benchmarks import measure

    return measure.take_turns(steps, FLAGS.steps, FLAGS.warmup)


def _peaks(rounds) -> list[float]:
    return [statistics.median(r[i].peak for r in rounds) for i in range(len(rounds[0]))]


MEASURES: dict[str, Callable[[Steps], list[str]]] = {
    "peak": peak, "recompute": recompute, "batch": batch, "together": together}


def lines(row: str) -> list[tuple[str, str]]:
    """(model, activation) of every line of a row's table."""
    composed = ["mish", "swish", "gelu_tanh"]
    if row == "peak":
        return [("resnet50", a) for a in (*composed, "gelu_erf", "keras_mish", "keras_swish",
                                          "keras_gelu_tanh", "keras_gelu")] + [
            ("bert", a) for a in ("mish", "swish", "gelu_erf", "keras_gelu")]
    if row == "together":
        return [(m, a) for m in ("resnet50", "bert") for a in ("mish", "gelu_tanh")]
    return [(m, a) for m in ("resnet50", "bert") for a in composed]


def run_all(row: str) -> int:
    """Run every line in a process of its own; return how many failed."""
    failed, found = 0, []
    for model, activation in lines(row):
        output = rows.in_own_process(f"{model} {activation}", "benchmarks.forward_ad", [
            f"--row={row}", f"--model={model}", f"--activation={activation}",
            f"--steps={FLAGS.steps}", f"--warmup={FLAGS.warmup}", f"--batch={FLAGS.batch}",
            f"--device_bytes={FLAGS.device_bytes}", f"--tiny={FLAGS.tiny}"])
        if output is None:
            failed += 1
            continue
        line = output.splitlines()[-1]
        found.append(line)
        print(line, flush=True)
    if row == "batch" and found:
        ratios = [float(line.split("|")[-2]) for line in found]
        print(f"mean of the batch ratios: {statistics.mean(ratios):.2f}")
    return failed


def main(argv: list[str]) -> int:
    """Print one line, or every line of a row."""
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {argv[1:]}")
    header = ("model", "activation", *COLUMNS[FLAGS.row])
    print(rows.head(header), flush=True)
    if FLAGS.all:
        return 1 if run_all(FLAGS.row) else 0
    import tensorflow as tf

    tf.config.threading.set_inter_op_parallelism_threads(1)
    steps = Steps(FLAGS.model, FLAGS.activation, FLAGS.tiny)
    print(rows.line([FLAGS.model, FLAGS.activation, *MEASURES[FLAGS.row](steps)]))
    return 0


if __name__ == "__main__":
    app.run(main)
