"""Recomputation changes no bit: losses, gradients, variables, over three steps, Grappler on.

Op determinism is on and operations run one at a time (see `tests.support.process`).
"""

from __future__ import annotations

import collections
import functools

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfckpt
from tests.support import models, process, training
from tests.support.models import MODELS

OPTIONS: dict[str, dict] = {
    "min": {"budget": "min"},
    "chen": {"solver": "chen"},
    "approx_dp": {"solver": "approx_dp", "objective": "memory"},
    "0.6": {"budget": 0.6},
    "0.7": {"budget": 0.7},
    "no-moves": {"budget": "min", "free_moves": False},
}
CASES = [
    *((name, "min") for name in MODELS),
    ("residual", "chen"), ("residual", "approx_dp"), ("residual", "0.7"), ("residual", "no-moves"),
    ("dense_gelu", "approx_dp"), ("dense_gelu", "0.7"), ("dense_gelu", "no-moves"),
    ("transformer", "0.7"), ("unet", "approx_dp"), ("unet", "0.7"), ("conv_relu", "0.7"),
    ("shared", "approx_dp"), ("keras_dropout", "0.6"), ("stateful_dropout", "0.7"),
]


@functools.cache
def plain(name: str):
    """Return the plain step's history, trained once per model, and what it executes."""
    process.fresh()
    made = MODELS[name]()
    step = tf.function(made.step)
    history = training.train(step, made)
    return history, tfckpt.verify.executed(step, *made.batches[0])


def rewritten(name: str, **options):
    """Return the same model again, and its decorated step."""
    process.fresh()
    made = MODELS[name]()
    return made, tfckpt.checkpoint(tf.function(made.step), **options)


@pytest.mark.parametrize("name, how", CASES)
def test_three_steps_agree_in_every_bit(name, how):
    wanted, before = plain(name)
    made, step = rewritten(name, **OPTIONS[how])
    found = training.train(step, made)
    report = step.report
    assert report.applied and report.recomputed_ops > 0, report.reason
    assert report.planned_peak_bytes < report.baseline_peak_bytes
    training.assert_same_bits(found, wanted)
    _assert_copies_ran(step, made, before, report)


def _assert_copies_ran(step, made, before, report):
    """Return what the plan recomputes is really executed once more, fused or not, and nothing else
    is.
    """
    copies = training.copies_in(step.get_concrete_function(*made.batches[0]).graph)
    planned = training.heavy([op.type for op in copies])
    assert len(copies) >= report.recomputed_ops
    after = tfckpt.verify.executed(step, *made.batches[0])
    extra = training.heavy(_expand(after.ops))
    extra.subtract(training.heavy(_expand(before.ops)))
    assert +extra == planned and not -extra
    ran = [node.name for node in after.nodes if training.COPY.search(node.name)]
    assert ran and after.copy_count > 0


def _expand(counts):
    return collections.Counter(counts).elements()


def test_resnet50_of_keras_itself():
    histories, steps = [], []
    for checkpoint in (False, True):
        process.fresh()
        model = keras.applications.ResNet50(weights=None, classes=5, input_shape=(32, 32, 3))
        made = models.trial(model, keras.optimizers.SGD(0.01, momentum=0.9),
                            "sparse_categorical_crossentropy",
                            models.numbers((16, 32, 32, 3), 5, steps=2), gradients=False)
        step = tf.function(made.step)
        steps.append(tfckpt.checkpoint(step) if checkpoint else step)
        histories.append(training.train(steps[-1], made))
    report = steps[1].report
    assert report.applied and report.recomputed_ops > 0, report.reason
    training.assert_same_bits(histories[1], histories[0])


def test_batch_statistics_move_once_per_step():
    process.fresh()
    made = MODELS["residual"]()
    step = tfckpt.checkpoint(tf.function(made.step))
    layer = next(x for x in made.model.layers if isinstance(x, keras.layers.BatchNormalization))
    seen = keras.Model(made.model.inputs, layer.input)(made.batches[0][0]).numpy()
    step(*made.batches[0])
    assert step.report.recomputed_ops > 0
    mean = seen.mean(axis=(0, 1, 2), dtype=np.float64)
    variance = seen.var(axis=(0, 1, 2), dtype=np.float64)
    keep = layer.momentum
    np.testing.assert_allclose(layer.moving_mean.numpy(), (1 - keep) * mean, rtol=1e-4, atol=1e-7)
    np.testing.assert_allclose(layer.moving_variance.numpy(), keep + (1 - keep) * variance,
                               rtol=1e-5)


def test_seed_states_advance_once_per_step():
    made, step = rewritten("keras_dropout")
    layers = [x for x in made.model.layers if isinstance(x, keras.layers.Dropout)]
    before = [x.seed_generator.state.numpy() for x in layers]
    for batch in made.batches:
        step(*batch)
    assert step.report.recomputed_ops > 0 and len(layers) == models.DROPOUTS
    for layer, start in zip(layers, before, strict=True):
        np.testing.assert_array_equal(layer.seed_generator.state.numpy() - start,
                                      [0, len(made.batches)])


def test_stateful_random_ops_are_never_drawn_again():
    made, step = rewritten("stateful_dropout")
    step(*made.batches[0])
    nodes = tfckpt.verify.executed(step, *made.batches[0]).nodes
    assert step.report.recomputed_ops > 0
    assert sum(node.op == "RandomUniform" for node in nodes) == 4  # one for each layer
    assert not [op for op in training.copies_in(step.get_concrete_function(
        *made.batches[0]).graph) if op.type.startswith("Random")]


@pytest.mark.parametrize("name", ["residual", "dense_gelu"])
def test_bit_identical_without_grappler_too(name):
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})
    try:
        histories = []
        for wrap in (lambda step: step, tfckpt.checkpoint):
            process.fresh()
            made = MODELS[name]()
            step = wrap(tf.function(made.step))
            histories.append(training.train(step, made))
        assert step.report.recomputed_ops > 0
        training.assert_same_bits(histories[1], histories[0])
    finally:
        tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": False})
