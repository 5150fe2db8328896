"""TensorFlow's own tests run with plans forced on: what `python -m tests.tensorflow_tests` does."""

from __future__ import annotations

import pytest

from tests.support.other_tests import Row
from tests.tensorflow_tests import main, suite

TEST = """
import tensorflow as tf
from tensorflow.python.framework import test_util
from tensorflow.python.platform import test


class SquaresTest(test.TestCase):

    def test_gradient(self):
        @tf.function
        def step(x):
            with tf.GradientTape() as tape:
                tape.watch(x)
                y = tf.reduce_sum(tf.sin(tf.square(x)))
            return tape.gradient(y, x)

        self.assertAllClose(step(tf.constant([0.0, 0.0])), [0.0, 0.0])

    @test_util.assert_no_new_pyobjects_executing_eagerly()
    def test_eager(self):
        self.assertAllClose(tf.square(2.0), 4.0)
"""


@pytest.fixture
def checkout(tmp_path):
    folder = tmp_path / "checkout" / "tensorflow" / "python" / "ops"
    folder.mkdir(parents=True)
    folder.parent.joinpath("__init__.py").write_text("raise ImportError('of the checkout')")
    folder.joinpath("squares_test.py").write_text(TEST)
    folder.joinpath("other_test.py").write_text("")
    return tmp_path / "checkout"


def test_files_that_take_gradients_are_found(checkout, tmp_path, capsys):
    assert suite(checkout, tmp_path / "copies").test_files(()) == ["ops/squares_test.py"]
    assert main([str(checkout), "--list"]) == 0
    assert capsys.readouterr().out == "ops/squares_test.py\n"
    assert main([str(tmp_path)]) == 2


@pytest.mark.nightly
def test_a_function_of_a_test_is_rewritten(checkout, tmp_path):
    tests = suite(checkout, tmp_path / "copies")
    row = Row(1, *(tests.outcomes(["ops/squares_test.py"], way) for way in ("", "models")), set())
    for name in ("test_gradient", "test_eager"):
        assert row.forced[f"ops/squares_test.py::SquaresTest::{name}"]["outcome"] == "passed"
    assert not row.differences()
    assert [step["identical"] for step in row.steps] == [True]
