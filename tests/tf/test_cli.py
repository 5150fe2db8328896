"""The command line: results, messages, exit codes, and what a bad file or a full disk leaves."""

from __future__ import annotations

import errno
import json
import os
import pathlib
import re
import subprocess
import sys
import time

import numpy as np
import pytest
import tensorflow as tf

import tfckpt
from tests.support import saved
from tfckpt.capture.files import read_path
from tfckpt.cli import main
from tfckpt.cli.arguments import budget_value
from tfckpt.cli.output import progress

ROOT = pathlib.Path(tfckpt.__file__).parents[1]
BATCH = ["--batch_size", str(saved.BATCH)]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A folder with a SavedModel `model` and one TF1 graph as `graph.pb`, `.pbtxt` and `.meta`."""
    folder = tmp_path_factory.mktemp("graphs")
    saved.save_trainer(folder / "model")
    graph = saved.tf1_graph()
    with graph.as_default():
        meta = tf.compat.v1.train.export_meta_graph()
    (folder / "graph.pb").write_bytes(graph.as_graph_def().SerializeToString())
    (folder / "graph.pbtxt").write_text(str(graph.as_graph_def()))
    (folder / "graph.meta").write_bytes(meta.SerializeToString())
    return folder


@pytest.fixture
def tool(files, tmp_path, capfd, monkeypatch):
    """Runs a command line in an empty folder beside the files: (code, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments):
        capfd.readouterr()
        code = main([str(files / a[1:]) if isinstance(a, str) and a.startswith("@") else str(a)
                     for a in arguments])
        out, err = capfd.readouterr()
        return code, out, err

    return run


def listing(folder) -> list[str]:
    return sorted(str(p.relative_to(folder)) for p in pathlib.Path(folder).rglob("*"))


# Usage.


@pytest.mark.parametrize("arguments, said", [
    ([], "choose one of inspect, plan, rewrite, compare"),
    (["frobnicate"], "frobnicate"),
    (["plan"], "takes GRAPH, not 0 paths"),
    (["plan", "a", "b"], "takes GRAPH, not 2 paths"),
    (["rewrite", "a"], "takes GRAPH and OUT, not 1 path"),
    (["plan", "a", "--budjet", "3"], "budget"),
    (["plan", "a", "--batch_size", "0"], "batch_size"),
    (["plan", "@graph.pb", "--budget", "much"], "much"),
    (["plan", "@graph.pb", "--budget", "1.5"], "1.5"),
    (["plan", "@graph.pb", "--solver", "magic"], "magic"),
    (["plan", "@graph.pb", "--objective", "fun"], "fun"),
])
def test_usage_errors(tool, arguments, said):
    code, out, err = tool(*arguments)
    assert code == 2 and out == "" and said in err and "usage error" in err
    assert "Traceback" not in err


def test_help(tool):
    code, out, err = tool("--help")
    assert code == 0 and not err
    assert all(f"tfckpt {c}" in out for c in ("inspect", "plan", "rewrite", "compare"))
    code, out, err = tool("rewrite", "--help")
    assert code == 0 and not err
    assert all(f"--{flag}" in out for flag in ("budget", "solver", "objective", "batch_size"))


def test_budgets_are_read_as_people_write_them():
    assert budget_value("0.5") == 0.5 and isinstance(budget_value("0.5"), float)
    assert budget_value("1.0") == 1.0
    assert budget_value("2GiB") == "2GiB" and budget_value("min") == "min"
    assert budget_value("800") == "800"


def test_as_a_module_in_a_process_that_loads_no_tensorflow_for_help():
    code = ("import sys, runpy; sys.argv = ['tfckpt', '--help']\n"
            "try: runpy.run_module('tfckpt', run_name='__main__')\n"
            "except SystemExit as stop: assert not stop.code\n"
            "assert 'tensorflow' not in sys.modules")
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True,
                          timeout=300, check=False)
    assert done.returncode == 0 and done.stdout.startswith("usage:"), done.stderr


# What the commands say.


