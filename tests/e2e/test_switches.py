"""`TFCKPT=off` has everything pass through; `TFCKPT_DUMP=dir` writes what can be replayed."""

from __future__ import annotations

import json
import pathlib

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfckpt
from tests.support import process, saved
from tfckpt.cli import main
from tfckpt.driving import dump
from tfckpt.ir.graph import Graph

BATCH, WIDTH = 2048, 32


@pytest.fixture
def invoke(capfd):
    """Run a command line: (code, stdout, stderr)."""
    def run(*arguments):
        capfd.readouterr()
        return main(list(arguments)), *capfd.readouterr()

    return run


def trained():
    """Return a decorated step, the bytes of what two calls gave, and its graph's ops."""
    process.fresh()
    weights = [tf.Variable(tf.random.stateless_normal((WIDTH, WIDTH), (1, i)) * 0.3)
               for i in range(6)]

    @tfckpt.checkpoint
    @tf.function
    def step(x):
        with tf.GradientTape() as tape:
            h = x
            for w in weights:
                h = tf.tanh(h @ w)
            loss = tf.reduce_mean(h * h)
        for w, g in zip(weights, tape.gradient(loss, weights), strict=True):
            w.assign_sub(0.1 * g)
        return loss

    x = tf.random.stateless_normal((BATCH, WIDTH), (2, 3))
    found = [step(x).numpy().tobytes() for _ in range(2)]
    return step, found, [op.name for op in step.get_concrete_function(x).graph.get_operations()]


def test_off_leaves_a_step_as_it_is(monkeypatch):
    rewritten, wanted, _ = trained()
    assert rewritten.report.applied
    monkeypatch.setenv("TFCKPT", "off")
    step, found, names = trained()
    assert found == wanted and step.report is None
    assert not any("tfckpt" in name for name in names)


def test_off_leaves_a_fit_as_it_is(monkeypatch):
    monkeypatch.setenv("TFCKPT", "off")
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(8, "tanh"),
                              keras.layers.Dense(1)])
    tfckpt.keras.checkpoint(model)
    model.compile("sgd", "mse")
    x = np.zeros((64, 8), np.float32)
    model.fit(x, x[:, :1], verbose=0)
    assert tfckpt.keras.report(model) is None


def test_off_leaves_a_file_as_it_is(monkeypatch, tmp_path, invoke):
    source, target = tmp_path / "in.pb", tmp_path / "out.pb"
    graph = saved.tf1_graph(width=64, depth=3, batch=512)
    source.write_bytes(graph.as_graph_def().SerializeToString(deterministic=True))
    monkeypatch.setenv("TFCKPT", "off")
    code, out, _ = invoke("rewrite", str(source), str(target))
    assert code == 0 and "TFCKPT=off" in out
    plain, same = (tf.compat.v1.GraphDef.FromString(p.read_bytes()) for p in (source, target))
    assert plain == same


@pytest.fixture
def dumped(monkeypatch, tmp_path):
    monkeypatch.setenv("TFCKPT_DUMP", str(tmp_path / "dumps"))
    step, _, _ = trained()
    monkeypatch.delenv("TFCKPT_DUMP")
    folder, = (tmp_path / "dumps").iterdir()
    return step, folder


def test_a_dump_contains_what_was_decided(dumped):
    step, folder = dumped
    assert sorted(p.name for p in folder.iterdir()) == [
        "compiled.json", "edits.json", "graph.json", "graph.pb", "options.json", "plans.json",
        "report.txt", "step.json", "versions.json"]
    assert json.loads((folder / "versions.json").read_text())["tensorflow"] == tf.__version__
    assert str(step.report) in (folder / "report.txt").read_text()
    graph = dump.from_json((folder / "graph.json").read_bytes())
    assert isinstance(graph, Graph) and len(graph.ops) == step.report.op_count
    names = {op.name for op in graph.ops}
    definition = tf.compat.v1.GraphDef.FromString((folder / "graph.pb").read_bytes())
    assert names <= {node.name for node in definition.node}
    assert not any("tfckpt" in node.name for node in definition.node)


def test_a_dump_is_replayed(dumped, invoke):
    _, folder = dumped
    code, out, err = invoke("replay", str(folder))
    assert code == 0, err
    assert "plans and edits are those of the dump" in out


def test_a_replay_says_what_differs(dumped, invoke):
    _, folder = dumped
    plans = folder / "plans.json"
    plans.write_text(plans.read_text().replace('"solver": "', '"solver": "not '))
    code, out, _ = invoke("replay", str(folder))
    assert code == 1 and "differs from the dump: plans.json" in out


@pytest.mark.parametrize("harm, said", [
    (lambda f: (f / "graph.json").unlink(), "has no graph.json"),
    (lambda f: (f / "graph.json").write_text("{}"), "is no dump of tfckpt"),
    (lambda f: (f / "options.json").write_text('{"format": 99, "value": 1}'), "has format 99")])
def test_what_is_no_dump_is_refused_in_one_line(dumped, invoke, harm, said):
    _, folder = dumped
    harm(folder)
    code, _, err = invoke("replay", str(folder))
    assert code == 1 and said in err and err.count("\n") == 1


def test_the_folder_of_all_dumps_is_told_from_that_of_one(dumped, invoke):
    _, folder = dumped
    code, _, err = invoke("replay", str(folder.parent))
    assert code == 1 and f"such as {str(folder)!r}" in err


def test_a_dump_that_cannot_be_written_does_not_end_the_training(monkeypatch, tmp_path):
    file = pathlib.Path(tmp_path / "file")
    file.write_text("in the way")
    monkeypatch.setenv("TFCKPT_DUMP", str(file))
    step, _, _ = trained()
    assert step.report.applied
