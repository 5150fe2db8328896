"""The plan store within a process: what a key depends on, what comes back, and what is not kept."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import random

import pytest
import tensorflow as tf

from tests.support.carriers import Given
from tfckpt import driver
from tfckpt.capture.grappler import question as grappler
from tfckpt.capture.tfgraph import capture
from tfckpt.driver import run
from tfckpt.driving.carrier import Outcome
from tfckpt.driving.here import place
from tfckpt.driving.proposals import PLAIN_FITS, device_parts_of
from tfckpt.errors import InfeasibleBudgetError, PlanError, RewriteError
from tfckpt.ir.edits import Edits
from tfckpt.ir.graph import BACKWARD, Branches, Graph, Loop
from tfckpt.request.options import make_options
from tfckpt.rewrite.passes.operand_order import keep_operand_order, read_of
from tfckpt.rewrite.plain_step import LiveStep
from tfckpt.store import files, key, surroundings
from tfckpt.store.definition import definition_digest
from tfckpt.store.key import graph_digest, key_of
from tfckpt.store.optimised import Answers
from tfckpt.store.texts import Texts

ROWS, WIDTH, LAYERS = 512, 128, 6


@pytest.fixture
def where(tmp_path, monkeypatch) -> pathlib.Path:
    """The folder of a store that is switched on."""
    monkeypatch.setenv(files.VARIABLE, str(tmp_path / "plans"))
    return tmp_path / "plans"


@pytest.fixture(scope="module")
def traced() -> tf.Graph:
    return trace("layer")


def trace(scope: str, rows: int = ROWS, activation=tf.nn.gelu) -> tf.Graph:
    """Return a step of dense layers under a name."""
    weights = [tf.Variable(tf.ones([WIDTH, WIDTH]), name=f"{scope}_{i}") for i in range(LAYERS)]

    def step(x):
        with tf.GradientTape() as tape:
            for i, w in enumerate(weights):
                with tf.name_scope(f"{scope}_{i}"):
                    x = activation(x @ w)
            loss = tf.reduce_mean(x * x)
        for w, g in zip(weights, tape.gradient(loss, weights), strict=True):
            w.assign_sub(0.1 * g)
        return loss

    return tf.function(step).get_concrete_function(
        tf.TensorSpec([rows, WIDTH])).graph


@pytest.fixture(scope="module")
def graph(traced) -> Graph:
    return capture(traced)


def renamed(graph: Graph) -> Graph:
    """Return the same graph with names that sort otherwise."""
    new = {op.name: f"n{len(graph.ops) - i}" for i, op in enumerate(graph.ops)}
    ops = tuple(dataclasses.replace(
        op, name=new[op.name], later_writes=tuple(new[name] for name in op.later_writes))
        for op in graph.ops)
    return dataclasses.replace(graph, name="other", ops=ops, inlined=("f: inlined",))


def planned(graph: Graph, **options) -> Outcome:
    return run(Given(graph), make_options(**options))


def searched(monkeypatch) -> list:
    """Return what notes each search of plans."""
    found, search = [], driver.searches

    def noted(*arguments):
        found.append(arguments)
        return search(*arguments)

    monkeypatch.setattr(driver, "searches", noted)
    return found


# The key.


def test_names_and_the_order_of_control_edges_are_no_part_of_the_hash(graph):
    other = renamed(graph)
    shuffled = random.Random(3)
    controls = dataclasses.replace(other, ops=tuple(dataclasses.replace(
        op, controls=tuple(shuffled.sample(op.controls, len(op.controls)))) for op in other.ops))
    assert graph_digest(graph) == graph_digest(other) == graph_digest(controls)
    assert graph_digest(capture(trace("another_name"))) == graph_digest(graph)


_LOOP = Loop(3, Graph("body", (), (), ()))


@pytest.mark.parametrize("field, value", [
    ("type", "Tanh"), ("inputs", lambda op: op.inputs[::-1]), ("controls", (0,)),
    ("outputs", lambda op: (dataclasses.replace(op.outputs[0], dtype="float16"),)),
    ("outputs", lambda op: (dataclasses.replace(op.outputs[0], shape=(1, 2)),)),
    ("outputs", lambda op: (dataclasses.replace(op.outputs[0], bytes=5),)),
    ("outputs", lambda op: (dataclasses.replace(op.outputs[0], variable_bytes=5),)),
    ("region", BACKWARD), ("pure", False), ("device", "/device:CPU:1"),
    ("attrs", {"transpose_a": True}), ("conditional", True), ("workspace", 5),
    ("loop", _LOOP), ("branches", Branches((_LOOP.body, _LOOP.body)))])
def test_all_else_of_an_op_is_part_of_the_hash(graph, field, value):
    i, op = next((i, op) for i, op in enumerate(graph.ops) if op.type == "MatMul")
    changed = dataclasses.replace(op, **{field: value(op) if callable(value) else value})
    assert changed != op
    other = dataclasses.replace(graph, ops=(*graph.ops[:i], changed, *graph.ops[i + 1:]))
    assert graph_digest(other) != graph_digest(graph)


@pytest.mark.parametrize("change", [
    lambda loop: {"trips": 4}, lambda loop: {"shares": {0: 1}}, lambda loop: {"takes": {0: (1,)}},
    lambda loop: {"body": Graph("b", (), (), (0,))}])
def test_what_is_known_of_a_loop_is_part_of_the_hash(graph, change):
    def digest(loop: Loop) -> str:
        ops = (dataclasses.replace(graph.ops[0], name="a"),
               dataclasses.replace(graph.ops[0], name="b", loop=loop))
        return graph_digest(Graph("", ops, (), ()))

    assert digest(dataclasses.replace(_LOOP, **change(_LOOP))) != digest(_LOOP)


def test_what_leaves_the_step_is_part_of_the_hash(graph):
    for change in ({"fetches": ()}, {"sinks": graph.sinks[1:]}):
        assert graph_digest(dataclasses.replace(graph, **change)) != graph_digest(graph)


def keys(graph: Graph, target=None, others=None, **options) -> str:
    chosen = make_options(**options)
    parts = device_parts_of(graph, chosen, place(target, False, False))
    return key_of(graph, parts, chosen, surroundings.surroundings() if others is None else others)


def test_options_are_part_of_the_key(graph):
    target = place(None, False, False)("")
    rates = dataclasses.replace(target.rates, known={graph.ops[5].name: 1.0})
    found = [keys(graph), keys(graph, budget=0.5), keys(graph, budget=0.6), keys(graph, fad=True),
             keys(graph, fad="auto"), keys(graph, solver="chen"), keys(graph, free_moves=False),
             keys(graph, objective="memory"), keys(graph, xla_trials=3), keys(graph, budget="2GB"),
             keys(graph, dataclasses.replace(target, device="GPU")),
             keys(graph, dataclasses.replace(target, rates=dataclasses.replace(
                 target.rates, flops_per_second=1.0))),
             keys(graph, dataclasses.replace(target, rates=rates)), keys(graph, others={})]
    assert len(set(found)) == len(found)
    assert keys(graph, batch_size=7) == keys(graph) == keys(renamed(graph))


def test_seconds_by_name_count_for_the_op(graph):
    target, other = place(None, False, False)(""), renamed(graph)

    def key_with(of: Graph, index: int) -> str:
        rates = dataclasses.replace(target.rates, known={of.ops[index].name: 1.0, "gone": 2.0})
        return keys(of, dataclasses.replace(target, rates=rates))

    assert key_with(graph, 5) == key_with(other, 5) != key_with(other, 6)


@pytest.mark.parametrize("name, value, counts", [
    ("XLA_FLAGS", "--x", True), ("TF_XLA_FLAGS", "--x", True), ("TF_ENABLE_ONEDNN_OPTS", "7", True),
    ("TF_CPP_MIN_LOG_LEVEL", "1", False), ("HOME", "/x", False)])
def test_flags_of_the_process_are_part_of_the_key(monkeypatch, name, value, counts):
    before = key.plain(surroundings.surroundings())
    monkeypatch.setenv(name, value)
    assert (key.plain(surroundings.surroundings()) != before) == counts


def test_our_own_source_is_part_of_the_key(monkeypatch, tmp_path):
    (tmp_path / "module.py").write_text("x = 1")
    monkeypatch.setattr(surroundings.tfckpt, "__file__", str(tmp_path / "__init__.py"))
    found = []
    for text in ("x = 1", "x = 2"):
        (tmp_path / "module.py").write_text(text)
        surroundings._source.cache_clear()
        found.append(surroundings.surroundings()["source"])
    surroundings._source.cache_clear()
    assert found[0] != found[1]


# What XLA is asked about.


def definition(scope: str = "layer", activation=tf.nn.gelu, factor: float = 2.0, branch: float = 3.0
               ) -> tf.compat.v1.GraphDef:
    """Return a graph with a constant, an attribute and functions, traced under a name."""
    @tf.function
    def nested(x):
        with tf.name_scope(scope):
            return activation(x) * branch

    def step(x):
        with tf.name_scope(scope):
            x = tf.transpose(x @ x) * factor
        return tf.cond(tf.reduce_sum(x) > 0, lambda: nested(x), lambda: x)

    return tf.function(step, autograph=False).get_concrete_function(
        tf.TensorSpec([4, 4])).graph.as_graph_def()


def test_the_hash_of_a_definition_knows_no_names():
    assert definition_digest(definition("one")) == definition_digest(definition("another"))


@pytest.mark.parametrize("change", [
    {"activation": tf.nn.tanh}, {"factor": 2.5}, {"branch": 2.5}])
def test_the_hash_of_a_definition_knows_constants_and_functions(change):
    assert definition_digest(definition(**change)) != definition_digest(definition())


def test_the_hash_of_a_definition_knows_attributes_inputs_and_devices():
    plain = definition()
    found = {definition_digest(plain)}

    def turned(node) -> None:
        node.attr["transpose_a"].b = True

    def swapped(node) -> None:
        node.input[0] = "x" if node.input[0] != "x" else plain.node[0].name + ":1"

    for change in (turned, swapped, lambda node: setattr(node, "device", "/device:CPU:1"),
                   lambda node: node.input.append("^x")):
        other = tf.compat.v1.GraphDef()
        other.CopyFrom(plain)
        change(next(node for node in other.node if node.op == "MatMul"))
        found.add(definition_digest(other))
    assert len(found) == 5


# Texts.


def test_texts_are_said_with_the_names_of_here(graph):
    other = renamed(graph)
    name, new = graph.ops[7].name, other.ops[7].name
    assert "/" in graph.ops[-1].name or "/" in name
    text = f"the plan of {name!r}: {name}-tfckpt2 reads {name}:0, 1,5 MB; {name}x stays"
    pieces = json.loads(json.dumps(Texts(graph).pieces(text)))
    assert Texts(other).text(pieces) == (
        f"the plan of {new!r}: {new}-tfckpt2 reads {new}:0, 1,5 MB; {name}x stays")
    assert Texts(graph).text(pieces) == text
    assert Texts(graph).pieces("no name: -tfckpt1") == "no name: -tfckpt1"
    for wrong in (-1, len(graph.ops)):
        with pytest.raises(IndexError):
            Texts(graph).text(["", wrong, ""])


# What comes back.


def plans_in(where: pathlib.Path) -> list[files.Kept]:
    """Return the plans of a store; what searches have found lies beside them."""
    return [file for file in files.kept(where) if "kind" not in file.head]


@pytest.mark.parametrize("options", [
    {}, {"budget": 0.6}, {"solver": "chen"}, {"fad": True}, {"fad": "auto"}])
def test_a_step_is_planned_once(graph, where, monkeypatch, options):
    searches = searched(monkeypatch)
    first = planned(graph, **options)
    again = planned(graph, **options)
    assert len(searches) == 1 and len(plans_in(where)) == 1
    assert first.report.applied and (first.plans, first.edits) == (again.plans, again.edits)
    assert not first.report.stored and again.report.stored == str(
        plans_in(where)[0].head["made"])[:10]
    assert "taken from the plan store (made 2" in str(again.report)
    for field in dataclasses.fields(first.report):
        if field.name not in ("plan_seconds", "stored"):
            assert getattr(again.report, field.name) == getattr(first.report, field.name)
    for name in ("points", "others", "chosen"):
        assert getattr(again.report.front, name) == getattr(first.report.front, name)
    assert again.report.explain() == first.report.explain()


def test_another_step_option_or_size_is_planned(graph, where, monkeypatch):
    searches = searched(monkeypatch)
    for run_one in (lambda: planned(graph), lambda: planned(graph, budget=0.7),
                    lambda: planned(capture(trace("layer", 2 * ROWS)))):
        run_one()
    assert len(searches) == 3 == len(plans_in(where))


def test_a_step_under_other_names_gets_the_plan(graph, where, monkeypatch):
    searches = searched(monkeypatch)
    first, again = planned(graph), planned(renamed(graph))
    assert len(searches) == 1 and again.report.stored and again.report.name == "other"
    assert first.plans == again.plans and again.edits.clones
    sources = {op.name for op in renamed(graph).ops}
    assert all(clone.source in sources for clone in again.edits.clones)


def test_what_becomes_of_derivatives_comes_back_under_other_names(graph, where):
    first, again = planned(graph, fad=True), planned(renamed(graph), fad=True)
    new = {op.name: other.name for op, other in zip(graph.ops, renamed(graph).ops, strict=True)}
    assert any(r.taken for r in first.report.forward_ad_regions) and again.report.stored
    assert again.report.forward_ad_regions == tuple(
        dataclasses.replace(r, source=new[r.source], ops=tuple(new[op] for op in r.ops))
        for r in first.report.forward_ad_regions)
    assert len(first.edits.added) == len(again.edits.added)


def test_plans_that_were_given_up_come_back(graph, where, monkeypatch):
    """A judge refuses the first plan; the second is kept, and needs not be refused again."""
    refused = []

    def judge(candidate) -> None:
        if candidate.edits is not None and not refused:
            refused.append(candidate)
            raise RewriteError(f"rewrite: {graph.ops[7].name!r} is not liked")

    monkeypatch.setattr(driver, "JUDGES", (*driver.JUDGES, judge))
    first, again = planned(graph), planned(renamed(graph))
    assert again.report.stored and first.plans == again.plans and len(refused) == 1
    assert len(first.report.rejected) == 1 and graph.ops[7].name in first.report.rejected[0]
    assert again.report.rejected == (first.report.rejected[0].replace(
        graph.ops[7].name, renamed(graph).ops[7].name),)


# What does not fit is planned anew.


def tampered(where: pathlib.Path, change) -> None:
    """Have the one plan of a store say something else, such that the file is whole."""
    path = plans_in(where)[0].path
    head, plan = files.read(where, path.stem)
    change(plan)
    files.write(where, path.stem, {k: v for k, v in head.items()
                                   if k not in ("format", "sha256")}, plan)


@pytest.mark.parametrize("change", [
    lambda plan: plan["parts"][0]["decision"]["plan"]["vertices"].reverse(),
    lambda plan: plan["parts"][0]["decision"]["plan"].pop("order"),
    lambda plan: plan["parts"][0]["decision"]["plan"]["waits"].append([0, 9, 1, 0]),
    lambda plan: plan["parts"][0]["decision"].update(requested=5),
    lambda plan: plan["parts"][0]["decision"]["regions"].append([0, [], 1, True, ""]),
    lambda plan: plan["parts"][0].update(decision=None),
    lambda plan: plan["parts"][0].update(without_loops=[]),
    lambda plan: plan["parts"].append(plan["parts"][0]), lambda plan: plan.clear()])
def test_a_kept_plan_that_does_not_fit_is_dropped(graph, where, monkeypatch, change):
    first = planned(graph)
    tampered(where, change)
    searches = searched(monkeypatch)
    again, later = planned(graph), planned(graph)
    assert len(searches) == 1 and not again.report.stored and later.report.stored
    assert first.plans == again.plans == later.plans


def test_a_kept_plan_that_cannot_be_applied_is_dropped(graph, where, monkeypatch):
    class Refusing(Given):
        def apply(self, edits) -> None:
            if self.refuses:
                self.refuses = False
                raise RewriteError("rewrite: not this one")
            super().apply(edits)

    planned(graph)
    searches = searched(monkeypatch)
    carrier = Refusing(graph)
    carrier.refuses = True
    outcome = run(carrier, make_options())
    assert len(searches) == 1 and outcome.report.applied and not outcome.report.stored
    assert carrier.applied == [outcome.edits]


def test_a_kept_plan_survives_the_time_limit(graph, where, monkeypatch):
    planned(graph)

    def judge(candidate) -> None:
        raise PlanError("plan: planning took longer than time_limit=1 seconds")

    for over in (True, False):
        with monkeypatch.context() as patch:
            patch.setattr("tfckpt.store.entry.time_is_over", lambda over=over: over)
            patch.setattr(files, "write", lambda *arguments: None)
            patch.setattr(driver, "JUDGES", (judge,))
            with pytest.raises(PlanError):
                planned(graph)
        assert bool(plans_in(where)) == over


# What is not kept.


def test_nothing_is_kept_where_the_store_is_off(graph, monkeypatch):
    written = []
    monkeypatch.setattr(files, "write", lambda *arguments: written.append(arguments))
    planned(graph)
    assert not written


def test_a_step_that_fits_is_not_kept(graph, where):
    assert planned(graph, budget="10GB").report.reason == PLAIN_FITS
    assert not where.exists()


def test_a_budget_that_is_refused_is_not_kept(graph, where):
    with pytest.raises(InfeasibleBudgetError):
        planned(graph, budget=0.01)
    assert not plans_in(where)


def test_what_the_clock_cut_short_is_not_kept(graph, where, monkeypatch):
    for module in ("entry", "pools"):
        monkeypatch.setattr(f"tfckpt.store.{module}.time_is_over", lambda: True)
    assert planned(graph).report.applied
    assert not where.exists()


def test_what_a_fault_had_part_in_is_not_kept(graph, where, monkeypatch):
    def judge(candidate) -> None:
        if candidate.edits is not None and not failed:
            failed.append(candidate)
            raise ZeroDivisionError

    failed: list = []
    monkeypatch.setattr(driver, "JUDGES", (*driver.JUDGES, judge))
    assert planned(graph).report.rejected and failed
    assert not plans_in(where)


@pytest.mark.parametrize("broken", ["tfckpt.store.entry.key_of", "tfckpt.store.entry.to_record"])
def test_a_fault_of_the_store_costs_nothing_but_the_plan(graph, where, monkeypatch, broken):
    def fails(*arguments):
        raise ZeroDivisionError

    monkeypatch.setattr(broken, fails)
    assert planned(graph).report.applied
    assert not plans_in(where)


@pytest.mark.parametrize("broken", ["_key", "_entry", "_candidate"])
def test_a_fault_of_a_kept_search_costs_nothing_but_the_search(graph, where, monkeypatch, broken):
    expected = planned(graph, budget=.6)

    def fails(*arguments):
        raise ZeroDivisionError

    for file in files.kept(where):
        if "kind" not in file.head:
            file.path.unlink()
    monkeypatch.setattr(f"tfckpt.store.pools.{broken}", fails)
    again = planned(graph, budget=.6)
    assert again.report.applied and not again.report.stored and again.plans == expected.plans


def test_a_dump_is_planned_again_without_the_store(graph, where, monkeypatch, traced, tmp_path):
    from tfckpt.carriers.dumped import replay

    monkeypatch.setenv("TFCKPT_DUMP", str(tmp_path / "dumps"))
    run(Given(graph, traced), make_options())
    outcome = run(Given(graph, traced), make_options())
    assert outcome.report.stored
    searches = searched(monkeypatch)
    for folder in sorted((tmp_path / "dumps").iterdir()):
        again, differing = replay(str(folder))
        assert not again.report.stored and not differing
    assert len(searches) == 2


# Grappler's answers.


def ordered(x, one: str = "z/Sin", other: str = "a/Sin"):
    """Return a sum and a cube whose operands have an order that only Grappler knows."""
    early, twin = tf.sin(x, name=one), tf.sin(x, name=other)
    cube = tf.pow(x, 3.0, name="cube/Pow") * 0.5 + tf.square(x, name="square/Square")
    return tf.add_n([tf.cos(x), early, tf.exp(x)], name="total"), twin, cube


def answered(monkeypatch, stored: bool = True, **names):
    """Return the edits that keep the order of operands, and how often Grappler was asked."""
    live = tf.function(lambda x: ordered(x, **names), autograph=False).get_concrete_function(
        tf.TensorSpec((8,), name="x")).graph
    asked, question = [], grappler.question

    def noted(*arguments):
        asked.append(arguments)
        return question(*arguments)

    monkeypatch.setattr(grappler, "question", noted)
    found = capture(live)
    edits = keep_operand_order(Edits(), found, LiveStep(live, (), Answers("s", found, stored)))
    plain = keep_operand_order(Edits(), found, LiveStep(live))
    monkeypatch.setattr(grappler, "question", question)
    assert edits == plain != Edits()
    return edits, len(asked) - 1


def test_grappler_is_asked_once_about_a_step(where, monkeypatch):
    assert answered(monkeypatch, stored=False)[1] == 1 and not where.exists()
    first, asked = answered(monkeypatch)
    assert asked == 1 and len(files.kept(where)) == 1
    assert answered(monkeypatch) == (first, 0)
    assert answered(monkeypatch, one="b/Sin")[1] == 1  # names decide the order
    (one, two) = files.kept(where)
    assert one.head["kind"] == two.head["kind"] == "Grappler's answer"
    for wrong in ("damaged", ["damaged"], [["a"]]):
        for file in (one, two):
            files.write(where, file.path.stem, {}, wrong)
        assert answered(monkeypatch)[1] == 1
    assert answered(monkeypatch) == (first, 0)
    monkeypatch.setenv(files.VARIABLE, "off")
    assert answered(monkeypatch)[1] == 1


def test_only_what_is_read_of_an_answer_is_kept():
    live = tf.function(lambda x: tf.nn.relu(tf.add_n([x @ x, x, tf.sin(x)])),
                       autograph=False).get_concrete_function(tf.TensorSpec((8, 8))).graph
    everything = LiveStep(live).optimised()
    kept = read_of(capture(live), everything)
    assert [node.type for node in kept.values()] == ["AddN"]
    assert len(everything) > 4
