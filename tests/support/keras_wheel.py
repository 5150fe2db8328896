"""A pytest plugin: Keras' own tests where its wheel is installed.

It gives them what they lack there, and Keras' `run_layer_test` more to train. Ops run one after the
other, so that what trainings leave behind can be compared in every bit.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest

PACKAGES = ("grain", "jax")
"""That test files import for the few tests that use them."""


def pytest_configure(config: pytest.Config) -> None:
    """Put the plugin to work."""
    import tensorflow as tf

    config.addinivalue_line("markers", "requires_trainable_backend: of Keras' own conftest")
    tf.config.threading.set_inter_op_parallelism_threads(1)  # or sums differ from run to run
    train_more()


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Have test files imported that import what is not installed."""
    with stand_ins():
        return (yield)


@contextlib.contextmanager
def stand_ins() -> Iterator[None]:
    """Let test files import, in this context, what a few of their tests alone use.

    That is the `conftest` of the repository, and packages of other backends: where one is not
    installed an empty module stands for it, so that tests that use it fail, and no others.
    """
    made = {"conftest": _conftest()}
    made |= {name: types.ModuleType(name) for name in PACKAGES
             if importlib.util.find_spec(name) is None}
    sys.modules.update(made)
    try:
        yield
    finally:
        for name in made:
            del sys.modules[name]


def _conftest() -> types.ModuleType:
    """Return a module with what test files import from the `conftest` of the repository."""
    def skip_if_backend(backend: str, reason: str) -> pytest.MarkDecorator:
        return pytest.mark.skipif(backend == "tensorflow", reason=reason)

    module = types.ModuleType("conftest")
    module.skip_if_backend = skip_if_backend
    return module


def train_more() -> None:
    """Have the training check of `run_layer_test` give the backward pass something to read.

    By itself it adds up what a layer returns, of which the gradient reads nothing, and trains
    nothing where a layer has no weights. Here it adds up squares, and what the layer is given is
    multiplied with a weight of the model. Where TensorFlow has no gradient of a layer, that weight
    is not trained. Where a test leaves the check out, as for layers of several arguments, it is
    made if it can be; that it could not with plans shows in what trainings have left behind.
    """
    from keras.src import ops
    from keras.src.testing import test_case

    class Squaring:
        """`keras.ops` with another sum: that loss is the only one there that calls it."""

        def __getattr__(self, name: str) -> Any:
            return getattr(ops, name)

        def sum(self, results: Any) -> Any:
            return ops.sum(ops.square(results))

    test_case.ops = Squaring()
    test_case.Model = _scaled(test_case.Model)
    test_case.TestCase.run_layer_test = _training(test_case.TestCase.run_layer_test)


def _training(run_layer_test: Callable) -> Callable:
    """Return a layer test that trains, if the layer can be trained as it trains layers."""
    @functools.wraps(run_layer_test)
    def run(self: Any, *args: Any, run_training_check: bool = True, **options: Any) -> None:
        if not run_training_check:
            with contextlib.suppress(Exception):
                return run_layer_test(self, *args, **options)
        return run_layer_test(self, *args, run_training_check=run_training_check, **options)

    return run


def _scaled(model: type) -> type:
    """Return a class of models, those derived from which multiply what they are called with."""
    import tensorflow as tf

    class Scaled(model):  # type: ignore[misc, valid-type]
        """Has a weight of its own."""

        def __init__(self) -> None:
            super().__init__()
            self.scale = self.add_weight(shape=(), initializer="ones")

        def __init_subclass__(cls, **options: Any) -> None:
            super().__init_subclass__(**options)
            cls.call = _scaling(cls.call)

        def fit(self, data: Iterator, **kwargs: Any) -> Any:
            data = (tuple(map(_tuple, batch)) for batch in data)  # no dataset makes lists
            try:
                return super().fit(data, **kwargs)
            except (LookupError, ValueError) as error:  # no gradient is registered, or none arrives
                if not isinstance(error, LookupError) and "No gradients provided" not in str(error):
                    raise
            self.scale.trainable = False
            self.train_function = None
            return super().fit(data, **kwargs)

    def _tuple(part: Any) -> Any:
        return tuple(part) if isinstance(part, list) else part

    def _scaling(call: Callable) -> Callable:
        def scaled(self: Any, x: Any, training: bool = False) -> Any:
            x = tf.nest.map_structure(
                lambda t: t * tf.cast(self.scale.value, t.dtype)
                if isinstance(t, tf.Tensor) and t.dtype.is_floating else t, x)
            if isinstance(x, dict):
                return self.layer(**x, training=training)
            return call(self, list(x) if isinstance(x, tuple) else x, training=training)
        return scaled

    return Scaled
