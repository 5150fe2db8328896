"""Calls a solver in a process of its own, which never loads TensorFlow.

The libraries of OR-tools and of TensorFlow conflict: a process that loads both crashes. A step
that is planned while it is traced is in a process that has loaded TensorFlow, so the solver runs in
another one.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from tfckpt.errors import PlanError

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


def call(function: Callable[Parameters, Result], *args: Parameters.args,
         **kwargs: Parameters.kwargs) -> Result:
    """Return what a module's function returns or raises when another Python process calls it.

    Args:
      function: importable by name; it, its arguments and its result must pickle.
      *args: its positional arguments.
      **kwargs: its keyword arguments.

    Raises:
      PlanError: the process could not be started, or failed; names the last line of its errors.
    """
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    try:
        done = subprocess.run(
            [sys.executable or "python3", "-m", __name__], env=environment, capture_output=True,
            input=pickle.dumps((function, args, kwargs)), check=False)
    except OSError as error:
        raise PlanError(f"plan: no process could be started for {function.__name__!r}: {error}; "
                        "use the solver 'auto', which needs none") from error
    if done.returncode:
        words = done.stderr.decode(errors="replace").strip().splitlines()[-1:]
        raise PlanError(f"plan: the process of {function.__name__!r} ended with "
                        f"{done.returncode} ({' '.join(words)}); use the solver 'auto'")
    outcome: tuple[Result, Exception | None] = pickle.loads(done.stdout)
    result, raised = outcome
    if raised is not None:
        raise raised
    return result


def _serve() -> None:
    """Read a call from standard input and write its outcome to standard output."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # keeps what libraries print out of the answer
    function, args, kwargs = pickle.load(sys.stdin.buffer)
    result = raised = None
    try:
        result = function(*args, **kwargs)
    except Exception as error:  # raised again by `call`
        raised = error
    with answers:
        pickle.dump((result, raised), answers)


if __name__ == "__main__":
    _serve()
