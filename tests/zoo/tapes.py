"""Tapes: several, persistent, nested; custom gradients; losses over shared weights."""

from __future__ import annotations

import keras
import tensorflow as tf

from tests.zoo.entry import LESS, UNCHANGED, Group, Training
from tests.zoo.steps import (
    BATCH,
    FEATURES,
    WIDTH,
    batches,
    by_hand,
    chain,
    crossentropy,
    mean_square,
    sgd,
    stack,
    supervised,
    weights,
)

layers = keras.layers
GROUP = Group("tapes")


def _descend(variables, gradients, rate=0.1):
    for v, g in zip(variables, gradients, strict=True):
        v.assign_sub(rate * g)


@GROUP.entry(smoke=True)
def generator_and_critic(wrap):
    """Two models, two tapes, two optimizers; equal ops in two losses of one output."""
    generator = keras.Sequential([stack(last=False), layers.Dense(FEATURES)])
    critic = keras.Sequential([stack(last=False), layers.Dense(1)])
    ours, theirs = keras.optimizers.Adam(1e-3), keras.optimizers.Adam(1e-3)
    ours.build(generator.trainable_variables)
    theirs.build(critic.trainable_variables)
    entropy = keras.losses.BinaryCrossentropy(from_logits=True)

    def step(x, y):
        noise = tf.random.stateless_normal((BATCH, FEATURES), (1, 2))
        with tf.GradientTape() as tape, tf.GradientTape() as other:
            fake = generator(noise, training=True)
            real_score, fake_score = critic(x, training=True), critic(fake, training=True)
            loss = entropy(tf.ones_like(fake_score), fake_score)
            critic_loss = (entropy(tf.ones_like(real_score), real_score)
                           + entropy(tf.zeros_like(fake_score), fake_score))
        found = tape.gradient(loss, generator.trainable_variables)
        critic_found = other.gradient(critic_loss, critic.trainable_variables)
        ours.apply(found, generator.trainable_variables)
        theirs.apply(critic_found, critic.trainable_variables)
        return loss, critic_loss, found, critic_found

    return Training(wrap.function(step), batches(), lambda: [
        *generator.variables, *critic.variables, *ours.variables, *theirs.variables])


@GROUP.entry(smoke=True)
def generator_after_the_critic(wrap):
    """Return the critic is updated first; the generator's loss reads the new critic."""
    generator, critic = weights(4), weights(4)

    def step(x, y):
        with tf.GradientTape() as tape:
            gap = tf.reduce_mean(chain(x, critic)) - tf.reduce_mean(
                chain(chain(-x, generator), critic))
        found = tape.gradient(gap, critic)
        _descend(critic, found)
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(chain(chain(-x, generator), critic))
        more = tape.gradient(loss, generator)
        _descend(generator, more)
        return gap, loss, found, more

    return Training(wrap.function(step), batches((512, FEATURES)),
                    lambda: [*generator, *critic])


@GROUP.entry(smoke=True)
def persistent_tape(wrap):
    ws = weights()

    def step(x, y):
        with tf.GradientTape(persistent=True) as tape:
            h = chain(x, ws[:4])
            first, second = mean_square(h), mean_square(chain(h, ws[4:]))
        found = tape.gradient(first, ws[:4]), tape.gradient(second, ws)
        _descend(ws[:4], found[0])
        _descend(ws, found[1])
        return first, second, found

    return Training(wrap.function(step), batches((512, FEATURES)), lambda: list(ws))


@GROUP.entry()
def gradient_penalty(wrap):
    ws = weights(6)

    def step(x, y):
        with tf.GradientTape() as tape:
            with tf.GradientTape() as inner:
                inner.watch(x)
                value = tf.reduce_sum(chain(x, ws))
            slope = inner.gradient(value, x)
            loss = value / BATCH + tf.reduce_mean(tf.square(tf.norm(slope, axis=1) - 1.0))
        found = tape.gradient(loss, ws)
        _descend(ws, found)
        return loss, found

    return Training(wrap.function(step), batches((512, FEATURES)), lambda: list(ws))


@GROUP.entry(expect=LESS)
def jacobian(wrap):
    ws = weights(4)

    def step(x, y):
        with tf.GradientTape() as tape:
            with tf.GradientTape() as inner:
                inner.watch(x)
                h = chain(x, ws)
            slopes = inner.batch_jacobian(h, x)
            loss = mean_square(slopes) + mean_square(h)
        found = tape.gradient(loss, ws)
        _descend(ws, found)
        return loss, found

    return Training(wrap.function(step), batches((64, FEATURES)), lambda: list(ws))


@GROUP.entry(expect=UNCHANGED, refused="inside of a loop")
def jacobian_unrolled(wrap):
    ws = weights(4)

    def step(x, y):
        with tf.GradientTape(persistent=True) as tape:
            h = tf.reduce_mean(chain(x, ws), 0)[:4]
        found = tape.jacobian(h, ws, experimental_use_pfor=False)
        _descend(ws, [tf.reduce_sum(j, 0) for j in found])
        return h, found

    return Training(wrap.function(step), batches((512, FEATURES)), lambda: list(ws))