def test_inspect(tool):
    code, out, err = tool("inspect", "@graph.pb", "--json")
    assert code == 0 and err == ""
    found = json.loads(out)
    step, = found["steps"]
    weights = saved.DEPTH * saved.WIDTH ** 2 * 4
    assert found["kind"] == "GraphDef"
    assert step["variables"] == saved.DEPTH and step["variable_bytes"] == weights
    # x, y and every layer's result are kept
    activation = saved.BATCH * saved.WIDTH * 4
    assert step["baseline_peak_bytes"] >= saved.DEPTH * activation
    assert step["types"]["MatMul"] == 3 * saved.DEPTH and step["types"]["Tanh"] == saved.DEPTH
    assert sum(step["regions"].values()) == step["ops"]
    assert step["live_at_peak"][0]["bytes"] == activation
    code, out, err = tool("inspect", "@model", *BATCH, "--top", "2")
    assert code == 0 and err == "" and "train: " in out and "live at the peak" in out


def test_plan_prints_a_monotone_front(tool, tmp_path):
    code, out, err = tool("plan", "@model", *BATCH, "--json", "--plot", "front.png")
    assert code == 0 and err == ""
    step, = json.loads(out)["steps"]
    peaks = [p["peak_bytes"] for p in step["front"]]
    times = [p["overhead"] for p in step["front"]]
    assert peaks == sorted(peaks, reverse=True) and times == sorted(times) and len(peaks) > 1
    assert step["applied"] and step["planned_peak_bytes"] < step["baseline_peak_bytes"]
    assert pathlib.Path("front.png").read_bytes().startswith(b"\x89PNG")
    code, out, err = tool("plan", "@model", *BATCH)
    assert code == 0 and out.count(" %") >= 2 * len(peaks) and " *" in out
    code, out, err = tool("plan", "@model", *BATCH, "--plot", "front.png")
    assert code == 1 and "--force" in err and out == ""


def test_an_infeasible_budget_states_a_feasible_one_as_a_flag(tool):
    code, out, err = tool("plan", "@graph.pb", "--budget", "0.01")
    assert code == 1 and out == "" and err.count("\n") == 1
    feasible = err.split("Pass --budget ")[1].split()[0]
    code, out, err = tool("plan", "@graph.pb", "--budget", feasible)
    assert code == 0, err


@pytest.mark.parametrize("name", ["graph.pb", "graph.pbtxt", "graph.meta"])
def test_rewrite_keeps_the_kind_and_the_numbers(tool, files, name):
    code, out, err = tool("rewrite", f"@{name}", name)
    assert code == 0 and "->" in out and f"wrote {name}" in err
    before, after = read_path(str(files / name)), read_path(name)
    assert (after.kind, after.text) == (before.kind, before.text)
    assert listing(".") == [name, f"{name}.report.txt"]
    assert "recomputed ops" in pathlib.Path(f"{name}.report.txt").read_text()
    assert "_tfckpt_copy" in str(after.proto)
    assert saved.run_graph_def(after.graph_defs()[0]) == saved.run_graph_def(
        before.graph_defs()[0])
    code, out, err = tool("compare", f"@{name}", name, "--fetch", "loss:0,train", "--json")
    assert code == 0, err
    step, = json.loads(out)["steps"]
    assert step["largest_relative_difference"] == 0.0
    for kind in ("planned", "measured"):
        plain, ours = step[f"{kind}_peak_bytes"]
        assert ours < plain
    assert step["types"]["MatMul"][1] > step["types"]["MatMul"][0]


def test_rewrite_and_compare_a_saved_model(tool, files):
    code, out, err = tool("rewrite", "@model", "smaller", *BATCH)
    assert code == 0, err
    assert {"smaller/saved_model.pb", "smaller/variables/variables.index"} <= set(listing("."))
    assert [p for p in listing(".") if p.startswith(".")] == []
    code, out, err = tool("compare", "@model", "smaller", *BATCH)
    assert code == 0 and "agree in every bit" in out and "measured peak" in out
    assert err == ""
    code, out, err = tool("rewrite", "smaller", "again", *BATCH)
    assert code == 1 and "rewritten by tfckpt before" in err
    # the same directory again: only with --force, and then whole
    code, out, err = tool("rewrite", "@model", "smaller", *BATCH)
    assert code == 1 and "--force" in err
    code, out, err = tool("rewrite", "@model", "smaller", *BATCH, "--force")
    assert code == 0 and tf.saved_model.load("smaller").count.numpy() == 0


def test_compare_sees_a_difference(tool, files):
    graph = tf.Graph()
    with graph.as_default():
        tf.graph_util.import_graph_def(read_path(str(files / "graph.pb")).proto, name="")
    changed = graph.as_graph_def()
    node, = (n for n in changed.node if n.name == "train/learning_rate")
    node.attr["value"].tensor.CopyFrom(tf.make_tensor_proto(np.float32(0.2)))
    pathlib.Path("changed.pb").write_bytes(changed.SerializeToString())
    code, out, err = tool("compare", "@graph.pb", "changed.pb")
    assert code == 0 and "largest relative difference" in out and "variable" in out
    code, out, err = tool("compare", "@graph.pb", "changed.pb", "--norun")
    assert code == 0 and "measured" not in out


