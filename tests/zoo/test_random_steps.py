"""Random steps without Keras models: they train as plain, and none is lost to a fault of tfckpt.

Some every day, chosen to be quick and unlike each other; 500 and 200 with the native pass nightly,
each in a process that it may crash. `python -m tests.random_steps` says more.
"""

from __future__ import annotations

import os
import shutil

import pytest

from tests import random_steps
from tests.support.random_steps import assembly, trial

DAILY = (1, 10, 14, 22, 29, 53, 61, 65, 66, 68, 69, 70, 83, 100, 101, 108, 112, 123, 131, 133,
         2043, 3041, 3105, 3172)
NATIVE = (1, 4, 6, 7, 10)
NIGHTLY, NIGHTLY_NATIVE, PART = 500, 200, 50
compiler = pytest.mark.skipif(not shutil.which(os.environ.get("CXX", "g++")),
                              reason="no C++ compiler")


@pytest.mark.parametrize("seed", DAILY)
def test_trains_as_plain(seed):
    found = trial.try_seed(seed)
    assert found.kind in trial.GOOD, random_steps.line_of(seed, vars(found), True)


@compiler
@pytest.mark.parametrize("seed", NATIVE)
def test_trains_as_plain_with_the_pass(seed):
    found = trial.try_seed(seed, native=True)
    assert found.kind in trial.GOOD, random_steps.line_of(seed, vars(found), True)


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("first", range(0, NIGHTLY, PART))
def test_many_train_as_plain(first):
    assert not random_steps.run(PART, first)


@compiler
@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("first", range(0, NIGHTLY_NATIVE, PART))
def test_many_train_as_plain_with_the_pass(first):
    assert not random_steps.run(PART, first, native=True)


def test_a_seed_stands_for_one_step():
    """What is drawn does not depend on what was drawn before, and a spec names all of it."""
    one, other = (assembly.build(assembly.draw_spec(3)) for _ in range(2))
    again = assembly.build(one.spec)
    assert one.trail == other.trail == again.trail and one.spec == again.spec
    for a, b, c in zip(one.variables, other.variables, again.variables, strict=True):
        assert (a.numpy() == b.numpy()).all() and (a.numpy() == c.numpy()).all()


def test_without_a_piece_the_others_stay():
    spec = assembly.build(assembly.draw_spec(3)).spec
    shorter = next(random_steps.simpler(spec))
    assert len(shorter.slots) == len(spec.slots) - 1
    assert set(assembly.build(shorter).spec.slots) <= set(spec.slots)


def test_a_step_that_differs_is_noticed(monkeypatch):
    """A state variable that tfckpt had written twice would be seen."""
    rewritten = trial._rewritten

    def wrong(spec):
        found, refusal = rewritten(spec)
        found.states[-1][-1] = found.states[-1][-1] + 1
        return found, refusal
    monkeypatch.setattr(trial, "_rewritten", wrong)
    found = trial.try_seed(DAILY[0])
    assert found.kind == trial.DIFFERS, found
