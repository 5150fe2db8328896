"""Runs Keras' own tests, which come in its wheel, plain and with a plan forced on every step.

    python -m tests.keras_layer_tests [--only PATTERN ...] [--way models|native] [--list]

Of the installed Keras those test files that train something; see `tests.support.other_tests`.
"""

from __future__ import annotations

import importlib.util
import pathlib
import re
import sys

from tests.support.other_tests import Suite

_FAILING = ("the step that finds no more data fails halfway. Plain, it has counted an iteration "
            "more by then; where tensors of any size are planned, that waits for the data")


def suite() -> Suite:
    """Return the tests of the Keras that is installed."""
    spec = importlib.util.find_spec("keras")
    assert spec is not None and spec.origin is not None
    return Suite(
        "tests.keras_layer_tests", __doc__.splitlines()[0],
        root=pathlib.Path(spec.origin).parents[1], below="keras/src",
        trains=re.compile(r"run_layer_test|\.fit\(|train_on_batch|train_step|GradientTape"),
        left_out=("backend/jax/*", "backend/torch/*", "ops/*",
                  "callbacks/orbax_checkpoint_test.py", "callbacks/tensorboard_test.py",
                  "trainers/data_adapters/*", "utils/jax_layer_test.py",
                  "utils/torch_utils_test.py"),
        expected={
            "trainers/trainer_test.py::*test_fit_sparse_*_graph": _FAILING,
            "models/model_test.py::*test_functional_optional_inputs_generator_*": _FAILING,
            "trainers/trainer_test.py::*test_steps_per_execution_steps_*_unknown_data*_non_jit":
                _FAILING,
        }, files=6, plugin="tests.support.keras_wheel")


if __name__ == "__main__":
    sys.exit(suite().main(sys.argv[1:]))
