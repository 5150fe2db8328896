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
from tfckpt.carriers.records import Mark, Records
from tfckpt.carriers.traced import Traced
from tfckpt.driving.carrier import Outcome
from tfckpt.ir.edits import Clone, Edits, Rewire, traced
from tfckpt.ir.hlo import XlaMemory
from tfckpt.plan.candidates import OWN
from tfckpt.request.budget import format_bytes
from tfckpt.request.options import make_options
from tfckpt.rewrite.names import FENCE

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


def walked(step: Any, batch: tf.Tensor) -> tuple[Any, Outcome]:
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
    measured = [tfckpt.verify.measure_peak(made, batch, repeats=3) for made in (
        tf.function(step), tfckpt.checkpoint(tf.function(step), budget=BUDGET))]
    simulated, kinds = _simulated(outcome), _kinds(edits)
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
        where=_where(planned.plan.solver),
        steps=len(schedule), repeats=len(again), first=first, second=second,
        fences=len(planned.plan.fences), waits=len(planned.plan.waits),
        deferred=len(planned.plan.moves.deferred), copy=copy.name, added=len(edits.added),
        kinds=", ".join(f"{count} {kind}" for kind, count in kinds.items()),
        rewires=len(edits.rewires), controls=len(edits.controls),
        moved=", ".join(f"`{traced(e.op)}`" for e in moved),
        measured_plain=format_bytes(measured[0]), measured=format_bytes(measured[1]),
        ratio=f"{measured[1] / measured[0]:.2f}",
        expected=format_bytes(simulated.temp_bytes), most=format_bytes(simulated.bound)))


def _wrapped(text: str) -> str:
    """Return a page whose paragraphs and items are broken into lines of one length."""
    items = re.split(r"\n\n|\n(?=\d+\. )", text.strip())
    made = [textwrap.fill(" ".join(item.split()), 115, break_long_words=False,
                          break_on_hyphens=False,
                          subsequent_indent=" " * len(re.match(r"(\d+\. )?", item)[0]))
            for item in items]
    return "".join(f"{item}\n" if again[:1].isdigit() and item[:1].isdigit() else f"{item}\n\n"
                   for item, again in zip(made, [*made[1:], ""], strict=True)).rstrip() + "\n"


def _where(solver: str) -> str:
    """Return where a proposal comes from, as the report names it."""
    name, _, changed = solver.partition(", ")
    own = name in {solve.__name__ for solve in OWN}
    return ("one of the planner's own" if own else f"`tfckpt/solvers/{name}.py`") + (
        ", which the search schedule by schedule has changed (*rescheduled*)" if changed else "")


def _kinds(edits: Edits) -> dict[str, int]:
    """Return how many new ops there are of each kind, all of them together."""
    found = {"copies of forward ops": 0, "control barriers (NoOp)": 0,
             "extra readers (`_tap`), for which Grappler treats an op as in the plain step": 0,
             "pass-throughs (`_guard`, `_wait`) of an input, by which what reads it waits": 0,
             "others": 0}
    copies, barriers, readers, inputs, others = found
    for op in edits.added:
        name = op.name.rpartition("-tfckpt")[2]
        found[copies if isinstance(op, Clone) else barriers if op.name.startswith(FENCE)
              else readers if name.startswith("_tap")
              else inputs if name.startswith(("_guard", "_wait")) else others] += 1
    return {kind: count for kind, count in found.items() if count}


def _simulated(outcome: Outcome) -> XlaMemory:
    """Return what the step with its plan takes in the simulation before it is applied."""
    asked = outcome.report.compiled if outcome.report else None
    assert asked is not None
    assert asked.after is not None
    return asked.after


