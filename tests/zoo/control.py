"""Control flow: recurrent layers, loops, branches, nested functions, several steps per call."""

from __future__ import annotations

import keras
import tensorflow as tf

from tests.zoo.entry import LESS, Group, Training
from tests.zoo.steps import (
    BATCH,
    CLASSES,
    FEATURES,
    batches,
    by_hand,
    chain,
    fit,
    mean_square,
    stack,
    supervised,
    tokens,
    weights,
)

layers = keras.layers
GROUP = Group("control")


def _recurrent(layer, around=3, length=16):
    text = keras.Input((length,), dtype="int32")
    h = layers.Embedding(50, FEATURES)(text)
    for _ in range(around):
        h = layers.Dense(32, "tanh")(h)
    return keras.Model(text, layers.Dense(CLASSES)(layer(h)))


@GROUP.entry(smoke=True)
def lstm(wrap):
    return supervised(wrap, _recurrent(layers.LSTM(8, use_cudnn=False)), tokens())


@GROUP.entry()
def lstm_unrolled(wrap):
    return supervised(wrap, _recurrent(layers.LSTM(8, unroll=True), length=8), tokens(length=8))


@GROUP.entry()
def gru(wrap):
    return supervised(wrap, _recurrent(layers.GRU(8)), tokens())


@GROUP.entry()
def gru_unrolled(wrap):
    text = keras.Input((6,), dtype="int32")
    h = layers.Embedding(50, FEATURES)(text)
    h = layers.GRU(8, unroll=True, return_sequences=True)(h)
    model = keras.Model(text, layers.Dense(CLASSES)(layers.GRU(8, unroll=True)(h)))
    return supervised(wrap, model, tokens(length=6))


@GROUP.entry()
def bidirectional_fit(wrap):
    return fit(wrap, _recurrent(layers.Bidirectional(layers.LSTM(8))), tokens())


def _sequences(layer, length=12):
    """Nothing but recurrent layers: what their loops keep is most of what the step holds."""
    return keras.Sequential([keras.Input((length, FEATURES)),
                             *(layer(FEATURES, return_sequences=True) for _ in range(3)),
                             layer(CLASSES)])


@GROUP.entry()
def stacked_lstm(wrap):
    return supervised(wrap, _sequences(layers.LSTM), batches((64, 12, FEATURES)))


@GROUP.entry()
def stacked_lstm_fit(wrap):
    return fit(wrap, _sequences(layers.LSTM), batches((64, 12, FEATURES)))


@GROUP.entry()
def stacked_gru(wrap):
    return supervised(wrap, _sequences(layers.GRU), batches((64, 12, FEATURES)))


@GROUP.entry()
def stacked_lstm_with_masks_and_dropout(wrap):
    text = keras.Input((12,), dtype="int32")
    h = layers.Embedding(50, FEATURES, mask_zero=True)(text)
    for seed in range(3):
        h = layers.LSTM(FEATURES, return_sequences=True, dropout=0.2, recurrent_dropout=0.2,
                        seed=seed)(h)
    return supervised(wrap, keras.Model(text, layers.Dense(CLASSES)(h[:, -1])), tokens(length=12))


@GROUP.entry(xla=True, expect=LESS)
def stacked_lstm_compiled(wrap):
    return supervised(wrap, _sequences(layers.LSTM), batches((64, 12, FEATURES)),
                      jit_compile=True)


@GROUP.entry(expect=LESS)
def convolutional_lstm(wrap):
    film = keras.Input((4, 8, 8, 3))
    h = layers.ConvLSTM2D(4, 3, padding="same")(film)
    for _ in range(3):
        h = layers.Conv2D(8, 3, padding="same", activation="relu")(h)
    model = keras.Model(film, layers.Dense(CLASSES)(layers.Flatten()(h)))
    return supervised(wrap, model, batches((8, 4, 8, 8, 3)))


@GROUP.entry()
def while_loop_between_layers(wrap):
    ws = weights()

    def forward(x):
        h = chain(x, ws[:3])
        h = tf.while_loop(lambda i, t: i < 4, lambda i, t: (i + 1, tf.tanh(t @ ws[3])),
                          (0, h), maximum_iterations=4)[1]
        return mean_square(chain(h, ws[4:]))

    return by_hand(wrap, forward, ws)


