"""The largest batch that fits."""

from __future__ import annotations

from collections.abc import Callable

ENDLESS = 1 << 31
"""No larger batch is looked for."""


def largest_batch(bytes_of: Callable[[int], int], limit: int, start: int = 1) -> int:
    """Return the largest batch whose bytes are within a limit; 0 where not even one example's are.

    Bytes are nearly a line in the batch, so most guesses are secants; every third one doubles the
    batch or halves what is left, so that a bend costs little. Where bytes do not grow with the
    batch everywhere, the batch found fits and the next one does not.

    Args:
      bytes_of: what a batch needs; called once for each batch that is tried.
      limit: bytes.
      start: the batch to begin with.

    Returns:
      A number of examples, at most `ENDLESS` where no limit is met.
    """
    known: dict[int, int] = {}

    def fits(batch: int) -> bool:
        known[batch] = bytes_of(batch)
        return known[batch] <= limit

    low, high = (start, 0) if fits(start) else (0, start)
    turn = 0
    while not high and low < ENDLESS:
        turn += 1
        guess = 2 * low if turn % 3 == 1 else max(low, _crossing(known, limit)) + 1
        guess = min(guess, ENDLESS)
        low, high = (guess, 0) if fits(guess) else (low, guess)
    while high - low > 1:
        turn += 1
        guess = (low + high) // 2 if turn % 3 == 1 else _crossing(known, limit)
        guess = min(max(guess, low + 1), high - 1)
        low, high = (guess, high) if fits(guess) else (low, guess)
    return low


def _crossing(known: dict[int, int], limit: int) -> int:
    """Return where the line through the two batches nearest to the limit meets it."""
    nearest = sorted(known, key=lambda batch: abs(known[batch] - limit))[:2]
    if len(nearest) == 1:
        return nearest[0] * limit // max(known[nearest[0]], 1)
    first, second = sorted(nearest)
    each = (known[second] - known[first]) / (second - first)
    return first + int((limit - known[first]) // each) if each > 0 else 0
