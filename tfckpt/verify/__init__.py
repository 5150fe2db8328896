"""Verification: measured peaks, executed copies, the same arithmetic, what XLA made of a step."""

from tfckpt.verify.arithmetic.background import wait_for_certificates
from tfckpt.verify.arithmetic.instantiated import same_arithmetic
from tfckpt.verify.arithmetic.same import Certificate
from tfckpt.verify.executed import Executed, executed
from tfckpt.verify.memory import measure_peak
from tfckpt.verify.xla import Compiled, compiled, compiled_for

__all__ = ["Certificate", "Compiled", "Executed", "compiled", "compiled_for", "executed",
           "measure_peak", "same_arithmetic", "wait_for_certificates"]
