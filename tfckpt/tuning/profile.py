"""Seconds of every op of a step, from TensorFlow's profiler."""

from __future__ import annotations

import pathlib
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from tfckpt.capture import tf_adapter
from tfckpt.carriers.checkpointed import CheckpointedStep
from tfckpt.errors import PlanError
from tfckpt.tuning.effects import refuse_lasting
from tfckpt.verify.snapshot import Snapshot

STEPS = 3
"""Profiled steps; the median of them counts."""


def op_seconds(step: Callable, *args: Any, **kwargs: Any) -> dict[str, float]:
    """Run a step a few times under TensorFlow's profiler, and return the seconds of its ops.

    For the option `op_seconds` of `tfckpt.checkpoint`, on the same machine. Variables that the step
    captures or is given are put back bit for bit.

    Args:
      step: a `tf.function`, or what `tfckpt.checkpoint` made of one; it is run as it was given.
      *args: positional arguments of one call, as large as they will be.
      **kwargs: keyword arguments of that call.

    Returns:
      Seconds by the name of what ran; some names are those of ops that Grappler made.

    Raises:
      PlanError: it is no such step, does what cannot be undone, or is compiled by XLA, whose ops
        have no times of their own; or a profile is being taken already.
    """
    function: Any = step.plain if isinstance(step, CheckpointedStep) else step
    if not tf_adapter.is_tf_function(function) or tf_adapter.compiles_with_xla(function):
        raise PlanError("plan: tfckpt.op_seconds takes a tf.function that XLA does not compile, or "
                        "what tfckpt.checkpoint made of one")
    function = tf_adapter.clone_function(function, function.python_function)
    concrete = function.get_concrete_function(*args, **kwargs)
    refuse_lasting(concrete.graph, getattr(step, "__name__", "step"))
    snapshot = Snapshot()
    snapshot.add(concrete, (args, kwargs))
    try:
        return profiled(lambda: function(*args, **kwargs))
    except tf.errors.AlreadyExistsError as error:
        raise PlanError("plan: tfckpt.op_seconds takes a profile, and another one is being taken "
                        "in this process; end that first") from error
    finally:
        snapshot.restore()


def profiled(call: Callable[[], Any], steps: int = STEPS) -> dict[str, float]:
    """Return the seconds of the ops that a call runs, by name; those of its first run do not count.

    Args:
      call: what is run; its results are waited for.
      steps: how many runs are profiled, after one that is not.

    Returns:
      The median of the seconds of an op that runs once in each, else what a run has on average.

    Raises:
      tf.errors.AlreadyExistsError: a profile is being taken already.
    """
    _wait(call())
    with tempfile.TemporaryDirectory() as folder:
        tf.profiler.experimental.start(
            folder, options=tf.profiler.experimental.ProfilerOptions(
                host_tracer_level=3, python_tracer_level=0))
        try:
            for _ in range(steps):
                _wait(call())
        finally:
            tf.profiler.experimental.stop()
        (path,) = pathlib.Path(folder).rglob("*.xplane.pb")
        return _of_a_step(tf_adapter.op_times(path.read_bytes()), steps)


def _of_a_step(times: Mapping[str, Sequence[float]], steps: int) -> dict[str, float]:
    """Return the median where an op ran once in each step, else what a step has on average."""
    return {name: statistics.median(found) if len(found) == steps else sum(found) / steps
            for name, found in sorted(times.items())}


def _wait(results: Any) -> None:
    for leaf in tf.nest.flatten(results):
        if isinstance(leaf, tf.Tensor):
            leaf.numpy()
