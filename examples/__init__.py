"""Runnable examples: `python -m examples.quickstart`, `python -m examples.demo`.

Importing this package loads TensorFlow quietly. TensorFlow writes its first messages (which CPU
instructions it uses, that it found no GPU) before it reads `TF_CPP_MIN_LOG_LEVEL`, so standard
error is set aside while it starts; should it fail to start, what it wrote is shown after all.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")


@contextlib.contextmanager
def _stderr_set_aside() -> Iterator[None]:
    """Collects what the process writes to standard error; shows it only after an exception."""
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


with _stderr_set_aside():
    import tensorflow as tf

    tf.config.list_physical_devices()
