"""Faults of tfckpt: exceptions not raised on purpose. They cost a plan, never the step."""

from __future__ import annotations

from absl import logging

INTERNAL = "internal error"
ADVICE = ("; this is a fault of tfckpt: set TFCKPT_DUMP to the path of a folder, run again, and "
          "report what is written there")


def said(error: Exception, what: str) -> str:
    """Return what a report says of a fault, and log it with its traceback.

    Args:
      error: what was raised.
      what: what could not be done.
    """
    logging.error("tfckpt: %s", what, exc_info=error)
    return f"{INTERNAL}: {type(error).__name__}: {error}"


def with_advice(reason: str) -> str:
    """Return a reason, and how to report it where it is a fault.

    Args:
      reason: why something was not done; that of a fault is what `said` returned.
    """
    return reason + ADVICE if reason.startswith(INTERNAL) else reason
