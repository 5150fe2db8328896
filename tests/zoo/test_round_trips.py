"""Round trips: what leaves the process and comes back goes on with the same numbers."""

from __future__ import annotations

import pickle

import keras
import pytest
import tensorflow as tf

import tfckpt
from tests.support import process
from tests.zoo import entry as zoo
from tests.zoo import steps


def _trained(entry_build, rewrite):
    process.fresh()
    wrap = zoo.Wrap(rewrite)
    return entry_build(wrap)


def _model(wrap):
    return steps.supervised(wrap, steps.stack(keras.layers.BatchNormalization), steps.batches())


def _values(training):
    return [v.numpy().tobytes() for v in training.state()]


def test_a_rewritten_training_function_in_a_saved_model(tmp_path):
    process.fresh()
    module = tf.Module()
    module.ws = steps.weights()
    spec = [tf.TensorSpec((512, steps.FEATURES)), tf.TensorSpec((512,), tf.int32)]
    training = steps.by_hand(zoo.Wrap(False), lambda x: steps.mean_square(
        steps.chain(x, module.ws)), module.ws)
    module.step = tfckpt.checkpoint(training.step)
    concrete = module.step.get_concrete_function(*spec)
    assert module.step.report.applied
    tf.saved_model.save(module, str(tmp_path), signatures={"train": concrete_signature(concrete)})
    loaded = tf.saved_model.load(str(tmp_path))
    copies = [n.name for f in loaded.signatures["train"].graph.as_graph_def().library.function
              for n in f.node_def if "-tfckpt" in n.name]
    copies += [op.name for op in loaded.signatures["train"].graph.get_operations()
               if "-tfckpt" in op.name]
    assert copies
    for x, y in steps.batches((512, steps.FEATURES)):
        ours = loaded.signatures["train"](x=x, y=y)["loss"]
        assert ours.numpy().tobytes() == training.step(x, y)[0].numpy().tobytes()
    for a, b in zip(loaded.ws, module.ws, strict=True):
        assert a.numpy().tobytes() == b.numpy().tobytes()


def concrete_signature(concrete):
    """Return the step as a signature: names for its loss."""
    @tf.function(input_signature=[tf.TensorSpec((512, steps.FEATURES), name="x"),
                                  tf.TensorSpec((512,), tf.int32, name="y")])
    def train(x, y):
        return {"loss": concrete(x, y)[0]}
    return train


@pytest.mark.parametrize("first, second", [
    (False, True), pytest.param(True, False, marks=pytest.mark.nightly)])
def test_a_checkpoint_is_taken_by_the_other_kind(tmp_path, first, second):
    whole = _trained(_model, False)
    for batch in whole.batches:
        whole.step(*batch)
    before = _trained(_model, first)
    before.step(*before.batches[0])
    path = tf.train.Checkpoint(values=[_tf(v) for v in before.state()]).save(str(tmp_path / "c"))
    after = _trained(_model, second)
    tf.train.Checkpoint(values=[_tf(v) for v in after.state()]).restore(
        path).assert_existing_objects_matched()
    for batch in after.batches[1:]:
        after.step(*batch)
    assert _values(after) == _values(whole)


def _tf(variable):
    return getattr(variable, "value", variable)


@pytest.mark.nightly
def test_weights_saved_by_keras(tmp_path):
    def build(wrap):
        return steps.fit(wrap, steps.stack(), steps.batches())

    ours = _trained(build, True)
    ours.step()
    process.fresh()
    model = tfckpt.keras.checkpoint(steps.stack())
    model.save_weights(str(tmp_path / "m.weights.h5"))
    again = steps.stack()
    again.load_weights(str(tmp_path / "m.weights.h5"))
    assert [v.numpy().tobytes() for v in again.variables] == [
        v.numpy().tobytes() for v in model.variables]


def test_plans_and_reports_are_pickled():
    wrap = zoo.Wrap(True)
    training = _model(wrap)
    training.step(*training.batches[0])
    report = wrap.reports()[0]
    _, plan = report.traced[1]
    again = pickle.loads(pickle.dumps(report))
    assert pickle.loads(pickle.dumps(plan)) == plan
    assert str(again) == str(report) and again.traced[1][1] == plan
