"""TensorFlow's own recomputation, which no public option reaches, to compare with.

Grappler's memory optimizer can recompute ops for the backward. In TensorFlow 2 it does nothing
by default: it looks for backward ops under another scope than the one `tf.GradientTape` uses.
"""

from __future__ import annotations

import contextlib

from tfckpt.capture import tf_adapter
from tfckpt.errors import PlanError

MODES = ("RECOMPUTATION_HEURISTICS", "HEURISTICS", "MANUAL")


def builtin_recomputation(mode: str = "RECOMPUTATION_HEURISTICS", *,
                          scope: str = "gradient_tape/") -> contextlib.AbstractContextManager[None]:
    """Have functions that this thread calls in the context pass Grappler's recomputation.

    A function is optimised when it is first called in the context, and again when it is called
    outside. Functions compiled by XLA do not pass here.

    Args:
      mode: "RECOMPUTATION_HEURISTICS" recomputes what is cheap by a list of op types,
        "HEURISTICS" swaps and schedules besides, "MANUAL" recomputes ops that were traced under
        `recompute_hint()`.
      scope: what the names of the backward's ops begin with.

    Returns:
      A context manager.

    Raises:
      PlanError: another mode.
    """
    if mode not in MODES:
        raise PlanError(f"plan: mode={mode!r} must be one of {', '.join(MODES)}")
    return tf_adapter.memory_optimizer(mode, scope)


def recompute_hint() -> contextlib.AbstractContextManager[None]:
    """Mark the ops that are traced in the context for the mode "MANUAL"."""
    return tf_adapter.mark_ops("_recompute_hint")
