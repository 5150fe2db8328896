"""A Keras model with a `train_step` of its own: the decorator stands on the method.

    python -m examples.02_custom_train_step [--small]

The step mixes each digit with another one (mixup), so it draws random numbers, and it returns
logs as Keras wants them. Nothing in it knows of tfckpt.
"""

from __future__ import annotations

import keras
import tensorflow as tf

import tfckpt
from examples import data, saving


class Mixup(keras.Model):
    """Trained on mixtures of two examples, one after the other in the batch."""

    def train_step(self, batch):
        """One step on images (batch, 8, 8, 1) and one-hot labels (batch, 10)."""
        images, labels = batch
        share = keras.random.uniform((tf.shape(images)[0], 1), 0.0, 0.5, seed=self.draws)
        labels += share * (tf.roll(labels, 1, axis=0) - labels)
        images += share[:, :, None, None] * (tf.roll(images, 1, axis=0) - images)
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x=images, y=labels, y_pred=self(images, training=True))
        variables = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, variables), variables)
        for metric in self.metrics:
            if metric.name == "loss":
                metric.update_state(loss)
        return self.get_metrics_result()


class LessMemory(Mixup):
    """The same model; its step is rewritten when Keras traces it."""

    @tfckpt.checkpoint(budget="min")
    def train_step(self, batch):
        """See `Mixup`."""
        return super().train_step(batch)


def build(kind: type[Mixup], blocks: int) -> Mixup:
    """Residual blocks."""
    saving.seed()
    image = keras.Input((8, 8, 1))
    h = keras.layers.Conv2D(32, 3, padding="same")(image)
    for _ in range(blocks):
        branch = keras.layers.Conv2D(64, 3, padding="same", activation="gelu")(h)
        h = keras.layers.Add()([h, keras.layers.Conv2D(32, 3, padding="same")(branch)])
    logits = keras.layers.Dense(10)(keras.layers.GlobalAveragePooling2D()(h))
    model = kind(image, logits)
    model.draws = keras.random.SeedGenerator(3)
    # jit_compile=False: under XLA, Keras' choice on a GPU, losses agree to rounding only
    model.compile(keras.optimizers.SGD(0.05, momentum=0.9),
                  keras.losses.CategoricalCrossentropy(from_logits=True), jit_compile=False)
    return model


def train(model: Mixup, images, labels, batch: int) -> saving.Run:
    """Two epochs of ordinary Keras, measured."""
    history = model.fit(images, labels, batch_size=batch, epochs=2, verbose=2,
                        callbacks=[tfckpt.keras.PeakMemory()]).history
    return saving.Run(int(history["peak_memory_mib"][-1] * 2**20), tuple(history["loss"]))


def main() -> None:
    """Train both."""
    small = saving.small(__doc__)
    saving.repeatable()
    images, labels = data.digits(768 if small else 1536)
    labels = keras.utils.to_categorical(labels, 10)
    blocks, batch = (4, 256) if small else (8, 512)
    plain = train(build(Mixup, blocks), images, labels, batch)
    model = build(LessMemory, blocks)
    ours = train(model, images, labels, batch)
    print(f"\n{model.train_step.report}")
    saving.show(plain, ours)


if __name__ == "__main__":
    main()