def test_a_graph_from_standard_input(tool, files, monkeypatch):
    with open(files / "graph.pb") as stream:
        monkeypatch.setattr(sys, "stdin", stream)
        code, out, err = tool("inspect", "-", "--top", "0")
    assert code == 0 and "standard input: GraphDef" in out


def test_two_meta_graphs_and_signature_only(tool, tmp_path):
    """Only a signature leads to the function; it is found, run and compared."""
    class Holder(tf.Module):
        pass

    module, trainer = Holder(), saved.Trainer()
    module.inner = trainer
    module.kept = [trainer.train]
    tf.saved_model.save(module, "m", signatures={"go": trainer.train})
    code, out, err = tool("rewrite", "m", "m2", *BATCH)
    assert code == 0, err
    code, out, err = tool("compare", "m", "m2", *BATCH)
    assert code == 0 and "agree in every bit" in out


# Bad input.


def _broken(folder: pathlib.Path, files: pathlib.Path) -> dict[str, str]:
    """Files that cannot be planned, and what must be said of them."""
    data = (files / "graph.pb").read_bytes()
    graph = read_path(str(files / "graph.pb")).proto

    def write(name, content):
        (folder / name).write_bytes(content)

    write("empty.pb", b"")
    write("truncated.pb", data[:len(data) // 2 + 7])
    write("noise.pb", np.random.default_rng(0).bytes(4096))
    write("prose.txt", b"Dear graph,\nplease train.\n")
    write("almost.pbtxt", b'node { name: "x" op: "Placeholder" frob: 3 }\n')
    write("no_ops.pbtxt", b"versions { producer: 1 }\n")
    cut = type(graph)()
    cut.CopyFrom(graph)
    del cut.node[3]
    write("dangling.pb", cut.SerializeToString())
    custom = type(graph)()
    custom.CopyFrom(graph)
    next(n for n in custom.node if n.op == "Tanh").op = "MyFastTanh"
    write("custom.pb", custom.SerializeToString())
    forward = tf.Graph()
    with forward.as_default():
        tf.tanh(tf.compat.v1.placeholder(tf.float32, (3,)))
    write("inference.pb", forward.as_graph_def().SerializeToString())
    open_ended = tf.Graph()
    with open_ended.as_default():
        x = tf.compat.v1.placeholder(tf.float32, (None, 8), name="x")
        tf.gradients(tf.reduce_sum(tf.tanh(x @ x[:8])), x)
    write("open.pb", open_ended.as_graph_def().SerializeToString())
    (folder / "hollow").mkdir()
    (folder / "cut").mkdir()
    write("cut/saved_model.pb", (files / "model/saved_model.pb").read_bytes()[:9000])
    os.symlink("nowhere", folder / "link.pb")
    return {"missing.pb": "No such file", "link.pb": "No such file", "empty.pb": "empty",
            "truncated.pb": "truncated or corrupt", "noise.pb": "truncated or corrupt",
            "prose.txt": "is text, but no GraphDef or MetaGraphDef",
            "almost.pbtxt": "frob", "no_ops.pbtxt": "holds no ops",
            "dangling.pb": "does not accept", "custom.pb": "MyFastTanh.*--op_library",
            "inference.pb": "inference graph", "open.pb": "--batch_size",
            "hollow": "without saved_model.pb", "cut": "truncated or corrupt"}


NAMES = ["missing.pb", "link.pb", "empty.pb", "truncated.pb", "noise.pb", "prose.txt",
         "almost.pbtxt", "no_ops.pbtxt", "dangling.pb", "custom.pb", "inference.pb", "open.pb",
         "hollow", "cut"]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory, files):
    folder = tmp_path_factory.mktemp("broken")
    return folder, _broken(folder, files)


@pytest.mark.parametrize("command", ["inspect", "plan", "rewrite", "compare"])
@pytest.mark.parametrize("name", NAMES)
def test_bad_input_is_one_line_and_leaves_nothing(tool, corpus, name, command):
    folder, said = corpus
    assert sorted(said) == sorted(NAMES)
    more = {"rewrite": ["out"], "compare": ["@graph.pb"]}.get(command, [])
    code, out, err = tool(command, folder / name, *more)
    assert code == 1 and out == "", (out, err)
    assert err.startswith("tfckpt: error: ") and err.count("\n") == 1, err
    assert "Traceback" not in err and "fault of tfckpt" not in err
    assert re.search(said[name], err), err
    assert listing(".") == []


def test_output_paths_that_cannot_be(tool, files):
    for target, said in (("no/where.pb", "no directory"), (str(files / "graph.pb"), "--force")):
        code, out, err = tool("rewrite", "@graph.pb", target)
        assert code == 1 and out == "" and said in err and err.count("\n") == 1
    pathlib.Path("folder").mkdir()
    for source in ("@graph.pb", "@model"):
        code, out, err = tool("rewrite", source, "folder", *BATCH, "--force")
        assert code == 1 and "choose another path" in err
    assert listing(".") == ["folder"]


def test_a_missing_op_library(tool):
    code, out, err = tool("inspect", "@graph.pb", "--op_library", "nothing.so")
    assert code == 1 and "nothing.so" in err and err.count("\n") == 1


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read and write everything")
def test_permissions(tool, files, tmp_path):
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o500)
    code, out, err = tool("rewrite", "@graph.pb", closed / "out.pb")
    assert code == 1 and "permissions" in err


