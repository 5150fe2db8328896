"""Under the native pass a step needs what it needs behind the decorator, or a reason is written."""

from __future__ import annotations

import os
import shutil

import pytest

from benchmarks import carriers
from tests.zoo import distribution
from tests.zoo.groups import ENTRIES

pytestmark = [pytest.mark.nightly, pytest.mark.skipif(
    not shutil.which(os.environ.get("CXX", "g++")), reason="no C++ compiler")]
COMPARED = {f"{e.group}-{e.name}": e for e in ENTRIES if not (e.xla or e.alone)}


@pytest.mark.parametrize("name", COMPARED)
def test_the_pass_plans_what_the_decorator_plans(name):
    if name.startswith("distribution-") and not distribution.available():
        pytest.skip("TensorFlow ran in this process before the zoo could ask for logical CPUs")
    row = carriers.compare(COMPARED[name])
    assert carriers.reason_for(name) or not row.planned[0] or row.ratio <= carriers.WITHIN, row


def test_reasons_are_those_of_entries():
    assert set(carriers.REASONS) <= set(COMPARED)
