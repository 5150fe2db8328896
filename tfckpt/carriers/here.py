"""The devices of this process as targets."""

from __future__ import annotations

import dataclasses

import tensorflow as tf

from tfckpt.devices import GPU_OF_UNKNOWN_KIND, preset_named
from tfckpt.target import CPU, GPU, Target


def target_of(device: str = "") -> Target:
    """Return what a step is planned for where its ops name a device of this process.

    Args:
      device: as ops spell it; "" is where ops without a device run, the first GPU if there is one.
    """
    spec = tf.DeviceSpec.from_string(device)
    gpus = tf.config.list_logical_devices(GPU)
    kind = spec.device_type or (GPU if gpus else CPU)
    return _gpu(spec.device_index or 0) if kind == GPU else Target(device=kind)


def _gpu(index: int) -> Target:
    """Return a GPU by its driver's name for it; one of ordinary rates where that says nothing."""
    physical = tf.config.list_physical_devices(GPU)
    name = ""
    if index < len(physical):
        name = tf.config.experimental.get_device_details(physical[index]).get("device_name", "")
    return (preset_named(name) or GPU_OF_UNKNOWN_KIND).target()


def place(target: Target | None, compiled: bool, optimised: bool):
    """Return the function that gives the target of each device of a step.

    Args:
      target: what was asked for instead of the devices of this process.
      compiled: whether XLA compiles the step.
      optimised: whether Grappler has run already.
    """
    def of(device: str) -> Target:
        found = target or target_of(device)
        return dataclasses.replace(found.compiled(compiled), optimised=optimised)

    return of
