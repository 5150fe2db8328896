"""The devices of this process as targets."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable

import tensorflow as tf

from tfckpt.capture import tf_adapter
from tfckpt.ir.target import Target
from tfckpt.request.devices import described


def target_of(device: str = "") -> Target:
    """Return what a step is planned for where its ops name a device of this process.

    Args:
      device: as ops spell it; "" is where ops without a device run: the first GPU if there is one,
        unless `tf.device` says another around the call.
    """
    default = tf.DeviceSpec.from_string(f"/{tf_adapter.device_of_calls()}")
    spec = default.make_merged_spec(tf.DeviceSpec.from_string(device))
    here = tf.config.list_physical_devices(spec.device_type)
    details = [tf.config.experimental.get_device_details(one)
               for one in here[spec.device_index or 0:][:1]]
    found = described(spec.device_type, "".join(d.get("device_name", "") for d in details))
    return dataclasses.replace(found, onednn=tf_adapter.uses_onednn()).with_threads(threads())


def threads() -> int:
    """Return how many threads run ops; TensorFlow takes one for each core where nobody says."""
    asked = tf.config.threading.get_inter_op_parallelism_threads()
    return asked or len(os.sched_getaffinity(0))


def place(target: Target | None, compiled: bool, optimised: bool) -> Callable[[str], Target]:
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
