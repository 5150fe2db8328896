"""What a user may write as a budget, parsed and checked before anything is traced.

* an int, or a string such as "6GiB" or "800 MB": bytes of the whole device, resident included;
* a float in (0, 1]: a fraction of the plain step's dynamic peak;
* "min": the least peak that a plan reaches.
"""

from __future__ import annotations

import dataclasses
import re

from tfckpt.errors import InfeasibleBudgetError, PlanError

_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
          "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}
_QUANTITY = re.compile(r"^\s*([0-9]+(?:\.[0-9]+)?)\s*([a-zA-Z]*)\s*$")
_HELP = ('write bytes as an int, a size such as "6GiB" or "800MB", a fraction of the plain peak '
         'such as 0.5, or "min"')


@dataclasses.dataclass(frozen=True)
class Budget:
    """A checked budget. Exactly one of the two is set; neither means "min"."""

    device_bytes: int | None = None
    fraction: float | None = None

    def dynamic(self, baseline_bytes: int, resident_bytes: int) -> int | None:
        """Bytes that the dynamic peak must not pass; None for the least peak."""
        if self.fraction is not None:
            return int(self.fraction * baseline_bytes)
        if self.device_bytes is not None:
            return self.device_bytes - resident_bytes
        return None

    def __str__(self) -> str:
        if self.fraction is not None:
            return f"{self.fraction:g} of plain"
        return "min" if self.device_bytes is None else format_bytes(self.device_bytes)

    def explain(self, error: InfeasibleBudgetError, baseline_bytes: int, resident_bytes: int,
                device: str = "") -> InfeasibleBudgetError:
        """The solver's refusal in the caller's unit.

        Args:
          device: which of several devices it is about.
        """
        least = error.smallest_bytes
        where = f" on {device}" if device else ""
        if self.fraction is not None:
            ratio = least / max(baseline_bytes, 1)
            ratio = min(1.0, -(-ratio * 1000 // 1) / 1000)  # rounded up: must be feasible
            return InfeasibleBudgetError(
                f"plan: budget={self.fraction:g} of the plain peak ({format_bytes(baseline_bytes)})"
                f" cannot be met{where}; the smallest feasible fraction found is {ratio:g} "
                f'({format_bytes(least)}). Pass budget={ratio:g} or budget="min"', least)
        total = least + resident_bytes
        return InfeasibleBudgetError(
            f"plan: budget={format_bytes(self.device_bytes or 0)} cannot be met{where}; the "
            f"smallest feasible one found is {total} bytes (about {format_bytes(total)}: "
            f"{format_bytes(resident_bytes)} resident + {format_bytes(least)} dynamic). "
            f'Pass budget={total} or budget="min"', total)


def parse_budget(budget: object) -> Budget:
    """Checks a budget.

    Raises:
      PlanError: malformed, zero or negative; the message says what may be written.
    """
    if isinstance(budget, Budget):
        return budget
    if isinstance(budget, bool) or not isinstance(budget, int | float | str):
        raise PlanError(f"plan: budget={budget!r} is not a budget; {_HELP}")
    if isinstance(budget, str):
        return _parse_text(budget)
    if isinstance(budget, float):
        if not 0.0 < budget <= 1.0:
            raise PlanError(f"plan: budget={budget!r} is a fraction outside (0, 1]; {_HELP}")
        return Budget(fraction=budget)
    if budget <= 0:
        raise PlanError(f"plan: budget={budget!r} bytes must be positive; {_HELP}")
    return Budget(device_bytes=budget)


def _parse_text(text: str) -> Budget:
    if text.strip().lower() == "min":
        return Budget()
    match = _QUANTITY.match(text)
    if match and not match[2] and 0.0 < float(match[1]) <= 1.0 and "." in match[1]:
        raise PlanError(f"plan: budget={text!r} is text; for a fraction of the plain peak drop the "
                        f"quotes: budget={match[1]}")
    if not match or match[2].lower() not in _UNITS:
        raise PlanError(f"plan: budget={text!r} cannot be read; {_HELP}")
    size = int(float(match[1]) * _UNITS[match[2].lower()])
    if size <= 0:
        raise PlanError(f"plan: budget={text!r} must be positive; {_HELP}")
    return Budget(device_bytes=size)


def format_bytes(size: float) -> str:
    """Bytes as a person reads them, in decimal megabytes or gigabytes."""
    if abs(size) >= 1e9:
        return f"{size / 1e9:.2f} GB"
    if abs(size) >= 1e6:
        return f"{size / 1e6:.1f} MB"
    return f"{size / 1e3:.1f} kB"
