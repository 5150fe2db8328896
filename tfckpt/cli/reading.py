"""From the paths of a command line to the training steps in them."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from tfckpt.capture.files import Document, read_bytes, read_path
from tfckpt.capture.steps import Step, training_steps
from tfckpt.cli.arguments import Request
from tfckpt.cli.output import progress
from tfckpt.errors import CaptureError


def read(path: str) -> Document:
    """Return the graph in a file or a SavedModel; "-" is standard input.

    Args:
      path: as on the command line.

    Raises:
      CaptureError: there is no graph.
    """
    if path != "-":
        return read_path(path)
    if sys.stdin is None:
        raise CaptureError("capture: standard input is closed; name a file or pipe a graph in")
    if sys.stdin.isatty():
        print("tfckpt: reading a graph from the terminal; name a file, or pipe one in",
              file=sys.stderr)
    return read_bytes(sys.stdin.buffer.read(), "standard input")


def steps_of(request: Request, document: Document, rewritten: bool = False) -> list[Step]:
    """Return the training steps of a graph, for the batch and the results that are asked for.

    Args:
      request: a parsed command line.
      document: the graph.
      rewritten: whether a step may be rewritten by tfckpt already.

    Raises:
      CaptureError: there is none, or one is rewritten that may not be.
    """
    with progress(f"reading {document.source}"):
        return training_steps(document, batch_size=request.batch_size, fetches=request.fetch,
                              rewritten=rewritten)


def say_unused(request: Request, document: Document, steps: Sequence[Step]) -> None:
    """Say where a batch was given of which nothing is made; after what may fail.

    Args:
      request: a parsed command line.
      document: the graph.
      steps: all of its steps.
    """
    if request.batch_size is not None and not any(step.leaves_open for step in steps):
        print(f"tfckpt: --batch_size={request.batch_size} changes nothing: {document.source} "
              "leaves no batch open", file=sys.stderr)
