"""Trains a small model with tfckpt in a process of its own, and prints what became of it as JSON.

    python -m tests.support.planned_in_process '{"batch": 256}'

Options, all of them left out where they are the default: `batch`, `budget`, `xla` (compile with
XLA), `before` (how many layers are made first, such that Keras numbers those of the model
otherwise), `folder` (of the plan store).
"""

from __future__ import annotations

import hashlib
import json
import os
import sys

ROWS = 256


def main(batch: int = ROWS, budget: object = "min", xla: bool = False, before: int = 0,
         folder: str = "off") -> dict:
    """Train for three steps."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    os.environ["TFCKPT_CACHE"] = folder
    import keras
    import numpy as np
    from tensorflow.python.framework import config

    import tfckpt
    from tests.support import process
    from tfckpt.plan.evaluate import Evaluator
    from tfckpt.verify.asking.xla import Asked

    process.prepare()
    if xla:  # Keras compiles nothing while op determinism is on
        config.disable_op_determinism()
    counts = {"priced": 0, "asked": 0}
    _count(Evaluator, "price", counts, "priced")
    _count(Asked, "memory", counts, "asked")
    for _ in range(before):
        keras.layers.Dense(3)
    keras.utils.set_random_seed(3)
    model = keras.Sequential([keras.layers.Input((64,)), *(
        keras.layers.Dense(128, activation="gelu") for _ in range(6)), keras.layers.Dense(4)])
    model = tfckpt.keras.checkpoint(model, budget=budget)
    model.compile("adam", "mse", jit_compile=xla)
    made = np.random.default_rng(0)
    x = made.standard_normal((3 * batch, 64), dtype=np.float32)
    y = made.standard_normal((3 * batch, 4), dtype=np.float32)
    model.fit(x, y, batch_size=batch, shuffle=False, verbose=0)
    report = tfckpt.keras.report(model)
    variables = [*model.variables, *model.optimizer.variables]
    return counts | {
        "stored": report.stored, "applied": report.applied, "text": str(report),
        "summary": [report.planned_peak_bytes, report.overhead, report.solver,
                    list(report.rejected), [str(d) for d in report.devices]],
        "compiled": None if report.compiled is None else str(report.compiled),
        "explained": report.explain(), "layers": [layer.name for layer in model.layers],
        "bits": hashlib.sha256(b"".join(
            np.asarray(v).tobytes() for v in variables if np.asarray(v).ndim)).hexdigest()}


def _count(kind: type, name: str, counts: dict[str, int], what: str) -> None:
    """Count the calls of a method."""
    method = getattr(kind, name)

    def counted(*arguments):
        counts[what] += 1
        return method(*arguments)

    setattr(kind, name, counted)


if __name__ == "__main__":
    print(json.dumps(main(**json.loads(sys.argv[1]))))
