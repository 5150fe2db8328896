"""Decorated functions are `tf.function`s to TensorFlow: as methods, as attributes, when saved."""

from __future__ import annotations

import gc

import pytest
import tensorflow as tf

import tfckpt
from tests.support import process

ROWS, WIDTH = 1024, 128
SPEC = tf.TensorSpec((ROWS, WIDTH))


def _start(seed):
    return 0.1 * tf.random.stateless_normal((WIDTH, WIDTH), (seed, 9))


def _train(weights, x):
    with tf.GradientTape() as tape:
        h = x
        for weight in weights:
            h = tf.nn.gelu(h @ weight)
        loss = tf.reduce_mean(h * h)
    for weight, gradient in zip(weights, tape.gradient(loss, weights), strict=True):
        weight.assign_sub(0.5 * gradient)
    return loss


def _as_method(wrap, signature):
    class Trainer(tf.Module):
        def __init__(self):
            super().__init__()
            self.weights = [tf.Variable(_start(n)) for n in range(6)]

        @wrap
        @tf.function(input_signature=signature)
        def train(self, x):
            return _train(self.weights, x)

    return Trainer()


def _as_attribute(wrap, signature):
    module = tf.Module()
    module.weights = [tf.Variable(_start(n)) for n in range(6)]
    module.train = wrap(tf.function(lambda x: _train(module.weights, x), signature))
    return module


def _steps(train):
    x = 10.0 * tf.random.stateless_normal((ROWS, WIDTH), (1, 2))
    return [train(x).numpy().tobytes() for _ in range(3)]


@pytest.mark.parametrize("made", [_as_method, _as_attribute])
@pytest.mark.parametrize("signature", [None, [SPEC]])
def test_what_is_saved_is_rewritten(made, signature, tmp_path):
    process.fresh()
    plain = made(lambda f: f, signature)
    wanted = _steps(plain.train)
    module = made(tfckpt.checkpoint, signature)
    if signature is None:
        module.train.get_concrete_function(SPEC)
    tf.saved_model.save(module, str(tmp_path), signatures=module.train if signature else None)
    assert module.train.report.applied
    loaded = tf.saved_model.load(str(tmp_path))
    assert _steps(loaded.train) == wanted
    graph = loaded.train.concrete_functions[0].graph
    copies = [op for op in graph.get_operations() if "_tfckpt_copy" in op.node_def.attr]
    assert len(copies) == module.train.report.recomputed_ops > 0
    assert _steps(module.train) == wanted


def test_methods_of_several_objects():
    trainers = [_as_method(tfckpt.checkpoint, [SPEC]) for _ in range(2)]
    found = [_steps(trainer.train) for trainer in trainers]
    assert found[0] == found[1] and trainers[0].train is trainers[0].train
    reports = [trainer.train.report for trainer in trainers]
    assert reports[0].applied and reports[0] is not reports[1]
    assert tfckpt.report_of(trainers[1].train) is reports[1]
    name = trainers[0].train.python_function.__name__
    assert name == "train"
    del trainers, found
    gc.collect()
