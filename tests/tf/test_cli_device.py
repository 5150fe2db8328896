"""`tfckpt plan --device`: what fits, and the largest batch, against trying every batch."""

from __future__ import annotations

import json
import pathlib
import sys

import numpy as np
import pytest
import tensorflow as tf

from tests.support import saved
from tfckpt.capture.files import read_path
from tfckpt.capture.steps import training_steps
from tfckpt.carriers.files import plan_file_step
from tfckpt.ir.target import GPU, Rates, Target
from tfckpt.request.options import make_options

WIDTH, PLACES, DEPTH = 8, 256, 6
FIGURES = "memory={},bandwidth=300GB,clock=1GHz,cores=1000"
FAST = ["--solver", "chen"]


class Trainer(tf.Module):
    """Wide activations between tiny weights: nearly all bytes grow with the batch."""

    def __init__(self):
        super().__init__()
        made = np.random.default_rng(0)
        self.weights = [tf.Variable(made.standard_normal((WIDTH, WIDTH)).astype(np.float32))
                        for _ in range(DEPTH)]

    @tf.function(input_signature=[tf.TensorSpec((None, PLACES, WIDTH))])
    def train(self, x):
        with tf.GradientTape() as tape:
            h = x
            for weight in self.weights:
                h = tf.tanh(tf.einsum("bpi,io->bpo", h, weight))
            loss = tf.reduce_mean(h)
        for weight, gradient in zip(self.weights, tape.gradient(loss, self.weights), strict=True):
            weight.assign_sub(gradient)
        return loss


class Nested(Trainer):
    """The same with a function for each layer."""

    @tf.function(input_signature=[tf.TensorSpec((None, PLACES, WIDTH))])
    def train(self, x):
        layer = tf.function(lambda h, weight: tf.tanh(tf.einsum("bpi,io->bpo", h, weight)))
        with tf.GradientTape() as tape:
            h = x
            for weight in self.weights:
                h = layer(h, weight)
            loss = tf.reduce_mean(h)
        for weight, gradient in zip(self.weights, tape.gradient(loss, self.weights), strict=True):
            weight.assign_sub(gradient)
        return loss


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("open") / "m"
    tf.saved_model.save(Trainer(), str(path))
    return str(path)


def planned(tool, *arguments) -> dict:
    """Return the only step of `plan --json`."""
    code, out, err = tool("plan", *arguments, "--json")
    assert code == 0 and err == "", err
    step, = json.loads(out)["steps"]
    return step


def needed(path: str, batch: int) -> tuple[int, int]:
    """Return bytes of the whole device, plain and rewritten, by planning for that batch alone."""
    step, = training_steps(read_path(path), batch_size=batch)
    report = plan_file_step(step, make_options(
        "min", "chen", target=Target(Rates(2e12, 3e11), GPU))).report
    return (report.resident_bytes + report.baseline_peak_bytes,
            report.resident_bytes + report.planned_peak_bytes)


def test_nested_functions_are_estimated_with_the_step(tool, model, tmp_path):
    tf.saved_model.save(Nested(), str(tmp_path / "nested"))
    options = ["--batch_size", "8", *FAST, "--device", FIGURES.format("1MB")]
    flat, nested = (planned(tool, path, *options)["device"]
                    for path in (model, str(tmp_path / "nested")))
    for name in ("plain", "rewritten"):
        for key in ("bytes", "resident_bytes", "largest_batch"):
            assert nested[name][key] == pytest.approx(flat[name][key], rel=0.05), (name, key)


def test_the_largest_batch_against_trying_every_one(tool, model):
    limit = 1_000_000
    step = planned(tool, model, "--batch_size", "5", *FAST, "--device", FIGURES.format(limit))
    tried = {batch: needed(model, batch) for batch in range(1, 41)}
    for which, name in enumerate(("plain", "rewritten")):
        wanted = max(batch for batch, sizes in tried.items() if sizes[which] <= limit)
        assert wanted < 40 and step["device"][name]["largest_batch"] == wanted
        assert step["device"][name]["bytes"] == tried[5][which]
        assert step["device"][name]["fits"] is (tried[5][which] <= limit)
    assert step["device"]["rewritten"]["largest_batch"] > step["device"]["plain"]["largest_batch"]


