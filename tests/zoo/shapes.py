"""Shapes: unknown and ragged batches, retracing, nests, optional inputs, sample weights."""

from __future__ import annotations

import keras
import numpy as np
import tensorflow as tf

from tests.zoo.entry import Group, Training
from tests.zoo.steps import (
    BATCH,
    CLASSES,
    FEATURES,
    batches,
    by_hand,
    chain,
    convolutions,
    crossentropy,
    fit,
    images,
    made,
    mean_square,
    sgd,
    stack,
    supervised,
    tokens,
    weights,
)

layers = keras.layers
GROUP = Group("shapes")
_UNKNOWN = [tf.TensorSpec((None, FEATURES), tf.float32), tf.TensorSpec((None,), tf.int32)]


@GROUP.entry(smoke=True)
def unknown_batch(wrap):
    return supervised(wrap, stack(), batches(), input_signature=_UNKNOWN)


@GROUP.entry()
def unknown_batch_by_hand(wrap):
    ws = weights()
    return by_hand(wrap, lambda x: mean_square(chain(x, ws, tf.nn.gelu)), ws,
                   input_signature=_UNKNOWN)


@GROUP.entry(smoke=True)
def unknown_batch_square_by_hand(wrap):
    """Both gradients of h * h are one product, and the sums over the batch are not."""
    ws = weights(4)

    def forward(x):
        h = chain(x, ws)
        return tf.reduce_mean(h * h)

    return by_hand(wrap, forward, ws, input_signature=_UNKNOWN)


@GROUP.entry()
def unknown_batch_convolutions(wrap):
    specs = [tf.TensorSpec((None, 16, 16, 3)), tf.TensorSpec((None,), tf.int32)]
    return supervised(wrap, convolutions(layers.BatchNormalization), images(),
                      keras.optimizers.Adam(1e-2), input_signature=specs)


@GROUP.entry()
def unknown_batch_attention(wrap):
    text = keras.Input((16,), dtype="int32")
    h = layers.Embedding(50, 16)(text)
    for _ in range(3):
        h = layers.LayerNormalization()(h + layers.MultiHeadAttention(2, 8)(h, h))
    model = keras.Model(text, layers.Dense(CLASSES)(layers.GlobalAveragePooling1D()(h)))
    specs = [tf.TensorSpec((None, 16), tf.int32), tf.TensorSpec((None,), tf.int32)]
    return supervised(wrap, model, tokens(), keras.optimizers.Adam(1e-2), input_signature=specs)


@GROUP.entry()
def unknown_length(wrap):
    ws = weights()
    data = [(tf.reshape(x, (16, -1, FEATURES)), y) for x, y in batches()]
    specs = [tf.TensorSpec((None, None, FEATURES)), tf.TensorSpec((None,), tf.int32)]
    return by_hand(wrap, lambda x: mean_square(
        chain(tf.reshape(x, (-1, FEATURES)), ws)), ws, data, input_signature=specs)


@GROUP.entry()
def unknown_rank_given_shape_inside(wrap):
    ws = weights()

    def forward(x):
        return mean_square(chain(tf.ensure_shape(x, (2 * BATCH, FEATURES)), ws))

    return by_hand(wrap, forward, ws, input_signature=[
        tf.TensorSpec(None), tf.TensorSpec((None,), tf.int32)])


@GROUP.entry()
def smaller_last_batch_in_fit(wrap):
    data = batches()
    return fit(wrap, stack(), data, fit_options={"batch_size": 200})


@GROUP.entry()
def dataset_of_unknown_batches(wrap):
    model = wrap.model(stack())
    model.compile(sgd(), crossentropy(), jit_compile=False)
    rng = made()
    data = tf.data.Dataset.from_tensor_slices((
        rng.standard_normal((600, FEATURES), dtype=np.float32),
        rng.integers(0, CLASSES, 600))).batch(256).repeat(2)
    return Training(lambda: model.fit(data, verbose=0).history, [()] * 2,
                    lambda: [*model.variables, *model.optimizer.variables])


@GROUP.entry()
def retraced_for_each_shape(wrap):
    data = [*batches()[:1], *batches((128, FEATURES))[:1], *batches((64, FEATURES))[:1]]
    return supervised(wrap, stack(), data)


@GROUP.entry()
def retraced_for_python_arguments(wrap):
    ws = weights()

    def step(x, y, depth, name):
        with tf.GradientTape() as tape:
            loss = mean_square(chain(x, ws[:depth], tf.tanh if name == "tanh" else tf.nn.gelu))
        found = tape.gradient(loss, ws[:depth])
        for w, g in zip(ws, found, strict=False):
            w.assign_sub(0.1 * g)
        return loss, found

    calls = [(*batch, depth, name) for batch, depth, name in zip(
        batches((512, FEATURES)), (8, 4, 8), ("tanh", "tanh", "gelu"), strict=True)]
    return Training(wrap.function(step), calls, lambda: list(ws))


@GROUP.entry()
def relaxed_shapes(wrap):
    data = [*batches()[:1], *batches((128, FEATURES))[:1], *batches((64, FEATURES))[:1]]
    return supervised(wrap, stack(), data, reduce_retracing=True)


