"""Plans the entries of the zoo twice: with the decorator, and unchanged under the native pass.

    python -m benchmarks.carriers [GROUP or GROUP-NAME ...]

A row has the peaks that the two planned (simulated, above what a step starts with), the native
one as a multiple of the decorator's, the measured peaks where there is enough to measure, and the
reason for a difference, or what the pass says of a step that is no better than it was. Entries that
XLA compiles do not pass through Grappler, and those that need a process of their own get none
here. The last line counts what is within 5 %.
"""

from __future__ import annotations

import dataclasses
import statistics
import sys
from collections.abc import Mapping

from benchmarks.measure import Meter
from tests.support import process
from tests.zoo import alone, groups
from tests.zoo import entry as zoo

REPEATS = 3
COUNTED = 1 << 20
WITHIN = 1.05


_LOOPS = "loops are lowered: not recomputed, and what they keep is not counted"
_BRANCHES = "branches are lowered: what they read is kept, and counted twice"
_OPEN = "the batch is open, and a pass sees no call: one that stands in is planned for"
_SHAPES = "shapes that only set_shape tells are unknown to the pass"
_MERGED = "Grappler's graph is another: merged, folded, rearranged (not looked into one by one)"
_SMALL = "a few kB of the update stand elsewhere in Grappler's order"
_UNSEEN = "the function does not pass through Grappler"
REASONS: Mapping[str, str] = {
    **dict.fromkeys(("state-static_lookup_of_strings", "state-python_calls",
                     "state-queue_between_steps"), _SHAPES),
    **dict.fromkeys(("state-assertions", "control-cond", "control-switch_case"), _BRANCHES),
    **dict.fromkeys((
        "control-lstm", "control-gru", "control-bidirectional_fit", "control-convolutional_lstm",
        "control-stacked_lstm", "control-stacked_lstm_fit", "control-stacked_gru",
        "control-stacked_lstm_with_masks_and_dropout", "control-while_loop_between_layers",
        "control-loops_in_a_row", "control-loops_of_branches_in_loops", "control-scan",
        "control-loops_with_random_numbers", "control-loops_with_a_python_function",
        "control-loops_whose_variable_is_written_in_between", "control-map_fn",
        "control-loops_whose_variable_is_written_behind_them", "tapes-jacobian_unrolled",
        "control-step_called_by_a_loop_in_a_function", "control-whole_loop_decorated",
        "control-several_steps_per_execution",
        "control-steps_per_execution_with_dropout_and_statistics",
        "distribution-mirrored_recurrent_layers",
        "architectures-sequence_to_sequence_with_attention"), _LOOPS),
    **dict.fromkeys((
        "shapes-unknown_batch", "shapes-unknown_batch_by_hand", "shapes-unknown_length",
        "shapes-unknown_batch_square_by_hand", "shapes-unknown_batch_convolutions",
        "shapes-unknown_batch_attention", "shapes-unknown_rank_given_shape_inside",
        "shapes-smaller_last_batch_in_fit", "shapes-dataset_of_unknown_batches",
        "shapes-ragged_input", "shapes-sparse_input", "shapes-empty_batch",
        "shapes-retraced_for_each_shape", "shapes-relaxed_shapes"), _OPEN),
    **dict.fromkeys((
        "randomness-dropout_in_attention", "precision-quantisation_aware",
        "optimizers-sparse_gradients_adagrad_fit", "tapes-hessian_vector_product",
        "tapes-forward_accumulator", "tapes-meta_learning", "tapes-recompute_grad_already_used",
        "tapes-gradients_of_constants", "shapes-retraced_for_python_arguments",
        "architectures-text_classification_transformer", "architectures-graph_convolution",
        "architectures-wasserstein_with_gradient_penalty", "architectures-diffusion_model",
        "architectures-gated_mixture_of_experts"), _MERGED),
    **dict.fromkeys((
        "randomness-dropout", "randomness-dropout_of_a_shared_generator",
        "optimizers-accumulates_and_averages", "optimizers-accumulation_in_fit",
        "control-lstm_unrolled", "shapes-several_inputs_and_outputs",
        "precision-float16_fit"), _SMALL),
    "tapes-custom_gradient_with_variables": "all of such a custom gradient looks like an update",
    "precision-bfloat16_convolutions": "TensorFlow imports no fused convolution of bfloat16",
    "compilation-without_grappler": _UNSEEN,
}
"""Why entries need more under the pass, or cannot be compared."""


