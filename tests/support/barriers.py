"""Writes a tensor that is read through a guard of barriers, and prints what XLA leaves of it.

    XLA_FLAGS=--xla_disable_hlo_passes=cse_barrier_expander python -m tests.support.barriers FOLDER

For each case `CASE.hlo` is a serialized module. A line of JSON: for each case the number of
operands that each barrier of the module has which is compiled for this device. See
`test_xla_barriers`.
"""

from __future__ import annotations

import json
import pathlib
import sys

import tensorflow as tf

from tfckpt.capture import tf_adapter
from tfckpt.ir.edits import Edits
from tfckpt.rewrite.appliers.funcgraph import apply
from tfckpt.rewrite.xla.guards import BarrierGuard

SIDE = 256


def unread(trigger):
    """Nothing reads the trigger but the guard."""
    return tf.zeros((SIDE,))


def read(trigger):
    """Something else reads the trigger."""
    return tf.sin(trigger) @ trigger


CASES = (unread, read)


def step(case):
    """Return a function in which one tensor passes a guard."""
    def body(x, w):
        graph = tf_adapter.tracing_graph()
        trigger = tf.transpose(tf.exp(w @ w) @ w)
        guard = BarrierGuard("g", trigger.name, "float32")
        apply(graph, Edits(added=(*guard.trigger_ops(),
                                  *guard.pass_through("out", x.name, "float32"))))
        return tf.tanh(graph.get_tensor_by_name("out:0")) @ w, case(trigger)

    return tf.function(body, jit_compile=True, autograph=False)


def main(folder: pathlib.Path) -> None:
    """Write and compile every case."""
    batch, found = [tf.ones((SIDE, SIDE))] * 2, {}
    for case in CASES:
        lowered = tf_adapter.lowered_hlo(step(case), batch, {})
        (folder / f"{case.__name__}.hlo").write_bytes(lowered)
        module = tf_adapter.optimized_hlo(step(case), batch, {}).hlo_module
        found[case.__name__] = [len(i.shape.tuple_shapes) for part in module.computations
                                for i in part.instructions if i.opcode == "opt-barrier"]
    print(json.dumps(found))


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
