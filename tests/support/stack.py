"""A stack so small that recursion over a graph fails."""

from __future__ import annotations

import contextlib
import sys

FRAMES = 120
"""Stack frames that calls of libraries need."""


@contextlib.contextmanager
def shallow(frames: int = FRAMES):
    """Allows that many more frames than there are."""
    depth, frame = 0, sys._getframe()
    while frame:
        depth, frame = depth + 1, frame.f_back
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(depth + frames)
    try:
        yield
    finally:
        sys.setrecursionlimit(before)