@GROUP.entry()
def ragged_input(wrap):
    ws = weights()
    rng = made()

    def forward(x):
        h = x.with_values(chain(x.values, ws))
        return mean_square(tf.reduce_mean(h, 1))

    data = [(tf.RaggedTensor.from_row_lengths(
        tf.constant(rng.standard_normal((300, FEATURES), dtype=np.float32)), [100, 50, 150]),
        tf.zeros(())) for _ in range(3)]
    return by_hand(wrap, forward, ws, data)


@GROUP.entry()
def sparse_input(wrap):
    ws = weights()
    rng = made()

    def forward(x):
        return mean_square(chain(tf.sparse.sparse_dense_matmul(x, ws[0]), ws[1:]))

    data = [(tf.sparse.from_dense(tf.constant(np.where(
        rng.random((512, FEATURES)) < 0.3, 1.5, 0.0).astype(np.float32))), tf.zeros(()))
        for _ in range(3)]
    return by_hand(wrap, forward, ws, data)


@GROUP.entry()
def dictionaries_and_nests(wrap):
    ws = weights()

    def step(batch, target):
        with tf.GradientTape() as tape:
            h = batch["x"] + batch["more"][0]
            loss = mean_square(chain(h, ws)) + 0.0 * tf.cast(tf.reduce_sum(target), tf.float32)
        found = tape.gradient(loss, {"a": ws[:4], "b": ws[4:]})
        for w, g in zip(ws, tf.nest.flatten(found), strict=True):
            w.assign_sub(0.1 * g)
        return {"loss": loss, "gradients": found}

    calls = [({"x": x, "more": (0.5 * x, None)}, y) for x, y in batches((512, FEATURES))]
    return Training(wrap.function(step), calls, lambda: list(ws))


@GROUP.entry()
def optional_inputs(wrap):
    ws = weights()

    def step(x, mask=None, *, scale=1.0):
        with tf.GradientTape() as tape:
            h = chain(x if mask is None else x * mask, ws)
            loss = scale * mean_square(h)
        found = tape.gradient(loss, ws)
        for w, g in zip(ws, found, strict=True):
            w.assign_sub(0.1 * g)
        return loss, found

    data = batches((512, FEATURES))
    ones = tf.ones((512, 1))
    calls = [(data[0][0],), (data[1][0], ones), (data[2][0], None)]
    return Training(wrap.function(step), calls, lambda: list(ws))


@GROUP.entry()
def sample_and_class_weights(wrap):
    data = batches()
    size = sum(int(x.shape[0]) for x, _ in data)
    return fit(wrap, stack(), data, fit_options={
        "sample_weight": np.linspace(0.1, 2.0, size).astype(np.float32)})


@GROUP.entry()
def masked_sequences(wrap):
    text = keras.Input((16,), dtype="int32")
    h = layers.Embedding(50, FEATURES, mask_zero=True)(text)
    for _ in range(3):
        h = layers.Dense(32, "tanh")(h)
    model = keras.Model(text, layers.Dense(CLASSES)(layers.GlobalAveragePooling1D()(h)))
    data = [(tf.where(tf.range(16) < 11, x, 0), y) for x, y in tokens()]
    return supervised(wrap, model, data)


@GROUP.entry()
def boolean_mask_of_data_dependent_size(wrap):
    ws = weights()

    def forward(x):
        h = chain(x, ws[:4])
        picked = tf.boolean_mask(h, tf.reduce_sum(h, 1) > 0.0)
        return mean_square(chain(picked, ws[4:]))

    return by_hand(wrap, forward, ws)


@GROUP.entry()
def several_inputs_and_outputs(wrap):
    one, two = keras.Input((FEATURES,)), keras.Input((FEATURES,))
    h = layers.Concatenate()([layers.Dense(32, "tanh")(one), layers.Dense(32, "relu")(two)])
    for _ in range(3):
        h = layers.Dense(32, "gelu")(h)
    model = wrap.model(keras.Model([one, two], {"a": layers.Dense(5, name="a")(h),
                                                "b": layers.Dense(1, name="b")(h)}))
    model.compile("adam", {"a": crossentropy(), "b": "mse"}, jit_compile=False)
    rng = made()
    x = [rng.standard_normal((512, FEATURES), dtype=np.float32) for _ in range(2)]
    y = {"a": rng.integers(0, 5, 512), "b": rng.standard_normal((512, 1), dtype=np.float32)}
    return Training(lambda: model.fit(x, y, batch_size=128, shuffle=False, verbose=0).history,
                    [()] * 2, lambda: [*model.variables, *model.optimizer.variables])


@GROUP.entry()
def train_on_batch(wrap):
    model = wrap.model(stack())
    model.compile(sgd(), crossentropy(), jit_compile=False)
    return Training(lambda x, y: model.train_on_batch(x.numpy(), y.numpy()), batches(),
                    lambda: [*model.variables, *model.optimizer.variables])


@GROUP.entry()
def empty_batch(wrap):
    data = batches()
    data[1] = (data[1][0][:0], data[1][1][:0])
    ws = weights()
    return by_hand(wrap, lambda x: tf.reduce_sum(chain(x, ws)), ws, data,
                   input_signature=_UNKNOWN)
