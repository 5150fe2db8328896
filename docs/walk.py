"""Writes `docs/walk.md`: one tensor and one budget, from a trace to the executor.

    python docs/walk.py

A small step is planned and run here; the names and bytes on the page are those of this run. Times
are left out: they are the machine's.
"""

from __future__ import annotations

import os
import pathlib
import re
import sys
import textwrap
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ["TFCKPT_CACHE"] = "off"  # what is shown is a search
os.environ["TFCKPT_CERTIFICATES"] = "off"

import keras
import tensorflow as tf

import tfckpt
from tfckpt import driver
from tfckpt.capture.tfgraph import capture
from tfckpt.carriers.trace_hook import Mark, Records, Traced
from tfckpt.ir.edits import Clone, Rewire, traced
from tfckpt.request.budget import format_bytes
from tfckpt.request.options import make_options

PAGE = pathlib.Path(__file__).with_name("walk.md")
BATCH, WIDTH, LAYERS, BUDGET = 2048, 256, 6, 0.5


def make_step() -> Any:
    """Return a training step of dense layers, not traced yet."""
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.layers.Input((WIDTH,)), *(
        keras.layers.Dense(WIDTH, activation="gelu", name=f"dense_{n}")
        for n in range(1, LAYERS + 1)), keras.layers.Dense(1, name="head")], name="model")
    optimizer = keras.optimizers.SGD(0.1)
    optimizer.build(model.trainable_variables)

    def train_step(x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(x)))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    return train_step


def walked(step: Any, batch: tf.Tensor) -> tuple[Any, driver.Outcome]:
    """Return the step as it was captured, and what the driver made of it."""
    graph = tf.function(step).get_concrete_function(batch).graph
    before = capture(graph)
    options = make_options(budget=BUDGET)
    return before, driver.run(Traced(graph, Mark(options, Records(), "train_step"),
                                     list(graph.inputs)), options)


def page() -> str:
    """Return the text of the page."""
    tf.config.threading.set_inter_op_parallelism_threads(1)
    step, batch = make_step(), tf.random.stateless_normal((BATCH, WIDTH), (1, 2))
    before, outcome = walked(step, batch)
    proposal, edits = outcome.proposals[0], outcome.edits
    assert edits is not None
    decision = proposal.decision
    graph, cost, planned = decision.graph, decision.cost, decision.planned
    schedule = planned.plan.schedule
    again = [v for v, copy in schedule if copy]
    vertex = next(v for v in again if cost.vertices[v].name.endswith("dense_2_1/Gelu/mul"))
    shown = cost.vertices[vertex]
    op, storage = graph.ops[shown.ops[-1]], cost.storages[shown.writes[0]]
    readers = [v for v in cost.vertices if shown.writes[0] in v.reads]
    first, second = (schedule.index((vertex, copy)) for copy in (0, 1))
    copies = [e for e in edits.added if isinstance(e, Clone)]
    copy = next(e for e in copies if e.source == op.name)
    moved = [e for e in edits.rewires if isinstance(e, Rewire)
             and e.tensor.startswith(f"{copy.name}:")]
    measured = [_measured(step, batch, solver=solver) for solver in ("store_all", "auto")]
    return _wrapped(TEXT.format(
        layers=LAYERS, width=WIDTH, batch=BATCH, tensor=traced(op.name),
        traced_ops=f"{len(before.ops):,}", ops=f"{len(graph.ops):,}",
        shape=" x ".join(map(str, op.outputs[0].shape or ())), dtype=op.outputs[0].dtype,
        op_type=op.type,
        vertices=len(cost.vertices), storages=len(cost.storages),
        bytes=format_bytes(storage.bytes), vertex=vertex, name=traced(shown.name),
        readers=", ".join(f"`{traced(r.name)}` ({r.region})" for r in readers),
        budget=BUDGET, plain=format_bytes(proposal.part.plain.peak_bytes),
        allowed=format_bytes(BUDGET * proposal.part.plain.peak_bytes),
        peak=format_bytes(planned.peak_bytes), front=len(planned.front), solver=planned.plan.solver,
        steps=len(schedule), repeats=len(again), first=first, second=second,
        fences=len(planned.plan.fences), waits=len(planned.plan.waits),
        deferred=len(planned.plan.moves.deferred), copies=len(copies), copy=copy.name,
        added=len(edits.added), rewires=len(edits.rewires), controls=len(edits.controls),
        moved=", ".join(f"`{traced(e.op)}`" for e in moved),
        measured_plain=format_bytes(measured[0]), measured=format_bytes(measured[1]),
        ratio=f"{measured[1] / measured[0]:.2f}",
        simulated=format_bytes(_simulated(outcome))))


def _wrapped(text: str) -> str:
    """Return a page whose paragraphs and items are broken into lines of one length."""
    items = re.split(r"\n\n|\n(?=\d+\. )", text.strip())
    made = [textwrap.fill(" ".join(item.split()), 115, break_long_words=False,
                          break_on_hyphens=False,
                          subsequent_indent=" " * len(re.match(r"(\d+\. )?", item)[0]))
            for item in items]
    return "".join(f"{item}\n" if again[:1].isdigit() and item[:1].isdigit() else f"{item}\n\n"
                   for item, again in zip(made, [*made[1:], ""], strict=True)).rstrip() + "\n"


