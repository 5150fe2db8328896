"""Every test here trains; see `tests.support.process` for the shared settings."""

from __future__ import annotations

import pytest

from tests.support import process
from tests.zoo import alone

alone.prepare()
_seeded = process.seeded


def pytest_collection_modifyitems(items):
    """Have steps say that they train unchanged: entries name those that do."""
    for item in items:
        item.add_marker(pytest.mark.filterwarnings(
            "default:tfckpt. .* trains unchanged. :UserWarning"))
