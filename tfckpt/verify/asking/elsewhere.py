"""XLA asked about a step for a GPU that is not here, where jaxlib's compiler for GPUs is.

The step is lowered by this process and compiled by another (`tfckpt.verify.asking.gpu_compiler`),
which has JAX and no TensorFlow: this interpreter if it has `jax[cuda12]`, or that of an environment
of its own, which `TFCKPT_JAX_PYTHON` names. Nothing runs, and no driver is needed.
"""

from __future__ import annotations

import atexit
import functools
import importlib.util
import os
import pathlib
import subprocess
import sys
from typing import Any, BinaryIO, cast

import tensorflow as tf

from tfckpt.capture import tf_adapter
from tfckpt.ir.graph import Graph
from tfckpt.ir.target import Target
from tfckpt.verify.asking import gpu_compiler
from tfckpt.verify.asking.xla import Asked

PYTHON = "TFCKPT_JAX_PYTHON"
"""Names the interpreter that has `jax[cuda12]`."""
_PLUGIN = "jax_plugins.xla_cuda12"
_CPU = "/job:localhost/replica:0/task:0/device:CPU:0"


def asked_for(live: tf.Graph, graph: Graph, target: Target | None) -> Asked | None:
    """Return what asks XLA about a step, on the device that runs it or for one that is described.

    Args:
      live: TensorFlow's graph of the step, as it was captured.
      graph: what was captured of it.
      target: what is planned for instead of the devices of this process.

    Returns:
      None where no compiler for the described device is here.
    """
    if target is None:
        return Asked(live, graph)
    if target.model not in gpu_compiler.TARGETS or not _interpreter():
        return None
    return AskedElsewhere(live, graph, target.model)


class AskedElsewhere(Asked):
    """A step that XLA can be asked about for a GPU that is described; nothing of it runs.

    Args:
      model: which GPU, a name in `gpu_compiler.TARGETS`.
    """

    def __init__(self, live: tf.Graph, graph: Graph, model: str) -> None:
        super().__init__(live, graph)
        self.model = model

    def _compiled(self, definition: tf.compat.v1.GraphDef) -> Any:
        return compiled_elsewhere(
            tf_adapter.lowered_graph(self.live, definition, self._shapes(), _CPU), self.model)


def compiled_elsewhere(module: bytes, model: str) -> Any:
    """Return the HloProto of a serialized HLO module, compiled for a GPU that is described.

    Args:
      module: the HLO module, serialized, before XLA has optimised it.
      model: which GPU, a name in `gpu_compiler.TARGETS`.

    Raises:
      RuntimeError: it cannot be compiled, or no compiler is here.
    """
    from tensorflow.compiler.xla.service import hlo_pb2

    if model not in gpu_compiler.TARGETS:
        raise RuntimeError(f"no GPU called {model!r} is described; "
                           f"{', '.join(gpu_compiler.TARGETS)} are")
    if not _interpreter():
        raise RuntimeError("no compiler for GPUs is here: pip install 'jax[cuda12]' into an "
                           f"environment of its own, and set {PYTHON} to its interpreter")
    return hlo_pb2.HloProto.FromString(_process(model).compiled(module))


def _interpreter() -> str:
    """Return the interpreter that has JAX's compiler for GPUs; "" where there is none."""
    named = os.environ.get(PYTHON, "")
    if named:
        return named
    try:
        return sys.executable if importlib.util.find_spec(_PLUGIN) else ""
    except ModuleNotFoundError:
        return ""


class _Process:
    """A process that compiles, for as long as this one runs.

    Raises:
      RuntimeError: it has no compiler, or ended.
    """

    def __init__(self, model: str) -> None:
        program = str(pathlib.Path(gpu_compiler.__file__))
        environment = {**os.environ, "JAX_PLATFORMS": "cpu", "TF_CPP_MIN_LOG_LEVEL": "3"}
        try:
            self._process = subprocess.Popen([_interpreter(), program, model],
                                             stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                             stderr=subprocess.DEVNULL, env=environment)
        except OSError as error:
            raise RuntimeError(f"{PYTHON}={_interpreter()} cannot be run: {error}") from error
        atexit.register(self._process.kill)
        self._questions = cast(BinaryIO, self._process.stdin)
        self._answers = cast(BinaryIO, self._process.stdout)
        self._answer()  # its greeting

    def compiled(self, module: bytes) -> bytes:
        """Return the serialized HloProto of a serialized module."""
        try:
            gpu_compiler.write(self._questions, module)
        except OSError as error:
            raise self._ended() from error
        return self._answer()

    def _answer(self) -> bytes:
        found = gpu_compiler.read(self._answers)
        if found is None:
            raise self._ended()
        return found

    def _ended(self) -> RuntimeError:
        _process.cache_clear()
        return RuntimeError("the process that compiles for the described GPU has ended "
                            f"(code {self._process.wait()}); see `python -m "
                            "tfckpt.verify.asking.gpu_compiler`, run by the interpreter "
                            "that has JAX")


@functools.cache
def _process(model: str) -> _Process:
    return _Process(model)