def _simulated(outcome: driver.Outcome) -> int:
    """Return the peak of the step as Grappler makes it, in bytes."""
    asked = outcome.report.compiled if outcome.report else None
    assert asked is not None
    assert asked.after is not None
    return asked.after.temp_bytes


def _measured(step: Any, batch: tf.Tensor, solver: str) -> int:
    """Return the measured peak of the step under a budget, in bytes."""
    return tfckpt.verify.measure_peak(
        tfckpt.checkpoint(tf.function(step), budget="min" if solver == "store_all" else BUDGET,
                          solver=solver), batch, repeats=3)


TEXT = """\
# One tensor and one budget, from the trace to the executor

Written by `docs/walk.py`, which plans and runs the step that it tells of: {layers} dense layers of
{width} units with GELU, a batch of {batch}, `budget={budget}`. Names and bytes are those of that
run; [architecture.md](architecture.md) has the folders in full, [glossary.md](glossary.md) the
words.

The tensor is `{tensor}:0`, an intermediate result of the second layer's GELU: {shape} {dtype},
{bytes}.

1. **The trace ends.** `tfckpt/carriers/trace_hook.py` is called with TensorFlow's FuncGraph before
   it becomes a FunctionDef. Functions that the step calls are inlined
   (`tfckpt/capture/inlining/inline.py`), and Grappler is asked what it would make of the step
   (`tfckpt/capture/grappler/question.py`); its answer takes the place of the ops of the trace
   (`tfckpt/capture/grappler/in_place.py`), so that what is planned is what runs: {traced_ops} ops
   of the trace become {ops}.
2. **The ops become plain data.** `tfckpt/capture/tfgraph.py` reads each op into an `Op` of
   `tfckpt/ir/graph.py`. The one that makes the tensor is a `{op_type}`, region `forward`, pure:
   `tfckpt/ops/arithmetic.py` says that it may run twice, costs little time, and may write its
   result over an input that nobody else reads.
3. **The budget becomes bytes.** `tfckpt/request/budget.py` has read `{budget}` as a fraction of
   the plain peak. What the plain step takes is simulated (`tfckpt/plan/planner.py`, `baseline`):
   {plain}, so {allowed} are allowed.
4. **Ops become costs.** `tfckpt/cost/build.py` joins ops that take no memory with their
   neighbours: {vertices} vertices and {storages} storages. The tensor is a storage of {bytes},
   written by vertex {vertex}, `{name}`, and read by {readers}: the plain step keeps it from the
   forward pass until that reader in the backward pass has run.
5. **Solvers propose.** Each algorithm in `tfckpt/solvers/` says which storages of the forward pass
   to keep; one of them, here `{solver}` (`tfckpt/plan/candidates.py` is the table), keeps what
   lies between layers and not the tensor. `tfckpt/plan/keep_sets.py` makes a schedule of that:
   whatever else the backward pass reads is computed again just before.
6. **The search prices and improves.** `tfckpt/plan/search.py` runs each proposal through
   `tfckpt/simulate/executor.py`, the order in which TensorFlow would run it, and
   `tfckpt/simulate/allocator.py`, what its allocator would then take. Of {front} plans that no
   other beats in both peak and time the fastest that fits the budget is taken: {peak}.
7. **The plan is a schedule.** {steps} steps, {repeats} of them second runs. Vertex {vertex} is
   step {first}, and again step {second}, just before its reader in the backward pass; between the
   two nothing holds its result. {deferred} vertices are deferred, {fences} places have control
   barriers, {waits} ops wait for another.
8. **The plan becomes edits.** `tfckpt/rewrite/realise.py` runs the passes of
   `tfckpt/rewrite/passes/`. The copy of the `{op_type}` is called `{copy}`; it is read instead of
   the original by {moved}. In all {copies} copies, {added} new ops, {rewires} rewired inputs and
   {controls} new control edges: barriers have a copy start no earlier than the backward pass needs
   it, and marks have Grappler and XLA not merge it with the original. The edits are checked as a
   whole.
9. **Judges.** `tfckpt/driving/judges.py`: the plan can be carried out, and simulated on what
   Grappler makes of it the step takes {simulated}. A plan that fails here costs that plan; the
   next on the list is tried.
10. **The graph is changed.** `tfckpt/rewrite/appliers/funcgraph.py` edits the FuncGraph in place,
    TensorFlow makes its FunctionDef of it, and `fit` or the caller goes on as if nothing had
    happened.
11. **The step runs.** `tfckpt.verify.measure_peak` counts what TensorFlow's allocator took above
    what was there when the step began: {measured_plain} plain, {measured} with the plan, {ratio}
    of it.
12. **The report tells.** `tfckpt/report/report.py` has all of these numbers;
    `tfckpt/verify/arithmetic/background.py` compares the arithmetic of both steps while the first
    ones train, and `report.identical` says what came of that.

A budget that cannot be met ends at 6 with an `InfeasibleBudgetError` that names the smallest that
can. With `jit_compile=True` XLA is asked at 9 how many bytes it would take
(`tfckpt/verify/asking/xla.py`). A graph in a file comes in by `tfckpt/carriers/files.py` instead
of 1, and goes out by `tfckpt/rewrite/appliers/graphdef.py` instead of 10.
"""


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    sys.exit(0)
