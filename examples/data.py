"""Real data that needs no download: it comes inside scikit-learn.

`digits`: hand-written digits with their values.
`photo_batches`: crops of two photographs; the label says which photograph a crop is from.
`text_batches`: pieces of the English descriptions of scikit-learn's data sets, as bytes; the
label says which description a piece is from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
from sklearn import datasets

Batch = tuple[np.ndarray, np.ndarray]

DESCRIBED: tuple[Callable[[], object], ...] = (
    datasets.load_iris,
    datasets.load_wine,
    datasets.load_digits,
    datasets.load_diabetes,
    datasets.load_linnerud,
    datasets.load_breast_cancer,
)
PHOTO_CLASSES = 2
TEXT_CLASSES = len(DESCRIBED)
BYTE_VALUES = 256


def digits(count: int | None = None) -> Batch:
    """Return the first `count` of 1797 scanned digits, or all of them.

    Images are float32 in [0, 1], shaped (count, 8, 8, 1); labels are int32 in [0, 10).
    """
    found = datasets.load_digits()
    images = (found.images[:count, ..., None] / 16).astype(np.float32)
    return images, found.target[:count].astype(np.int32)


def photo_batches(steps: int, batch: int, size: int, seed: int) -> Iterator[Batch]:
    """Yield `steps` batches of random `size` by `size` crops, half of them mirrored.

    Images are float32 in [0, 1], shaped (batch, size, size, 3); labels are int32.
    """
    photos = [image.astype(np.float32) / 255 for image in datasets.load_sample_images().images]
    generator = np.random.default_rng(seed)
    for _ in range(steps):
        labels = generator.integers(0, len(photos), batch, dtype=np.int32)
        yield np.stack([_crop(photos[label], size, generator) for label in labels]), labels


def _crop(image: np.ndarray, size: int, generator: np.random.Generator) -> np.ndarray:
    top = generator.integers(0, image.shape[0] - size + 1)
    left = generator.integers(0, image.shape[1] - size + 1)
    crop = image[top : top + size, left : left + size]
    return crop[:, ::-1] if generator.random() < 0.5 else crop


def text_batches(steps: int, batch: int, length: int, seed: int) -> Iterator[Batch]:
    """Yield `steps` batches of `length` bytes of text each.

    Tokens are int32 in [0, 256), shaped (batch, length); labels are int32.
    """
    texts = [
        np.frombuffer(load().DESCR.encode("utf-8"), dtype=np.uint8).astype(np.int32)
        for load in DESCRIBED
    ]
    generator = np.random.default_rng(seed)
    for _ in range(steps):
        labels = generator.integers(0, len(texts), batch, dtype=np.int32)
        yield np.stack([_window(texts[label], length, generator) for label in labels]), labels


def _window(text: np.ndarray, length: int, generator: np.random.Generator) -> np.ndarray:
    start = generator.integers(0, len(text) - length + 1)
    return text[start : start + length]
