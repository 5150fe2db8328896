"""State: what a step changes beside its weights is changed once."""

from __future__ import annotations

import pathlib
import tempfile

import keras
import numpy as np
import tensorflow as tf

from tests.zoo.entry import Group, Training
from tests.zoo.steps import (
    BATCH,
    FEATURES,
    batches,
    by_hand,
    chain,
    convolutions,
    crossentropy,
    fit,
    images,
    mean_square,
    sgd,
    stack,
    supervised,
    weights,
)

layers = keras.layers
GROUP = Group("state")


@GROUP.entry()
def batch_normalization(wrap):
    return supervised(wrap, convolutions(layers.BatchNormalization), images())


@GROUP.entry()
def batch_normalization_fit(wrap):
    return fit(wrap, convolutions(layers.BatchNormalization), images())


@GROUP.entry()
def renormalization_frozen(wrap):
    """Return every other BatchNorm is frozen: it reads its statistics instead of writing them."""
    model = stack(layers.BatchNormalization)
    for layer in model.layers[1::4]:
        layer.trainable = False
    return supervised(wrap, model, batches())


@GROUP.entry()
def spectral_normalization(wrap):
    parts = [keras.Input((FEATURES,))]
    for _ in range(4):
        parts += [layers.SpectralNormalization(layers.Dense(32)), layers.Activation("tanh")]
    return supervised(wrap, keras.Sequential([*parts, layers.Dense(5)]), batches())


@GROUP.entry()
def normalization_layer_adapted(wrap):
    data = batches()
    scale = layers.Normalization()
    scale.adapt(data[0][0])
    return supervised(wrap, keras.Sequential([scale, *stack().layers]), data)


@GROUP.entry()
def stateful_metrics(wrap):
    return fit(wrap, stack(), batches(),
               metrics=["accuracy", keras.metrics.SparseTopKCategoricalAccuracy(2)])


@GROUP.entry()
def metrics_added_by_a_layer(wrap):
    class Watch(layers.Layer):
        def __init__(self):
            super().__init__()
            self.mean = keras.metrics.Mean()

        def call(self, x):
            self.mean.update_state(tf.reduce_mean(x))
            return tf.tanh(x)

    return supervised(wrap, stack(Watch), batches())


@GROUP.entry(smoke=True)
def moving_average_and_counter(wrap):
    ws, count = weights(), tf.Variable(0, dtype=tf.int64)
    average = tf.Variable(tf.zeros(FEATURES))

    def forward(x):
        count.assign_add(1)
        h = chain(x, ws[:4])
        average.assign(0.9 * average + 0.1 * tf.reduce_mean(h, 0))
        return mean_square(chain(h + average, ws[4:])) * tf.cast(count, tf.float32)

    return by_hand(wrap, forward, ws, extra=[count, average])


@GROUP.entry()
def average_of_weights(wrap):
    model, average = stack(), tf.train.ExponentialMovingAverage(0.9)
    optimizer, loss = sgd(), crossentropy()
    variables = [v.value for v in model.trainable_variables]
    optimizer.build(model.trainable_variables)
    with tf.init_scope():
        average.apply(variables)

    def step(x, y):
        with tf.GradientTape() as tape:
            value = loss(y, model(x, training=True))
        gradients = tape.gradient(value, model.trainable_variables)
        optimizer.apply(gradients, model.trainable_variables)
        average.apply(variables)
        return value, gradients

    return Training(wrap.function(step), batches(), lambda: [
        *model.variables, *optimizer.variables, *(average.average(v) for v in variables)])


@GROUP.entry(smoke=True)
def lookup_table_in_the_forward(wrap):
    table = tf.lookup.experimental.MutableHashTable(tf.int64, tf.float32, 1.0)
    ws = weights()

    def forward(x):
        key = tf.cast(tf.reduce_sum(tf.abs(x)), tf.int64) % 7
        table.insert(key[None], table.lookup(key[None]) + 0.5)
        h = chain(x, ws[:4])
        return mean_square(chain(h * table.lookup(key[None]), ws[4:]))

    def exported():
        keys, values = table.export()
        order = tf.argsort(keys)
        return [tf.gather(keys, order), tf.gather(values, order)]

    training = by_hand(wrap, forward, ws)
    return Training(training.step, training.batches, lambda: [*ws, *exported()])


@GROUP.entry()
def static_lookup_of_strings(wrap):
    words = tf.constant([f"word{i}" for i in range(20)])
    table = layers.StringLookup(vocabulary=[f"word{i}" for i in range(0, 20, 2)])
    embed = tf.Variable(tf.random.stateless_normal((12, FEATURES), (1, 2)))
    ws = weights()

    def forward(x):
        picked = tf.gather(words, tf.cast(tf.abs(x[:, 0]) * 7.0, tf.int32) % 20)
        return mean_square(chain(x + tf.gather(embed, table(picked)), ws))

    return by_hand(wrap, forward, [*ws, embed])


