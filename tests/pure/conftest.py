"""Hypothesis profiles: every run draws the same examples unless HYPOTHESIS_PROFILE=fuzz."""

from __future__ import annotations

import os
import sys

import pytest
from hypothesis import Phase, settings

settings.register_profile("reproducible", deadline=None, derandomize=True)
settings.register_profile("fuzz", deadline=None, max_examples=1000, print_blob=True)
settings.register_profile("mutants", deadline=None, derandomize=True, database=None,
                          phases=(Phase.explicit, Phase.generate))
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "reproducible"))


@pytest.fixture(autouse=True)
def without_tensorflow():
    """Fail where TensorFlow is loaded: OR-tools crashes beside it, so solvers start processes."""
    yield
    assert "tensorflow" not in sys.modules, "this test, or a test module, has loaded TensorFlow"
