"""Results of searches, kept: another batch or budget of the same step starts from them.

The key is the structure of the cost graph, without bytes, seconds and names: what may be kept or
computed again are numbers of storages and vertices there, and mean the same whatever the sizes.
What comes back is priced anew.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import pathlib
from collections.abc import Collection, Sequence
from typing import Any

import tensorflow as tf

import tfckpt
from tfckpt.common import faults
from tfckpt.common.clock import time_is_over
from tfckpt.ir.costgraph import CostGraph
from tfckpt.ir.schedule import Moves
from tfckpt.plan.evaluate import Candidate
from tfckpt.solvers.recursion import Recursion
from tfckpt.store import files
from tfckpt.store.key import plain
from tfckpt.store.surroundings import surroundings

FAR = 4.0
"""How many times larger or smaller a step may be than the one that was searched."""
MOST = 600
"""Candidates that are kept at most."""


class Pools:
    """The pools of a step's searches in the plan store.

    Args:
      name: of the step, for people.
    """

    def __init__(self, where: pathlib.Path, name: str) -> None:
        self.where, self.name = where, name

    def read(self, graph: CostGraph, searched: object, plain_bytes: int) -> list[Candidate]:
        """Return the candidates of a search of the same structure; none where none is kept.

        Args:
          graph: the cost graph that is searched.
          searched: what else the search depends on.
          plain_bytes: requested peak of the plain step.
        """
        key = ""
        try:
            key = _key(graph, searched)
            found = files.read(self.where, key)
            if found is None or not 1 / FAR <= plain_bytes / max(found[1]["plain"], 1) <= FAR:
                return []
            return [_candidate(entry) for entry in found[1]["candidates"]]
        except Exception as error:
            faults.said(error, f"what was searched of {self.name} is dropped")
            if key:
                files.remove(self.where, key)
            return []

    def write(self, graph: CostGraph, searched: object, plain_bytes: int,
              candidates: Sequence[Candidate]) -> None:
        """Keep the candidates that a search ended with.

        Args:
          graph: the cost graph that was searched.
          searched: what else the search depends on.
          plain_bytes: requested peak of the plain step.
          candidates: the pool at the end of the search; more than `MOST` are not kept.
        """
        if time_is_over() or len(candidates) > MOST:
            return
        try:
            files.write(self.where, _key(graph, searched), {
                "made": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
                "step": self.name, "kind": "search", "budget": "any", "tfckpt": tfckpt.__version__,
                "tensorflow": tf.__version__},
                {"plain": plain_bytes, "candidates": [_entry(c) for c in candidates]})
        except Exception as error:
            faults.said(error, f"what was searched of {self.name} is not kept")


def pools_of(name: str) -> Pools | None:
    """Return where a step's searches are kept; None where there is no store.

    Args:
      name: of the step, for people.
    """
    where = files.folder()
    return None if where is None else Pools(where, name)


def _key(graph: CostGraph, searched: object) -> str:
    vertices = [[v.region, v.reads, v.writes, v.after, v.reuses, v.recomputable, v.workspace > 0,
                 v.cheap, v.donates, v.fusible, v.join, v.conditional, v.device,
                 v.reads_variables, v.updates, v.again]
                for v in graph.vertices]
    storages = [[s.producer, s.fetched] for s in graph.storages]
    what = ["search", vertices, storages, len(graph.variable_bytes), plain(searched),
            plain(surroundings())]
    return hashlib.sha256(json.dumps(what).encode()).hexdigest()


def _entry(candidate: Candidate) -> dict[str, Any]:
    schedule, recursion = candidate.schedule, candidate.recursion
    return {"keep": _bits(candidate.keep), "again": _bits(candidate.again),
            "deferred": candidate.moves.deferred, "released": candidate.moves.released,
            "reordered": candidate.reordered, "source": candidate.source, "early": candidate.early,
            "schedule": None if schedule is None else [list(step) for step in schedule],
            "recursion": None if recursion is None else {
                "made": recursion.made, "through": recursion.through,
                "kept": [_bits(kept) for kept in recursion.kept]}}


def _candidate(entry: dict[str, Any]) -> Candidate:
    schedule, recursion = entry["schedule"], entry["recursion"]
    return Candidate(
        _numbers(entry["keep"]), _numbers(entry["again"]),
        Moves(tuple(entry["deferred"]), tuple(entry["released"])), entry["reordered"],
        entry["source"], None if schedule is None else tuple((v, copy) for v, copy in schedule),
        None if recursion is None else Recursion(
            tuple(recursion["made"]), tuple(recursion["through"]),
            tuple(_numbers(kept) for kept in recursion["kept"])), entry["early"])


def _bits(numbers: Collection[int]) -> str:
    """Return a set of numbers as the bits of one, in hexadecimal: shorter than a list by far."""
    return f"{sum(1 << number for number in numbers):x}"


def _numbers(bits: str) -> frozenset[int]:
    return frozenset(i for i, bit in enumerate(reversed(f"{int(bits, 16):b}")) if bit == "1")
