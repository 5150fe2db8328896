"""Edits on definitions: sessions and plainly loaded SavedModels compute what they did before."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest
import tensorflow as tf

from grappler_ext.item import rewrite_item
from tests.support import saved
from tfckpt import driver
from tfckpt.capture.files import META_GRAPH, SAVED_MODEL, read_bytes, read_path
from tfckpt.capture.steps import training_steps
from tfckpt.carriers.files import plan_file_step, rewrite
from tfckpt.cli import main
from tfckpt.errors import CaptureError, CostError, RewriteError
from tfckpt.ir.edits import AddControl, Clone, Create, Edits, Rewire
from tfckpt.plan.loops import choice
from tfckpt.request.options import make_options
from tfckpt.rewrite.appliers.graphdef import apply_to_graph_def, edit_function_def


def rewritten(document, budget="min", batch_size=None):
    """Return the rewritten document and the results, all of which must be applied."""
    steps = training_steps(document, batch_size=batch_size)
    results = [plan_file_step(step, make_options(budget=budget)) for step in steps]
    assert results and all(r.report.applied and r.edits.clones for r in results)
    return rewrite(document, results), results


def test_a_tf1_training_graph_in_a_session():
    definition = saved.tf1_graph().as_graph_def()
    before = definition.SerializeToString(deterministic=True)
    document = read_bytes(before, "graph.pb")
    edited, (result,) = rewritten(document)
    assert definition.SerializeToString(deterministic=True) == before
    assert document.proto == definition  # only the copy is changed
    made = [node for node in edited.proto.node if "_tfckpt_copy" in node.attr]
    assert {node.op for node in made} <= {"MatMul", "Tanh"}
    assert len(made) == len(result.edits.clones) > 0
    assert saved.run_graph_def(edited.proto) == saved.run_graph_def(definition)


def test_the_step_leaves_initialisers_and_savers_out():
    definition = saved.tf1_graph().as_graph_def()
    (step,) = training_steps(read_bytes(definition.SerializeToString(), "graph.pb"))
    names = {op.name for op in step.graph.ops}
    assert {"loss", "train", "layer0/w", "layer3/Tanh"} <= names
    assert not [n for n in names if n.startswith("save/") or n == "init" or "Assign" in n]


def test_meta_graph_and_text():
    graph = saved.tf1_graph()
    with graph.as_default():
        meta = tf.compat.v1.train.export_meta_graph()
    document = read_bytes(str(meta).encode(), "graph.pbtxt")
    assert document.kind == META_GRAPH and document.text
    edited, _ = rewritten(document)
    again = read_bytes(edited.serialized(), "again.pbtxt")
    assert again.kind == META_GRAPH and again.text
    assert again.proto.collection_def.keys() == meta.collection_def.keys()
    assert saved.run_graph_def(again.proto.graph_def) == saved.run_graph_def(meta.graph_def)


_CHILD = """
import sys
import tensorflow as tf
assert not any(name.startswith("tfckpt") for name, found in sys.modules.items() if found)
try:
    import tfckpt
except ImportError:
    pass
else:
    raise SystemExit("tfckpt can be imported here, so this proves nothing")
tf.config.threading.set_inter_op_parallelism_threads(1)
tf.config.experimental.enable_op_determinism()
import numpy as np
for path in sys.argv[1:]:
    model = tf.saved_model.load(path)
    made = np.random.default_rng(0)
    for call in (model.train, model.signatures["learn"], model.train):
        x, y = (tf.constant(made.standard_normal((1024, 128), dtype=np.float32)) for _ in "xy")
        print(call(x=x, y=y)["loss"].numpy().tobytes().hex(), end=" ")
    print(int(model.count), *(hash(w.numpy().tobytes()) for w in model.weights + model.slots))
