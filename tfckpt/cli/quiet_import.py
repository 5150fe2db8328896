"""Loads TensorFlow without what it writes before it reads `TF_CPP_MIN_LOG_LEVEL`."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator

SILENCED = os.environ.get("TF_CPP_MIN_LOG_LEVEL", "") not in ("", "0")
"""True if the caller silenced TensorFlow: then work in progress is not announced either."""


def load_tensorflow() -> None:
    """Import TensorFlow; what it says is shown only if it fails."""
    if "tensorflow" in sys.modules:
        return
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # errors reach us as exceptions
    with _stderr_set_aside():
        import tensorflow as tf

        tf.config.list_physical_devices()


@contextlib.contextmanager
def warnings_off() -> Iterator[None]:
    """Leave out what TensorFlow's Python side warns of while it reads somebody's graph."""
    from absl import logging

    before = logging.get_verbosity()
    logging.set_verbosity(logging.ERROR)
    try:
        yield
    finally:
        logging.set_verbosity(before)


@contextlib.contextmanager
def _stderr_set_aside() -> Iterator[None]:
    sys.stderr.flush()
    kept = os.dup(2)
    with tempfile.TemporaryFile() as collected:
        os.dup2(collected.fileno(), 2)
        failed = True
        try:
            yield
            failed = False
        finally:
            sys.stderr.flush()
            os.dup2(kept, 2)
            os.close(kept)
            if failed:
                collected.seek(0)
                sys.stderr.write(collected.read().decode("utf-8", "replace"))
