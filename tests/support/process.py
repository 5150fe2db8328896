"""Settings of every test process that runs TensorFlow, made before TensorFlow initialises."""

from __future__ import annotations

import contextlib
import gc
import logging
import multiprocessing
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor

import keras
import pytest
import tensorflow as tf
from tensorflow.python.framework import config

import grappler_ext


def prepare() -> None:
    """Make TensorFlow itself repeatable. Idempotent; must run before the first op does.

    With more than one inter-op thread plain TensorFlow does not reproduce its own numbers: the
    order in which AddN adds three or more inputs depends on which of them is still needed
    elsewhere when it starts. The setting belongs to the process, so all tests share it.

    What has been imported by then is never garbage: half a million objects that each of Keras'
    `clear_session` would look through again, for longer than a small model trains.
    """
    if tf.config.threading.get_inter_op_parallelism_threads() != 1:
        tf.config.threading.set_inter_op_parallelism_threads(1)
        tf.config.threading.set_intra_op_parallelism_threads(2)
    tf.config.experimental.enable_op_determinism()
    gc.freeze()


@contextlib.contextmanager
def without_determinism():
    """For XLA: Keras refuses to compile a model while op determinism is on."""
    config.disable_op_determinism()
    try:
        yield
    finally:
        tf.config.experimental.enable_op_determinism()


def seed() -> None:
    """Set every seed: op determinism refuses random ops without one."""
    keras.utils.set_random_seed(3)


@pytest.fixture(autouse=True)
def seeded() -> None:
    """For a conftest: sets every seed before each test."""
    seed()


def fresh() -> None:
    """Set every seed and forget Keras' names, so that a model made twice is named the same."""
    keras.backend.clear_session()
    seed()


@pytest.fixture(scope="module")
def apart() -> Iterator[ProcessPoolExecutor]:
    """For a module: a process for its peaks. What other tests leave has free memory in pieces."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), prepare) as pool:
        yield pool


class _Refusals(logging.Handler):
    def __init__(self, found: list[str]):
        super().__init__(logging.WARNING)
        self.found = found

    def emit(self, record: logging.LogRecord) -> None:
        """Note one message, without the function's name."""
        _, apart, why = record.getMessage().partition(" is not rewritten: ")
        if apart:
            self.found.append(why)


@contextlib.contextmanager
def refusals_of_the_pass() -> Iterator[list[str]]:
    """Yield a list that takes why the native pass leaves functions alone, while it says so."""
    found: list[str] = []
    handler, logger = _Refusals(found), logging.getLogger("absl")
    logger.addHandler(handler)
    try:
        yield found
    finally:
        logger.removeHandler(handler)


def without_pass() -> None:
    """Take the native pass out of service and forget what it has planned."""
    grappler_ext.disable()
    if grappler_ext._bridge is not None:
        grappler_ext._bridge.rewriters.clear()