@GROUP.entry()
def hessian_vector_product(wrap):
    ws = weights(4)

    def step(x, y):
        with tf.GradientTape() as outer:
            with tf.GradientTape() as inner:
                loss = mean_square(chain(x, ws))
            found = inner.gradient(loss, ws)
            product = tf.add_n([tf.reduce_sum(g * w) for g, w in zip(found, ws, strict=True)])
        curved = outer.gradient(product, ws)
        _descend(ws, curved)
        return loss, product, curved

    return Training(wrap.function(step), batches((512, FEATURES)), lambda: list(ws))


@GROUP.entry()
def forward_accumulator(wrap):
    """Forward over reverse."""
    ws = weights(4)

    def step(x, y):
        with tf.autodiff.ForwardAccumulator(ws, [tf.ones_like(w) for w in ws]) as accumulator:
            with tf.GradientTape() as tape:
                loss = mean_square(chain(x, ws))
            found = tape.gradient(loss, ws)
        curved = accumulator.jvp(found)
        _descend(ws, found)
        return loss, found, curved

    return Training(wrap.function(step), batches((512, FEATURES)), lambda: list(ws))


@GROUP.entry()
def meta_learning(wrap):
    """MAML: a gradient through a step of gradient descent."""
    ws = weights(4)

    def step(x, y):
        with tf.GradientTape() as outer:
            with tf.GradientTape() as inner:
                loss = mean_square(chain(x, ws))
            moved = [w - 0.1 * g for w, g in zip(ws, inner.gradient(loss, ws), strict=True)]
            after = mean_square(chain(-x, moved))
        found = outer.gradient(after, ws)
        _descend(ws, found)
        return loss, after, found

    return Training(wrap.function(step), batches((512, FEATURES)), lambda: list(ws))


@GROUP.entry()
def several_tasks(wrap):
    features = keras.Input((FEATURES,))
    h = features
    for _ in range(3):
        h = layers.Dense(WIDTH, "tanh")(h)
    heads = [layers.Dense(5)(layers.Dense(WIDTH, "relu")(h)) for _ in range(3)]
    model = keras.Model(features, heads)
    optimizer, loss = keras.optimizers.Adam(1e-2), crossentropy()
    optimizer.build(model.trainable_variables)

    def step(x, y):
        with tf.GradientTape() as tape:
            values = [loss((y + i) % 5, out) for i, out in enumerate(model(x, training=True))]
            total = tf.add_n([w * v for w, v in zip((1.0, 0.5, 0.1), values, strict=True)])
        found = tape.gradient(total, model.trainable_variables)
        optimizer.apply(found, model.trainable_variables)
        return values, found

    return Training(wrap.function(step), batches(),
                    lambda: [*model.variables, *optimizer.variables])


@GROUP.entry()
def contrastive_over_shared_weights(wrap):
    """SimCLR: one encoder, two views, all pairs of a batch."""
    model = stack(depth=3)
    optimizer = keras.optimizers.Adam(1e-2)
    optimizer.build(model.trainable_variables)

    def step(x, y):
        with tf.GradientTape() as tape:
            views = [tf.math.l2_normalize(model(x * (1.0 + 0.1 * i), training=True), 1)
                     for i in range(2)]
            scores = tf.matmul(views[0], views[1], transpose_b=True) / 0.1
            target = tf.range(tf.shape(x)[0])
            loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(target, scores))
        found = tape.gradient(loss, model.trainable_variables)
        optimizer.apply(found, model.trainable_variables)
        return loss, found

    return Training(wrap.function(step), batches((128, FEATURES)),
                    lambda: [*model.variables, *optimizer.variables])


@GROUP.entry()
def momentum_encoder(wrap):
    """BYOL: a second encoder follows the first one's weights."""
    online, target = weights(4), weights(4)

    def step(x, y):
        wanted = chain(x * 1.1, target)
        with tf.GradientTape() as tape:
            loss = mean_square(chain(x, online) - tf.stop_gradient(wanted))
        found = tape.gradient(loss, online)
        _descend(online, found)
        for slow, fast in zip(target, online, strict=True):
            slow.assign(0.99 * slow + 0.01 * fast)
        return loss, found

    return Training(wrap.function(step), batches((512, FEATURES)), lambda: [*online, *target])


@GROUP.entry(smoke=True)
def custom_gradients(wrap):
    @tf.custom_gradient
    def reversed_gradient(t):
        return tf.sinh(t), lambda upstream: -0.5 * upstream * tf.cosh(t)

    ws = weights()
    return by_hand(wrap, lambda x: mean_square(
        chain(x, ws, lambda t: tf.tanh(reversed_gradient(t)))), ws)


@GROUP.entry()
def custom_gradient_with_variables(wrap):
    ws = weights()

    def layer(h, w):
        @tf.custom_gradient
        def inside(t):
            result = tf.tanh(t @ w)

            def grad(upstream, variables=None):
                d = upstream * (1.0 - tf.square(result))
                return tf.matmul(d, w, transpose_b=True), [tf.matmul(t, d, transpose_a=True)]
            return result, grad
        return inside(h)

    def forward(x):
        h = x
        for w in ws:
            h = layer(h, w)
        return mean_square(h)

    return by_hand(wrap, forward, ws)


