"""Progress messages while something takes long: single lines on stderr.

Silenced as people silence TensorFlow: `TF_CPP_MIN_LOG_LEVEL` of 1 or more, `tf.get_logger()` or
absl's logger set to errors only.
"""

from __future__ import annotations

import contextlib
import logging as standard
import os
import sys
import threading
from collections.abc import Callable, Iterator

from absl import logging

PATIENCE = 1.5
"""Seconds that pass before a person is told what they wait for."""


def say(line: str) -> None:
    """Write a line to stderr, with the name of the package before it, unless that is silenced.

    Args:
      line: without the name of the package, and without a newline at its end.
    """
    if not silenced():
        sys.stderr.write(f"tfckpt: {line}\n")  # at once: others may write between two calls
        sys.stderr.flush()


def silenced() -> bool:
    """Return whether TensorFlow's messages of this kind are switched off in the process."""
    level = os.environ.get("TF_CPP_MIN_LOG_LEVEL", "0").strip()
    return (level.isdigit() and int(level) > 0
            or logging.get_verbosity() < logging.WARNING
            or standard.getLogger("tensorflow").getEffectiveLevel() >= standard.ERROR)


@contextlib.contextmanager
def waiting_for(what: str, after: float = PATIENCE) -> Iterator[Callable[[str], None]]:
    """Say what is being done once it has taken some time, and its result when it is done.

    Args:
      what: a line such as "planning step (1,200 operations)".
      after: seconds.

    Yields:
      What takes the result, as text; it is said only where `what` was.
    """
    said = threading.Event()

    def announce() -> None:
        said.set()
        say(f"{what} ...")

    timer = threading.Timer(after, announce)
    timer.daemon = True
    timer.start()
    results: list[str] = []
    try:
        yield results.append
    finally:
        timer.cancel()
        if said.is_set():
            for line in results:
                say(line)
