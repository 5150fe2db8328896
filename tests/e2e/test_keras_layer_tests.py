"""Keras' own tests run with plans forced on: what `python -m tests.keras_layer_tests` does."""

from __future__ import annotations

import os
import shutil

import pytest

from tests.keras_layer_tests import suite
from tests.support.other_tests import Row

DENSE = "layers/core/dense_test.py::DenseTest::test_dense_basics"
compiler = pytest.mark.skipif(not shutil.which(os.environ.get("CXX", "g++")),
                              reason="no C++ compiler")


@pytest.mark.nightly
@pytest.mark.parametrize("way", ["models", pytest.param("native", marks=compiler)])
def test_a_step_of_a_test_is_rewritten_and_leaves_the_same_bits(way):
    row = Row(1, suite().outcomes([DENSE]), suite().outcomes([DENSE], way), set())
    assert [line["outcome"] for line in row.plain.values()] == ["passed"]
    assert not row.differences() and not row.numbers()
    assert len(row.forced[DENSE]["numbers"]) == len(row.steps) == 2
    for step in row.steps:
        assert not step["reason"] and step["recomputed"] and step["identical"]


def test_what_is_different_is_told():
    def line(outcome, norm):
        return {"outcome": outcome, "numbers": [[str(norm), [norm]]], "steps": []}

    plain = {"a": line("passed", 1.0), "b": line("passed", 1.0), "c": line("failed", 1.0)}
    forced = {"a": line("failed", 1.0), "b": line("passed", 1.5), "d": line("passed", 1.0)}
    row = Row(1, plain, forced, set())
    assert row.differences() == {"a": "passed, then failed", "c": "failed, then not run",
                                 "d": "not run, then passed"}
    assert row.numbers() == {"b": 0.5, "d": float("inf")}
    row.unsteady.update("abcd")
    assert not row.differences() and not row.numbers()


def test_files_that_train_are_found():
    files = suite().test_files(["layers/core", "optimizers/adam*"])
    assert {"layers/core/dense_test.py", "layers/core/embedding_test.py"} <= set(files)
    assert all("layers/core" in file or "adam" in file for file in files)
    folders = dict(suite().batches(files))
    assert sum(map(len, folders["layers/core"])) == sum("core/" in file for file in files)
