"""Every test here trains; see `tests.support.process` for the shared settings."""

from __future__ import annotations

import pathlib

import pytest

from tests.support import process

process.prepare()
_HERE = pathlib.Path(__file__).parent


def pytest_collection_modifyitems(items):
    for item in items:
        if _HERE in item.path.parents:
            item.add_marker(pytest.mark.e2e)


@pytest.fixture(autouse=True)
def _seeded():
    process.seed()
