"""The names of solvers and objectives, and what an effort may be."""

from __future__ import annotations

import math
import numbers
from typing import Any

from tfckpt.errors import PlanError
from tfckpt.plan.candidates import SOLVERS

AUTO, OPTIMAL = "auto", "optimal"
SOLVER_NAMES = (AUTO, *SOLVERS, OPTIMAL)
OBJECTIVES = ("time", "memory")


def check_names(solver: str, objective: str) -> None:
    """Raise `PlanError`, naming the choices, for an unknown solver or objective.

    Args:
      solver: should be one of `SOLVER_NAMES`.
      objective: should be one of `OBJECTIVES`.

    Raises:
      PlanError: it is not.
    """
    if solver not in SOLVER_NAMES:
        raise PlanError(f"plan: unknown solver {solver!r}; choose one of "
                        f"{', '.join(SOLVER_NAMES)}")
    if objective not in OBJECTIVES:
        raise PlanError(f"plan: unknown objective {objective!r}; choose one of "
                        f"{', '.join(OBJECTIVES)}")


def check_effort(effort: Any) -> None:
    """Raise `PlanError` unless the effort is a positive number.

    Args:
      effort: any value; bools and infinity are refused.

    Raises:
      PlanError: it is no positive number.
    """
    if isinstance(effort, bool) or not isinstance(effort, numbers.Real) or not (
            0 < float(effort) < math.inf):
        raise PlanError(f"plan: effort={effort!r} must be a positive number, 1 by default")
