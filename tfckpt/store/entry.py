"""One step's place in the plan store.

Kept is what a search has decided and another would decide again: not what the time limit cut
short, what a fault of ours or a compiler that did not answer had part in, nor what needed no
search. Nothing that goes wrong here costs more than the plan.
"""

from __future__ import annotations

import datetime
import pathlib
from collections.abc import Sequence
from typing import Any

import tensorflow as tf
from absl import logging

import tfckpt
from tfckpt.common import faults
from tfckpt.common.clock import time_is_over
from tfckpt.driving.parts import DevicePart, Part
from tfckpt.driving.proposals import PLAIN_FITS
from tfckpt.ir.graph import Graph
from tfckpt.request.options import Options
from tfckpt.store import files
from tfckpt.store.definition import definition_digest
from tfckpt.store.key import key_of
from tfckpt.store.records import Decided, from_record, to_record
from tfckpt.store.surroundings import surroundings


class Entry:
    """The place in the store where the plan of a step is kept, or would be.

    Args:
      name: of the step, for people.
      graph, wanted: the step, and the parts of its devices.
    """

    def __init__(self, where: pathlib.Path, key: str, name: str, graph: Graph,
                 wanted: Sequence[DevicePart]) -> None:
        self.where, self.key, self.name = where, key, name
        self.graph, self.wanted = graph, wanted

    def read(self) -> Decided | None:
        """Return what was decided for the step before; None where nothing is kept.

        Raises:
          Exception: what is kept does not fit the step.
        """
        found = files.read(self.where, self.key)
        if found is None:
            return None
        head, record = found
        return from_record(record, self.graph, self.wanted, str(head["made"]).partition("T")[0])

    def drop(self, why: Exception) -> None:
        """Forget what is kept, unless it is only that the time limit is over.

        Args:
          why: what was wrong with what is kept.
        """
        if time_is_over():
            return
        logging.info("tfckpt: the kept plan of %s is dropped: %s: %s", self.name,
                     type(why).__name__, why)
        files.remove(self.where, self.key)

    def write(self, decided: Decided, parts: Sequence[Part]) -> None:
        """Keep what was decided.

        Args:
          decided: what is kept: the accepted proposals and what was asked for them.
          parts: as they were priced.
        """
        try:
            if _lasts(decided):
                files.write(self.where, self.key, self._head(decided),
                            to_record(decided, self.graph, parts))
        except Exception as error:
            faults.said(error, f"the plan of {self.name} is not kept")

    def _head(self, decided: Decided) -> dict[str, Any]:
        """Return what `tfckpt cache list` says."""
        planned = [p.decision.planned for p in decided.proposals]
        fullest = max(range(len(planned)), key=lambda i: planned[i].peak_bytes)
        part, changes = self.wanted[fullest], any(p.changes for p in decided.proposals)
        plain, expected = (decided.compiled and decided.compiled.peaks) or (  # as the report says
            planned[fullest].baseline_bytes, planned[fullest].peak_bytes)
        return {
            "made": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "step": self.name, "ops": len(self.graph.ops), "budget": str(part.budget),
            "device": part.device or part.target.device, "applied": changes,
            "plain_bytes": plain, "planned_bytes": expected,
            "tfckpt": tfckpt.__version__, "tensorflow": tf.__version__}


def entry_of(name: str, graph: Graph, parts: Sequence[DevicePart], options: Options,
             live: Any = None) -> Entry | None:
    """Return the place of a step in the store; None where there is no store.

    Args:
      name: of the step, for people.
      graph: the whole step.
      parts: of its devices, with their budgets and targets.
      options: how the step is planned, which the plan depends on.
      live: TensorFlow's graph, where XLA is asked about it.
    """
    where = files.folder()
    if where is None:
        return None
    try:
        asked = None if live is None else definition_digest(live.as_graph_def())
        key = key_of(graph, parts, options, {**surroundings(), "asked about": asked})
    except Exception as error:
        faults.said(error, f"no kept plan of {name} is looked for")
        return None
    return Entry(where, key, name, graph, parts)


def _lasts(decided: Decided) -> bool:
    """Return whether it took a search, and another would decide the same."""
    said = (*decided.rejected, *(p.reason for p in decided.proposals))
    return not (time_is_over() or None in decided.answers
                or any(faults.INTERNAL in line for line in said)
                or all(p.reason == PLAIN_FITS for p in decided.proposals))
