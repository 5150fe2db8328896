"""The command line: what the commands say and write, and what their flags change."""

from __future__ import annotations

import json
import pathlib
import platform
import re
import shutil
import subprocess
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfckpt
from tests.support import saved
from tests.support.cli import BATCH, listing
from tests.support.forward_ad import COMPOSED
from tfckpt.capture.files import read_path
from tfckpt.cli.arguments import budget_value, parse
from tfckpt.cli.running import Measured, largest_difference

ROOT = pathlib.Path(tfckpt.__file__).parents[1]


# Usage.


@pytest.mark.parametrize("arguments, said", [
    ([], "choose one of inspect, plan, rewrite, replay, compare"),
    (["frobnicate"], "frobnicate"),
    (["ispect", "@graph.pb"], "did you mean inspect?"),
    (["@graph.pb"], "is a path, not a command; write tfckpt inspect "),
    (["--batch_size", "3", "plan", "@graph.pb"], "stands before the command"),
    (["completion"], "takes SHELL, not 0 paths"),
    (["completion", "tcsh"], "choose one of bash, zsh, fish"),
    (["cache"], "takes ACTION, not 0 paths"),
    (["cache", "lst"], "choose one of list, clear"),
    (["cache", "clear", "now"], "takes ACTION, not 2 paths"),
    (["plan", "a", "--budget", "50%"], "--budget 50% cannot be read"),
    (["plan", "a", "--budget", "GPU:0=much"], "--budget much cannot be read"),
    (["plan", "a", "--budget", "device"], "nothing runs here; write a size"),
    (["plan"], "takes GRAPH, not 0 paths"),
    (["plan", "a", "b"], "takes GRAPH, not 2 paths"),
    (["rewrite", "a"], "takes GRAPH and OUT, not 1 path"),
    (["plan", "a", "--budjet", "3"], "budget"),
    (["plan", "a", "--batch_size", "0"], "batch_size"),
    (["plan", "a", "--batch_size", "abc"], "write a whole number of 1 or more"),
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


@pytest.mark.parametrize("arguments", [
    ["--batch-size", "7", "--no-free-moves"], ["--batch_size=7", "--nofree_moves"],
    ["--batch-size=7", "--no_free-moves"], ["--batch_size", "7", "--free-moves=false"]])
def test_dashes_and_underscores_are_the_same(arguments):
    request = parse("plan", [*arguments, "--op-library=my-ops.so", "--", "--a-graph"])
    assert request.batch_size == 7 and request.free_moves is False
    assert request.op_library == ["my-ops.so"] and request.paths == ("--a-graph",)


def test_help_and_version_of_what_is_installed(tool):
    assert tool("help", "plan")[1] == tool("plan", "--help")[1]
    code, out, err = tool("--version")
    assert (code, err) == (0, "") and out == (
        f"tfckpt {tfckpt.__version__} (TensorFlow {tf.__version__}, Keras {keras.__version__}, "
        f"Python {platform.python_version()})\n")
    assert tool("-V")[1] == out


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
    # each weight has its momentum, which only the fused update touches
    assert step["variables"] == 2 * saved.DEPTH and step["variable_bytes"] == 2 * weights
    # x, y and every layer's result are kept
    activation = saved.BATCH * saved.WIDTH * 4
    assert step["baseline_peak_bytes"] >= saved.DEPTH * activation
    assert step["types"]["MatMul"] == 3 * saved.DEPTH and step["types"]["Tanh"] == saved.DEPTH
    assert sum(step["regions"].values()) == step["ops"]
    assert step["live_at_peak"][0]["bytes"] == activation
    code, out, err = tool("inspect", "@model", *BATCH, "--top", "2")
    assert code == 0 and err == "" and "train: " in out and "live at the peak" in out
    assert re.search(r"in \d+ smaller ones$", out)
    code, out, err = tool("inspect", "@graph.pb", "--batch_size", "7")
    assert code == 0 and "--batch_size=7 changes nothing" in err


def test_layers_of_a_saved_model_have_the_names_that_its_variables_tell(tool, tmp_path):
    """TensorFlow numbers the scopes of Keras' layers; a file tells of layers by variables alone."""
    net = keras.Sequential([keras.Input((64,)), *(
        keras.layers.Dense(64, "tanh", name=name) for name in ("stem", "block", "head"))])

    class Trainer(tf.Module):
        @tf.function(input_signature=[tf.TensorSpec((4096, 64))])
        def train(self, x):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(net(x))
            for v, g in zip(net.trainable_variables,
                            tape.gradient(loss, net.trainable_variables), strict=True):
                v.assign_sub(0.1 * g)
            return loss

    trainer = Trainer()
    trainer.net = net
    tf.saved_model.save(trainer, str(tmp_path / "named"), signatures=trainer.train)
    code, out, err = tool("inspect", tmp_path / "named", "--json")
    assert code == 0, err
    step = next(s for s in json.loads(out)["steps"] if s["baseline_peak_bytes"])
    told = {held["layer"].rpartition("/")[2] for held in step["live_at_peak"]}
    assert {"stem", "block", "head"} <= told and not any(name.endswith("_1") for name in told)
    code, out, err = tool("plan", tmp_path / "named", "--keep", "sten")
    assert code == 1 and "'stem'" in err


def test_plan_prints_a_monotone_front(tool, tmp_path):
    code, out, err = tool("plan", "@model", *BATCH, "--json", "--plot", "front.png")
    assert code == 0 and err == ""
    step, = json.loads(out)["steps"]
    peaks = [p["live_peak_bytes"] for p in step["front"]]
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
    for kind in ("simulated", "measured"):
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


def test_compare_begins_with_the_same_variables(tmp_path):
    """Initialisers without a seed draw others in each session."""
    with tf.Graph().as_default() as graph:
        tf.random.set_seed(1)
        h = tf.compat.v1.placeholder(tf.float32, (64, 32))
        for n in range(3):
            h = tf.nn.relu(h @ tf.compat.v1.get_variable(
                f"w{n}", (32, 32), initializer=tf.compat.v1.glorot_uniform_initializer(),
                use_resource=n > 0))
        optimizer = tf.compat.v1.train.MomentumOptimizer(0.1, 0.9)
        optimizer.minimize(tf.reduce_mean(h), name="train")
    definition = graph.as_graph_def(add_shapes=True)
    for node in definition.node:
        if "seed2" in node.attr:
            node.attr["seed"].i = node.attr["seed2"].i = 0
    (path := tmp_path / "drawn.pb").write_bytes(definition.SerializeToString())
    done = subprocess.run(
        [sys.executable, "-m", "tfckpt", "compare", path, path, "--fetch", "train"],
        capture_output=True, text=True, check=False)  # without determinism, which wants seeds
    assert done.returncode == 0 and "agree in every bit" in done.stdout, done.stdout + done.stderr


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


def test_counts_and_seeds_make_no_difference_smaller():
    """A generator's state of nine digits made float32 differ by 1e-15."""
    seed = np.array([983488254], np.int64)
    one, other = ({"variable 0": np.array([value], np.float32), "variable 1": seed}
                  for value in (1.0, 1.5))
    assert largest_difference(Measured(None, 0.0, one), Measured(None, 0.0, other)) == (
        0.5, "variable 0")


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


# Options of `plan` and `rewrite`.


def planned(tool, *arguments) -> dict:
    """Return the only step of `plan --json`."""
    code, out, err = tool("plan", *arguments, "--json")
    assert code == 0 and err == "", err
    step, = json.loads(out)["steps"]
    return step


@pytest.mark.parametrize("solver", ["store_all", "chen", "lcg", "acg", "approx_dp"])
def test_every_solver_can_be_named(tool, solver):
    step = planned(tool, "@graph.pb", "--solver", solver)
    assert step["solver"].startswith(solver) or not step["applied"]
    assert {p["solver"].partition(",")[0] for p in step["front"]} <= {solver, "store_all"}
    if solver == "store_all":
        assert step["recomputed_ops"] == 0


def test_the_objective_and_the_budget_choose(tool):
    options = ["@graph.pb", "--solver", "approx_dp", "--budget"]
    fast = planned(tool, *options, "0.95")
    small = planned(tool, *options, "0.95", "--objective", "memory")
    plain = fast["baseline_peak_bytes"]
    assert max(fast["planned_peak_bytes"], small["planned_peak_bytes"]) <= 0.95 * plain
    assert small["planned_peak_bytes"] < fast["planned_peak_bytes"]
    assert fast["overhead"] < small["overhead"]
    whole = int(fast["resident_bytes"] + 0.95 * plain)
    assert planned(tool, *options, str(whole)) == fast


def test_the_batch_size_scales_what_is_kept(tool):
    small, large = (planned(tool, "@model", "--batch_size", str(size), "--budget", "0.9")
                    for size in (1024, 4096))
    # weights and their gradients do not grow with the batch
    ratio = large["baseline_peak_bytes"] / small["baseline_peak_bytes"]
    assert 3 < ratio <= 4 and small["name"] == large["name"] == "train"


def test_free_moves_can_be_left_out(tool):
    step = planned(tool, "@graph.pb", "--solver", "store_all", "--nofree_moves")
    assert not step["applied"] and "no plan" in step["reason"]


def losses(path: str) -> tuple[np.ndarray, int]:
    """Losses of three steps of a graph in a session, and how many ops it has."""
    v1 = tf.compat.v1
    graph = tf.Graph()
    with graph.as_default():
        tf.graph_util.import_graph_def(read_path(path).proto, name="")
    with v1.Session(graph=graph) as session:
        session.run("init")
        x, y = saved.batch()
        found = [session.run(["loss:0", "train"], {"x:0": x, "y:0": y})[0] for _ in range(3)]
    return np.array(found), len(graph.get_operations())


@pytest.mark.parametrize("use_resource", [True, False])
def test_forward_ad_keeps_derivatives_only_when_asked_to(tool, use_resource):
    graph = saved.tf1_graph(depth=4, use_resource=use_resource, activation=COMPOSED["mish"])
    pathlib.Path("in.pb").write_bytes(graph.as_graph_def().SerializeToString())
    wanted, count = losses("in.pb")
    taken = {}
    for fad in ("false", "true", "auto"):
        code, out, err = tool("rewrite", "in.pb", f"{fad}.pb", "--fad", fad, "--budget", "0.95",
                              "--solver", "store_all" if fad != "auto" else "auto")
        assert code == 0, err
        report = pathlib.Path(f"{fad}.pb.report.txt").read_text()
        said = re.search(r"(\d+) of \d+ regions keep", report)  # where there are regions
        taken[fad] = int(said[1]) if said else 0
        found, ops = losses(f"{fad}.pb")
        np.testing.assert_allclose(found, wanted, rtol=1e-6)
        made = [node.name for node in read_path(f"{fad}.pb").proto.node if "_fad_" in node.name]
        assert bool(made) == bool(taken[fad])
        code, out, err = tool("rewrite", f"{fad}.pb", "again.pb")
        assert code == 1 and "rewritten by tfckpt before" in err
    assert taken["false"] == 0 and taken["true"] >= 3


def test_what_forward_ad_replaces_is_gone_from_the_graph(tool, tmp_path):
    """Old backward ops would be run by whoever asks for every result, as `compare` does."""
    graph = saved.tf1_graph(depth=3, activation=COMPOSED["mish"])
    pathlib.Path("in.pb").write_bytes(graph.as_graph_def().SerializeToString())
    assert tool("rewrite", "in.pb", "out.pb", "--fad", "true", "--solver", "store_all")[0] == 0
    counts = [sum(node.op == "Sigmoid" for node in read_path(name).proto.node)
              for name in ("in.pb", "out.pb")]
    assert counts[0] == 3 and counts[1] < 3  # the gradient of softplus
    code, out, err = tool("compare", "in.pb", "out.pb", "--json")
    step, = json.loads(out)["steps"]
    before, after = step["simulated_peak_bytes"]
    assert after < before and step["largest_relative_difference"] < 1e-6


@pytest.mark.parametrize("arguments, said", [
    (["plan", "@graph.pb", "--fad", "maybe"], "maybe"),
    (["rewrite", "@graph.pb", "-"], "OUT must be a path"),
    (["inspect", "@graph.pb", "--fad", "true"], "fad"),
])
def test_more_usage_errors(tool, arguments, said):
    code, out, err = tool(*arguments)
    assert code == 2 and out == "" and said in err


def test_pictures_of_the_front(tool, monkeypatch):
    code, out, err = tool("plan", "@graph.pb", "--solver", "chen", "--plot", "front.svg")
    assert code == 0 and b"<svg" in pathlib.Path("front.svg").read_bytes()
    for name in ("front.xyz", "front"):
        code, out, err = tool("plan", "@graph.pb", "--plot", name)
        assert code == 1 and out == "" and name in err and ".png" in err
    monkeypatch.setitem(sys.modules, "matplotlib.backend_bases", None)
    code, out, err = tool("plan", "@graph.pb", "--plot", "other.png")
    assert code == 1 and out == "" and "tfckpt[plots]" in err and err.count("\n") == 1
    assert listing(".") == ["front.svg"]


def test_a_saved_model_as_text(tool, files):
    shutil.copytree(files / "model", "text")
    document = read_path("text")
    pathlib.Path("text/saved_model.pb").unlink()
    pathlib.Path("text/fingerprint.pb").unlink(missing_ok=True)
    pathlib.Path("text/saved_model.pbtxt").write_text(str(document.proto))
    code, out, err = tool("rewrite", "text", "smaller", *BATCH)
    assert code == 0, err
    assert read_path("smaller").text and not pathlib.Path("smaller/saved_model.pb").exists()
    code, out, err = tool("compare", "text", "smaller", *BATCH)
    assert code == 0 and "agree in every bit" in out


class Mish(saved.Trainer):
    """A trainer with activations that are compositions."""

    def _forward(self, x):
        for weight in self.weights[:3]:
            x = COMPOSED["mish"](x @ weight)
        return x


def test_forward_ad_in_a_saved_model(tool):
    module = Mish()
    module.weights, module.slots = module.weights[:3], module.slots[:3]
    tf.saved_model.save(module, "m")
    options = [*BATCH, "--fad", "true", "--solver", "store_all"]
    assert planned(tool, "m", *options)["kept_derivatives"] == 3
    code, out, err = tool("rewrite", "m", "m2", *options)
    assert code == 0, err
    code, out, err = tool("compare", "m", "m2", *BATCH, "--json")
    step, = json.loads(out)["steps"]
    assert 0 <= step["largest_relative_difference"] < 1e-6
    assert step["types"]["Sigmoid"][1] < step["types"]["Sigmoid"][0] == 3
    before, after = step["simulated_peak_bytes"]
    assert after < before


def test_a_step_that_fits_as_it_is_has_no_table(tool):
    code, out, err = tool("plan", "@graph.pb", "--budget", "1TiB")
    assert code == 0 and out.splitlines()[1:] == ["not applied: the plain step fits the budget"]


# Variables whose sizes a file does not say.


@pytest.fixture(scope="module")
def captured(tmp_path_factory):
    """Graphs of one step, whose variables are captured handles; all sizes but theirs are known
    in "ensured.pb"."""
    folder = tmp_path_factory.mktemp("captured")
    weights = [tf.Variable(tf.eye(64)) for _ in range(3)]

    def graph(read, **options):
        @tf.function(autograph=False)
        def step(x):
            with tf.GradientTape() as tape:
                values = [read(w) for w in weights]
                h = x
                for value in values:
                    h = COMPOSED["gelu_tanh"](h @ value)
                loss = tf.reduce_mean(h * h)
            for w, g in zip(weights, tape.gradient(loss, values), strict=True):
                w.assign_sub(0.1 * g)
            return loss

        traced = step.get_concrete_function(tf.TensorSpec((256, 64)))
        return traced.graph.as_graph_def(**options).SerializeToString()

    plain, ensured = tf.convert_to_tensor, lambda w: tf.ensure_shape(w, (64, 64))
    (folder / "bare.pb").write_bytes(graph(plain))
    (folder / "shapes.pb").write_bytes(graph(plain, add_shapes=True))
    (folder / "ensured.pb").write_bytes(graph(ensured))
    return folder


def test_variables_of_unknown_size_are_said_to_be_unknown(tool, captured):
    code, out, err = tool("inspect", captured / "bare.pb")
    assert code == 0 and "parameters  3 variables of unknown size\n" in out, err
    assert "plain peak  unknown: variable " in out and "add_shapes=True" in out
    found = json.loads(tool("inspect", captured / "bare.pb", "--json")[1])["steps"][0]
    assert found["unknown_variables"] == 3 and found["baseline_peak_bytes"] is None
    code, out, err = tool("compare", captured / "bare.pb", captured / "shapes.pb", "--norun")
    rows = {line.split("  ")[0]: line.split()[-2:] for line in out.splitlines()}
    assert code == 0 and rows["variables of unknown size"] == ["3", "0"]
    assert re.search(r"simulated peak, \w+ threads? +unknown +\d", out)
    for command in (["plan", captured / "bare.pb"], ["rewrite", captured / "bare.pb", "out"]):
        code, out, err = tool(*command)
        assert code == 1 and out == "" and "has an unknown shape" in err
        assert "add_shapes=True" in err and err.count("\n") == 1
    assert listing(".") == []


def test_only_the_variables_are_of_unknown_size(tool, captured):
    """Peaks are those of the graph that says all; a size, which counts variables, is refused."""
    code, out, err = tool("inspect", captured / "ensured.pb")
    assert code == 0 and "parameters  3 variables of unknown size\n" in out
    whole = json.loads(tool("inspect", captured / "shapes.pb", "--json")[1])["steps"][0]
    assert whole["unknown_variables"] == 0 and whole["variable_bytes"] == 3 * 4 * 64 * 64
    found = json.loads(tool("inspect", captured / "ensured.pb", "--json")[1])["steps"][0]
    assert found["baseline_peak_bytes"] == whole["baseline_peak_bytes"]
    assert found["resident_bytes"] == whole["resident_bytes"] - whole["variable_bytes"]
    for size in ("2MiB", "1000000"):
        for command in (["plan", captured / "ensured.pb"],
                        ["rewrite", captured / "ensured.pb", "out"]):
            code, out, err = tool(*command, "--budget", size)
            assert code == 1 and out == "" and err.count("\n") == 1
            assert "3 of " in err and "--budget 0.5, or --budget min" in err
    code, out, err = tool("plan", captured / "ensured.pb", "--budget", "0.7")
    assert code == 0 and out.endswith("not counted: 3 variables of unknown size\n")
    code, out, err = tool("rewrite", captured / "ensured.pb", "out")
    assert code == 0 and out.endswith("not counted: 3 variables of unknown size\n")
    assert "and 3 variables of unknown size" in pathlib.Path("out.report.txt").read_text()


def test_a_step_that_looks_rows_up_before_a_loop(tool, tmp_path):
    """Its graph says what shares a device by names that the loaded function does not have.

    And its loop's body keeps what the gradient needs, by which it is no training step.
    """
    module = saved.Tagger()
    tf.saved_model.save(module, str(tmp_path / "tagger"), signatures={"train": module.train})
    code, out, err = tool("rewrite", tmp_path / "tagger", tmp_path / "ours", "--batch_size", "64")
    assert code == 0, err
    assert "train: " in out and "body" not in out
    code, out, err = tool("compare", tmp_path / "tagger", tmp_path / "ours", "--batch_size", "64")
    assert code == 0 and "results and variables after a step agree in every bit" in out, out + err


def test_a_dimension_besides_the_first_is_open(tool, tmp_path):
    """No batch size tells it, and nothing is called here."""
    class Open(saved.Trainer):
        @tf.function(input_signature=[tf.TensorSpec((None, None, saved.WIDTH))])
        def train(self, x):
            """Return the loss of a step."""
            return self._learn(x, x)

    tf.saved_model.save(Open(), str(tmp_path / "open"))
    code, out, err = tool("plan", tmp_path / "open", "--batch_size", "8")
    assert code == 1 and out == "" and "; save it with a size for each dimension but" in err, err