@dataclasses.dataclass(frozen=True)
class Row:
    """One entry: bytes with the decorator and under the pass; 0 where nothing was planned."""

    name: str
    plain: tuple[int, int]
    planned: tuple[int, int]
    measured: tuple[int, int]
    said: str

    @property
    def ratio(self) -> float:
        """Return what the pass plans as a multiple of what the decorator does."""
        return self.planned[1] / self.planned[0] if all(self.planned) else float("nan")

    def __str__(self) -> str:
        counted = [f"{b / 1e3:.0f}" if min(self.measured) >= COUNTED else "" for b in self.measured]
        return (f"| {self.name} | {self.plain[0] / 1e3:.0f} | {self.planned[0] / 1e3:.0f} | "
                f"{self.plain[1] / 1e3:.0f} | {self.planned[1] / 1e3:.0f} | {self.ratio:.2f} | "
                f"{counted[0]} | {counted[1]} | {reason_for(self.name) or self.said} |")


def reason_for(name: str) -> str:
    """Return why an entry is not compared with the decorator; "" if it is."""
    return REASONS.get(name, "")


def compare(entry: zoo.Entry) -> Row:
    """Train an entry both ways.

    Raises:
      Exception: whatever its training does.
    """
    import grappler_ext

    try:
        with process.refusals_of_the_pass() as refused, zoo.conditions(entry):
            decorated = zoo.train(entry, rewrite=True)
            ours = _measured(decorated.training)
            with grappler_ext.enabled():
                native = zoo.train(entry, rewrite=False)
                passed = _measured(native.training)
                reports = list(grappler_ext.reports().values())
    finally:
        process.without_pass()
    found = [max(each, key=lambda r: r.baseline_peak_bytes, default=None)
             for each in (decorated.reports, reports)]
    said = "; ".join(refused)
    if not said and found[1] is not None:
        said = found[1].reason
    elif not said and found[0] is not None:
        said = "no function with a gradient passed through Grappler"
    return Row(f"{entry.group}-{entry.name}",
               *(tuple(0 if r is None else getattr(r, field) for r in found)
                 for field in ("baseline_peak_bytes", "planned_peak_bytes")),
               (ours, passed), said)


def _measured(training: zoo.Training) -> int:
    """Return the median peak of a step, in bytes."""
    peaks = []
    for _ in range(REPEATS):
        meter = Meter()
        meter.start()
        training.step(*training.batches[-1])
        peaks.append(meter.stop().peak)
    return int(statistics.median(peaks))


def main(wanted: list[str]) -> None:
    """Print one row for each entry, and how many are within 5 %."""
    alone.prepare()
    print("| entry | plain kB | decorator kB | plain for the pass kB | pass kB | pass / decorator "
          "| decorator measured kB | pass measured kB | said |")
    print("| --- " * 9 + "|")
    rows = []
    for entry in groups.ENTRIES:
        name = f"{entry.group}-{entry.name}"
        if entry.xla or entry.alone or wanted and not {entry.group, name} & set(wanted):
            continue
        try:
            rows.append(compare(entry))
            print(rows[-1], flush=True)
        except Exception as error:  # one row says so, the others are printed all the same
            print(f"| {name} | failed: {str(error).splitlines()[0][:80]} |", flush=True)
    planned = [row.ratio for row in rows if all(row.planned)]
    print(f"\n{len(planned)} planned both ways, {sum(r <= WITHIN for r in planned)} of them no "
          f"more than 5 % above the decorator; median {statistics.median(planned or [0]):.2f}")


if __name__ == "__main__":
    main(sys.argv[1:])