def _loops(wrap, body, after=lambda h: h, extra=(), last=lambda: None):
    """Three loops over the same body between layers; `last` is called after the update."""
    ws = weights()

    def forward(x):
        h = chain(x, ws[:1])
        for w in ws[1:4]:
            h = tf.while_loop(lambda i, t: i < 6, lambda i, t, w=w: (i + 1, body(t, w)), (0, h))[1]
            h = after(h)
        loss = mean_square(chain(h, ws[4:5]))
        last()
        return loss

    return by_hand(wrap, forward, ws[:5], extra=extra)


@GROUP.entry()
def loops_in_a_row(wrap):
    return _loops(wrap, lambda t, w: tf.nn.softplus(tf.tanh(t @ w)))


@GROUP.entry(expect=LESS)
def loops_of_branches_in_loops(wrap):
    def inner(t, w):
        return tf.while_loop(
            lambda j, u: j < 2,
            lambda j, u: (j + 1, tf.cond(j > 0, lambda: tf.sin(u @ w), lambda: tf.tanh(u))),
            (0, t))[1]
    return _loops(wrap, inner)


@GROUP.entry(refused="RandomUniform")
def loops_with_random_numbers(wrap):
    return _loops(wrap, lambda t, w: tf.tanh(t @ w) * tf.random.uniform(tf.shape(t), seed=3))


@GROUP.entry(refused="PyFunc")
def loops_with_a_python_function(wrap):
    def body(t, w):
        called = tf.numpy_function(lambda v: v * 1.5, [t], tf.float32)
        return tf.tanh(t @ w) * tf.ensure_shape(called, t.shape)
    return _loops(wrap, body)


@GROUP.entry(refused="may write a variable that the loop reads")
def loops_whose_variable_is_written_in_between(wrap):
    scale = tf.Variable(0.9, trainable=False)

    def after(h):
        scale.assign(scale * 0.9)
        return h * scale

    return _loops(wrap, lambda t, w: tf.tanh(t @ w) * scale, after, [scale])


@GROUP.entry()
def loops_whose_variable_is_written_behind_them(wrap):
    """Nothing but our own control edges has the write wait for the copies."""
    scale = tf.Variable(0.9, trainable=False)
    return _loops(wrap, lambda t, w: tf.tanh(t @ w) * scale, extra=[scale],
                  last=lambda: scale.assign(scale * 0.9))


@GROUP.entry()
def loop_of_data_dependent_length(wrap):
    """Autograph: a Python `while` over tensors."""
    ws = weights()

    def forward(x):
        h = chain(x, ws[:4])
        while tf.reduce_mean(tf.abs(h)) > 0.2:
            h = 0.8 * tf.tanh(h @ ws[4])
        return mean_square(chain(h, ws[5:]))

    return by_hand(wrap, forward, ws)


@GROUP.entry()
def autograph_for_and_if(wrap):
    ws = weights()

    def forward(x):
        h = chain(x, ws[:4])
        for i in tf.range(3):
            if i == 1:
                h = tf.nn.relu(h)
            else:
                h = tf.sin(h @ ws[4])
        return mean_square(chain(h, ws[5:]))

    return by_hand(wrap, forward, ws)


@GROUP.entry()
def scan(wrap):
    ws = weights()

    def forward(x):
        h = tf.reshape(chain(x, ws[:4]), (8, -1, FEATURES))
        h = tf.scan(lambda state, t: tf.tanh(state @ ws[4] + t), h)
        return mean_square(chain(tf.reshape(h, (-1, FEATURES)), ws[5:]))

    return by_hand(wrap, forward, ws)


@GROUP.entry()
def map_fn(wrap):
    ws = weights()

    def forward(x):
        h = tf.reshape(chain(x, ws[:4]), (8, -1, FEATURES))
        h = tf.map_fn(lambda t: tf.tanh(t @ ws[4]), h)
        return mean_square(chain(tf.reshape(h, (-1, FEATURES)), ws[5:]))

    return by_hand(wrap, forward, ws)


@GROUP.entry()
def vectorized_map(wrap):
    ws = weights()

    def forward(x):
        h = tf.vectorized_map(lambda t: tf.tanh(tf.linalg.matvec(ws[4], t)), chain(x, ws[:4]))
        return mean_square(chain(h, ws[5:]))

    return by_hand(wrap, forward, ws)


