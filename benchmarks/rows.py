"""Tables whose rows are measured in processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable, Sequence


def line(cells: Iterable[str]) -> str:
    """One line of a Markdown table."""
    return "| " + " | ".join(cells) + " |"


def head(columns: Sequence[str]) -> str:
    """Return the first two lines of a Markdown table."""
    return line(columns) + "\n" + line(["---"] * len(columns))


def in_own_process(name: str, module: str, arguments: Sequence[str]) -> str | None:
    """Return what a module prints, run by itself; None where it fails, and standard error says why.

    Args:
      name: of the row, for that message.
    """
    done = subprocess.run([sys.executable, "-m", module, *arguments], capture_output=True,
                          text=True, check=False,
                          env={"TF_CPP_MIN_LOG_LEVEL": "2", **os.environ})
    if done.returncode:
        print(f"failed: {name}\n{done.stderr[-2000:]}", file=sys.stderr, flush=True)
        return None
    return done.stdout
