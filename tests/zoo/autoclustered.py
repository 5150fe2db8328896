"""Counts what autoclustering leaves of a rewritten step; see `test_compilation`.

    TF_XLA_FLAGS=--tf_xla_cpu_global_jit python -m tests.zoo.autoclustered

TensorFlow reads the flag once in a process; without it nothing is clustered on a CPU.
"""

from __future__ import annotations

import json

import tensorflow as tf

import tfckpt
from tests.support.training import COPY, copies_in, heavy
from tests.zoo import alone
from tests.zoo.entry import Wrap
from tests.zoo.steps import by_hand, chain, mean_square, weights


def main() -> None:
    """Print products: those planned again, those that ran again, and the clusters of the plain."""
    alone.prepare()
    tf.config.optimizer.set_jit("autoclustering")
    nodes = []
    for rewrite in (False, True):
        ws = weights()
        made = by_hand(Wrap(rewrite), lambda x, ws=ws: mean_square(chain(x, ws)), ws)
        nodes.append(tfckpt.verify.executed(made.step, *made.batches[0]).nodes)
    graph = made.step.get_concrete_function(*made.batches[0]).graph
    print(json.dumps({
        "planned": sum(heavy(op.type for op in copies_in(graph)).values()),
        "ran": sum(heavy(node.op for node in nodes[1] if COPY.search(node.name)).values()),
        "clusters": sum(node.op == "_XlaRun" for node in nodes[0])}), flush=True)


if __name__ == "__main__":
    main()