@pytest.mark.parametrize("source, target, call", [
    ("@graph.pb", "out.pb", "fsync"), ("@model", "out", "rename"), ("@graph.pb", "out.pb", "link")])
def test_a_full_disk_leaves_the_old_output_or_none(tool, monkeypatch, source, target, call):
    real, fsync = getattr(os, call), os.fsync

    def full(*arguments, **options):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "somewhere")

    monkeypatch.setattr(os, call, full)
    code, out, err = tool("rewrite", source, target, *BATCH)
    assert code == 1 and "No space left on device" in err and err.count("\n") == 1
    assert listing(".") == []
    monkeypatch.setattr(os, call, real)
    assert tool("rewrite", source, target, *BATCH)[0] == 0
    before = {name: pathlib.Path(name).read_bytes() for name in listing(".")
              if pathlib.Path(name).is_file()}
    monkeypatch.setattr(os, "fsync" if call == "link" else call, full)
    code, out, err = tool("rewrite", source, target, *BATCH, "--force", "--budget", "0.9")
    assert code == 1
    monkeypatch.setattr(os, "fsync" if call == "link" else call,
                        real if call != "link" else fsync)
    assert {name: pathlib.Path(name).read_bytes() for name in before} == before


_KILLED = """
import os, sys, signal
from tfckpt.cli import main, output
real = os.fsync
def fsync(number):
    real(number)
    os.kill(os.getpid(), signal.{signal})
os.fsync = fsync
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize("name, code, left", [("SIGKILL", -9, True), ("SIGTERM", 143, False)])
def test_a_killed_run_leaves_no_half_file(files, tmp_path, name, code, left):
    done = subprocess.run(
        [sys.executable, "-c", _KILLED.format(signal=name), "rewrite", str(files / "graph.pb"),
         str(tmp_path / "out.pb")], cwd=ROOT, capture_output=True, text=True, timeout=800,
        check=False)
    assert done.returncode == code, done.stderr
    assert not (tmp_path / "out.pb").exists()
    assert bool(listing(tmp_path)) == left  # a temporary file, which nothing takes for the output


def test_progress_is_shown_on_a_terminal_only(capsys, monkeypatch):
    with progress("planning"):
        time.sleep(0.7)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    with progress("planning"):
        time.sleep(0.7)
    said = capsys.readouterr().err
    assert "planning ..." in said and said.endswith("\r\033[K")


def test_fuzzed_graphs_are_rewritten_or_refused():
    """A child, since TensorFlow itself may abort; FUZZ_SECONDS and FUZZ_SEED make it longer."""
    seconds, seed = os.environ.get("FUZZ_SECONDS", "15"), os.environ.get("FUZZ_SEED", "0")
    done = subprocess.run([sys.executable, "-m", "tests.support.fuzz", seconds, seed], cwd=ROOT,
                          capture_output=True, text=True, timeout=float(seconds) + 800,
                          check=False)
    assert done.returncode == 0, f"from seed {seed}: {done.stderr[-3000:]}"
    assert int(done.stdout.split()[0]) > 0  # some mutants still train
