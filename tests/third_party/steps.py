"""Training steps of packages that we did not write: random weights, nothing is downloaded.

Each builder imports its package, makes a model by the package's own means, and returns a step as
`tests.zoo` has them. Losses are the packages' where they have one.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tests.zoo.entry import Entry, Training, Wrap

ENTRIES: list[Entry] = []
STEPS = 2
RATE = 0.01


def entry(package: str) -> Callable:
    """Decorator: adds a step of a package, which the builder gets as its second argument."""
    def add(build: Callable[[Wrap, Any], Training]) -> Callable:
        ENTRIES.append(Entry(build.__name__, package,
                             lambda wrap: build(wrap, importlib.import_module(package)),
                             large=True))
        return build
    return add


def descent(wrap: Wrap, loss: Callable, variables: Callable[[], Sequence[tf.Variable]],
            batches: list[tuple]) -> Training:
    """Return a step of gradient descent, as people write it around somebody's model."""
    loss(*batches[0])  # makes variables
    found = list(variables())

    def step(*batch):
        with tf.GradientTape() as tape:
            total = loss(*batch)
        gradients = tape.gradient(total, found)
        for variable, gradient in zip(found, gradients, strict=True):
            if gradient is not None:
                variable.assign_sub(RATE * tf.convert_to_tensor(gradient))
        return total

    return Training(wrap.function(step, autograph=False), batches, lambda: found)


def fitted(wrap: Wrap, model: Any, loss: Any, x: Any, y: np.ndarray, size: int) -> Training:
    """Return epochs of `fit` on arrays, the last batch smaller, with a fresh optimizer."""
    model = wrap.model(model)
    model.compile("adam", loss)

    def epoch(number):
        return model.fit(x, y, batch_size=size, epochs=1, shuffle=False, verbose=0).history["loss"]

    return Training(epoch, [(n,) for n in range(STEPS)], lambda: model.trainable_variables)


def made() -> np.random.Generator:
    """Return a generator of numbers, the same for each step."""
    return np.random.default_rng(0)


def texts(rows: int, length: int, words: int = 500) -> list[tuple]:
    """Return batches of token numbers and labels."""
    rng = made()
    return [(tf.constant(rng.integers(1, words, (rows, length), dtype=np.int32)),
             tf.constant(rng.integers(0, 3, rows, dtype=np.int32))) for _ in range(STEPS)]


