"""The plan store between processes: the same training, planned by the first of them."""

from __future__ import annotations

import json
import os
import pathlib
import re
import subprocess
import sys

import pytest

import tfckpt
from tests.support.planned_in_process import ROWS

ROOT = pathlib.Path(tfckpt.__file__).parents[1]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}


def started(folder, **options) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-m", "tests.support.planned_in_process",
         json.dumps({"folder": str(folder), **options})],
        cwd=ROOT, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finished(process: subprocess.Popen) -> dict:
    out, err = process.communicate(timeout=600)
    assert process.returncode == 0, err[-2000:]
    return json.loads(out.splitlines()[-1])


def trained(folder, **options) -> dict:
    return finished(started(folder, **options))


def tool(folder, *arguments: str) -> str:
    done = subprocess.run([sys.executable, "-m", "tfckpt", "cache", *arguments], cwd=ROOT,
                          env={**ENVIRONMENT, "TFCKPT_CACHE": str(folder)}, capture_output=True,
                          text=True, timeout=600, check=False)
    assert done.returncode == 0 and not done.stderr, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a store with the plan of the first training."""
    return tmp_path_factory.mktemp("store")


@pytest.fixture(scope="module")
def first(folder):
    return trained(folder)


def assert_from_store(again: dict, first: dict) -> None:
    assert again["stored"] and again["priced"] == again["asked"] == 0
    assert "taken from the plan store" in again["text"]
    assert again["summary"] == first["summary"] and again["compiled"] == first["compiled"]
    assert again["bits"] == first["bits"]


def test_the_second_process_searches_nothing_and_trains_the_same(folder, first):
    assert first["applied"] and not first["stored"] and first["priced"] > 50
    again = trained(folder)
    assert_from_store(again, first)
    assert again["explained"] == first["explained"]


def test_layers_that_are_numbered_otherwise_get_the_plan(folder, first):
    again = trained(folder, before=3)
    assert_from_store(again, first)
    assert again["layers"] != first["layers"]
    assert _sizes(again["explained"]) == _sizes(first["explained"])
    for found in (first, again):
        assert f"/{found['layers'][1]}" in found["explained"]


def _sizes(explained: str) -> list[str]:
    """Return the bytes of what is live; of equals the name decides which come first."""
    return re.findall(r"^ +([\d.]+ .B)", explained, re.MULTILINE)


@pytest.mark.parametrize("options", [{"batch": 2 * ROWS}, {"budget": 0.8}])
def test_another_batch_or_budget_is_planned(folder, first, options):
    other = trained(folder, **options)
    assert not other["stored"] and other["priced"]


def test_without_the_store_the_same_is_planned(first):
    other = trained("off")
    assert not other["stored"] and other["priced"] == first["priced"]
    assert other["summary"] == first["summary"] and other["bits"] == first["bits"]


def test_a_damaged_file_is_planned_anew(tmp_path, folder, first):
    for path in folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes()[:-100])
    again = trained(tmp_path)
    assert not again["stored"] and again["bits"] == first["bits"]
    assert_from_store(trained(tmp_path), first)


def test_two_processes_at_once(tmp_path, first):
    both = [started(tmp_path) for _ in range(2)]
    for process in both:
        found = finished(process)
        assert found["summary"] == first["summary"] and found["bits"] == first["bits"]
    assert {path.suffix for path in tmp_path.iterdir()} == {".jsonl"}
    assert_from_store(trained(tmp_path), first)


def test_what_xla_answered_is_not_asked_again(tmp_path):
    first = trained(tmp_path, xla=True)
    again = trained(tmp_path, xla=True, before=2)
    assert first["asked"] >= 2 and "plans tried" in first["compiled"]
    assert_from_store(again, first)


def test_the_command_line_lists_and_clears(tmp_path, folder, first):
    for path in folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    count = len(list(tmp_path.iterdir()))
    listed = tool(tmp_path, "list").splitlines()
    assert len(listed) == count + 2 and listed[0].split()[:3] == ["used", "size", "step"]
    assert any(re.search(r" sequential\S* +\d+ +min +CPU +[\d.]+ [kM]B of [\d.]+ MB$", line)
               for line in listed[1:-1]), listed
    assert re.fullmatch(rf"{count} plans?, [\d.]+ kB in {re.escape(str(tmp_path))}", listed[-1])
    plans = json.loads(tool(tmp_path, "list", "--json"))["plans"]
    assert len(plans) == count and {plan["budget"] for plan in plans} >= {"min"}
    reported = re.search(r"planned peak +([\d.]+ [kM]B)", first["text"])
    assert reported and f" {reported[1]} of " in "\n".join(listed), listed
    assert re.fullmatch(rf"removed {count} plans?, [\d.]+ kB\n", tool(tmp_path, "clear"))
    assert tool(tmp_path, "list") == f"0 plans, 0.0 kB in {tmp_path}\n"
    assert tool("off", "list") == tool("off", "clear") == (
        "the plan store is switched off (TFCKPT_CACHE=off)\n")