@GROUP.entry(smoke=True)
def cond(wrap):
    ws = weights()

    def forward(x):
        h = chain(x, ws[:4])
        h = tf.cond(tf.reduce_sum(h) > 0.0, lambda: tf.tanh(h @ ws[4]), lambda: h * 2.0)
        return mean_square(chain(h, ws[5:]))

    return by_hand(wrap, forward, ws)


@GROUP.entry()
def switch_case(wrap):
    ws = weights()

    def forward(x):
        h = chain(x, ws[:4])
        index = tf.cast(tf.abs(tf.reduce_sum(h)) * 100.0, tf.int32) % 3
        h = tf.switch_case(index, [lambda: tf.tanh(h @ ws[4]), lambda: h * 2.0, lambda: -h])
        return mean_square(chain(h, ws[5:]))

    return by_hand(wrap, forward, ws)


@GROUP.entry()
def tensor_array(wrap):
    ws = weights()

    def forward(x):
        h = chain(x, ws[:4])
        store = tf.TensorArray(tf.float32, 4)
        for i in range(4):
            store = store.write(i, tf.sin(h * float(i + 1)))
        return mean_square(chain(tf.reduce_sum(store.stack(), 0), ws[4:]))

    return by_hand(wrap, forward, ws)


@GROUP.entry()
def nested_functions(wrap):
    @tf.function
    def layer(h, w):
        return tf.tanh(tf.nn.softplus(h @ w))

    ws = weights()

    def forward(x):
        h = x
        for w in ws:
            h = tf.square(layer(h, w)) + 0.1
        return mean_square(h)

    return by_hand(wrap, forward, ws)


@GROUP.entry(refused="nested function")
def nested_function_and_layers(wrap):
    """Return a function that must stay one between layers: those are recomputed, it is not."""
    @tf.function(experimental_attributes={"_noinline": True})
    def middle(h, w):
        return tf.nn.softplus(h @ w)

    ws = weights(10)
    return by_hand(wrap, lambda x: mean_square(
        chain(middle(chain(x, ws[:5]), ws[5]), ws[6:])), ws)


@GROUP.entry()
def step_called_by_a_loop_in_a_function(wrap):
    """Return the whole training loop in one `tf.function`; ours is the step that it calls."""
    ws = weights()

    def step(x):
        with tf.GradientTape() as tape:
            loss = mean_square(chain(x, ws))
        for w, g in zip(ws, tape.gradient(loss, ws), strict=True):
            w.assign_sub(0.1 * g)
        return loss

    inner = wrap.function(step)

    @tf.function
    def loop(x, y):
        last = tf.constant(0.0)
        for i in tf.range(3):
            last = inner(x * (1.0 + 0.1 * tf.cast(i, tf.float32)))
        return last

    return Training(loop, batches((2 * BATCH, FEATURES)), lambda: list(ws))


@GROUP.entry()
def whole_loop_decorated(wrap):
    """Decorated is the loop: its gradient lies in the loop's body."""
    ws = weights()

    def loop(x, y):
        last = tf.constant(0.0)
        for i in tf.range(3):
            with tf.GradientTape() as tape:
                last = mean_square(chain(x * (1.0 + 0.1 * tf.cast(i, tf.float32)), ws))
            for w, g in zip(ws, tape.gradient(last, ws), strict=True):
                w.assign_sub(0.1 * g)
        return last

    return Training(wrap.function(loop), batches((2 * BATCH, FEATURES)), lambda: list(ws))


@GROUP.entry(smoke=True)
def several_steps_per_execution(wrap):
    return fit(wrap, stack(), batches(), steps_per_execution=3)


@GROUP.entry()
def steps_per_execution_with_dropout_and_statistics(wrap):
    def drop():
        return layers.Dropout(0.3, seed=5)
    return fit(wrap, stack(layers.BatchNormalization, drop), batches(), steps_per_execution=2)


@GROUP.entry()
def fit_with_validation_and_prediction(wrap):
    training = fit(wrap, stack(layers.BatchNormalization), batches(),
                   metrics=["accuracy"], fit_options={"validation_split": 0.25})
    return training


@GROUP.entry()
def unrolled_iterations_over_shared_weights(wrap):
    ws = weights(2)

    def forward(x):
        h = x
        for _ in range(6):
            h = h + tf.tanh(tf.tanh(h @ ws[0]) @ ws[1])
        return mean_square(h)

    return by_hand(wrap, forward, ws)