"""


def test_a_saved_model_trains_where_there_is_no_tfckpt(tmp_path):
    """Written by the command line, loaded and trained by a process that cannot import tfckpt."""
    plain, smaller = tmp_path / "plain", tmp_path / "smaller"
    saved.save_trainer(plain)
    document = read_path(str(plain))
    assert document.kind == SAVED_MODEL
    before = document.serialized()
    _, (result,) = rewritten(document, batch_size=saved.BATCH)
    assert document.serialized() == before
    assert result.step.name == "train"
    assert main(["rewrite", str(plain), str(smaller), "--batch_size", str(saved.BATCH)]) == 0
    assert b"_tfckpt_copy" in (smaller / "saved_model.pb").read_bytes()
    # an editable install stands on every process's path: an entry of None refuses the import
    script = "import sys; sys.modules['tfckpt'] = None\n" + _CHILD
    done = subprocess.run([sys.executable, "-I", "-c", script, str(plain), str(smaller)],
                          cwd=tmp_path, capture_output=True, text=True, timeout=800,
                          env={**os.environ, "PYTHONHASHSEED": "0"}, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    first, second = done.stdout.strip().splitlines()
    assert first.split() and first == second


def test_nested_functions_of_a_session_graph():
    """Their bodies are rewritten; their results can still be fetched by name."""
    definition = saved.tf1_graph(
        activation=tf.function(lambda h: tf.tanh(tf.nn.softplus(h)))).as_graph_def()
    calls = [node.name for node in definition.node if node.op == "PartitionedCall"]
    assert len(calls) == 2 * saved.DEPTH
    edited, (result,) = rewritten(read_bytes(definition.SerializeToString(), "graph.pb"))
    assert len(result.report.inlined) == 1 and not result.report.refused
    assert {"Softplus"} < {node.op for node in edited.proto.node if "_tfckpt_copy" in node.attr}
    assert not any("Call" in node.op for node in edited.proto.node)
    assert saved.run_graph_def(edited.proto) == saved.run_graph_def(definition)
    assert {node.name for node in edited.proto.node} > set(calls)
    (named,) = training_steps(read_bytes(definition.SerializeToString(), "graph.pb"),
                              fetches=["train", f"{calls[0]}:0"])
    assert named.graph.has_gradient() and named.graph.fetches


def trained_alike(tmp_path, edited):
    """Train the model saved as `plain` and its edited copy, two steps each; return both."""
    shutil.copytree(tmp_path / "plain", tmp_path / "smaller")
    (tmp_path / "smaller" / "saved_model.pb").write_bytes(edited.serialized())
    modules, trained = [], []
    for name in ("plain", "smaller"):
        module = tf.saved_model.load(str(tmp_path / name))
        losses = [module.train(*saved.batch(i))["loss"].numpy().tobytes() for i in range(2)]
        trained.append(losses + [w.numpy().tobytes() for w in module.weights])
        modules.append(module)
    assert trained[0] == trained[1]
    return modules


def test_nested_functions_of_a_saved_model(tmp_path):
    tf.saved_model.save(saved.Nested(), str(tmp_path / "plain"))
    document = read_path(str(tmp_path / "plain"))
    edited, (result,) = rewritten(document, batch_size=saved.BATCH)
    assert result.report.inlined == (f"layer, {saved.DEPTH} calls",)
    modules = trained_alike(tmp_path, edited)
    assert [module.count.numpy() for module in modules] == [2 * saved.DEPTH + 2] * 2


def test_loops_of_a_session_graph():
    """They are copied whole; initialisers and savers, which write too, do not wait for copies."""
    definition = saved.tf1_graph(activation=lambda h: tf.while_loop(
        lambda i, t: i < 3, lambda i, t: (i + 1, tf.tanh(tf.nn.softplus(t))), (0, h))[1],
        depth=saved.DEPTH).as_graph_def()
    edited, (result,) = rewritten(read_bytes(definition.SerializeToString(), "graph.pb"))
    copied = {node.op for node in edited.proto.node if "_tfckpt_copy" in node.attr}
    assert "StatelessWhile" in copied
    assert all("in segments: something reads" in line for line in result.report.refused)
    assert saved.run_graph_def(edited.proto) == saved.run_graph_def(definition)


def test_loops_that_read_variables_of_a_saved_model(tmp_path):
    tf.saved_model.save(saved.Looped(), str(tmp_path / "plain"))
    document = read_path(str(tmp_path / "plain"))
    edited, (result,) = rewritten(document, batch_size=saved.BATCH)
    assert not result.report.refused
    assert any(clone.source.startswith("while") for clone in result.edits.clones)
    trained_alike(tmp_path, edited)


def test_loops_of_a_saved_model_are_recomputed_in_segments(tmp_path, monkeypatch):
    """Their functions are the process's, not the graph's: Grappler died of those it did not find.

    What is expected to run has the loops over segments in it, with what they keep.
    """
    monkeypatch.setattr(driver, "ASKED_FROM", 0)
    tf.saved_model.save(saved.Recurrent(), str(tmp_path / "plain"))
    document = read_path(str(tmp_path / "plain"))
    (step,) = [step for step in training_steps(document, batch_size=saved.BATCH)
               if step.name == "train"]  # the loop's body has gradient scopes as well
    result = plan_file_step(step, make_options(budget="min"))
    edited, report = rewrite(document, [result]), result.report
    assert len(report.segments) == 1 and not report.refused, str(report)
    assert .9 * report.bound_bytes < report.expected_bytes[1] < .5 * report.expected_bytes[0]
    trained_alike(tmp_path, edited)


def test_gradients_of_loops_of_a_saved_model_compute_entries_again(tmp_path, monkeypatch):
    monkeypatch.setattr(choice, "choices", lambda graph, target: [])
    tf.saved_model.save(saved.Recurrent(), str(tmp_path / "plain"))
    document = read_path(str(tmp_path / "plain"))
    (step,) = [step for step in training_steps(document, batch_size=saved.BATCH)
               if step.name == "train"]
    result = plan_file_step(step, make_options(budget="min"))
    assert result.report.again and not result.report.refused, str(result.report)
    trained_alike(tmp_path, rewrite(document, [result]))


def test_unknown_dimensions_are_refused_by_name(tmp_path):
    saved.save_trainer(tmp_path / "m", signatures=False)
    (step,) = training_steps(read_path(str(tmp_path / "m")))
    with pytest.raises(CostError, match="x:0.*batch_size"):
        plan_file_step(step, make_options())


def test_what_does_not_train_is_refused(tmp_path):
    module = tf.Module()
    module.f = tf.function(lambda x: x * 2, input_signature=[tf.TensorSpec((3,))])
    tf.saved_model.save(module, str(tmp_path / "m"))
    with pytest.raises(CaptureError, match="inference graph"):
        training_steps(read_path(str(tmp_path / "m")))


def test_a_rewritten_graph_is_not_rewritten_again():
    definition = saved.tf1_graph().as_graph_def()
    edited, _ = rewritten(read_bytes(definition.SerializeToString(), "graph.pb"))
    with pytest.raises(CaptureError, match="rewritten by tfckpt before"):
        training_steps(edited)


def test_reference_variables_are_not_written_before_the_copies_have_read_them():
    """References change in place: an update that came too early would change the copies."""
    definition = saved.tf1_graph(use_resource=False).as_graph_def()
    assert {n.op for n in definition.node} >= {"VariableV2", "ApplyMomentum"}
    edited, (result,) = rewritten(read_bytes(definition.SerializeToString(), "graph.pb"))
    nodes = {node.name: node for node in edited.proto.node}

    def weight_of(copy):
        """Return the variable that a copied product reads, through whatever passes it on."""
        name = copy.input[1]
        while nodes[name].op == "Identity":
            name = nodes[name].input[0]
        return name

    copies = [node for node in nodes.values()
              if "_tfckpt_copy" in node.attr and node.op == "MatMul"]
    assert len(copies) > 1
    updates = {node.input[0]: node for node in nodes.values() if node.op == "ApplyMomentum"}
    for copy in copies:
        assert nodes[weight_of(copy)].op == "VariableV2"
        assert f"^{copy.name}" in updates[weight_of(copy)].input
    for threads in (1, 2, 4):
        assert saved.run_graph_def(edited.proto, threads=threads) == saved.run_graph_def(
            definition, threads=1)
    assert result.report.planned_peak_bytes < 0.8 * result.report.baseline_peak_bytes


# The applier by itself, on definitions written by hand.


def two_part_function():
    """f(x): Split into three, the last two added; as a FunctionDef."""
    @tf.function(input_signature=[tf.TensorSpec((6,))])
    def f(x):
        parts = tf.split(x, 3)
        return tf.add(parts[1], parts[2], name="sum")

    return f.get_concrete_function().function_def


def call(function):
    """Return what the function makes of 0..5."""
    definition = tf.compat.v1.GraphDef()
    definition.library.function.add().CopyFrom(function)
    node = definition.node.add(name="x", op="Placeholder")
    node.attr["dtype"].type = tf.float32.as_datatype_enum
    node = definition.node.add(name="y", op="PartitionedCall", input=["x"])
    node.attr["f"].func.name = function.signature.name
    for key in ("Tin", "Tout"):
        node.attr[key].list.type.append(tf.float32.as_datatype_enum)
    graph = tf.Graph()
    with graph.as_default():
        tf.graph_util.import_graph_def(definition, name="")
    with tf.compat.v1.Session(graph=graph) as session:
        return session.run("y:0", {"x:0": [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]}).tolist()


def test_slots_of_list_outputs_and_arguments():
    function = two_part_function()
    assert call(function) == [6.0, 8.0]
    wait = Create("wait", "NoOp", (), ("x",), (), {})
    pick = Edits(added=(wait, Clone("split-again", "split", ("split/split_dim:0", "x:0"),
                                    ("wait",))),
                 rewires=(Rewire("sum", 0, "split-again:0"),),
                 controls=(AddControl("sum", "wait"),))
    edit_function_def(function, pick)
    assert call(function) == [4.0, 6.0]


@pytest.mark.parametrize("edits, said", [
    (Edits(rewires=(Rewire("nobody", 0, "x:0"),)), "nobody"),
    (Edits(rewires=(Rewire("sum", 2, "x:0"),)), "no input 2"),
    (Edits(rewires=(Rewire("sum", 0, "split:3"),)), "no output 3"),
    (Edits(controls=(AddControl("sum", "nobody"),)), "nobody"),
    (Edits(added=(Clone("split", "sum", ("x:0", "x:0")),)), "two ops"),
    (Edits(added=(Clone("x", "sum", ("x:0", "x:0")),)), "two ops"),
    (Edits(added=(Clone("new", "nobody", ("x:0",)),)), "nobody"),
])
def test_edits_that_do_not_fit_are_refused(edits, said):
    with pytest.raises(RewriteError, match=said):
        edit_function_def(two_part_function(), edits)


def test_graph_def_names():
    graph = tf.Graph()
    with graph.as_default():
        x = tf.compat.v1.placeholder(tf.float32, (6,), name="x")
        parts = tf.split(x, 3, name="split")
        tf.add(parts[0], parts[0], name="sum")
    edits = Edits(rewires=(Rewire("sum", 0, "split:2"), Rewire("sum", 1, "split:0")))
    edited = apply_to_graph_def(graph.as_graph_def(), edits)
    assert list(edited.node[-1].input) == ["split:2", "split"]
    with pytest.raises(RewriteError, match="nobody"):
        apply_to_graph_def(graph.as_graph_def(), Edits(rewires=(Rewire("sum", 0, "nobody:0"),)))


def test_what_the_native_pass_adds_is_placed():
    """The placer has run by then, and XLA's passes fail where an op is on no device."""
    device = "/job:localhost/replica:0/task:0/device:CPU:0"
    with tf.Graph().as_default() as graph, tf.device(device):
        x = tf.constant([1.0], name="x")
        tf.exp(tf.sin(x, name="sin"), name="exp")
    edited = rewrite_item(graph.as_graph_def(), Edits(
        added=(Create("fence", "NoOp", (), (), (), {}),
               Create("guard", "Identity", ("x:0",), ("fence",), ("float32",),
                      {"T": "dtype:float32"}),
               Clone("sin-tfckpt1", "sin", ("guard:0",))),
        rewires=(Rewire("exp", 0, "sin-tfckpt1:0"),)))
    assert {node.name: node.device for node in edited.node} == dict.fromkeys(
        ("x", "sin", "exp", "fence", "guard", "sin-tfckpt1"), device)
