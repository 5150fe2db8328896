"""What strided slices take, against numpy's own indexing."""

from __future__ import annotations

import random

import numpy as np
import pytest

from tfckpt.ops.slices import MASKS, slice_of


def _random(rng, rank):
    """Return what an op is given, with its masks, and numpy's index of the same meaning."""
    places = rng.randint(1, rank)
    begin = [rng.randint(-3, 3) for _ in range(places)]
    end = [rng.randint(-2, 6) for _ in range(places)]
    masks = dict.fromkeys(MASKS, 0)
    index: list[object] = []
    ellipsis = rng.randrange(places) if rng.random() < 0.4 else -1
    for place in range(places):
        kind = rng.choice(("whole", "whole", "one", "part", "from", "to"))
        if place == ellipsis:
            masks["ellipsis_mask"] |= 1 << place
            index.append(...)
        elif kind == "one":
            masks["shrink_axis_mask"] |= 1 << place
            index.append(begin[place])
        else:
            opens, closes = kind in ("whole", "to"), kind in ("whole", "from")
            masks["begin_mask"] |= opens << place
            masks["end_mask"] |= closes << place
            index.append(slice(None if opens else begin[place], None if closes else end[place]))
    return begin, end, masks, tuple(index)


@pytest.mark.parametrize("seed", range(400))
def test_a_slice_along_one_axis_is_what_numpy_takes(seed):
    rng = random.Random(seed)
    dims = [rng.randint(3, 5) for _ in range(rng.randint(1, 4))]
    begin, end, masks, index = _random(rng, len(dims))
    found = slice_of(dims, begin, end, [1] * len(begin), masks)
    numbers = np.arange(np.prod(dims)).reshape(dims)
    taken = numbers[index]
    if found is None:
        return
    expected = np.take(numbers, range(found.begin, found.end), found.axis)
    if found.shrunk:
        expected = expected.squeeze(found.axis)
    assert np.array_equal(taken, expected)
    assert found.told in (found.axis, found.axis - len(dims))
    assert (found.told < 0) == (... in index[:index.index(...) + 1]
                                and found.axis > index.index(...) if ... in index else False)


def test_what_is_not_known_is_no_slice():
    none = dict.fromkeys(MASKS, 0)
    assert slice_of((4, None), (0, -1), (4, 2), (1, 1), none) is None
    assert slice_of((4, None), (0, 1), (4, -1), (1, 1), none) is None
    assert slice_of((4, None), (0, 1), (4, 2), (1, 1), none | {"end_mask": 2}) is None
    assert slice_of((4, None), (0, 1), (4, 2), (1, 1), none) == (1, 1, 1, 2, False)
    assert slice_of((4, None), (1, 0), (2, 0), (1, 1), none | {"end_mask": 2, "begin_mask": 2})
    assert slice_of((4, 4), (0, 1), (4, 2), (1, 2), none) is None
    assert slice_of((4, 4), (0, 1), (4, 2), (1, 1), none | {"new_axis_mask": 1}) is None
    assert slice_of((4, 4), (1, 1), (2, 2), (1, 1), none) is None
