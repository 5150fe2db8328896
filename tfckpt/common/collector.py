"""Python's garbage collector, put off while a step is read, planned and rewritten.

Each of the many small values that stand for a graph counts as a reason to look for garbage, and
what is looked through then is all that the program has made before: half a million objects of
TensorFlow and Keras, for longer than a step is read. What ends here is freed without a collector.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def collector_paused() -> Iterator[None]:
    """Have no garbage collected in this context, in any thread: for what takes a second or so."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@contextlib.contextmanager
def older_objects_set_aside() -> Iterator[None]:
    """Have the collector look at objects made in this context alone: for a search of any length.

    Nothing is set aside where other code has done that already, since it would be given back here.
    """
    if gc.get_freeze_count():
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
