"""Every test here runs TensorFlow; see `tests.support.process` for the shared settings."""

from __future__ import annotations

import pytest

from tests.support import cli, process
from tfckpt.capture import tf_adapter

process.prepare()
_seeded = process.seeded
files, tool = cli.files, cli.tool


@pytest.fixture
def hook():
    """Install hooks, and take them away again."""
    from tensorflow.python.eager.polymorphic_function import transform
    before = list(transform.FUNC_GRAPH_TRANSFORMS)
    yield tf_adapter.install_trace_hook
    transform.FUNC_GRAPH_TRANSFORMS[:] = before
