"""A budget for each device: which of several entries applies to a device.

    tfckpt.checkpoint(step, budget={"GPU:0": "30GB", "GPU:1": "70GB", "*": "min"})

A key is a device as TensorFlow writes it, in full or in part ("GPU:1", "/job:worker/task:1",
"GPU"), or "*" for those that no other key fits. Of several keys that fit, the one that says most
counts; of equals, the first.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping

import tensorflow as tf

from tfckpt.errors import PlanError
from tfckpt.request.budget import Budget, parse_budget
from tfckpt.verify.memory import default_device, free_bytes

OTHERS = "*"
_HELP = 'write {"GPU:0": "30GB", "GPU:1": "70GB"}; "*" stands for all other devices'


@dataclasses.dataclass(frozen=True)
class Budgets:
    """The checked budgets of a step's devices, each with the key that a user wrote.

    A single budget is that of every device: it has one entry, for `OTHERS`.
    """

    entries: tuple[tuple[str, Budget], ...] = ((OTHERS, Budget()),)

    @property
    def sized(self) -> bool:
        """Return whether a budget is a number of bytes, so that all sizes have to be known."""
        return any(budget.sized for _, budget in self.entries)

    def of(self, device: str) -> Budget:
        """Return the budget of a device, as ops spell it; "" is where ops without a device run.

        What a device has free is asked now.

        Args:
          device: as ops spell it; "" where ops without a device run.

        Returns:
          The budget, with `free_bytes` filled in where it is what the device has free.

        Raises:
          PlanError: no key fits it.
        """
        keys = dict(self.entries)
        fitting = [key for key in keys if key != OTHERS and _fits(key, _full(device))]
        key = max(fitting, key=_said, default=OTHERS)
        if key not in keys:
            raise PlanError(f"plan: budget has no entry for {_short(_full(device))}, where a part "
                            f"of this step runs; add one, or {OTHERS!r} for all other devices")
        budget = keys[key]
        if budget.of_device:
            spec = _full(device)
            free = free_bytes(f"{spec.device_type}:{spec.device_index}")
            return dataclasses.replace(budget, free_bytes=free)
        return budget

    def check(self, devices: Iterable[str]) -> None:
        """Refuse keys of devices that neither a step nor TensorFlow in this process knows.

        Args:
          devices: those of the step, as ops spell them.

        Raises:
          PlanError: names the key and the devices that there are.
        """
        named = [key for key, _ in self.entries if key != OTHERS]
        if not named:
            return
        known = dict.fromkeys(_full(name) for name in (
            *devices, *(device.name for device in tf.config.list_logical_devices())))
        for key in named:
            if not any(_fits(key, spec) for spec in known):
                raise PlanError(f"plan: budget names {key!r}, and there is no such device; there "
                                f"are {', '.join(map(_short, known))}")


def parse_budgets(budget: object) -> Budgets:
    """Check a budget, or a mapping from devices to budgets.

    Args:
      budget: as for `parse_budget`; or a mapping from devices to such budgets; or a `Budgets`,
        which is given back.

    Raises:
      PlanError: malformed; the message says what may be written.
    """
    if isinstance(budget, Budgets):
        return budget
    if not isinstance(budget, Mapping):
        return Budgets(((OTHERS, parse_budget(budget)),))
    if not budget:
        raise PlanError(f"plan: budget={budget!r} names no device; {_HELP}")
    seen: dict[tf.DeviceSpec | str, object] = {}
    for key in budget:
        spec = key if key == OTHERS else _spec(key)
        if spec in seen:
            raise PlanError(f"plan: budget names one device twice, as {seen[spec]!r} and {key!r}")
        seen[spec] = key
    return Budgets(tuple((str(key), parse_budget(value)) for key, value in budget.items()))


def _spec(key: object) -> tf.DeviceSpec:
    try:
        spec = tf.DeviceSpec.from_string(key)
        if isinstance(key, str) and spec.to_string():
            return spec
    except (ValueError, AttributeError, TypeError):
        pass
    raise PlanError(f"plan: budget names {key!r}, which is no device; {_HELP}")


def _full(device: str) -> tf.DeviceSpec:
    """Return a device with what ops may leave out: this process, and its first device."""
    default = tf.DeviceSpec.from_string(f"/job:localhost/replica:0/task:0/{default_device()}")
    found = default.make_merged_spec(tf.DeviceSpec.from_string(device))
    return found if found.device_index is not None else found.replace(device_index=0)


def _fits(key: str, device: tf.DeviceSpec) -> bool:
    return bool(device.make_merged_spec(tf.DeviceSpec.from_string(key)) == device)


def _said(key: str) -> int:
    spec = tf.DeviceSpec.from_string(key)
    return sum(part is not None for part in (
        spec.job, spec.replica, spec.task, spec.device_type, spec.device_index))


def _short(device: tf.DeviceSpec) -> str:
    """Return a device as people write it: without what names this process."""
    name = f"{device.device_type}:{device.device_index}"
    here = device.job == "localhost"
    return name if here else f"/job:{device.job}/task:{device.task}/device:{name}"
