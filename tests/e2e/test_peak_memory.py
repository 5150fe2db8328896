"""`tfckpt.keras.PeakMemory`: measured peaks in the logs, whatever the devices are."""

from __future__ import annotations

import csv
import os
import pathlib
import subprocess
import sys
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfckpt
from tests.support import process
from tests.support.models import arrays, stack
from tfckpt.keras.peak_memory import _of_whole_batches

MIB = 1 << 20
KEY = "peak_memory_mib"


class ManyTensors(keras.Model):
    """A model whose step has `count` tensors of 16 MiB at once and trains one number."""

    def __init__(self, count: int):
        super().__init__()
        self.count = count
        self.weight = self.add_weight(shape=(), initializer="ones")

    def train_step(self, data):
        seed = tf.reduce_sum(tf.cast(data[0], tf.float32))
        live = [tf.random.stateless_uniform((2048, 2048), (i, tf.cast(seed, tf.int32)))
                for i in range(self.count)]
        total = tf.reduce_sum(tf.math.cumsum(tf.stack(live), axis=1))  # copies them all, twice
        self.weight.assign_add(total * 1e-9)
        return {"loss": total}


def train(model, *callbacks, batches=3, epochs=1):
    model.compile("sgd", jit_compile=False)
    x = np.zeros((4 * batches, 1), np.float32)
    return model.fit(x, x, batch_size=4, epochs=epochs, verbose=0, callbacks=list(callbacks))