def test_whether_it_fits_to_the_byte(tool, model):
    options = [model, "--batch_size", "64", *FAST, "--device"]
    found = planned(tool, *options, "H100-80GB")["device"]
    assert found["name"] == "H100-80GB" and found["memory_bytes"] == 80 * 10**9
    assert found["plain"]["fits"] and found["rewritten"]["fits"]
    size = found["plain"]["bytes"]
    assert size == found["plain"]["resident_bytes"] + found["plain"]["peak_bytes"]
    kept = DEPTH * 64 * PLACES * WIDTH * 4
    assert kept <= found["plain"]["peak_bytes"] <= 2 * kept
    assert found["rewritten"]["bytes"] < size
    assert 0 < found["plain"]["seconds"] < found["rewritten"]["seconds"] < 1e-3
    for room, largest in ((size, 64), (size - 1, 63)):
        exact = planned(tool, *options, FIGURES.format(room))["device"]
        assert exact["plain"]["fits"] is (room == size)
        assert exact["plain"]["largest_batch"] == largest
        assert exact["rewritten"]["fits"]


def test_not_even_one_example(tool, model):
    found = planned(tool, model, "--batch_size", "8", *FAST, "--device", FIGURES.format("9kB"))
    for name in ("plain", "rewritten"):
        assert found["device"][name]["largest_batch"] == 0 and not found["device"][name]["fits"]


def test_the_times_of_the_device_plan(tool):
    """Products are all that takes time where arithmetic is slow, and nearly free elsewhere."""
    overheads = {}
    for name, bandwidth, clock in (("products", "100TB", "1MHz"), ("memory", "1GB", "100GHz")):
        step = planned(tool, "@graph.pb", *FAST, "--device",
                       f"memory=1GB,bandwidth={bandwidth},clock={clock},cores=64000")
        overheads[name] = step["overhead"]
        seconds = [step["device"][n]["seconds"] for n in ("plain", "rewritten")]
        # what was planned with is what Grappler says of the graph that was made
        assert seconds[1] / seconds[0] - 1 == pytest.approx(step["overhead"], abs=0.03)
    assert overheads["products"] != pytest.approx(overheads["memory"], abs=0.01)


def test_a_fixed_batch_is_said(tool):
    step = planned(tool, "@graph.pb", *FAST, "--device", "T4")
    assert step["device"]["plain"]["largest_batch"] is None
    # momentum's slots are only written, by fused updates: resident all the same
    weights = saved.DEPTH * saved.WIDTH ** 2 * 4
    assert step["device"]["plain"]["resident_bytes"] >= 2 * weights
    code, out, err = tool("plan", "@graph.pb", *FAST, "--device", "T4")
    assert code == 0 and err == "" and "the batch is fixed in the graph" in out
    assert "on T4" in out and "14.90 GB of 16.00 GB" in out and "with tfckpt" in out


def test_in_words(tool, model):
    code, out, err = tool("plan", model, "--batch_size", "64", *FAST, "--device", "l4")
    assert code == 0 and err == ""
    line, = (line for line in out.splitlines() if line.startswith("plain "))
    assert line.split()[-2] == "yes" and int(line.split()[-1].replace(",", "")) > 64


@pytest.mark.parametrize("device, said", [
    ("H1000", "choose one of V100-16GB"), ("memory=24GB", "cannot be read")])
def test_unknown_devices_are_usage_errors(tool, device, said):
    code, out, err = tool("plan", "@graph.pb", "--device", device)
    assert code == 2 and out == "" and said in err and "usage error" in err


def test_only_plan_has_a_device(tool):
    assert tool("inspect", "@graph.pb", "--device", "T4")[0] == 2
    assert tool("plan", "--help")[1].count("--device") == 1


def test_nothing_of_grappler_is_loaded_without_a_device(tool, monkeypatch):
    for name in [n for n in sys.modules if n.partition(".")[0] == "grappler_ext"]:
        monkeypatch.delitem(sys.modules, name)
    assert tool("plan", "@graph.pb", *FAST)[0] == 0
    assert not [n for n in sys.modules if n.partition(".")[0] == "grappler_ext"]
    assert not list(pathlib.Path.cwd().iterdir())