@GROUP.entry(smoke=True)
def prints(wrap):
    """Return what is printed is part of the state."""
    ws, out = weights(), pathlib.Path(tempfile.mkstemp(suffix=".txt")[1])

    def forward(x):
        h = chain(x, ws[:4])
        tf.print("mean", tf.reduce_mean(h), output_stream=f"file://{out}")
        return mean_square(chain(h, ws[4:]))

    training = by_hand(wrap, forward, ws)
    return Training(training.step, training.batches,
                    lambda: [*ws, np.array(out.read_text(), object)])


@GROUP.entry()
def assertions(wrap):
    ws = weights()

    def forward(x):
        h = x
        for w in ws:
            h = tf.tanh(h @ w)
            tf.debugging.assert_all_finite(h, "not finite")
            tf.debugging.assert_less(h, 1.5)
        return mean_square(tf.debugging.check_numerics(h, "bad"))

    return by_hand(wrap, forward, ws)


@GROUP.entry(smoke=True)
def python_calls(wrap):
    ws, calls = weights(), []

    def noted(h):
        calls.append(float(h.numpy().mean()))
        return h * 1.5

    def forward(x):
        h = chain(x, ws[:4])
        scaled = tf.numpy_function(lambda a: (calls.append(1.0), a.sum())[1], [h], tf.float32)
        scaled.set_shape(())
        seen = tf.py_function(noted, [h], tf.float32)
        seen.set_shape(h.shape)
        return mean_square(chain(seen, ws[4:])) + 0.0 * tf.stop_gradient(scaled)

    training = by_hand(wrap, forward, ws)
    return Training(training.step, training.batches, lambda: [*ws, calls])


@GROUP.entry()
def summaries(wrap):
    folder = pathlib.Path(tempfile.mkdtemp())
    writer, ws = tf.summary.create_file_writer(str(folder)), weights()
    count = tf.Variable(0, dtype=tf.int64)

    def forward(x):
        count.assign_add(1)
        h = chain(x, ws[:4])
        with writer.as_default(step=count):
            tf.summary.write("mean", tf.reduce_mean(h))
            tf.summary.write("h", h)
        return mean_square(chain(h, ws[4:]))

    def events():
        writer.flush()
        records = [r for f in sorted(folder.iterdir())
                   for r in tf.compat.v1.train.summary_iterator(str(f))]
        return [tf.make_ndarray(value.tensor) for r in records for value in r.summary.value]

    training = by_hand(wrap, forward, ws)
    return Training(training.step, training.batches, lambda: [*ws, count, *events()])


@GROUP.entry()
def queue_between_steps(wrap):
    queue = tf.queue.FIFOQueue(8, [tf.float32], [()])
    ws = weights()
    queue.enqueue(1.0)

    def forward(x):
        h = chain(x, ws[:4])
        queue.enqueue(tf.reduce_mean(h))
        return mean_square(chain(h * queue.dequeue(), ws[4:]))

    training = by_hand(wrap, forward, ws)
    return Training(training.step, training.batches, lambda: [*ws, queue.size()])


@GROUP.entry()
def variable_written_and_read_in_the_forward(wrap):
    """Return a memory bank: the forward reads what it has just written."""
    ws, bank = weights(), tf.Variable(tf.zeros((2 * BATCH, FEATURES)))

    def forward(x):
        h = chain(x, ws[:4])
        bank.assign(0.5 * bank + 0.5 * tf.stop_gradient(h))
        return mean_square(chain(h + bank, ws[4:])) + mean_square(bank - h)

    return by_hand(wrap, forward, ws, extra=[bank])


@GROUP.entry()
def variable_written_twice(wrap):
    ws, scale = weights(), tf.Variable(1.0)

    def forward(x):
        h = tf.tanh(x @ ws[0]) * scale
        scale.assign_add(0.25)
        h = chain(h, ws[1:4]) * scale
        scale.assign(scale * 0.75)
        return mean_square(chain(h, ws[4:]) * scale)

    return by_hand(wrap, forward, ws, extra=[scale])


@GROUP.entry()
def weights_constrained_and_regularised(wrap):
    parts = [keras.Input((FEATURES,))]
    for _ in range(4):
        parts.append(layers.Dense(32, "tanh", kernel_regularizer="l2", activity_regularizer="l2",
                                  kernel_constraint=keras.constraints.MaxNorm(1.0)))
    return supervised(wrap, keras.Sequential([*parts, layers.Dense(5)]), batches())
