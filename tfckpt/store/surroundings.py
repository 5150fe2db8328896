"""Properties of a process that a plan depends on: versions, our source, devices, threads, flags."""

from __future__ import annotations

import functools
import hashlib
import os
import pathlib
import platform
from importlib import metadata

import tensorflow as tf

import tfckpt

_PACKAGES = ("tensorflow", "numpy", "networkx", "ortools", "jaxlib")
_FLAGS = ("XLA_", "TF_XLA_", "TF_ENABLE_", "TF_DISABLE_", "TF_USE_", "TF_CPU_", "TF_GPU_",
          "TF_CUDNN_", "TF_DETERMINISTIC_", "NVIDIA_TF32_", "TFCKPT_JAX_PYTHON")
"""How the names of environment variables begin that may change what TensorFlow or XLA does."""


def surroundings() -> dict[str, object]:
    """Return what equal steps with equal options may be planned differently for."""
    return {
        "tfckpt": tfckpt.__version__, "source": _source(), "packages": _versions(),
        "machine": (platform.machine(), len(os.sched_getaffinity(0))),
        "threads": (tf.config.threading.get_inter_op_parallelism_threads(),
                    tf.config.threading.get_intra_op_parallelism_threads()),
        "devices": [(device.name, sorted(tf.config.experimental.get_device_details(
            device).items())) for device in tf.config.list_physical_devices()],
        "optimizers": sorted(tf.config.optimizer.get_experimental_options().items()),
        "clusters": str(tf.config.optimizer.get_jit()),
        "flags": sorted((name, value) for name, value in os.environ.items()
                        if name.startswith(_FLAGS)),
    }


@functools.cache
def _source() -> str:
    """Return a hash of the modules of tfckpt: who changes them wants no plan of before."""
    package = pathlib.Path(tfckpt.__file__).parent
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        digest.update(f"{path.relative_to(package)}\n".encode() + path.read_bytes())
    return digest.hexdigest()


@functools.cache
def _versions() -> tuple[str, ...]:
    found = []
    for package in _PACKAGES:
        try:
            found.append(f"{package} {metadata.version(package)}")
        except metadata.PackageNotFoundError:
            continue
    return tuple(found)
