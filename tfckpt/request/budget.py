"""Parsing and checks of the user's budget, before anything is traced.

* an int, or a string such as "6GiB" or "800 MB": bytes of the whole device, resident included;
* a float in (0, 1]: a fraction of the plain step's dynamic peak;
* "min": the minimum peak that a plan reaches;
* "device": what is free on the device that the step runs on, when it is planned.
"""

from __future__ import annotations

import dataclasses
import numbers
import re

from tfckpt.errors import InfeasibleBudgetError, PlanError

_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
          "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12,
          "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}
DEVICE = "device"
ONE_PIECE = 31 / 32
"""Of what a device has free, what is expected to be left in one piece when a step runs. A fit of
ResNet-50 on an H100 that left 1.4 % of the memory to batches and gaps between variables failed."""
OVER = 1.03
"""Times what is allowed, from which a measured peak is worth a warning."""
_SLOWER = 0.02
"""Of the plain step's time, from which an error says what a plan takes more."""
_PERCENTS = 100
"""Bytes up to which an int without a unit was hardly meant to be bytes."""
_QUANTITY = re.compile(r"^\s*([0-9]+(?:\.[0-9]+)?)\s*([a-zA-Z]*)\s*$")
_PERCENT = re.compile(r"^[0-9]+(?:\.[0-9]+)?\s*%$")
_HELP = ('write bytes as an int, a size such as "6GiB" or "800MB", a fraction of the plain peak '
         'such as 0.5, "min", or "device" for what is free there')


@dataclasses.dataclass(frozen=True)
class Budget:
    """A checked budget. At most one is set; none means "min".

    Attributes:
      device_bytes: of the whole device, what is resident there included.
      fraction: of the plain step's dynamic peak.
      free_bytes: what the device has free when the step is planned; with `of_device`, 0 until
        somebody has asked the device.
      of_device: whether `free_bytes` is the budget.
      in_one_piece: whether what is free has to serve a single request, as of a step that XLA
        compiles for a GPU; what is free is in several pieces.
      text: how bytes were written, where that was with a unit.
    """

    device_bytes: int | None = None
    fraction: float | None = None
    of_device: bool = False
    in_one_piece: bool = False
    free_bytes: int = 0
    text: str = dataclasses.field(default="", compare=False, repr=False)

    @property
    def sized(self) -> bool:
        """Return whether the budget is a number of bytes, so that all sizes have to be known."""
        return self.device_bytes is not None or self.of_device

    def dynamic(self, baseline_bytes: int, resident_bytes: int) -> int | None:
        """Return bytes that the dynamic peak must not pass; None for the minimum peak.

        Args:
          baseline_bytes: dynamic peak of the plain step.
          resident_bytes: allocated on the device before the step starts: variables, inputs,
            constants.
        """
        if self.fraction is not None:
            return int(self.fraction * baseline_bytes)
        if self.device_bytes is not None:
            return self.device_bytes - resident_bytes
        return self._usable_bytes if self.of_device else None

    @property
    def _usable_bytes(self) -> int:
        return int(ONE_PIECE * self.free_bytes) if self.in_one_piece else self.free_bytes

    def __str__(self) -> str:
        if self.fraction is not None:
            return f"{self.fraction:g} of plain"
        if self.of_device:
            return f"{format_bytes(self.free_bytes)} free on the device"
        if self.device_bytes is None:
            return "min"
        size = format_bytes(self.device_bytes)
        return f"{self.text} ({size})" if "i" in self.text.lower() else size

    def refusal(self, smallest_bytes: int, baseline_bytes: int, resident_bytes: int,
                device: str = "", note: str = "", sure_bytes: int = 0,
                overhead: float | None = None) -> InfeasibleBudgetError:
        """Return the error that says, in the caller's unit, that no plan fits.

        Args:
          smallest_bytes: smallest dynamic peak that was found.
          baseline_bytes: that of the plain step.
          resident_bytes: allocated before the step starts: variables, inputs and constants.
          device: which of several devices it is about.
          note: what else there is to say, after a space.
          sure_bytes: the most that was simulated of the plan of the smallest peak, which is what it
            is expected to take; 0 where that is the same. It is what the error says to pass.
          overhead: planned extra time of that plan, as a fraction; None where it is not known.
        """
        smallest = min(smallest_bytes, baseline_bytes)  # the plain step is a plan too
        # a peak that may be about the plain step's is no better than that
        saves = smallest < sure_bytes and _fraction(sure_bytes, baseline_bytes) < 1.0
        sure = sure_bytes if saves else smallest
        most = f" at most, {format_bytes(smallest)} expected" if sure > smallest else ""
        found = "found that is sure to be met is" if sure > smallest else "found is"
        where = f" on {device}" if device else ""
        as_it_is = smallest == baseline_bytes
        overhead = 0.0 if as_it_is else overhead
        slower = overhead is not None and overhead >= _SLOWER
        most += f", {100 * (overhead or 0.0):+.0f} % time" if slower else ""
        least = ", with which the step trains unchanged" if as_it_is else ' or budget="min"' + (
            ", which weighs memory against time" if slower else "")
        if self.fraction is not None:
            fraction = _fraction(sure, baseline_bytes)
            return InfeasibleBudgetError(
                f"plan: budget={self.fraction:g} of the plain peak ({format_bytes(baseline_bytes)})"
                f" cannot be met{where}; the smallest feasible fraction {found} "
                f"{fraction} ({format_bytes(sure)}{most}). Pass "
                f"budget={fraction}{least}{note}", smallest, overhead, fraction)
        if self.of_device:
            piece = " in one piece" if self.in_one_piece else ""
            return InfeasibleBudgetError(
                f'plan: budget="device" cannot be met{where}: {format_bytes(self._usable_bytes)} '
                f"are free{piece}, and the minimum that a step needs there above what it starts "
                f"with is {format_bytes(smallest)}. Use a smaller batch, free memory before the "
                f'first step, or pass budget="min"{note}', smallest, overhead, "min")
        total = sure + resident_bytes
        asked = self.device_bytes or 0
        has_unit = any(letter.isalpha() for letter in self.text)
        shown = str(self) if has_unit or asked > _PERCENTS else (
            f'{asked} is bytes (megabytes are "{asked}MB", a fraction of the plain peak is '
            f"{asked / 100:g}) and")
        return InfeasibleBudgetError(
            f"plan: budget={shown} cannot be met{where}; the "
            f"smallest feasible one {found} {total} bytes (about {format_bytes(total)}: "
            f"{format_bytes(resident_bytes)} resident + {format_bytes(sure)} dynamic{most}). "
            f"Pass budget={total}{least}{note}", smallest, overhead, total)


