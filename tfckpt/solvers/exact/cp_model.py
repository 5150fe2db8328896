"""The rematerialization problem as a CP-SAT model: what `tfckpt.solvers.exact.optimal` solves.

Stage `t` consists of the copies that run just before the `t`-th original, in the order of their
originals, and then that original. For every stage and recomputable vertex there is one Boolean
(a copy runs), for every stage and storage another (its latest instance is in memory when the stage
begins). What is live at a step follows from these as in `tfckpt.simulate.simulate`: within a stage
an instance stays in memory while a later step of the stage, or a later stage, needs it.

Source: the stages are those of Jain et al. 2020, "Checkmate", section 4. Freeing after the last
reader, buffers that are taken over, donated and fetched storages are modelled here, as the
simulator counts them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

from tfckpt.ir.costgraph import CostGraph
from tfckpt.ir.schedule import Schedule, with_copies

Literal = Any
"""A Boolean variable of the model or its negation, or a bool that is known beforehand."""

Term = tuple[int, Literal]
"""Units of memory, and whether they are allocated."""


class StageModel:
    """Variables and constraints over one graph and one order of its originals.

    Args:
      cp: the module `ortools.sat.python.cp_model`.
      graph: joint graph.
      order: its originals; joins may be left out.
      copies: most copies of one vertex; None for any number.

    Attributes:
      model: the CP-SAT model; `limit` and an objective are for the caller to add.
      runs: for each stage the copies that may run there, by vertex.
      unit: bytes that one unit of memory stands for; it divides every size.

    Complexity: with n vertices and E reads O(n * E) variables, O(n^2) memory constraints of at
    most n terms each.
    """

    def __init__(self, cp: ModuleType, graph: CostGraph, order: Sequence[int], copies: int | None
                 ) -> None:
        self.model = cp.CpModel()
        self.graph, self.order = graph, tuple(order)
        self.place = {v: t for t, v in enumerate(self.order)}
        self.unit = math.gcd(*(s.bytes for s in graph.storages),
                             *(v.workspace for v in graph.vertices)) or 1
        vertices, stages = graph.vertices, len(self.order)
        self.again = [v for v in self.order if vertices[v].recomputable]
        self.made = [self.place.get(s.producer, stages) for s in graph.storages]
        self.copied = [vertices[s.producer].recomputable for s in graph.storages]
        self.inside: list[list[int]] = [[] for _ in graph.storages]  # readers that may be copies
        self.donors: list[list[int]] = [[] for _ in graph.storages]
        for t, v in enumerate(self.order):
            for s in vertices[v].reads:
                if vertices[v].recomputable:
                    self.inside[s].append(v)
            for s in vertices[v].donates:
                self.donors[s].append(t)
        self.fixed = [not self.copied[s] and not self.inside[s]
                      for s in range(len(graph.storages))]
        self.runs: list[dict[int, Literal]] = [
            {v: self.model.new_bool_var(f"run {v} in {t}") for v in self.again
             if self.place[v] < t} for t in range(stages)]
        self.saved = [[False] * len(graph.storages) for _ in range(stages + 1)]
        self.given = [[False] * len(graph.storages) for _ in range(stages + 1)]
        for s in range(len(graph.storages)):
            self._lifetime(s)
        self.need = [[self._needed(t, s) for s in range(len(graph.storages))]
                     for t in range(stages)]
        for t in range(stages):
            for s in range(len(graph.storages)):
                if self._may_vary(t, s):
                    self._available(t, s)
            self._useful(t)
        if copies is not None:
            for v in self.again:
                self.model.add(sum(self._copies(v, 0, stages)) <= copies)

    # Literals.

    def _either(self, *literals: Literal) -> Literal:
        """Return a literal that is true exactly if one of the given ones is."""
        if any(literal is True for literal in literals):
            return True
        unknown = [literal for literal in literals if literal is not False]
        if len(unknown) < 2:
            return unknown[0] if unknown else False
        result = self.model.new_bool_var("")
        for literal in unknown:
            self.model.add_implication(literal, result)
        self.model.add_bool_or([*unknown, ~result])
        return result

    def _implies(self, causes: Sequence[Literal], effects: Sequence[Literal]) -> None:
        """Require one of the effects if all causes are true."""
        if any(cause is False for cause in causes) or any(e is True for e in effects):
            return
        clause = [*(~cause for cause in causes if cause is not True),
                  *(effect for effect in effects if effect is not False)]
        self.model.add_bool_or(clause or [False])

    def _copies(self, v: int, start: int, stop: int) -> list[Literal]:
        """Return whether a vertex runs again in each of the stages start .. stop - 1."""
        return [row[v] for row in self.runs[start:stop] if v in row]

    def _run(self, t: int, s: int) -> Literal:
        """Return whether stage t makes the storage again."""
        return self.runs[t].get(self.graph.storages[s].producer, False)

    # Lifetimes.

    def _lifetime(self, s: int) -> None:
        """Fill in `saved` and `given` for one storage.

        `saved[t][s]`: its latest instance is in memory, and counted, when stage t begins. A fetched
        storage needs no such variable. `given[t][s]`: a donor has handed the latest instance
        over; it may still be read and costs nothing.
        """
        stages = len(self.order)
        if self.graph.storages[s].fetched:
            return
        donors = self.donors[s]
        readers = sorted(self.place[r] for r in self.graph.readers[s] if r in self.place)
        if self.fixed[s]:
            last = min(readers[-1:] + donors[:1], default=-1)
            for t in range(self.made[s] + 1, last + 1):
                self.saved[t][s] = True
        else:
            last = donors[0] if donors and not self.copied[s] else stages - 1
            for t in range(self.made[s] + 1, last + 1):
                if t - 1 not in donors:
                    self.saved[t][s] = self.model.new_bool_var(f"saved {s} in {t}")
        for t in range(donors[0] + 1 if donors else stages, stages):
            self.given[t][s] = (t <= readers[-1] if self.fixed[s]
                                else self.model.new_bool_var(f"given {s} in {t}"))

    def _may_vary(self, t: int, s: int) -> bool:
        """Return whether it is a decision in which state stage t finds the storage."""
        return not (self.fixed[s] or self.graph.storages[s].fetched or self.made[s] >= t)

    def _needed(self, t: int, s: int) -> list[Literal]:
        """Return whether, from the i-th reader of stage t on, anything still needs the storage.

        There is one entry for each vertex of `inside[s]` that may run in the stage, and a last one
        for the original. The list is empty if there is nothing to decide.
        """
        if self.graph.storages[s].fetched or self.made[s] >= t:
            return []
        reads = s in self.graph.vertices[self.order[t]].reads
        chain = [self._either(self.saved[t + 1][s], reads)]
        for r in reversed(self.inside[s]):
            if r in self.runs[t]:
                chain.append(self._either(chain[-1], self.runs[t][r]))
        return chain[::-1]

    def _available(self, t: int, s: int) -> None:
        """Require that what stage t reads or saves was saved, given away or made in the stage."""
        run, saved, given = self._run(t, s), self.saved[t][s], self.given[t][s]
        for r in self.inside[s]:
            if r in self.runs[t]:
                self._implies([self.runs[t][r]], [saved, run, given])
        if s in self.graph.vertices[self.order[t]].reads:
            self._implies([], [saved, run, given])
        self._implies([self.saved[t + 1][s]], [saved, run])
        if t not in self.donors[s]:
            self._implies([self.given[t + 1][s]], [given])
        self._implies([run, saved], [])  # the old instance has no reader left
        self._implies([run, given], [])

    def _useful(self, t: int) -> None:
        """Require that what is saved or made is needed; some optimal schedule always does so."""
        for s, chain in enumerate(self.need[t]):
            if self._may_vary(t, s):
                self._implies([self.saved[t][s]], [chain[0]])
        for v, run in self.runs[t].items():
            self._implies([run], [self.need[t][s][0] for s in self.graph.vertices[v].writes
                                  if self.need[t][s]])

    # Memory.

    def limit(self, peak: Literal) -> None:
        """Limit every step to at most `peak` units.

        Args:
          peak: units of memory, of `unit` bytes each: an int, or an integer variable of the model.
        """
        for t, original in enumerate(self.order):
            for u, run in (*self.runs[t].items(), (original, True)):
                terms = self._live(t, u) + self._takeovers(t, u, run)
                known = sum(size for size, literal in terms if literal is True)
                total = known + sum(size * literal for size, literal in terms
                                    if not isinstance(literal, bool))
                if isinstance(total, int) and isinstance(peak, int):
                    if total > peak:
                        self._implies([run], [])
                    continue
                bound = self.model.add(total <= peak)
                if run is not True:
                    bound.only_enforce_if(run)

    def _live(self, t: int, u: int) -> list[Term]:
        """Return what is live while step u of stage t runs; reused buffers are not yet deducted."""
        vertex = self.graph.vertices[u]
        terms: list[Term] = [(vertex.workspace // self.unit, True)]
        for s, storage in enumerate(self.graph.storages):
            size = storage.bytes // self.unit
            if not size or self.made[s] > t:
                continue
            if s in vertex.writes:
                terms.append((size, True))
            if storage.fetched:
                terms += self._fetched(t, u, s, size)
            elif s not in vertex.writes and self.made[s] < t:
                terms.append((size, self._is_live(t, u, s)))
        return terms

    def _is_live(self, t: int, u: int, s: int) -> Literal:
        """Return whether a counted instance exists while step u of stage t runs.

        Step u is no writer of the storage.
        """
        if self.fixed[s]:
            return self.saved[t][s]
        original = u == self.order[t]
        if self.copied[s] and not original and self.place[u] < self.made[s]:
            return self.saved[t][s]  # a copy in this stage is still to come
        before = [r for r in self.inside[s] if r in self.runs[t]
                  and (original or self.place[r] < self.place[u])]
        needed = self.need[t][s][len(before)]
        if self.given[t][s] is False:
            return needed  # whatever is needed is there, by `_available`
        return self._not(self._either(self._not(self._counted(t, s)), self._not(needed)))

    def _counted(self, t: int, s: int) -> Literal:
        """Return whether the instance that stage t reads counts: no donor handed it over."""
        return True if self.given[t][s] is False else self._either(
            self.saved[t][s], self._run(t, s))

    @staticmethod
    def _not(literal: Literal) -> Literal:
        return not literal if isinstance(literal, bool) else ~literal

    def _fetched(self, t: int, u: int, s: int, size: int) -> list[Term]:
        """Return the instances of a fetched storage made before step u, except those given away."""
        producer, later = self.graph.storages[s].producer, self.place[u] > self.made[s]
        terms = [(size, run) for run in self._copies(producer, 0, t + 1 if later else t)]
        if self.made[s] < t:
            terms.append((size, True))
        before = None
        for donor in self.donors[s]:
            if donor < t:
                again = True if before is None else self._either(
                    *self._copies(producer, before + 1, donor + 1))
                terms.append((-size, again))
                before = donor
        return terms

    def _takeovers(self, t: int, u: int, run: Literal) -> list[Term]:
        """Return the input buffers that step u of stage t writes into, first pair first."""
        storages = self.graph.storages
        taken: list[tuple[int, int, Literal]] = []
        for written, read in self.graph.vertices[u].reuses:
            if storages[read].bytes != storages[written].bytes or storages[read].fetched:
                continue
            dying = self._dies(t, u, read)
            if dying is False:
                continue
            rivals = [take for w, r, take in taken if w == written or r == read]
            if rivals or run is not True:
                busy = self._not(dying), self._not(run), *rivals
                take = self._not(self._either(*busy))
            else:
                take = dying
            taken.append((written, read, take))
        return [(-storages[r].bytes // self.unit, take) for _, r, take in taken]

    def _dies(self, t: int, u: int, s: int) -> Literal:
        """Return whether step u of stage t, if it runs, is the last to read a counted instance."""
        if u == self.order[t]:
            later = self._either(self.saved[t + 1][s], self.given[t + 1][s])
        else:
            inside = [r for r in self.inside[s] if r in self.runs[t]]
            later = self.need[t][s][inside.index(u) + 1]
        return self._not(self._either(later, self._not(self._counted(t, s))))

    # Solutions.

    def schedule(self, is_true: Callable[[Literal], bool]) -> Schedule:
        """Return the schedule of a solution, given which variables are true in it.

        Args:
          is_true: takes a variable of the model and says whether it is true in the solution.
        """
        return with_copies(self.order, ((v for v, run in row.items() if is_true(run))
                                        for row in self.runs))
