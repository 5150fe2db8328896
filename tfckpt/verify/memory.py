"""Measured peak memory of a step, from TensorFlow's own allocator statistics."""

from __future__ import annotations

import os
import pathlib
import resource
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from tfckpt.capture import tf_adapter
from tfckpt.capture.tf_adapter import default_device
from tfckpt.errors import VerificationError
from tfckpt.verify.snapshot import Snapshot

_REMEDY = (
    "TensorFlow keeps no allocator statistics for {device} in this process. On a CPU they come "
    "with oneDNN, which is off by default on many processors; set TF_CPU_ALLOCATOR_USE_BFC=1, "
    "which keeps the kernels, or TF_ENABLE_ONEDNN_OPTS=1, before TensorFlow is imported")


def ask_for_statistics() -> None:
    """Have the CPU's allocator keep statistics in a process that is ours.

    Says nothing to a process whose TensorFlow has used a device already. For commands: a library
    must not change the allocator of who imports it.
    """
    if not tf_adapter.uses_onednn():
        os.environ.setdefault("TF_CPU_ALLOCATOR_USE_BFC", "1")


def measure_peak(fn: Callable, *args: Any, repeats: int = 1, device: str | None = None,
                 **kwargs: Any) -> int:
    """Peak bytes of one call above what is allocated when it starts (the dynamic peak).

    The call really runs; variables that a `tf.function` changes are put back afterwards. The
    first call of a new trace is not measured, since it builds the executor.

    Args:
      fn: a `tf.function`, a step decorated with `tfckpt.checkpoint`, or any callable (whose
        variables are then left as the call leaves them).
      *args: positional arguments of the call.
      repeats: calls to measure; the median is returned.
      device: default "GPU:0" where there is one, else "CPU:0".
      **kwargs: keyword arguments of the call.

    Returns:
      Bytes; the report of a rewritten step has them from then on.

    Raises:
      VerificationError: the allocator keeps no statistics; names the environment variable.
    """
    name = device or default_device()
    saved = Snapshot()
    if hasattr(fn, "get_concrete_function"):
        saved.add(fn.get_concrete_function(*args, **kwargs))
    try:
        fn(*args, **kwargs)
        peaks = sorted(peak_of_call(fn, args, kwargs, name) for _ in range(max(repeats, 1)))
    finally:
        saved.restore()
    peak = peaks[len(peaks) // 2]
    report = getattr(fn, "report", None)
    if report is not None and report.applied:
        report.measured_peak_bytes = peak
    return peak


def peak_of_call(fn: Callable, args: Sequence, kwargs: Mapping, device: str) -> int:
    """Peak bytes of one call above what is allocated when it starts; its results are waited for.

    Args:
      fn: what is called.
      args: its positional arguments.
      kwargs: its keyword arguments.
      device: whose allocator is read, such as "GPU:0"; its highest count begins anew.

    Returns:
      Bytes.

    Raises:
      VerificationError: the allocator keeps no statistics.
    """
    before = memory_info(device, reset=True)["current"]
    result = fn(*args, **kwargs)
    tf.nest.map_structure(lambda t: t.numpy() if hasattr(t, "numpy") else t, result)
    return int(memory_info(device)["peak"] - before)


def memory_info(device: str, reset: bool = False) -> dict[str, int]:
    """Return bytes allocated on a device now (`current`) and at most since the last reset (`peak`).

    Args:
      device: such as "GPU:0".
      reset: has the peak start again from what is allocated now, before both are read.

    Returns:
      Bytes by these names.

    Raises:
      VerificationError: the allocator keeps no statistics; names the environment variable.
    """
    try:
        if reset:
            tf.config.experimental.reset_memory_stats(device)
        return tf.config.experimental.get_memory_info(device)
    except (ValueError, tf.errors.OpError) as error:
        raise VerificationError(f"verify: {_REMEDY.format(device=device)}") from error


def free_bytes(device: str) -> int:
    """Return bytes that a device has left.

    They are what TensorFlow may take of it less what is allocated now. Of a CPU it is what the
    machine has available, less where the process or its control group may not take as much.

    Args:
      device: such as "GPU:0".

    Returns:
      Bytes; 0 where more is allocated than it may take.

    Raises:
      VerificationError: the device's allocator keeps no statistics.
    """
    if device.startswith("CPU"):
        return _free_on_host()
    return max(0, tf_adapter.memory_limit(device) - memory_info(device)["current"])


def _free_on_host() -> int:
    """Return the smallest of what machine, control group and the process's own limit leave."""
    status = _kibibytes("/proc/self/status")
    left = [_kibibytes("/proc/meminfo").get("MemAvailable", 0)]
    for limit, used in ((resource.RLIMIT_AS, "VmSize"), (resource.RLIMIT_DATA, "VmData")):
        most = resource.getrlimit(limit)[0]
        if most != resource.RLIM_INFINITY:
            left.append(most - status.get(used, 0))
    for folder, most_name, used_name in _CONTROL_GROUPS:
        allowed, taken = _number(folder / most_name), _number(folder / used_name)
        if allowed is not None and taken is not None:
            left.append(allowed - taken)
    return max(0, min(left))


def addresses_are_limited() -> bool:
    """Return whether this process may not take as many addresses as it asks for (`ulimit -v`)."""
    return any(resource.getrlimit(limit)[0] != resource.RLIM_INFINITY
               for limit in (resource.RLIMIT_AS, resource.RLIMIT_DATA))


_CONTROL_GROUPS = (
    (pathlib.Path("/sys/fs/cgroup"), "memory.max", "memory.current"),
    (pathlib.Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes", "memory.usage_in_bytes"))


def _kibibytes(path: str) -> dict[str, int]:
    """Return the lines of a table of the kernel that count kB, in bytes by name."""
    lines = (line.split() for line in pathlib.Path(path).read_text().splitlines())
    return {line[0].rstrip(":"): 1024 * int(line[1]) for line in lines
            if len(line) == 3 and line[2] == "kB"}


def _number(path: pathlib.Path) -> int | None:
    """Return what a file of one number says; None where there is none."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # no such group, or "max"
        return None
