"""Compilation: XLA, eager runs, autoclustering, Grappler's options."""

from __future__ import annotations

import contextlib

import keras
import tensorflow as tf

from tests.zoo.entry import NO_REPORT, Group, Training
from tests.zoo.steps import (
    BATCH,
    FEATURES,
    batches,
    by_hand,
    chain,
    convolutions,
    fit,
    images,
    mean_square,
    stack,
    supervised,
    weights,
)

layers = keras.layers
GROUP = Group("compilation")


@GROUP.entry(xla=True, smoke=True)
def compiled(wrap):
    return supervised(wrap, stack(), batches(), jit_compile=True)


@GROUP.entry(xla=True)
def compiled_convolutions(wrap):
    return supervised(wrap, convolutions(layers.BatchNormalization), images(), jit_compile=True)


@GROUP.entry(xla=True)
def compiled_fit(wrap):
    return fit(wrap, stack(), batches(), jit_compile=True)


@GROUP.entry()
def automatic_choice_fit(wrap):
    return fit(wrap, stack(), batches(), jit_compile="auto")


@GROUP.entry(expect=NO_REPORT)
def run_eagerly(wrap):
    """No graph: a warning says so, and nothing changes."""
    return fit(wrap, stack(), batches(), run_eagerly=True)


@GROUP.entry(expect=NO_REPORT)
def functions_run_eagerly(wrap):
    training = supervised(wrap, stack(), batches())

    def step(x, y):
        tf.config.run_functions_eagerly(True)
        try:
            return training.step(x, y)
        finally:
            tf.config.run_functions_eagerly(False)

    return Training(step, training.batches, training.state)


def _with_options(wrap, options):
    """Grappler's options hold while the step runs."""
    training = supervised(wrap, convolutions(layers.BatchNormalization), images())

    def step(*batch):
        with grappler_options(options):
            return training.step(*batch)

    return Training(step, training.batches, training.state)


@contextlib.contextmanager
def grappler_options(options):
    """Have Grappler's options set for a while."""
    before = tf.config.optimizer.get_experimental_options()
    tf.config.optimizer.set_experimental_options(options)
    try:
        yield
    finally:
        tf.config.optimizer.set_experimental_options(
            {name: before.get(name, name != "disable_meta_optimizer") for name in options})


@GROUP.entry(smoke=True)
def without_grappler(wrap):
    return _with_options(wrap, {"disable_meta_optimizer": True})


@GROUP.entry()
def without_remapper(wrap):
    return _with_options(wrap, {"remapping": False})


@GROUP.entry()
def without_arithmetic_optimization(wrap):
    return _with_options(wrap, {"arithmetic_optimization": False, "constant_folding": False})


@GROUP.entry()
def without_dependency_optimization(wrap):
    return _with_options(wrap, {"dependency_optimization": False, "loop_optimization": False})


@GROUP.entry(xla=True, alone=True)
def autoclustering(wrap):
    training = supervised(wrap, stack(), batches())

    def step(x, y):
        tf.config.optimizer.set_jit("autoclustering")
        try:
            return training.step(x, y)
        finally:
            tf.config.optimizer.set_jit(False)

    return Training(step, training.batches, training.state)


def _mixed(wrap, compiled_first):
    ws = weights()
    training = by_hand(wrap, lambda x: mean_square(chain(x, ws)), ws)
    outer = tf.function(lambda x, y: training.step(x, y), jit_compile=True)
    calls = []

    def step(x, y):
        calls.append(None)
        return (outer if (len(calls) % 2) == compiled_first else training.step)(x, y)

    return Training(step, batches((2 * BATCH, FEATURES)), training.state)


@GROUP.entry(xla=True)
def traced_plain_then_called_compiled(wrap):
    return _mixed(wrap, False)


@GROUP.entry(xla=True)
def traced_compiled_then_called_plain(wrap):
    return _mixed(wrap, True)


@GROUP.entry(xla=True)
def compiled_function_inside_the_step(wrap):
    """Return a layer compiled by itself, in a step that is not."""
    @tf.function(jit_compile=True)
    def layer(h, w):
        return tf.tanh(h @ w) * 0.9

    ws = weights(10)
    return by_hand(wrap, lambda x: mean_square(
        chain(layer(chain(x, ws[:5]), ws[5]), ws[6:])), ws)


@GROUP.entry()
def called_by_another_function(wrap):
    """Return the step is one call in a function of the user, which is not ours."""
    ws = weights()

    def step(x, y):
        with tf.GradientTape() as tape:
            loss = mean_square(chain(x, ws))
        found = tape.gradient(loss, ws)
        for w, g in zip(ws, found, strict=True):
            w.assign_sub(0.1 * g)
        return loss

    inner = wrap.function(step)
    outer = tf.function(lambda x, y: inner(x, y), autograph=False)
    return Training(outer, batches((512, FEATURES)), lambda: list(ws))
