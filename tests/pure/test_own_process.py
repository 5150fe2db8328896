"""Solvers called in another process: results, their errors, and a process that dies."""

from __future__ import annotations

import os

import pytest

from tfckpt.errors import InfeasibleBudgetError, PlanError
from tfckpt.solvers.exact import own_process

pytestmark = pytest.mark.pure


def answer(a, b=0):
    print("libraries print")
    return os.getpid(), a + b


def refuse():
    raise InfeasibleBudgetError("plan: too little", 12)


def test_the_result_comes_from_another_process():
    pid, total = own_process.call(answer, 3, b=4)
    assert total == 7 and pid != os.getpid()


def test_errors_arrive_whole():
    with pytest.raises(InfeasibleBudgetError, match="plan: too little") as caught:
        own_process.call(refuse)
    assert caught.value.smallest_bytes == 12


def test_a_process_that_dies_is_an_error_that_names_another_solver():
    with pytest.raises(PlanError, match="ended with 3.*auto"):
        own_process.call(os._exit, 3)


def test_no_interpreter_is_an_error(monkeypatch):
    monkeypatch.setattr("sys.executable", "/no/such/python")
    with pytest.raises(PlanError, match="no process could be started.*auto"):
        own_process.call(answer, 1)