TEXT = """\
# One tensor and one budget, from the trace to the executor

Written by `docs/walk.py`, which plans and runs the step that it tells of: {layers} dense layers of
{width} units with GELU, a batch of {batch}, `budget={budget}`. Names and bytes are those of that
run; [architecture.md](architecture.md) has the folders in full, [glossary.md](glossary.md) the
words.

The tensor is `{tensor}:0`, an intermediate result of the second layer's GELU: {shape} {dtype},
{bytes}.

1. **The trace ends.** `tfckpt/carriers/trace_hook.py` is called with TensorFlow's FuncGraph, the
   graph into which a function is traced, before it becomes a FunctionDef, the form in which it is
   kept and run. Functions that the step calls are inlined (`tfckpt/capture/inlining/inline.py`).
   Grappler, TensorFlow's own optimizer, would merge and fuse ops later, when the step is first
   called, so that other tensors would be kept than the trace says. So it is asked now what it makes
   of the step (`tfckpt/capture/grappler/question.py`); its answer takes the place of the ops of the
   trace (`tfckpt/capture/grappler/in_place.py`), marked so that Grappler changes nothing more of
   it: {traced_ops} ops of the trace become {ops}. They are named as in the trace, after the prefix
   `optimized/`, which this page leaves out where it names ops of the plain step.
2. **The ops become plain data.** `tfckpt/capture/tfgraph.py` reads each op into an `Op` of
   `tfckpt/ir/graph.py`. The one that makes the tensor is a `{op_type}`, region `forward` (a part of
   the forward pass), pure: `tfckpt/ops/arithmetic.py` says that it may run twice, costs little
   time, and may write its result over an input that nobody else reads.
3. **The budget becomes bytes.** `tfckpt/request/budget.py` has read `{budget}` as a fraction of
   the plain peak. What the plain step takes is simulated (`baseline` in
   `tfckpt/plan/choosing/planned.py`): {plain}, so {allowed} are allowed.
4. **Ops become costs.** `tfckpt/cost/build.py` joins ops that take no memory with their
   neighbours: {vertices} vertices and {storages} storages. The tensor is a storage of {bytes},
   written by vertex {vertex}, `{name}`, and read by {readers}: the plain step keeps it from the
   forward pass until that reader in the backward pass has run.
5. **Solvers propose.** Each algorithm in `tfckpt/solvers/`, and a few proposals of the planner's
   own, say which storages of the forward pass to keep; `tfckpt/plan/candidates.py` is the table of
   both. `tfckpt/plan/keep_sets.py` makes a schedule of that (`tfckpt/solvers/recursion.py` where
   later runs of the forward keep something as well): whatever else the backward pass reads is
   computed again just before. The plan that is taken in the end comes from `{solver}`
   ({where}), and does not keep the tensor.
6. **The search prices and improves.** `tfckpt/plan/search.py` starts from the proposals and looks
   for better schedules, by their live bytes and their time (`tfckpt/simulate/simulate.py`). It
   finds {front} plans that no other beats in both. Of these and others near them
   `tfckpt/plan/planner.py` takes the fastest that fits; those that may be it are simulated further:
   `tfckpt/simulate/executor.py` has the order in which TensorFlow would run them, and
   `tfckpt/simulate/allocator.py` what its allocator would then take. The plan that is taken needs
   {peak} at most.
7. **The plan is a schedule.** {steps} steps, {repeats} of them second runs. Vertex {vertex} is
   step {first}, and again step {second}, before its reader in the backward pass; between the two
   nothing holds its result. {deferred} vertices are deferred (they run just before something reads
   them), {fences} places have control barriers, before which no copy that follows may start, and
   {waits} single ops wait for another where TensorFlow would run ahead.
8. **The plan becomes edits.** `tfckpt/rewrite/realise.py` runs the passes of
   `tfckpt/rewrite/passes/`. The copy of the `{op_type}` is called `{copy}`; {moved} reads the copy
   now, and no longer the original. In all there are {added} new ops: {kinds}. {rewires} inputs of
   ops that were there read something else, and {controls} of these ops wait for one more. The
   copies have marks, attributes by which Grappler does not merge them with the originals. The edits
   are checked as a whole.
9. **Judges** are what a plan has to pass before it is applied (`tfckpt/driving/judges.py`,
   `tfckpt/driving/trials.py`): its edits can be made, and it fits where it is simulated once more,
   in more circumstances than in 6. Nobody has to be asked for that, since the graph is Grappler's
   already: {expected} are expected, {most} at most. A plan that fails here is given up, and the
   next on the list is tried.
10. **The graph is changed.** `tfckpt/rewrite/appliers/funcgraph.py` edits the FuncGraph in place,
    TensorFlow makes its FunctionDef of it, and `fit` or the caller goes on as if nothing had
    happened.
11. **The step runs.** `tfckpt.verify.measure_peak` counts what TensorFlow's allocator took above
    what was there when the step began: {measured_plain} without tfckpt, {measured} with the plan,
    {ratio} of it.
12. **The report tells.** `tfckpt/report/report.py` has all of these numbers;
    `tfckpt/verify/arithmetic/background.py` compares the arithmetic of both steps while the first
    ones train, and `report.identical` says what came of that.

A budget that cannot be met ends at 6 or 9 with an `InfeasibleBudgetError` that names the smallest
that can. With `jit_compile=True` the ops of the trace stay as they are in 1, and XLA is asked at 9
how many bytes it would take (`tfckpt/verify/asking/xla.py`). A graph in a file comes in by
`tfckpt/carriers/files.py` instead of 1, and goes out by `tfckpt/rewrite/appliers/graphdef.py`
instead of 10.
"""


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    sys.exit(0)
