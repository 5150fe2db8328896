"""The judge that asks what runs the step: XLA, or Grappler, which leaves it to the executor.

They are asked what the step takes, plain and with a few of its plans: XLA compiles it, and what
Grappler makes of it is simulated; where that is the step already, nobody is asked. A budget is one
of these bytes then. What comes out corrects what the next plan may need, by a line through what is
known; the fastest plan whose bytes fit is taken. Where none of them does, that which is made
without a budget and that of the lowest peak are asked about before a budget is refused. For the
minimum peak XLA tries two plans, or is bound to one in two ways. It may take more for a plan of
fewer bytes, since what is recomputed stands in the way of its fusions: where it takes far more than
planned, as many plans more between those tried and the plain step are asked about. Before a budget
is refused that is done in an order in which the budget has no part: so the one that is named then
is met by the same plan. Nothing runs.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

from tfckpt.common.clock import time_is_over
from tfckpt.common.messages import waiting_for
from tfckpt.driving.aims import between, corrected
from tfckpt.driving.answers import (
    XLA_WORDS,
    Compiler,
    Simulated,
    Trial,
    Words,
    alike,
)
from tfckpt.driving.judges import Candidate, Rejected
from tfckpt.driving.parts import MINIMUM, Part, Proposal, unchanged
from tfckpt.driving.proposals import (
    ALLOWED,
    BETWEEN,
    FASTER,
    FEWER,
    NOTHING_TO_GAIN,
    ONE_BEFORE,
    OTHER_WAY,
)
from tfckpt.ir.edits import Edits
from tfckpt.ir.hlo import XlaMemory
from tfckpt.ir.target import ORDER
from tfckpt.plan.choosing.rules import ROOM, minimum_of
from tfckpt.request.budget import format_bytes
from tfckpt.verify.asking.xla import NotAsked

TIME_OVER = "the time limit is over"
NEAR = 0.97
"""Of what is allowed, what a plan may leave unused before a faster one is looked for."""
SIMILAR = 0.95
"""What two smallest plans may differ by for the faster to be taken."""


class Trials:
    """What was asked about a step.

    Attributes:
      plain: what the plain step takes; None where nobody tells.
      reason: why not.
      tried: the plans that were asked about, in their order.
      answers: what came out of every question, in their order; None where nothing did.
      seconds: how long all answers took.
    """

    def __init__(self, name: str, compiler: Compiler | Simulated | None, most: int,
                 words: Words = XLA_WORDS, objective: str = "time") -> None:
        self.name, self.most, self.words, self.objective = name, most, words, objective
        self.tried: list[Trial] = []
        self.answers: list[XlaMemory | None] = []
        self.seconds = 0.0
        self._refused = 0  # plans that XLA did not compile, and such as were dismissed
        self._dismissed = ""  # why a plan was given up that fits
        self._fewest = False  # whether a plan of the fewest bytes was asked for
        self._last: list[Trial] | None = None  # before a refusal: what the budget has no part in
        self._lowest = False  # whether that of the lowest peak was asked for then
        self._between = most  # how many more plans between others may be asked for
        self._expected = False  # whether what is expected has to fit, and not the most
        self.plain: XlaMemory | None = None
        self.reason = ("" if compiler and most else
                       "switched off (xla_trials=0)" if compiler else
                       "the step is read from a file, or no compiler for the described device is "
                       "here (jax[cuda12] has one for H100-80GB)")
        self._compiler = compiler
        if not self.reason:
            try:
                self.plain = self._memory("the plain step", None, None)
            except NotAsked as error:
                self.reason = str(error)

    def _memory(self, what: str, edits: Edits | None, proposal: Proposal | None) -> XlaMemory:
        compiler = self._compiler
        assert compiler is not None
        self.answers.append(None)
        started = time.perf_counter()
        with waiting_for(f"asking {self.words.who} what {what} of {self.name} takes") as done:
            try:
                memory = self.answers[-1] = (
                    compiler.memory_of(proposal) if isinstance(compiler, Simulated)
                    else compiler.memory(edits))
            finally:
                self.seconds += time.perf_counter() - started
            done(f"{what} of {self.name} takes {format_bytes(memory.bound)}")
        return memory

    def memory_of(self, proposal: Proposal) -> XlaMemory | None:
        """Return what the step takes with a proposal; None where XLA was not asked.

        Args:
          proposal: for the part that was asked about; one that changes nothing is the plain step.
        """
        if not proposal.changes:
            return self.plain
        trial = self._trial(proposal)
        return trial.memory if trial else None

    def _trial(self, proposal: Proposal) -> Trial | None:
        return next((t for t in self.tried if alike(t.proposal, proposal)), None)

    def judge(self, candidate: Candidate) -> None:
        """Accept the fastest candidate found whose compiled bytes fit, and are below the plain's.

        Args:
          candidate: asked about here, if it has not been; accepted where nobody tells what a step
            takes.

        Raises:
          Rejected: this is not it.
          InfeasibleBudgetError: no candidate is left, and none that was compiled fits.
        """
        if self.plain is None:
            return
        proposal = candidate.proposals[0]
        if candidate.edits is None:
            self._check_unchanged(proposal)
            return
        trial = self._trial(proposal)
        over = trial is None and time_is_over()
        if over and not self.tried:  # nobody knows better than what was planned
            self.plain, self.reason = None, TIME_OVER
            return
        if over or trial is None and self._count >= self._bound:
            raise self._ended(proposal.part, f"{self.words.who} is not asked about more plans")
        new = trial is None
        trial = trial or self._compile(candidate, proposal)
        if self._last is not None and trial not in self._last:
            self._last.append(trial)
        again = new or proposal.part.allowed is None
        self._weigh(trial, left=max(0, self.most - self._count) if again else 0)

    def dismiss(self, candidate: Candidate, why: str) -> None:
        """Forget a candidate that was accepted here and is not applied for another reason.

        Its plans count as plans that were asked about. Where none is left in the end, the step is
        left as it is for that reason: a larger budget would not help.

        Args:
          candidate: its plans are not taken for the best any more.
          why: they are not applied.
        """
        self._dismissed = why
        for proposal in candidate.proposals:
            left = [trial for trial in self.tried if not alike(trial.proposal, proposal)]
            self._refused += len(self.tried) - len(left)
            self.tried = left

    @property
    def _count(self) -> int:
        """Return how many plans XLA was asked about."""
        return len(self.tried) + self._refused

    @property
    def _bound(self) -> int:
        """Return how many plans XLA may be asked about.

        As many between others; before a budget is refused as many as without a budget, and that of
        the lowest peak in both ways.
        """
        return 2 * self.most + (0 if self._last is None else 2 * self.most + 2)

    def _compile(self, candidate: Candidate, proposal: Proposal) -> Trial:
        try:
            memory = self._memory(f"plan {self._count + 1}",
                                  candidate.edits, proposal)
        except NotAsked as error:
            self._refused += 1
            raise Rejected(f"{self.words.refuses}: {error}") from error
        self.tried.append(Trial(proposal, memory))
        return self.tried[-1]

    def _weigh(self, trial: Trial, left: int) -> None:
        """Accept a plan that was compiled if it is the best so far and none is worth a try.

        Args:
          trial: the plan, and the bytes it takes as compiled.
          left: how many more XLA may be asked about.
        """
        part = trial.proposal.part
        limit, best = self._limit(part), self._best(part)
        taken, sized = self._counted(trial.memory), part.allowed is not None
        most = f"{'' if sized else 'no more than the plain '}{format_bytes(limit)}"
        said = f"{self.words.takes} {format_bytes(taken)}, {most} {ALLOWED}"
        aim = self._corrected(trial, limit, left) if left and sized else None
        if not sized:
            self._try_another(trial, said, left, self.tried)
        if taken > limit:
            if left and not self._takes_more(trial):
                raise Rejected(said, room=aim)
            if best is None and sized:
                self._before_refusal(trial, said)
            raise self._ended(part, said)
        if self._last and taken < NEAR * limit:
            self._try_faster(trial, limit, said)
        if best is not None and best is not trial.proposal:
            raise Rejected(f"{said}; {ONE_BEFORE}", instead=best)
        if aim is not None and taken < NEAR * limit and trial.recomputes:
            raise Rejected(f"{said}; {FASTER}", room=aim)

    def _takes_more(self, trial: Trial) -> bool:
        """Return whether a plan of more bytes takes less: then fewer bytes are of no use."""
        return not trial.proposal.part.target.orders_by_control and any(
            t.planned > trial.planned and t.memory.bound < trial.memory.bound for t in self.tried)

    def _before_refusal(self, trial: Trial, said: str) -> None:
        """Reject a plan for others: between those tried, those without a budget, the lowest.

        What would be taken without a budget weighs memory against time, and may take fewer bytes
        than the plan of the lowest peak, as compiled.
        """
        target = trial.proposal.part.target
        if self._last is None:
            if self._takes_more(trial):
                self._try_between(trial, self.tried, said)
            self._last, self._between = [], self.most
            raise Rejected(said, room=MINIMUM)
        if not self._lowest:
            self._try_another(trial, said, self.most - len(self._last), self._last)
            self._lowest = True
            raise Rejected(said, room=0)
        if (target.may_hold_otherwise and not target.otherwise and self._last
                and trial is self._last[-1]):
            raise Rejected(f"{said}; {OTHER_WAY}", instead=trial.otherwise)

    def _try_between(self, trial: Trial, tried: Sequence[Trial], said: str) -> None:
        """Reject a plan for one between those tried and the plain step that may take less."""
        assert self.plain is not None
        part = trial.proposal.part
        if part.target.orders_by_control or not self._may_ask_between():
            return
        room = between([(t.planned, t.memory.bound) for t in tried],
                       (part.plain.peak_bytes, self.plain.temp_bytes))
        if room is not None:
            raise Rejected(f"{said}; {BETWEEN}", room=room)

    def _may_ask_between(self) -> bool:
        """Return whether one more plan between others may be asked about, which is counted."""
        self._between -= 1
        return self._between >= 0

    def _try_faster(self, trial: Trial, limit: int, said: str) -> None:
        """Reject one of the lowest plans, which fits, for one between it and what does not.

        Not where plans that fit are given up for another reason: so would that one be.
        """
        over = [t.planned for t in self.tried
                if t.planned > trial.planned and self._counted(t.memory) > limit]
        if over and not self._dismissed and self._may_ask_between():
            raise Rejected(f"{said}; {FASTER}", room=math.isqrt(trial.planned * min(over)))

    def _try_another(self, trial: Trial, said: str, left: int, tried: Sequence[Trial]) -> None:
        """Reject the minimum plan for a second one: that of the fewest bytes, whatever its time.

        Where there is no other, or XLA does not keep the plan's order, so that its bytes say
        little, it is the same plan, to which XLA is bound in the other way. Then for others between
        these and the plain step.
        """
        target = trial.proposal.part.target
        keeps_order = target.orders_by_control or target.hold == ORDER
        if left and keeps_order and not self._fewest and not self._as_planned(trial):
            self._fewest = True
            raise Rejected(f"{said}; {FEWER}", room=0)
        if left and target.may_hold_otherwise and len(tried) == 1:
            raise Rejected(f"{said}; {OTHER_WAY}", instead=trial.otherwise)
        self._try_between(trial, tried, said)

    def _as_planned(self, trial: Trial) -> bool:
        """Return whether the executor keeps within what was planned; XLA is asked again anyway."""
        assert self.plain is not None
        part = trial.proposal.part
        return part.target.orders_by_control and (
            SIMILAR * trial.memory.temp_bytes * part.plain.peak_bytes
            <= trial.planned * self.plain.temp_bytes)

    def _ended(self, part: Part, said: str) -> Rejected:
        """Return what ends the search: the best so far is taken, or nothing is changed.

        Where no plan is sure to fit, one is taken that is likely to.
        """
        best = self._best(part)
        if best is None:
            self._expected = True
            best = self._best(part)
        return Rejected(said, instead=best or unchanged(part, self._none_left(part)))

    def _counted(self, memory: XlaMemory) -> int:
        """Return the bytes of an answer that have to fit.

        The most, or where nothing is sure to fit those that are expected.
        """
        return memory.temp_bytes if self._expected or not memory.most_bytes else memory.bound

    def _limit(self, part: Part) -> int:
        """Return the temporary bytes that a plan may take: fewer than the plain step, always."""
        assert self.plain is not None
        below = self.plain.temp_bytes - 1
        return below if part.allowed is None else min(part.allowed, below)

    def _best(self, part: Part) -> Proposal | None:
        """Return the fastest plan of those that fit, or without a budget of those near the minimum.

        Near is what the planner takes for it: a little memory that may buy much time. None where no
        plan fits. Of those that are likely to fit, but not sure to, that which misses by least; and
        none, without a budget, that may take more by as much as it is expected to take less.
        """
        limit = self._limit(part)
        fitting = [t for t in self.tried if self._counted(t.memory) <= limit]
        if self._expected and part.allowed is None:
            fitting = [t for t in fitting if t.memory.temp_bytes + t.memory.bound <= 2 * limit]
        if not fitting:
            return None
        if self._expected and part.allowed is not None:
            return min(fitting, key=lambda t: (
                t.memory.bound, t.proposal.decision.planned.time)).proposal
        if part.allowed is None:
            assert self.plain is not None
            planned = fitting[0].proposal.decision.planned
            lowest = minimum_of([(t.memory.bound, t.proposal.decision.planned.time)
                                 for t in fitting], self.plain.temp_bytes,
                                planned.baseline.time, self.objective)
            room = 0.0 if self.objective == "memory" else ROOM * self.plain.temp_bytes
            near = max(lowest / SIMILAR, lowest + room)
            fitting = [t for t in fitting if t.memory.bound <= near]
        return min(fitting, key=lambda t: t.proposal.decision.planned.time).proposal

    def _corrected(self, trial: Trial, limit: int, left: int) -> int:
        """Return the planned bytes that are expected to become what is allowed."""
        assert self.plain is not None
        known = [(trial.proposal.part.plain.peak_bytes, self.plain.temp_bytes)] + [
            (t.planned, t.memory.bound) for t in self.tried if t is not trial]
        return corrected((trial.planned, trial.memory.bound), known, limit, left)

    def _check_unchanged(self, proposal: Proposal) -> None:
        """Raise `InfeasibleBudgetError` where no plan is left, and a budget is not met.

        The planner may take the plain step for one that fits, where it takes more: then what was
        found is taken.
        """
        part = proposal.part
        assert self.plain is not None
        if self._dismissed and self._best(part) is None:
            return
        looked = self.tried or proposal.reason == NOTHING_TO_GAIN  # not where planning failed
        if looked and part.allowed is not None and self.plain.temp_bytes > part.allowed:
            best = self._best(part)
            if best is not None:
                raise Rejected(f"the plain step {self.words.takes} "
                               f"{format_bytes(self.plain.temp_bytes)}; {ONE_BEFORE}",
                               instead=best)
            lowest = min(self._last or self.tried, default=None,
                         key=lambda trial: trial.memory.temp_bytes)
            memory = self.plain if lowest is None else lowest.memory
            raise part.refusal(memory.temp_bytes, part.held_bytes, f". {self._asked()}",
                               memory.bound, None if lowest is None else lowest.overhead)

    def _asked(self) -> str:
        tried, who = len(self.tried), self.words.who
        if not tried:
            return "No plan is predicted to take less than the plain step"
        plans = "plan" if tried == 1 else "plans"
        said = f"{who[0].upper()}{who[1:]} was asked about {tried} {plans}"
        if tried < self.most or not self.words.option:
            return f"{said}; no other is predicted to take less"
        return (f"{said}; {self.words.option}={2 * self.most} instead of {self.most} has it asked "
                "about more")

    def _none_left(self, part: Part) -> str:
        if self._dismissed:
            return self._dismissed
        what = "takes less than the plain step" if part.allowed is None else "fits"
        by = "compiled by XLA" if self.words is XLA_WORDS else f"as {self.words.who} leaves it"
        return f"{by}, none of the plans tried {what}. {self._asked()}"
