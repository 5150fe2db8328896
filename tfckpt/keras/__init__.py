"""Keras: `checkpoint(model)` makes `compile` and `fit` train in less memory, without other changes.

`PeakMemory()` is a callback that measures what they really need.
"""

from __future__ import annotations

from tfckpt.keras.batches import look_at_batches
from tfckpt.keras.peak_memory import PEAK, PeakMemory
from tfckpt.keras.wrapping import checkpoint, report

__all__ = ["PEAK", "PeakMemory", "checkpoint", "look_at_batches", "report"]
