"""Trains one entry in this process and says what differs; tests run it for entries that need a
process of their own: `python -m tests.zoo.alone GROUP-NAME`.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys

import tensorflow as tf

import tfckpt
from tests.support import process
from tests.zoo import entry as zoo

DEVICES = 4
ENVIRONMENT = {"CUDA_VISIBLE_DEVICES": "", "TF_XLA_FLAGS": "--tf_xla_cpu_global_jit"}
"""Of such a process. The flag has autoclustering, where an entry asks for it, act on CPUs too."""


def prepare() -> None:
    """Logical CPUs and what else must be set before TensorFlow runs its first op."""
    with contextlib.suppress(RuntimeError):  # TensorFlow runs already: what needs them is skipped
        tf.config.set_logical_device_configuration(
            tf.config.list_physical_devices("CPU")[0],
            [tf.config.LogicalDeviceConfiguration()] * DEVICES)
    process.prepare()


def compare(entry: zoo.Entry) -> tuple[list[str], list[dict]]:
    """Return what differs between the plain and the rewritten training, and what the reports say.
    """
    with zoo.conditions(entry):
        return outcome(entry, zoo.train(entry, rewrite=False), zoo.train(entry, rewrite=True))


def outcome(entry: zoo.Entry, wanted: zoo.Trained, found: zoo.Trained
            ) -> tuple[list[str], list[dict]]:
    """Return what `compare` returns, of two trainings."""
    tfckpt.verify.wait_for_certificates()
    return zoo.differences(found, wanted, entry.xla), [
        {"applied": r.applied, "reason": r.reason, "recomputed": r.recomputed_ops,
         "plain": r.baseline_peak_bytes, "planned": r.planned_peak_bytes,
         "refused": list(r.refused), "identical": r.identical, "certificate": r.certificate}
        for r in found.reports]


def compare_alone(entry: zoo.Entry) -> tuple[list[str], list[dict]]:
    """`compare` in a process of its own.

    Raises:
      RuntimeError: the process failed; has the end of what it said.
    """
    done = subprocess.run(
        [sys.executable, "-m", "tests.zoo.alone", f"{entry.group}-{entry.name}"],
        capture_output=True, text=True, timeout=600, check=False,
        env={**os.environ, **ENVIRONMENT})
    if done.returncode:
        raise RuntimeError(done.stderr[-3000:])
    different, reports = json.loads(done.stdout.strip().splitlines()[-1])
    return different, reports


def main(name: str) -> None:
    """Print what `compare` returns as one line of JSON."""
    from tests.zoo import groups

    prepare()
    entry = next(e for e in groups.ENTRIES if f"{e.group}-{e.name}" == name)
    print(json.dumps(compare(entry)))


if __name__ == "__main__":
    main(sys.argv[1])
