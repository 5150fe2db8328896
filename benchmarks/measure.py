"""Measures two versions of a training step side by side in one process.

Peaks come from TensorFlow's own allocator statistics, times from `time.perf_counter`. The two
steps take turns, so that whatever else the machine is doing meets both of them alike.

On the CPU TensorFlow does not count tensors smaller than 256 KiB, and it counts a reused block of
memory at its full size, which may be up to twice what was asked for. Peaks of one and the same
step therefore scatter by some percent, and those of very small models are zero.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

MB = 1_000_000


def default_device() -> str:
    """Return the device whose memory counts: the first GPU, or the CPU where there is none."""
    return "GPU:0" if tf.config.list_physical_devices("GPU") else "CPU:0"


def device_name(otherwise: str) -> str:
    """Return what the first GPU calls itself.

    Args:
      otherwise: where there is none.
    """
    names = [tf.config.experimental.get_device_details(gpu).get("device_name", "a GPU")
             for gpu in tf.config.list_physical_devices("GPU")]
    return names[0] if names else otherwise


@dataclass(frozen=True)
class Sample:
    """One step.

    peak: bytes above what was allocated before it.
    seconds: of wall time.
    processor: seconds that all threads computed; other programs disturb them less.
    """

    peak: int
    seconds: float
    processor: float = 0.0


@dataclass(frozen=True)
class Comparison:
    """Medians over the measured steps of both versions.

    plain_peak, ours_peak: bytes above what was allocated when the step began.
    plain_seconds, ours_seconds: wall seconds of one step.
    time_ratio, processor_ratio: medians, over neighbouring steps, of ours divided by plain.
    """

    plain_peak: int
    ours_peak: int
    plain_seconds: float
    ours_seconds: float
    time_ratio: float
    processor_ratio: float

    @property
    def memory_ratio(self) -> float:
        """Peak of ours as a fraction of the peak of plain."""
        return self.ours_peak / self.plain_peak if self.plain_peak else float("nan")


class Meter:
    """Measures what happens between `start()` and `stop()`."""

    def __init__(self, device: str | None = None):
        self._device = device or default_device()
        self._before = 0
        self._began = self._computed = 0.0

    def start(self) -> None:
        """Take the bytes allocated now as zero and start the clock."""
        tf.config.experimental.reset_memory_stats(self._device)
        self._before = tf.config.experimental.get_memory_info(self._device)["current"]
        self._computed = time.process_time()
        self._began = time.perf_counter()

    def stop(self) -> Sample:
        """Return the highest bytes and the seconds since `start()`."""
        seconds = time.perf_counter() - self._began
        processor = time.process_time() - self._computed
        peak = tf.config.experimental.get_memory_info(self._device)["peak"]
        return Sample(int(peak) - self._before, seconds, processor)


def measure_step(step: Callable[..., Any], *args: Any, device: str | None = None) -> Sample:
    """Run one step, wait until its outputs exist, drop them, and say what it took."""
    meter = Meter(device)
    meter.start()
    outputs = step(*args)
    for tensor in tf.nest.flatten(outputs):
        if isinstance(tensor, tf.Tensor):
            tensor.numpy()
    sample = meter.stop()
    del outputs
    return sample


def compare(
    plain: Callable[..., Any],
    plain_args: tuple[Any, ...],
    ours: Callable[..., Any],
    ours_args: tuple[Any, ...],
    steps: int = 8,
    warmup: int = 3,
    device: str | None = None,
) -> Comparison:
    """Alternates `plain` and `ours` for `steps` pairs after `warmup` unmeasured pairs."""
    rounds = take_turns([(plain, plain_args), (ours, ours_args)], steps, warmup, device)
    return summarise([(p, o) for p, o in rounds])


def take_turns(
    steps: Sequence[tuple[Callable[..., Any], tuple[Any, ...]]],
    rounds: int,
    warmup: int = 3,
    device: str | None = None,
) -> list[tuple[Sample, ...]]:
    """Run steps, each with its arguments, one after the other, `rounds` times after `warmup`."""
    if rounds < 1:
        raise ValueError(f"steps must be at least 1, not {rounds}")
    for _ in range(warmup):
        for step, args in steps:
            measure_step(step, *args, device=device)
    gc.collect()
    return [
        tuple(measure_step(step, *args, device=device) for step, args in steps)
        for _ in range(rounds)
    ]


def summarise(pairs: list[tuple[Sample, Sample]]) -> Comparison:
    """Medians of a list of (plain, ours) samples."""
    return Comparison(
        plain_peak=round(statistics.median(p.peak for p, _ in pairs)),
        ours_peak=round(statistics.median(o.peak for _, o in pairs)),
        plain_seconds=statistics.median(p.seconds for p, _ in pairs),
        ours_seconds=statistics.median(o.seconds for _, o in pairs),
        time_ratio=statistics.median(o.seconds / p.seconds for p, o in pairs),
        processor_ratio=statistics.median(
            o.processor / max(p.processor, 1e-9) for p, o in pairs
        ),
    )
