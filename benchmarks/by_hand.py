"""The networks of `benchmarks.jobs` with `tf.recompute_grad` placed by hand.

Where its users would put it: around each residual block, dense block, stage of convolutions,
inception module, encoder layer, recurrent layer, level of the U-Net. What lies between two of the
layers named here is one such part; its inputs are kept, and it runs again in the backward pass.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

LAST_LAYERS = {
    "resnet50": r"pool1_pool|conv\d_block\d+_out",
    "densenet121": r"pool\d(_pool)?",
    "vgg16": r"block\d_pool",
    "inception_v3": r"mixed\d+",
    "lstm": r"lstm(_\d+)?",
}


def last_layers(name: str, model: Any) -> list[Any]:
    """Return the layers with which the parts of a job's model end, in order."""
    layers = model.layers
    if name == "transformer":  # an encoder layer adds twice
        return [layer for layer in layers if isinstance(layer, keras.layers.Add)][1::2]
    if name == "unet":  # each level ends with its second convolution
        found = [layer for layer in layers if isinstance(layer, keras.layers.Conv2D)
                 and not isinstance(layer, keras.layers.Conv2DTranspose)]
        return found[1:-1:2]
    pattern = re.compile(LAST_LAYERS[name])
    return [layer for layer in layers if pattern.fullmatch(layer.name)]


def recomputing(name: str, model: Any) -> Callable[[tf.Tensor], tf.Tensor]:
    """Return a function that computes what the model does, with its parts run again in the
    backward.

    Raises:
      ValueError: the model has no layer that ends a part.
    """
    ends = [layer.output for layer in last_layers(name, model)]
    if not ends:
        raise ValueError(f"no layer of {name} ends a part")
    producers = {id(layer.output): layer for layer in model.layers}
    known = [model.inputs[0]]
    parts = []
    for end in [*ends, model.outputs[0]]:
        reads = _reads(end, known, producers)
        parts.append((keras.Model(reads, end), [_position(known, tensor) for tensor in reads]))
        known.append(end)

    def forward(x: tf.Tensor) -> tf.Tensor:
        values = [x]
        for part, reads in parts[:-1]:
            values.append(tf.recompute_grad(_called(part))(*(values[i] for i in reads)))
        part, reads = parts[-1]  # the loss follows: nothing would be gained
        return _called(part)(*(values[i] for i in reads))

    return forward


def _called(part: Any) -> Callable[..., tf.Tensor]:
    return lambda *h: part(list(h) if len(h) > 1 else h[0], training=True)


def _position(known: Sequence[Any], tensor: Any) -> int:
    """Index by identity: equality of symbolic tensors is another one."""
    return next(i for i, other in enumerate(known) if other is tensor)


def _reads(end: Any, known: Sequence[Any], producers: dict[int, Any]) -> list[Any]:
    """Return the known tensors from which `end` is computed, in the order in which they are known.
    """
    stop = {id(tensor) for tensor in known}
    found, seen, pending = set(), set(), [end]
    while pending:
        tensor = pending.pop()
        if id(tensor) in seen:
            continue
        seen.add(id(tensor))
        if id(tensor) in stop:
            found.add(id(tensor))
        else:
            pending.extend(keras.tree.flatten(producers[id(tensor)].input))
    return [tensor for tensor in known if id(tensor) in found]