class Batches(keras.callbacks.Callback):
    """Records the logged peak of each batch."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def on_train_batch_end(self, batch, logs=None):
        self.seen.append(logs[KEY])


def test_the_peak_is_what_the_step_allocates():
    """Five tensors, their stack and its sums: 15 x 16 MiB, give or take one reused buffer set."""
    process.fresh()
    noted = Batches()
    history = train(ManyTensors(5), tfckpt.keras.PeakMemory(), noted).history
    fewest, most = 10 * 16, 16 * 16
    start = tf.config.experimental.get_memory_info("CPU:0")["current"] / MIB
    assert len(noted.seen) == 3
    for peak in noted.seen:
        assert fewest <= peak <= most + 2 * start + 16
    assert history[KEY] == [max(noted.seen)]
    small = train(ManyTensors(1), tfckpt.keras.PeakMemory()).history[KEY][0]
    assert noted.seen[-1] - small > 0.8 * (fewest - 3 * 16)


def test_history_progress_bar_and_csv(tmp_path, capsys):
    process.fresh()
    path = tmp_path / "log.csv"
    model = stack()
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    x, y = arrays(2048)
    history = model.fit(x, y, batch_size=1024, epochs=2, verbose=2, validation_data=(x, y),
                        callbacks=[tfckpt.keras.PeakMemory(), keras.callbacks.CSVLogger(path)])
    assert len(history.history[KEY]) == 2
    assert capsys.readouterr().out.count(f"{KEY}: ") == 2
    with path.open() as lines:
        rows = list(csv.DictReader(lines))
    assert [float(row[KEY]) for row in rows] == history.history[KEY]


def test_tensorboard_gets_a_scalar(tmp_path):
    pytest.importorskip("tensorboard")
    process.fresh()
    train(ManyTensors(1), tfckpt.keras.PeakMemory(), keras.callbacks.TensorBoard(tmp_path))
    tags = set()
    for path in tmp_path.rglob("events*"):
        for event in tf.compat.v1.train.summary_iterator(str(path)):
            tags.update(value.tag for value in event.summary.value)
    assert f"epoch_{KEY}" in tags


def test_a_wrapped_model_is_compared_and_its_report_filled(capsys):
    process.fresh()
    model = stack(width=256)
    tfckpt.keras.checkpoint(model)
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    x, y = arrays(4096 * 4)
    model.fit(x, y, batch_size=4096, epochs=2, verbose=0,
              callbacks=[tfckpt.keras.PeakMemory(compare=True)])
    said = capsys.readouterr().out
    assert [line.split()[0] for line in said.splitlines() if line.startswith("  ")] == [
        "plain", "planned", "measured", "peak"], said
    report = tfckpt.keras.report(model)
    assert report.applied
    # the batch itself is counted too, and chunks may be up to twice the request
    assert 0.7 * report.planned_peak_bytes < report.measured_peak_bytes
    assert report.measured_peak_bytes < 2.5 * report.planned_peak_bytes + x.nbytes / 4


def test_compare_without_checkpoint_says_so(capsys):
    process.fresh()
    train(ManyTensors(1), tfckpt.keras.PeakMemory(compare=True))
    assert "none of this model: tfckpt.keras.checkpoint(model) plans" in capsys.readouterr().out


def test_a_measured_peak_above_the_plain_one_warns(monkeypatch):
    process.fresh()
    model = stack()
    tfckpt.keras.checkpoint(model)
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    x, y = arrays(2048)
    monkeypatch.setattr(tfckpt.keras.peak_memory, "memory_info",
                        lambda device, reset=False: {"current": 0, "peak": 1 << 40})
    with pytest.warns(UserWarning, match="above the plain step's planned"):
        model.fit(x, y, batch_size=1024, verbose=0, callbacks=[tfckpt.keras.PeakMemory()])


def test_every_gpu_of_a_strategy(monkeypatch):
    """GPUs as TensorFlow names them under a strategy, with made-up statistics."""
    class Strategy:
        num_replicas_in_sync = 2

        class extended:  # noqa: N801
            worker_devices = ("/job:worker/replica:0/task:1/device:GPU:0",
                              "/job:worker/replica:0/task:1/device:GPU:1")

    class Model:
        distribute_strategy = Strategy

    asked = []

    def info(device, reset=False):
        asked.append(device)
        return {"current": MIB, "peak": (3 if device == "GPU:0" else 7) * MIB}

    monkeypatch.setattr(tfckpt.keras.peak_memory, "memory_info", info)
    callback = tfckpt.keras.PeakMemory()
    callback.set_model(Model())
    callback.on_train_begin()
    callback.on_epoch_begin(0)
    callback.on_train_batch_begin(0)
    logs = {}
    callback.on_train_batch_end(0, logs)
    assert logs == {KEY: 7.0, f"{KEY}_gpu_0": 3.0, f"{KEY}_gpu_1": 7.0}
    assert set(asked) == {"GPU:0", "GPU:1"}


_CHILD = """
import sys, warnings
import numpy as np, tensorflow as tf
tf.config.set_logical_device_configuration(
    tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * 2)
import keras
import tfckpt
with tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]).scope():
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4)])
    model.compile("sgd", "mse")
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    history = model.fit(np.ones((64, 8)), np.ones((64, 4)), batch_size=32, verbose=0,
                        callbacks=[tfckpt.keras.PeakMemory()]).history
