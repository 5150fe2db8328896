"""A loop of one's own, whose step records two tapes: a generative adversarial network.

    python -m examples.03_custom_loop_two_tapes [--small]

The generator draws digits, the discriminator tells them from scanned ones. One step trains both:
each tape differentiates one loss, and both pass through the discriminator.
"""

from __future__ import annotations

import keras
import tensorflow as tf

import tfckpt
from examples import data, saving

NOISE = 32


def generator(width: int) -> keras.Model:
    """Noise to digits."""
    noise = keras.Input((NOISE,))
    h = keras.layers.Reshape((4, 4, width))(keras.layers.Dense(16 * width)(noise))
    h = keras.layers.UpSampling2D()(h)
    for _ in range(3):
        h = keras.layers.Conv2D(width, 3, padding="same", activation="relu")(h)
    return keras.Model(noise, keras.layers.Conv2D(1, 3, padding="same", activation="sigmoid")(h))


def discriminator(width: int) -> keras.Model:
    """Digits to one number each: above zero for a scanned one."""
    image = keras.Input((8, 8, 1))
    h = image
    for _ in range(4):
        h = keras.layers.Conv2D(width, 3, padding="same", activation="gelu")(h)
    return keras.Model(image, keras.layers.Dense(1)(keras.layers.GlobalAveragePooling2D()(h)))


def make_step(width: int):
    """Return the step as a plain Python function, with models and optimizers of its own."""
    saving.seed()
    draw, judge = generator(width), discriminator(width)
    optimizers = keras.optimizers.Adam(2e-4), keras.optimizers.Adam(2e-4)
    for optimizer, model in zip(optimizers, (draw, judge), strict=True):
        optimizer.build(model.trainable_variables)
    distance = keras.losses.BinaryCrossentropy(from_logits=True)

    def step(images, noise):
        with tf.GradientTape() as draw_tape, tf.GradientTape() as judge_tape:
            drawn = draw(noise, training=True)
            real, false = judge(images, training=True), judge(drawn, training=True)
            draw_loss = distance(tf.ones_like(false), false)
            judge_loss = (distance(tf.ones_like(real), real)
                          + distance(tf.zeros_like(false), false))
        for tape, loss, model, optimizer in (
                (draw_tape, draw_loss, draw, optimizers[0]),
                (judge_tape, judge_loss, judge, optimizers[1])):
            variables = model.trainable_variables
            optimizer.apply(tape.gradient(loss, variables), variables)
        return draw_loss, judge_loss

    return step


def train(step, batches) -> saving.Run:
    """Return every batch once; the last one is measured again."""
    losses = tuple(float(loss) for batch in batches for loss in step(*batch))
    return saving.Run(tfckpt.verify.measure_peak(step, *batches[-1], repeats=3), losses)


def main() -> None:
    """Train both."""
    small = saving.small(__doc__)
    saving.repeatable()
    width, batch, count = (32, 256, 3) if small else (64, 448, 4)
    images, _ = data.digits(batch * count)
    made = tf.random.Generator.from_seed(1)
    batches = [(tf.constant(images[i * batch:(i + 1) * batch]), made.normal((batch, NOISE)))
               for i in range(count)]
    # jit_compile=False: compiled by XLA, losses would agree to rounding, not in every bit
    plain = train(tf.function(make_step(width), jit_compile=False), batches)
    step = tfckpt.checkpoint(tf.function(make_step(width), jit_compile=False), budget="min")
    ours = train(step, batches)
    print(step.report)
    saving.show(plain, ours)


if __name__ == "__main__":
    main()
