"""tfckpt in a few lines: one decorator above `@tf.function`.

Run with: python -m examples.quickstart
"""

import keras
import tensorflow as tf

import tfckpt

keras.utils.set_random_seed(0)
model = keras.Sequential([keras.Input((256,))])
for _ in range(12):
    model.add(keras.layers.Dense(256, activation="gelu"))
model.add(keras.layers.Dense(10))
optimizer = keras.optimizers.Adam(1e-3)
loss_function = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


@tfckpt.checkpoint(budget="min")
@tf.function
def train_step(x, y):
    with tf.GradientTape() as tape:
        loss = loss_function(y, model(x, training=True))
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
    return loss


def main() -> None:
    """Trains for five steps on one made-up batch and prints what tfckpt did."""
    x = tf.random.stateless_normal((2048, 256), seed=(0, 0))
    y = tf.argmax(x[:, :10], axis=1)
    for number in range(5):
        print(f"step {number}: loss {float(train_step(x, y)):.4f}")
    print(train_step.report)


if __name__ == "__main__":
    main()
