"""The example of the README: ResNet-50 in less memory, with one line more.

Run with: python -m examples.quickstart
"""

import keras
import numpy as np

import tfckpt

model = keras.applications.ResNet50(weights=None, classes=10, input_shape=(64, 64, 3))
model = tfckpt.keras.checkpoint(model, budget="min")  # the line that is new
model.compile(keras.optimizers.SGD(0.01, momentum=0.9), "sparse_categorical_crossentropy",
              jit_compile="auto")  # Keras' default: XLA on a GPU; either way is planned for
x = np.random.default_rng(0).random((64, 64, 64, 3), dtype=np.float32)
y = np.arange(64) % 10
model.fit(x, y, batch_size=16, callbacks=[tfckpt.keras.PeakMemory(compare=True)])  # measures
print(tfckpt.keras.report(model))
print(tfckpt.keras.report(model).explain(top=3))
