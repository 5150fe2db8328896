"""A step from a dump (`TFCKPT_DUMP=dir`), planned again as it was: for bug reports."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Mapping
from typing import ClassVar

import tensorflow as tf

from tfckpt.capture.steps import imported
from tfckpt.driver import INLINED, run
from tfckpt.driving import dump
from tfckpt.driving.answers import Recorded
from tfckpt.driving.carrier import Captured, Outcome
from tfckpt.errors import CaptureError
from tfckpt.ir.edits import Edits
from tfckpt.request.options import Options
from tfckpt.verify.arithmetic.same import COMPILED


class Dumped:
    """A step that another process captured; its edits go nowhere.

    Raises:
      CaptureError: the folder is no dump.
    """

    kind: ClassVar[str] = "dump"
    leaves_out: ClassVar[Mapping[str, str]] = {
        INLINED: "they were when the step was captured"}

    def __init__(self, folder: str) -> None:
        self.folder = pathlib.Path(folder)
        self.about = json.loads(self.read("step.json"))
        self.optimised = self.about["optimised"]

    def read(self, file: str) -> bytes:
        """Return the content of a file of the dump.

        Args:
          file: its name in the folder, such as "graph.json".

        Raises:
          CaptureError: it is not there.
        """
        try:
            return (self.folder / file).read_bytes()
        except OSError as error:
            inside = sorted(path.parent.name for path in self.folder.glob(f"*/{file}"))
            raise CaptureError(f"capture: {str(self.folder)!r} is no dump of tfckpt: it has no "
                               f"{file} ({error.strerror})" + (
                f"; there are dumps of {len(inside)} steps in it, such as "
                f"{str(self.folder / inside[0])!r}" if inside else "")) from error

    def capture(self, options: Options) -> Captured:
        """Return the step as it was captured.

        Args:
          options: how the step is planned; not looked at, since the dump has its own capture.

        Raises:
          CaptureError: a file of the dump is missing, or is of another version.
        """
        live = imported(tf.compat.v1.GraphDef.FromString(self.read("graph.pb")))
        graph = dump.from_json(self.read("graph.json"), "graph.json")
        compiled = self.about["compiled"]
        answers = Recorded(dump.from_json(self.read("compiled.json"), "compiled.json"))
        return Captured(self.about["name"], graph, live, compiled,
                        compiler=answers if compiled else None, grappler=lambda _: answers,
                        stored=False, doubt=lambda: COMPILED if compiled else "")

    def apply(self, edits: Edits) -> None:
        """Do nothing.

        Args:
          edits: what is done to the step; left alone, since the step is not here.
        """


def replay(folder: str) -> tuple[Outcome, list[str]]:
    """Plan a dumped step again; return what came out and what differs from the dump.

    Args:
      folder: that of one step, below the folder that `TFCKPT_DUMP` named.

    Returns:
      The outcome of planning, and the names of the files ("plans.json", "edits.json") that would
      now be written otherwise; none where the same came out.

    Raises:
      CaptureError: it is no dump, or one of another version.
    """
    step = Dumped(folder)
    outcome = run(step, dump.from_json(step.read("options.json"), "options.json"))
    again = {"plans.json": dump.to_json(outcome.plans), "edits.json": dump.to_json(outcome.edits)}
    return outcome, [name for name, data in again.items() if data != step.read(name)]
