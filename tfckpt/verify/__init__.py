"""Verification: measured peaks, executed copies."""

from tfckpt.verify.executed import Executed, executed
from tfckpt.verify.memory import measure_peak

__all__ = ["Executed", "executed", "measure_peak"]
