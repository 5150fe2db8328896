"""Training steps in files: a TF1 graph with an optimizer, and a module saved with its step."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

WIDTH, DEPTH, BATCH = 128, 9, 1024


def batch(seed=0):
    """Features and targets as numpy arrays."""
    made = np.random.default_rng(seed)
    return (made.standard_normal((BATCH, WIDTH), dtype=np.float32),
            made.standard_normal((BATCH, WIDTH), dtype=np.float32))


def start(layer, width=WIDTH):
    """Initial weights of a layer."""
    return np.random.default_rng(100 + layer).standard_normal(
        (width, width)).astype(np.float32) / np.float32(width ** 0.5)


class Trainer(tf.Module):
    """Tanh layers with momentum; `train` is one step, `predict` is no training."""

    def __init__(self):
        super().__init__()
        self.weights = [tf.Variable(start(i)) for i in range(DEPTH)]
        self.slots = [tf.Variable(tf.zeros_like(w)) for w in self.weights]
        self.count = tf.Variable(0, dtype=tf.int64)

    def _forward(self, x):
        for weight in self.weights:
            x = tf.tanh(x @ weight)
        return x

    def _learn(self, x, y):
        with tf.GradientTape() as tape:
            parts = tf.split((self._forward(x) - y) ** 2, 2, axis=1)  # an op with several outputs
            loss = tf.reduce_mean(parts[0]) + tf.reduce_mean(parts[1])
        gradients = tape.gradient(loss, self.weights)
        for weight, slot, gradient in zip(self.weights, self.slots, gradients, strict=True):
            slot.assign(0.9 * slot + gradient)
            weight.assign_sub(0.1 * slot)
        self.count.assign_add(1)
        return {"loss": loss}

    @tf.function(input_signature=[tf.TensorSpec((None, WIDTH)), tf.TensorSpec((None, WIDTH))])
    def train(self, x, y):
        return self._learn(x, y)

    @tf.function(input_signature=[tf.TensorSpec((None, WIDTH))])
    def predict(self, x):
        return self._forward(x)


class Nested(Trainer):
    """The same with a `tf.function` for each layer, which counts its calls."""

    @tf.function
    def layer(self, x, weight):
        """One layer."""
        self.count.assign_add(1)
        return tf.tanh(tf.nn.softplus(x @ weight))

    def _forward(self, x):
        for weight in self.weights:
            x = self.layer(x, weight)
        return x


class Looped(Trainer):
    """The same with three products for each layer, in loops that read the weights."""

    def _forward(self, x):
        for weight in self.weights:
            x = tf.while_loop(lambda i, h: i < 3,
                              lambda i, h, w=weight: (i + 1, tf.tanh(h @ w)), (0, x))[1]
        return x


class Recurrent(Trainer):
    """The same with 60 products in a loop before the others."""

    def _forward(self, x):
        def cell(i, h):
            return i + 1, tf.tanh(tf.tanh(h @ self.weights[0]) + tf.sigmoid(h) * tf.sin(h))

        x = tf.while_loop(lambda i, h: i < 60, cell, (0, x))[1]
        for weight in self.weights[1:]:
            x = tf.tanh(x @ weight)
        return x


class Tagger(tf.Module):
    """Looks rows up in a table that is trained, and goes through them in a loop."""

    def __init__(self):
        super().__init__()
        self.weights = [tf.Variable(start(i, 64)) for i in range(5)]
        self.table = tf.Variable(start(9, 64))

    @tf.function(input_signature=[tf.TensorSpec((None, 40), tf.int32)])
    def train(self, ids):
        """Return the loss of a step."""
        variables = [*self.weights, self.table]
        with tf.GradientTape() as tape:
            h = tf.nn.embedding_lookup(self.table, ids)
            for weight in self.weights:
                h = h + tf.nn.gelu(h @ weight)
            h = tf.scan(lambda c, x: tf.tanh(c + x @ self.weights[0]), tf.transpose(h, (1, 0, 2)),
                        tf.zeros_like(h[:, 0]))
            loss = tf.reduce_mean(h ** 2)
        for variable, gradient in zip(variables, tape.gradient(loss, variables), strict=True):
            variable.assign_sub(0.1 * tf.convert_to_tensor(gradient))
        return {"loss": loss}


def save_trainer(path, signatures=True) -> None:
    """Write a `Trainer` as a SavedModel."""
    module = Trainer()
    tf.saved_model.save(module, str(path),
                        signatures={"learn": module.train} if signatures else None)


def tf1_graph(width=WIDTH, depth=DEPTH, batch=BATCH, use_resource=True,
              activation=tf.tanh) -> tf.Graph:
    """Return a TF1 training graph with momentum, an initialiser `init` and a train op `train`."""
    graph = tf.Graph()
    v1 = tf.compat.v1
    with graph.as_default():
        x = v1.placeholder(tf.float32, (batch, width), name="x")
        y = v1.placeholder(tf.float32, (batch, width), name="y")
        h = x
        for layer in range(depth):
            with v1.variable_scope(f"layer{layer}"):
                weight = v1.get_variable("w", initializer=start(layer, width),
                                         use_resource=use_resource)
                h = activation(tf.matmul(h, weight))
        loss = tf.reduce_mean(tf.math.squared_difference(h, y), name="loss")
        v1.train.MomentumOptimizer(0.1, 0.9).minimize(loss, name="train")
        v1.group(*[v.initializer for v in v1.global_variables()], name="init")
        v1.train.Saver()
    return graph


def run_graph_def(definition, steps=3, threads=1, config=None) -> list[bytes]:
    """Losses and weights after some steps in a session, bit for bit."""
    v1 = tf.compat.v1
    graph = tf.Graph()
    with graph.as_default():
        tf.graph_util.import_graph_def(definition, name="")
    found = []
    names = {node.name for node in definition.node}
    reads = [name for i in range(DEPTH) for name in (
        f"layer{i}/w/Read/ReadVariableOp:0", f"layer{i}/w/read:0") if name[:-2] in names]
    assert len(reads) == DEPTH
    config = config or v1.ConfigProto()
    config.inter_op_parallelism_threads = threads
    with v1.Session(graph=graph, config=config) as session:
        session.run("init")
        for step in range(steps):
            x, y = batch(step)
            loss, _ = session.run(["loss:0", "train"], {"x:0": x, "y:0": y})
            found.append(loss.tobytes())
        found += [value.tobytes() for value in session.run(reads)]
    return found
