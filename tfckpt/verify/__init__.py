"""Verification: measured peaks, executed copies, what XLA made of a step."""

from tfckpt.verify.executed import Executed, executed
from tfckpt.verify.memory import measure_peak
from tfckpt.verify.xla import Compiled, compiled, compiled_for

__all__ = ["Compiled", "Executed", "compiled", "compiled_for", "executed", "measure_peak"]
