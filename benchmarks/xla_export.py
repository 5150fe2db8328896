"""Writes a training step as XLA's input, to be run where there is no TensorFlow.

    python -m benchmarks.xla_export DIR [--job=resnet50] [--budget=min] [--size=small]
                                        [--device=H100-80GB]

DIR then contains `plain.hlo`, `data.hlo` and `barrier.hlo` (serialized HLO modules, before XLA's
own passes; the last two are rewritten, with one guard each, see `tfckpt.rewrite.xla.guards`),
`inputs.npz` (their inputs: the batch and the variables, in the order of their parameters) and
`about.json`. `python benchmarks/xla_gpu.py DIR` runs them in a process with JAX. With `--device`
they are planned for that device instead of this machine's; where they are to run on a GPU, name it.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
from typing import Any

from absl import app, flags

FLAGS = flags.FLAGS
flags.DEFINE_string("job", "resnet50", "A name in benchmarks.jobs.JOBS.")
flags.DEFINE_string("budget", "min", "'min' or a fraction such as 0.6.")
flags.DEFINE_string("device", "", "What to plan for: see grappler_ext.PRESETS.")
flags.DEFINE_enum("size", "full", ["full", "small", "tiny"], "Which of benchmarks.jobs' sizes.")

KINDS = ("plain", "data", "barrier")


def export(name: str, size: str, budget: object, folder: pathlib.Path,
           device: str = "") -> dict[str, Any]:
    """Write one job; return the content of `about.json`.

    Raises:
      ValueError: the parameters of the compiled step are not its inputs and variables in order.
    """
    import keras
    import numpy as np
    import tensorflow as tf

    from benchmarks import jobs
    from tfckpt.carriers.checkpointed import CheckpointedStep
    from tfckpt.driving.here import target_of
    from tfckpt.request.devices import find_device
    from tfckpt.request.options import make_options

    sizes = {"full": {}, "small": jobs.SMALL, "tiny": jobs.TINY}[size].get(name, {})
    folder.mkdir(parents=True, exist_ok=True)
    target = find_device(device).target() if device else target_of()
    inputs: list[list] = []
    for kind in KINDS:
        keras.backend.clear_session()
        job = jobs.JOBS[name](**sizes)
        step: Any = tf.function(job.train_step, jit_compile=True)
        if kind != "plain":
            step = CheckpointedStep(step, make_options(
                budget, target=dataclasses.replace(target, guard=kind)))
        inputs.append(arguments(step, (job.x, job.y)))
        module = step.experimental_get_compiler_ir(job.x, job.y)(stage="hlo_serialized")
        check_parameters(module, inputs[-1])
        (folder / f"{kind}.hlo").write_bytes(module)
    if not all(one.tobytes() == other.tobytes() for other_inputs in inputs[1:]
               for one, other in zip(inputs[0], other_inputs, strict=True)):
        raise ValueError("the steps take different inputs")
    np.savez(folder / "inputs.npz", *inputs[0])
    loss = tf.function(job.train_step)(job.x, job.y)  # the variables change here, and not before
    about = {"job": name, "size": size, "budget": budget, "planned_for": device,
             "tensorflow": tf.__version__, "tensorflow_loss": float(loss),
             "recomputed_ops": step.report.recomputed_ops}
    (folder / "about.json").write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")
    return about


def arguments(step: Any, args: tuple) -> list:
    """Values of what a traced step takes: its arguments, then the variables that it captures."""
    import tensorflow as tf

    from tfckpt.capture import tf_adapter

    values = list(args)
    for tensor in step.get_concrete_function(*args).captured_inputs:
        data = tf_adapter.handle_shape(tensor) if tensor.dtype == tf.resource else None
        values.append(tf.raw_ops.ReadVariableOp(resource=tensor, dtype=data[1]) if data else tensor)
    return [value.numpy() for value in values]


def check_parameters(module: bytes, values: list) -> None:
    """Raise ValueError unless a module's parameters have the shapes of these values, in order."""
    from tensorflow.compiler.xla.service import hlo_pb2

    expected = [tuple(value.shape) for value in values]
    program = hlo_pb2.HloModuleProto.FromString(module).host_program_shape
    found = [tuple(parameter.dimensions) for parameter in program.parameters]
    if found != expected:
        raise ValueError(f"the module takes {len(found)} parameters of shapes {found[:4]} ..., not "
                         f"{len(expected)} of {expected[:4]} ...")


def main(argv: list[str]) -> None:
    """Write the job that the flags name."""
    if len(argv) != 2:
        raise app.UsageError("name one folder to write to")
    budget = FLAGS.budget if FLAGS.budget == "min" else float(FLAGS.budget)
    about = export(FLAGS.job, FLAGS.size, budget, pathlib.Path(argv[1]), FLAGS.device)
    print(f"{about['job']} ({about['size']}), {about['recomputed_ops']} recomputed ops, "
          f"in {argv[1]}")


if __name__ == "__main__":
    app.run(main)
