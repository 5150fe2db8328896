"""Which part of each axis a strided slice takes, as its masks and constants say."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

MASKS = ("begin_mask", "end_mask", "ellipsis_mask", "new_axis_mask", "shrink_axis_mask")
"""The attributes that say how a slice is to be read."""


class Slice(NamedTuple):
    """A slice along one axis, one element after the other, all other axes being taken whole.

    Attributes:
      axis: which.
      told: the same as the slice says it: from the last axis on, below 0, after an ellipsis.
      begin, end: the first element, and the one after the last.
      shrunk: whether the result lacks the axis.
    """

    axis: int
    told: int
    begin: int
    end: int
    shrunk: bool


def slice_of(dims: Sequence[int | None], begin: Sequence[int], end: Sequence[int],
             strides: Sequence[int], masks: Mapping[str, object]) -> Slice | None:
    """Return what a strided slice takes; None where it is more than one axis, or not known.

    Args:
      dims: of the tensor that is sliced; None of an axis whose length is not known.
      begin: the first index of each axis, as the op is given them.
      end: those after the last.
      strides: from index to index.
      masks: the attributes `MASKS` of the op.
    """
    def masked(name: str, place: int) -> bool:
        return bool(int(str(masks[name])) >> place & 1)

    if masks["new_axis_mask"] or set(strides) - {1} or len(begin) > len(dims) + 1:
        return None
    found: list[Slice] = []
    axis, after = 0, False
    for place in range(len(begin)):
        if masked("ellipsis_mask", place):
            axis, after = axis + len(dims) - len(begin) + 1, True
            continue
        size = dims[axis] if axis < len(dims) else None
        shrunk = masked("shrink_axis_mask", place)
        first = 0 if masked("begin_mask", place) and not shrunk else begin[place]
        last: int | None = end[place]
        if shrunk:
            last = first + 1 or size
        elif masked("end_mask", place):
            if first == 0:
                axis += 1
                continue  # the whole axis, however long it is
            last = size
        if size is not None:
            first, last = (n + size if n < 0 else n for n in (first, last or 0))
            last = min(last, size)
        if last is None or min(first, last) < 0:
            return None
        if (first, last) != (0, size) or shrunk:
            told = axis - len(dims) if after else axis
            found.append(Slice(axis, told, first, last, shrunk))
        axis += 1
    one = found[0] if len(found) == 1 else None
    return one if one is not None and one.begin < one.end else None
