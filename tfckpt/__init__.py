"""tfckpt: train TensorFlow models in less memory, with the same numbers.

Imports are lazy: `import tfckpt.plan` loads no TensorFlow.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from tfckpt.errors import (
    CaptureError,
    CostError,
    InfeasibleBudgetError,
    PlanError,
    RewriteError,
    TfckptError,
    VerificationError,
)

if TYPE_CHECKING:
    from tfckpt import keras, verify
    from tfckpt.api import checkpoint, report_of
    from tfckpt.forward_ad import eager_fad, nested_forward_ad
    from tfckpt.report.report import Report
    from tfckpt.saved import saved_tensors
    from tfckpt.tuning.profile import op_seconds
    from tfckpt.tuning.run import tune

__version__ = "0.1.0"

__all__ = ["CaptureError", "CostError", "InfeasibleBudgetError", "PlanError", "Report",
           "RewriteError", "TfckptError", "VerificationError", "checkpoint", "eager_fad", "keras",
           "nested_forward_ad", "op_seconds", "report_of", "saved_tensors", "tune",
           "verify"]

_LAZY = {"eager_fad": ("tfckpt.forward_ad", "eager_fad"),
         "nested_forward_ad": ("tfckpt.forward_ad", "nested_forward_ad"),
         "checkpoint": ("tfckpt.api", "checkpoint"), "report_of": ("tfckpt.api", "report_of"),
         "Report": ("tfckpt.report.report", "Report"),
         "op_seconds": ("tfckpt.tuning.profile", "op_seconds"),
         "saved_tensors": ("tfckpt.saved", "saved_tensors"),
         "tune": ("tfckpt.tuning.run", "tune"),
         "keras": ("tfckpt.keras", None), "verify": ("tfckpt.verify", None)}


if not TYPE_CHECKING:  # with it, checkers would let any name pass
    def __getattr__(name: str) -> Any:
        if name not in _LAZY:
            raise AttributeError(f"module 'tfckpt' has no attribute {name!r}")
        module, attribute = _LAZY[name]
        loaded = importlib.import_module(module)
        return getattr(loaded, attribute) if attribute else loaded


def __dir__() -> list[str]:
    return sorted(__all__)
