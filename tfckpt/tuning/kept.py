"""The plan that tuning has chosen for a step, kept in the plan store for the next process.

The key is that of plans, with the step as it is traced for one call, and everything that tuning
depends on; measured times of ops are kept with it, since the plan depends on them.
"""

from __future__ import annotations

import dataclasses
import datetime
import hashlib
import json
import pathlib
from collections.abc import Mapping
from typing import Any

import tensorflow as tf
from absl import logging

import tfckpt
from tfckpt.capture.tfgraph import capture
from tfckpt.common import faults
from tfckpt.cost.measured import by_op
from tfckpt.ir.graph import Graph
from tfckpt.request.budget import Budget
from tfckpt.request.options import Options
from tfckpt.store import files
from tfckpt.store.key import graph_digest, plain
from tfckpt.store.surroundings import surroundings
from tfckpt.tuning.result import Measured, Tuned


@dataclasses.dataclass(frozen=True)
class Before:
    """The choice that an earlier process made.

    Attributes:
      plain, plans, chosen, allowed_bytes: as in `Tuned`.
      budget, objective, op_seconds: what the chosen plan was made with.
      planned: whether a plan was chosen.
      other: whether XLA compiles it where it does not compile the step, or the other way round.
      made: the day on which it was.
    """

    plain: Measured
    plans: tuple[Measured, ...]
    chosen: Measured
    allowed_bytes: int | None
    budget: Budget
    objective: str
    op_seconds: Mapping[str, float]
    planned: bool
    other: bool
    made: str


class Kept:
    """The place of a tuned step in the store."""

    def __init__(self, where: pathlib.Path, key: str, name: str, graph: Graph) -> None:
        self.where, self.key, self.name, self.graph = where, key, name, graph

    def read(self) -> Before | None:
        """Return what was chosen; None where nothing is kept, or it cannot be read."""
        found = files.read(self.where, self.key)
        if found is None:
            return None
        head, record = found
        try:
            rows = [Measured(**row) for row in record["rows"]]
            ops = self.graph.ops
            return Before(
                rows[0], tuple(rows[1:]), rows[record["chosen"]], record["allowed"],
                Budget(**record["budget"]), record["objective"],
                {ops[i].name: seconds for i, seconds in record["seconds"]},
                record["planned"], record["other"], str(head["made"]).partition("T")[0])
        except (KeyError, IndexError, TypeError) as error:
            logging.info("tfckpt: what was tuned of %s is dropped: %r", self.name, error)
            self.drop()
            return None

    def drop(self) -> None:
        """Forget what was chosen."""
        files.remove(self.where, self.key)

    def write(self, found: Tuned, options: Options, planned: bool, other: bool) -> None:
        """Keep what was chosen.

        Args:
          found: all that was measured, and which row was chosen.
          options: of the chosen plan.
          planned: whether it has a plan, rather than to be the step as it was written.
          other: whether XLA compiles it where it does not compile the step, or the other way round.
        """
        rows = [found.plain, *found.plans]
        index = {op.name: i for i, op in enumerate(self.graph.ops)}
        taken = by_op(self.graph, options.op_seconds)
        record = {
            "rows": [dataclasses.asdict(row) for row in rows],
            "chosen": next(i for i, row in enumerate(rows) if row is found.chosen),
            "allowed": found.allowed_bytes, "planned": planned, "other": other,
            "budget": dataclasses.asdict(options.budgets.of("")), "objective": options.objective,
            "seconds": sorted((index[name], taken[name]) for name in taken)}
        files.write(self.where, self.key, {
            "made": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "step": self.name, "ops": len(self.graph.ops), "kind": "tuned", "budget": found.asked,
            "plain_bytes": found.plain.peak_bytes, "planned_bytes": found.chosen.peak_bytes,
            "tfckpt": tfckpt.__version__, "tensorflow": tf.__version__}, record)


def place_of(name: str, live: Any, options: Options, xla: bool) -> Kept | None:
    """Return the place of a step in the store; None where there is no store.

    Args:
      name: of the step, for people.
      live: TensorFlow's graph of the plain step, for the call that it is tuned with.
      options: those that the step is decorated with.
      xla: whether plans are tried with and without XLA.
    """
    where = files.folder()
    if where is None:
        return None
    try:
        graph = capture(live)
        chosen = {field.name: getattr(options, field.name)
                  for field in dataclasses.fields(options) if field.name != "op_seconds"}
        given = by_op(graph, options.op_seconds)
        index = {op.name: i for i, op in enumerate(graph.ops)}
        what = ["tuned", graph_digest(graph), plain(chosen), xla,
                sorted((index[op], seconds) for op, seconds in given.items()),
                plain(surroundings())]
        key = hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()
    except Exception as error:
        faults.said(error, f"nothing that was tuned of {name} is looked for")
        return None
    return Kept(where, key, name, graph)
