"""Budgets in bytes; `tests/e2e/test_bad_input.py` tests those that are refused."""

from __future__ import annotations

import dataclasses
import pickle

import numpy as np
import pytest

from tfckpt.request.budget import parse_budget

BASELINE, RESIDENT = 1_000_000, 30_000


@pytest.mark.parametrize(("budget", "device_bytes"), [
    (123456, 123456), ("123456", 123456), ("100b", 100), ("2GiB", 2 * 1024**3),
    (" 800 MB ", 800_000_000), ("1.5gib", 1_610_612_736), ("1.5KB", 1500), ("1tb", 10**12),
    ("3 MiB", 3_145_728), ("7kib", 7168), ("1 TiB", 1024**4), ("2gb", 2 * 10**9),
    ("16G", 16 * 10**9), ("1.5m", 1_500_000), ("3k", 3000), ("1T", 10**12),
    (np.int64(123456), 123456), (np.uint8(200), 200),
])
def test_bytes_of_the_whole_device_include_what_is_resident(budget, device_bytes):
    assert parse_budget(budget).dynamic(BASELINE, RESIDENT) == device_bytes - RESIDENT


@pytest.mark.parametrize(("budget", "dynamic"), [
    (1.0, 1_000_000), (0.25, 250_000), (np.float32(0.25), 250_000), (np.float64(0.5), 500_000)])
def test_a_fraction_is_of_the_plain_dynamic_peak(budget, dynamic):
    assert parse_budget(budget).dynamic(BASELINE, RESIDENT) == dynamic


@pytest.mark.parametrize("budget", ["min", "MIN", " min "])
def test_the_minimum_has_no_limit(budget):
    assert parse_budget(budget).dynamic(BASELINE, RESIDENT) is None


def test_what_a_device_has_free_is_all_for_the_step():
    asked = dataclasses.replace(parse_budget("device"), free_bytes=777)
    assert asked.dynamic(BASELINE, RESIDENT) == 777 and asked.sized
    assert [parse_budget(b).sized for b in ("1GB", 5, 0.5, "min")] == [True, True, False, False]


def test_a_refused_fraction_can_be_passed_back_as_it_is_printed():
    """1 would be one byte."""
    error = parse_budget(0.8).refusal(1500, 1000, 0, overhead=0.2)
    named, _, what = str(error).partition("Pass budget=")[2].partition(", ")
    assert parse_budget(eval(named)).fraction == 1.0
    assert what == "with which the step trains unchanged" and error.overhead == 0.0


def test_a_budget_of_few_bytes_is_taken_for_a_slip():
    for budget in (80, "80"):
        said = str(parse_budget(budget).refusal(5 * 10**7, 10**8, 0))
        assert 'budget=80 is bytes (megabytes are "80MB", a fraction of the plain peak is ' in said
    assert "is bytes" not in str(parse_budget("80B").refusal(5 * 10**7, 10**8, 0))


@pytest.mark.parametrize("budget", [0.4, "40MB"])
def test_a_refusal_says_what_the_plan_costs(budget):
    error = parse_budget(budget).refusal(50_000_000, 100_000_000, 0, overhead=2.084)
    assert "50.0 MB" in str(error) and ", +208 % time). Pass budget=" in str(error)
    assert str(error).endswith('or budget="min", which weighs memory against time')
    assert pickle.loads(pickle.dumps(error)).overhead == error.overhead == 2.084
    assert "time" not in str(parse_budget(budget).refusal(50_000_000, 100_000_000, 0, overhead=0))


def test_bytes_are_said_as_they_were_written():
    assert str(parse_budget("40MiB")) == "40MiB (41.9 MB)"
    assert str(parse_budget("40MB")) == "40.0 MB"
    assert parse_budget("40MiB") == parse_budget(40 * 2**20)


@pytest.mark.parametrize("budget", [0.4, "40MB"])
def test_what_a_refusal_says_to_pass_is_what_the_plan_is_sure_to_meet(budget):
    """The expected peak is accepted as well, and may be passed."""
    error = parse_budget(budget).refusal(50_000_000, 100_000_000, 7_000_000, sure_bytes=55_000_001)
    said = str(error)
    named = eval(said.partition("Pass budget=")[2].partition(" or ")[0])
    assert parse_budget(named).dynamic(100_000_000, 7_000_000) >= 55_000_001
    assert "50.0 MB expected" in said and "55.0 MB" in said and "at most" in said
    assert error.smallest_bytes == 50_000_000 and error.budget == named
    assert pickle.loads(pickle.dumps(error)).budget == named


@pytest.mark.parametrize("sure", [100_000_000, 99_990_000])
def test_a_peak_that_may_be_that_of_the_plain_step_is_not_passed(sure):
    said = str(parse_budget(0.4).refusal(50_000_000, 100_000_000, 0, sure_bytes=sure))
    assert "Pass budget=0.5 or" in said and "at most" not in said
