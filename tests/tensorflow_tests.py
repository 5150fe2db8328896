"""Runs TensorFlow's own tests plain and with a plan forced on every function with a gradient.

    python -m tests.tensorflow_tests CHECKOUT [--only PATTERN ...] [--way models|native] [--list]

They are not in its wheel: CHECKOUT is a checkout of TensorFlow's repository, of the version that is
installed. Of it only test files are used, those that take gradients; see
`tests.support.other_tests`. What they import is the installed TensorFlow.
"""

from __future__ import annotations

import pathlib
import re
import shutil
import sys
import tempfile

from tests.support.other_tests import Suite

LEFT_OUT = ("client/*", "compiler/*", "data/*", "distribute/*", "eager/benchmarks*",
            "eager/memory_tests/*", "eager/polymorphic_function/*_xla_jit_test.py",
            "eager/remote_execution_test.py", "framework/experimental/*",
            "ops/memory_tests/*", "tpu/*")
_PENDING = ("it counts Python objects: those of a step that was just traced are there until its "
            "certificate is made, some seconds later")
EXPECTED = {
    "eager/backprop_test.py::BackpropTest::test*Jacobian*": _PENDING,
    "eager/forwardprop_test.py::ForwardpropTest::testHVPCorrectness": _PENDING,
    "eager/forwardprop_test.py::ForwardpropTest::testNumericHigherOrder*": _PENDING,
    "eager/backprop_test.py::BackpropTest::testNameScope":
        "it counts two equal ops in the graph, which Grappler, asked while it is traced, merges",
    "framework/function_test.py::FunctionInlineControlTest::testFoo1":
        "it fails where Python has not collected the garbage of testFoo0, plain too",
}
"""Tests, as patterns, that come out otherwise, each with the reason."""


def suite(checkout: pathlib.Path, folder: pathlib.Path) -> Suite:
    """Return TensorFlow's tests.

    Args:
      checkout: of TensorFlow's repository.
      folder: takes copies of the test files: beside them pytest would import the package of the
        checkout instead of the one that is installed.
    """
    tests = checkout / "tensorflow" / "python"
    for path in tests.rglob("*_test.py"):
        copy = folder / path.relative_to(tests)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, copy)
    return Suite(
        "tests.tensorflow_tests", __doc__.splitlines()[0], root=folder, below=".",
        trains=re.compile(r"\.gradient\(|gradients_impl\.|GradientTape|compute_gradient"),
        left_out=LEFT_OUT, expected=EXPECTED, files=1,
        plugin="tests.support.tensorflow_cases")


def main(arguments: list[str]) -> int:
    """Print the table; return the exit status."""
    if not arguments or not pathlib.Path(arguments[0], "tensorflow", "python").is_dir():
        print(__doc__)
        return 2
    with tempfile.TemporaryDirectory() as folder:
        return suite(pathlib.Path(arguments[0]), pathlib.Path(folder)).main(arguments[1:])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