@GROUP.entry()
def recompute_grad_already_used(wrap):
    """Written by hand before: it must go on doing what it does."""
    ws = weights()

    def forward(x):
        h = x
        for i in range(0, 8, 2):
            h = tf.recompute_grad(
                lambda t, a, b: tf.tanh(tf.nn.softplus(t @ a) @ b))(h, ws[i], ws[i + 1])
        return mean_square(h)

    return by_hand(wrap, forward, ws)


@GROUP.entry()
def remat_scope_already_used(wrap):
    with keras.RematScope(mode="activations"):
        model = stack(depth=3)
    return supervised(wrap, model, batches())


@GROUP.entry()
def stop_gradient_in_between(wrap):
    ws = weights()

    def forward(x):
        h = chain(x, ws[:4])
        return mean_square(chain(tf.stop_gradient(h), ws[4:])) + mean_square(h)

    return by_hand(wrap, forward, ws)


@GROUP.entry()
def no_gradient_for_some(wrap):
    """Variables that the loss does not read: their gradient is None or zero."""
    ws = weights()

    def step(x, y):
        with tf.GradientTape() as tape:
            loss = mean_square(chain(x, ws[:6]))
        found = tape.gradient(loss, ws, unconnected_gradients="zero")
        _descend(ws, found)
        return loss, found

    return Training(wrap.function(step), batches((512, FEATURES)), lambda: list(ws))


@GROUP.entry(expect=LESS)
def gradients_of_the_input(wrap):
    """Adversarial training: the input is moved along its gradient first."""
    model, loss, optimizer = stack(), crossentropy(), sgd()
    optimizer.build(model.trainable_variables)

    def step(x, y):
        with tf.GradientTape() as inner:
            inner.watch(x)
            value = loss(y, model(x, training=True))
        worse = tf.stop_gradient(x + 0.01 * tf.sign(inner.gradient(value, x)))
        with tf.GradientTape() as tape:
            value = loss(y, model(worse, training=True))
        found = tape.gradient(value, model.trainable_variables)
        optimizer.apply(found, model.trainable_variables)
        return value, found

    return Training(wrap.function(step), batches(),
                    lambda: [*model.variables, *optimizer.variables])


@GROUP.entry()
def output_gradients(wrap):
    """Return the backward starts from given gradients."""
    ws = weights()

    def step(x, y):
        with tf.GradientTape() as tape:
            h = chain(x, ws)
        found = tape.gradient(h, ws, output_gradients=tf.cos(x))
        _descend(ws, found, 0.001)
        return found

    return Training(wrap.function(step), batches((512, FEATURES)), lambda: list(ws))


@GROUP.entry()
def distillation(wrap):
    teacher, student = stack(activation="relu"), stack(depth=3)
    teacher.trainable = False
    optimizer = keras.optimizers.Adam(1e-2)
    optimizer.build(student.trainable_variables)

    def step(x, y):
        soft = tf.nn.softmax(teacher(x, training=False) / 2.0)
        with tf.GradientTape() as tape:
            out = student(x, training=True)
            loss = tf.reduce_mean(tf.nn.softmax_cross_entropy_with_logits(soft, out / 2.0))
        found = tape.gradient(loss, student.trainable_variables)
        optimizer.apply(found, student.trainable_variables)
        return loss, found

    return Training(wrap.function(step), batches(),
                    lambda: [*student.variables, *teacher.variables, *optimizer.variables])


@GROUP.entry()
def policy_gradient(wrap):
    """PPO: a clipped ratio of likelihoods and a value head."""
    policy, value = stack(), stack()
    optimizer = keras.optimizers.Adam(1e-2)
    both = [*policy.trainable_variables, *value.trainable_variables]
    optimizer.build(both)

    def step(x, y):
        with tf.GradientTape() as tape:
            log = tf.nn.log_softmax(policy(x, training=True))
            chosen = tf.gather(log, y, batch_dims=1)
            ratio = tf.exp(chosen - tf.stop_gradient(chosen) * 0.9)
            guess = value(x, training=True)[:, 0]
            gain = tf.reduce_sum(x, 1) - guess
            fixed = tf.stop_gradient(gain)
            loss = (-tf.reduce_mean(tf.minimum(
                ratio * fixed, tf.clip_by_value(ratio, 0.8, 1.2) * fixed))
                + 0.5 * mean_square(gain) + 0.01 * tf.reduce_mean(tf.exp(log) * log))
        found = tape.gradient(loss, both)
        optimizer.apply(found, both)
        return loss, found

    return Training(wrap.function(step), batches(), lambda: [*both, *optimizer.variables])


@GROUP.entry(smoke=True)
def gradients_of_constants(wrap):
    """Divisions by a constant: the tape also traces the gradient of the divisor, unread."""
    ws = weights()
    return by_hand(wrap, lambda x: mean_square(
        chain(x, ws, lambda h: 0.5 * h * (1.0 + tf.math.erf(h / 1.4142)))), ws)