def _fraction(part: int, whole: int) -> float:
    """Return a fraction in thousands, rounded up: it must be feasible."""
    return min(1.0, -(-part / max(whole, 1) * 1000 // 1) / 1000)


def parse_budget(budget: object) -> Budget:
    """Check a budget.

    Args:
      budget: bytes of the whole device as an int or "6GiB", a fraction of the plain step's dynamic
        peak as a float in (0, 1], "min" or "device"; or a `Budget`, which is given back.

    Raises:
      PlanError: malformed, zero or negative; the message says what may be written.
    """
    if isinstance(budget, Budget):
        return budget
    if isinstance(budget, str):
        return _parse_text(budget)
    if isinstance(budget, bool) or not isinstance(budget, numbers.Real):
        raise PlanError(f"plan: budget={budget!r} is not a budget; {_HELP}")
    if isinstance(budget, numbers.Integral):
        if budget <= 0:
            raise PlanError(f"plan: budget={budget!r} bytes must be positive; {_HELP}")
        return Budget(device_bytes=int(budget))
    number = float(budget)
    if not 0.0 < number <= 1.0:
        in_bytes = f"for bytes write budget={int(number)}; " if 1e6 <= number < 1e18 else ""
        raise PlanError(f"plan: budget={budget!r} is a fraction outside (0, 1]; {in_bytes}{_HELP}")
    return Budget(fraction=number)


def _parse_text(text: str) -> Budget:
    word = text.strip().lower()
    if word in ("min", DEVICE):
        return Budget(of_device=word == DEVICE)
    if _PERCENT.match(word):
        raise PlanError(f"plan: budget={text!r} cannot be read; for a fraction of the plain peak "
                        f"write a number: budget={float(word.rstrip('% ')) / 100:g}")
    match = _QUANTITY.match(text)
    if match and not match[2] and 0.0 < float(match[1]) <= 1.0 and "." in match[1]:
        raise PlanError(f"plan: budget={text!r} is text; for a fraction of the plain peak drop the "
                        f"quotes: budget={match[1]}")
    if not match or match[2].lower() not in _UNITS:
        raise PlanError(f"plan: budget={text!r} cannot be read; {_HELP}")
    size = int(float(match[1]) * _UNITS[match[2].lower()])
    if size <= 0:
        raise PlanError(f"plan: budget={text!r} must be positive; {_HELP}")
    return Budget(device_bytes=size, text=text.strip())


def format_bytes(size: float) -> str:
    """Return bytes as a person reads them, in decimal megabytes or gigabytes.

    Args:
      size: in bytes; may be negative.

    Returns:
      A number with its unit, such as "1.50 GB", "20.0 MB" or "3.1 kB".
    """
    if abs(size) >= 1e9:
        return f"{size / 1e9:.2f} GB"
    if abs(size) >= 1e6:
        return f"{size / 1e6:.1f} MB"
    return f"{size / 1e3:.1f} kB"
