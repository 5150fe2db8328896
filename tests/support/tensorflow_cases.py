"""A pytest plugin: what TensorFlow's test cases expect of whoever runs them."""

from __future__ import annotations

import importlib.util
import socket
import sys
import types

from _pytest.unittest import TestCaseFunction
from absl import flags


def pytest_configure() -> None:
    """Put the plugin to work."""
    TestCaseFunction.errors = TestCaseFunction.skipped = ()  # of a result of unittest
    flags.FLAGS.mark_as_parsed()
    if importlib.util.find_spec("portpicker") is None:
        module = types.ModuleType("portpicker")
        module.pick_unused_port = _unused_port
        sys.modules["portpicker"] = module


def _unused_port() -> int:
    with socket.socket() as found:
        found.bind(("localhost", 0))
        return found.getsockname()[1]