print("KEYS", sorted(key for key in history if "peak" in key))
print("SAID", [str(w.message) for w in caught if "PeakMemory" in str(w.message)])
"""


def child(**environment) -> str:
    root = pathlib.Path(tfckpt.__file__).parents[1]
    kept = {k: v for k, v in os.environ.items() if k != "TF_CPU_ALLOCATOR_USE_BFC"}
    return subprocess.run([sys.executable, "-c", _CHILD], capture_output=True, text=True, cwd=root,
                          env={**kept, **environment}, timeout=800, check=True).stdout


def test_two_logical_cpus():
    said = child()
    assert f"KEYS ['{KEY}', '{KEY}_cpu_0', '{KEY}_cpu_1']" in said and "SAID []" in said


def test_without_statistics_training_goes_on_with_a_warning():
    said = child(TF_ENABLE_ONEDNN_OPTS="0")
    assert "KEYS []" in said
    assert "TF_CPU_ALLOCATOR_USE_BFC=1" in said and "TF_ENABLE_ONEDNN_OPTS" in said


def test_the_warning_names_what_is_measured_nowhere(monkeypatch):
    def info(device, reset=False):
        raise tfckpt.VerificationError("verify: nothing for TPU:0")

    monkeypatch.setattr(tfckpt.keras.peak_memory, "memory_info", info)
    process.fresh()
    with pytest.warns(UserWarning, match="PeakMemory measures nothing. verify: nothing for TPU"):
        history = train(ManyTensors(1), tfckpt.keras.PeakMemory(compare=True)).history
    assert KEY not in history
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        monkeypatch.undo()
        assert KEY in train(ManyTensors(1), tfckpt.keras.PeakMemory()).history


def events(folder) -> list:
    """Return what stands in the event files below a folder, in order; read without TensorBoard."""
    found = []
    for path in sorted(pathlib.Path(folder).rglob("events*")):
        for record in tf.data.TFRecordDataset(str(path)):
            found.append(tf.compat.v1.Event.FromString(record.numpy()))
    return found


def values(folder, tag) -> list:
    return [(event.step, value) for event in events(folder)
            for value in event.summary.value if value.tag == tag]


def test_tensorboard_scalars_picture_and_graph(tmp_path):
    process.fresh()
    model = stack()
    tfckpt.keras.checkpoint(model, solver="approx_dp")
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    x, y = arrays(2048)
    history = model.fit(x, y, batch_size=1024, epochs=3, verbose=0,
                        callbacks=[tfckpt.keras.PeakMemory(log_dir=tmp_path / "logs")]).history
    scalars = values(tmp_path, KEY)
    assert [step for step, _ in scalars] == [0, 1, 2]
    np.testing.assert_allclose([v.simple_value for _, v in scalars], history[KEY], rtol=1e-6)
    (step, value), = values(tmp_path, "live_bytes")  # once for each trace, not for each epoch
    image = tf.io.decode_png(value.image.encoded_image_string)
    assert step == 0 and image.shape[:2] == (value.image.height, value.image.width)
    assert value.image.width > 400 and len(np.unique(image.numpy())) > 10
    graph, = [tf.compat.v1.GraphDef.FromString(event.graph_def)
              for event in events(tmp_path) if event.graph_def]
    copies = [node for node in graph.node if "_tfckpt_copy" in node.attr]
    assert len(copies) == tfckpt.keras.report(model).recomputed_ops > 0
    assert any(node.name.startswith("tfckpt/fence") for node in graph.node)


def test_tensorboard_without_a_wrapped_model_without_statistics_without_matplotlib(
        tmp_path, monkeypatch):
    process.fresh()
    train(ManyTensors(1), tfckpt.keras.PeakMemory(log_dir=tmp_path / "plain"), epochs=2)
    assert len(values(tmp_path / "plain", KEY)) == 2
    assert not any(event.graph_def for event in events(tmp_path / "plain"))

    def info(device, reset=False):
        raise tfckpt.VerificationError("verify: nothing here")

    monkeypatch.setattr(tfckpt.keras.peak_memory, "memory_info", info)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    model = stack()
    tfckpt.keras.checkpoint(model, solver="approx_dp")
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    x, y = arrays(1024)
    with pytest.warns(UserWarning) as said:
        model.fit(x, y, batch_size=1024, verbose=0,
                  callbacks=[tfckpt.keras.PeakMemory(log_dir=str(tmp_path / "bare"))])
    messages = " ".join(str(w.message) for w in said)
    assert "measures nothing" in messages and "tfckpt[plots]" in messages
    assert values(tmp_path / "bare", KEY) == [] == values(tmp_path / "bare", "live_bytes")
    assert sum(bool(event.graph_def) for event in events(tmp_path / "bare")) == 1


@pytest.mark.parametrize("peaks, typical", [
    ([9], 9), ([9, 5], 5), ([9, 8, 1], 8),
    ([20, 8, 8, 1], 8), ([9, 7, 8, 8, 1], 8)])
def test_a_partial_batch_says_nothing_of_whole_ones(peaks, typical):
    assert _of_whole_batches(peaks) == typical