def pictures(rows: int, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Return pictures and labels."""
    rng = made()
    return rng.random((rows, size, size, 3), dtype=np.float32), rng.integers(0, 5, rows)


def cross_entropy(labels: tf.Tensor, logits: tf.Tensor) -> tf.Tensor:
    """Return the mean cross entropy."""
    return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits))


SMALL = dict(vocabulary_size=500, num_layers=4, num_heads=4, hidden_dim=64, intermediate_dim=256,
             max_sequence_length=64)


@entry("keras_hub")
def bert_in_fit(wrap, hub):
    """Return a text classifier, trained by `fit`."""
    backbone = hub.models.BertBackbone(**SMALL)
    model = hub.models.BertTextClassifier(backbone=backbone, num_classes=3)
    (tokens, labels), *_ = texts(80, 64)
    model.preprocessor = None
    given = {"token_ids": tokens.numpy(), "segment_ids": np.zeros((80, 64), np.int32),
             "padding_mask": np.ones((80, 64), np.int32)}
    return fitted(wrap, model, keras.losses.SparseCategoricalCrossentropy(from_logits=True),
                  given, labels.numpy(), size=32)


@entry("keras_hub")
def gpt2_language_model(wrap, hub):
    """Next tokens of GPT-2."""
    backbone = hub.models.GPT2Backbone(**SMALL)

    def loss(tokens, _):
        hidden = backbone({"token_ids": tokens, "padding_mask": tf.ones_like(tokens)},
                          training=True)
        logits = backbone.token_embedding(hidden, reverse=True)
        return cross_entropy(tokens[:, 1:], logits[:, :-1])
    return descent(wrap, loss, lambda: [v.value for v in backbone.trainable_variables],
                   texts(32, 64))


@entry("keras_hub")
def llama_language_model(wrap, hub):
    """Rotary embeddings, grouped heads, RMS norms, gated layers."""
    backbone = hub.models.LlamaBackbone(
        vocabulary_size=500, num_layers=4, num_query_heads=4, num_key_value_heads=2, hidden_dim=64,
        intermediate_dim=128)

    def loss(tokens, _):
        hidden = backbone({"token_ids": tokens, "padding_mask": tf.ones_like(tokens)},
                          training=True)
        return cross_entropy(tokens[:, 1:], backbone.token_embedding(
            hidden, reverse=True)[:, :-1])
    return descent(wrap, loss, lambda: [v.value for v in backbone.trainable_variables],
                   texts(32, 64))


@entry("keras_hub")
def resnet_in_fit(wrap, hub):
    """Return a picture classifier, trained by `fit`."""
    backbone = hub.models.ResNetBackbone(
        input_conv_filters=[64], input_conv_kernel_sizes=[3], stackwise_num_filters=[64, 64, 128],
        stackwise_num_blocks=[2, 2, 2], stackwise_num_strides=[1, 2, 2],
        block_type="basic_block", image_shape=(32, 32, 3))
    outputs = keras.layers.Dense(5)(keras.layers.GlobalAveragePooling2D()(backbone.output))
    return fitted(wrap, keras.Model(backbone.input, outputs),
                  keras.losses.SparseCategoricalCrossentropy(from_logits=True),
                  *pictures(80, 32), size=32)


@entry("transformers")
def bert_classifier(wrap, transformers):
    """Its own loss."""
    model = transformers.TFBertForSequenceClassification(transformers.BertConfig(
        vocab_size=500, hidden_size=64, num_hidden_layers=4, num_attention_heads=4,
        intermediate_size=256, num_labels=3))
    return descent(wrap, lambda tokens, labels: tf.reduce_mean(
        model(input_ids=tokens, labels=labels, training=True).loss),
        lambda: model.trainable_variables, texts(32, 64))


@entry("transformers")
def gpt2(wrap, transformers):
    """Its own loss of next tokens."""
    model = transformers.TFGPT2LMHeadModel(transformers.GPT2Config(
        vocab_size=500, n_positions=64, n_embd=64, n_layer=4, n_head=4))
    return descent(wrap, lambda tokens, _: tf.reduce_mean(
        model(input_ids=tokens, labels=tokens, training=True).loss),
        lambda: model.trainable_variables, texts(32, 64))


@entry("transformers")
def t5(wrap, transformers):
    """Return an encoder and a decoder."""
    model = transformers.TFT5ForConditionalGeneration(transformers.T5Config(
        vocab_size=500, d_model=64, d_kv=16, d_ff=128, num_layers=3, num_heads=4,
        decoder_start_token_id=0))
    return descent(wrap, lambda tokens, _: tf.reduce_mean(
        model(input_ids=tokens, labels=tokens, training=True).loss),
        lambda: model.trainable_variables, texts(32, 48))


@entry("transformers")
def vision_transformer(wrap, transformers):
    """Pictures in patches."""
    model = transformers.TFViTForImageClassification(transformers.ViTConfig(
        hidden_size=64, num_hidden_layers=4, num_attention_heads=4, intermediate_size=256,
        image_size=32, patch_size=4, num_labels=5))
    x, y = pictures(32, 32)
    batch = (tf.constant(x.transpose(0, 3, 1, 2)), tf.constant(y))
    return descent(wrap, lambda x, y: tf.reduce_mean(
        model(pixel_values=x, labels=y, training=True).loss),
        lambda: model.trainable_variables, [batch] * STEPS)


@entry("tensorflow_probability")
def bayesian_layers(wrap, tfp):
    """Flipout: weights drawn anew in each step, and their divergence in the loss."""
    tf_keras = importlib.import_module("tf_keras")
    model = tf_keras.Sequential([
        tf_keras.layers.InputLayer((32,)),
        *(tfp.layers.DenseFlipout(128, activation="relu", seed=i) for i in range(4)),
        tfp.layers.DenseFlipout(3, seed=9)])

    def loss(x, y):
        return cross_entropy(y, model(x, training=True)) + 1e-3 * tf.add_n(model.losses)
    return descent(wrap, loss, lambda: model.trainable_variables, rows(1024))


def rows(count: int, features: int = 32) -> list[tuple]:
    """Return batches of rows and labels."""
    rng = made()
    return [(tf.constant(rng.standard_normal((count, features), dtype=np.float32)),
             tf.constant(rng.integers(0, 3, count, dtype=np.int32))) for _ in range(STEPS)]


@entry("tensorflow_probability")
def autoregressive_flow(wrap, tfp):
    """Return a masked autoregressive flow of four bijectors, its likelihood maximised."""
    nets = [tfp.bijectors.AutoregressiveNetwork(
        params=2, event_shape=[16], hidden_units=[64, 64], activation="tanh") for _ in range(4)]
    chain = tfp.bijectors.Chain([part for net in nets for part in (
        tfp.bijectors.MaskedAutoregressiveFlow(net),
        tfp.bijectors.Permute(list(range(15, -1, -1))))])
    flow = tfp.distributions.TransformedDistribution(
        tfp.distributions.MultivariateNormalDiag(tf.zeros(16)), chain)
    return descent(wrap, lambda x, _: -tf.reduce_mean(flow.log_prob(x)),
                   lambda: [v for net in nets for v in net.trainable_variables], rows(2048, 16))


@entry("tensorflow_probability")
def gaussian_process(wrap, tfp):
    """Return the marginal likelihood of a Gaussian process: Cholesky factors."""
    scales = [tf.Variable(1.0), tf.Variable(1.0), tf.Variable(0.5)]

    def loss(x, y):
        kernel = tfp.math.psd_kernels.ExponentiatedQuadratic(
            tf.nn.softplus(scales[0]), 4.0 * tf.nn.softplus(scales[1]))
        process = tfp.distributions.GaussianProcess(
            kernel, x, observation_noise_variance=tf.nn.softplus(scales[2]))
        return -process.log_prob(tf.cast(y, tf.float32)) / 400.0
    return descent(wrap, loss, lambda: scales, rows(400, 4))


def seen(wrap: Wrap, backbone: Any) -> Training:
    """Return a step of a backbone of Keras 2 with a classifier behind it."""
    tf_keras = importlib.import_module("tf_keras")
    model = tf_keras.Sequential([backbone, tf_keras.layers.GlobalAveragePooling2D(),
                                 tf_keras.layers.Dense(5)])
    x, y = pictures(16, 64)
    return descent(wrap, lambda x, y: cross_entropy(y, model(x, training=True)),
                   lambda: model.trainable_variables, [(tf.constant(x), tf.constant(y))] * STEPS)


@entry("keras_cv")
def residual_backbone(wrap, cv):
    """Pre-activated residual blocks."""
    return seen(wrap, cv.models.ResNetV2Backbone(
        stackwise_filters=[16, 32, 64], stackwise_blocks=[2, 2, 2], stackwise_strides=[1, 2, 2],
        include_rescaling=False, input_shape=(64, 64, 3)))


@entry("keras_cv")
def csp_darknet(wrap, cv):
    """Return the backbone of a detector: depthwise convolutions, concatenations, swish."""
    return seen(wrap, cv.models.CSPDarkNetBackbone(
        stackwise_channels=[32, 64, 128], stackwise_depth=[1, 2, 1], use_depthwise=True,
        include_rescaling=False, input_shape=(64, 64, 3)))


def click_features(deepctr: Any) -> tuple[list, dict[str, np.ndarray], np.ndarray]:
    """Return feature columns, what is fed for them, and labels."""
    columns = importlib.import_module("deepctr.feature_column")
    rng, count = made(), 4096
    found = [columns.SparseFeat(f"c{i}", 100, embedding_dim=16) for i in range(12)]
    found += [columns.DenseFeat(f"d{i}", 1) for i in range(4)]
    fed = {f"c{i}": rng.integers(0, 100, count) for i in range(12)}
    fed |= {f"d{i}": rng.random(count, dtype=np.float32) for i in range(4)}
    return found, fed, rng.integers(0, 2, count).astype(np.float32)


def click_model(wrap: Wrap, deepctr: Any, name: str) -> Training:
    """Return a step of a model of click rates, around the model itself."""
    columns, fed, labels = click_features(deepctr)
    model = getattr(importlib.import_module("deepctr.models"), name)(
        columns, columns, dnn_hidden_units=(256, 128, 64))
    given = {key: tf.constant(value[:, None]) for key, value in fed.items()}

    def loss(y):
        found = tf.reshape(model(given, training=True), [-1])
        return tf.reduce_mean(tf.keras.losses.binary_crossentropy(y, found)) + (
            tf.add_n(model.losses) if model.losses else 0.0)
    return descent(wrap, loss, lambda: model.trainable_variables, [(tf.constant(labels),)] * STEPS)


@entry("deepctr")
def deep_factorization_machine(wrap, deepctr):
    """DeepFM."""
    return click_model(wrap, deepctr, "DeepFM")


@entry("deepctr")
def compressed_interaction_network(wrap, deepctr):
    """xDeepFM."""
    return click_model(wrap, deepctr, "xDeepFM")


@entry("gpflow")
def sparse_gaussian_process(wrap, gpflow):
    """Return a variational Gaussian process in double precision."""
    rng = made()
    x, y = rng.random((2000, 3)), rng.random((2000, 1))
    model = gpflow.models.SVGP(gpflow.kernels.Matern52(), gpflow.likelihoods.Gaussian(),
                               x[:100].copy(), num_data=2000)
    return descent(wrap, lambda x, y: model.training_loss((x, y)),
                   lambda: model.trainable_variables,
                   [(tf.constant(x), tf.constant(y))] * STEPS)


@entry("spektral")
def graph_convolutions(wrap, spektral):
    """Convolutions over the edges of a graph."""
    rng = made()
    nodes = 1000
    adjacency = (rng.random((nodes, nodes)) < 0.01).astype(np.float32)
    adjacency = spektral.utils.gcn_filter(np.maximum(adjacency, adjacency.T))
    layers = [spektral.layers.GCNConv(64, "relu") for _ in range(4)]
    last = spektral.layers.GCNConv(3)
    x = tf.constant(rng.standard_normal((nodes, 32), dtype=np.float32))
    edges, labels = tf.constant(adjacency), tf.constant(rng.integers(0, 3, nodes))

    def loss(x, labels):
        for layer in layers:
            x = layer([x, edges])
        return cross_entropy(labels, last([x, edges]))
    return descent(wrap, loss, lambda: [v for layer in (*layers, last)
                                        for v in layer.trainable_variables],
                   [(x, labels)] * STEPS)


@entry("tensorflow_recommenders")
def cross_network(wrap, recommenders):
    """Crossed features, ranked."""
    tf_keras = importlib.import_module("tf_keras")
    crosses = [recommenders.layers.dcn.Cross(projection_dim=32) for _ in range(4)]
    deep = tf_keras.Sequential([tf_keras.layers.Dense(256, "relu") for _ in range(3)])
    last = tf_keras.layers.Dense(3)

    def loss(x, y):
        crossed = x
        for cross in crosses:
            crossed = cross(x, crossed)
        return cross_entropy(y, last(tf.concat([crossed, deep(x)], axis=1)))
    return descent(wrap, loss, lambda: [v for layer in (*crosses, deep, last)
                                        for v in layer.trainable_variables], rows(2048, 128))
