"""A pytest plugin: what each test runs, as coverage tells it; for `tests.coverage`.

The context of a line is the address of the test that ran it, in processes that the test starts too.
"""

from __future__ import annotations

import os

import coverage
import pytest


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item, nextitem):
    """Name the test while it runs, with what its fixtures do."""
    running = coverage.Coverage.current()
    os.environ["COVERED_TEST"] = item.nodeid
    if running is not None:
        running.switch_context(item.nodeid)
    try:
        return (yield)
    finally:
        os.environ["COVERED_TEST"] = ""
        if running is not None:
            running.switch_context("")
