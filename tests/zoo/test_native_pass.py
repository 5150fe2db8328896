"""The zoo without a line changed: the native pass in place of decorators."""

from __future__ import annotations

import os
import shutil

import pytest

import grappler_ext
from tests.support import process
from tests.zoo import distribution
from tests.zoo import entry as zoo
from tests.zoo.groups import ENTRIES

pytestmark = pytest.mark.skipif(not shutil.which(os.environ.get("CXX", "g++")),
                                reason="no C++ compiler")
DAILY = ("distribution-mirrored_custom_loop", "randomness-dropout", "control-cond",
         "tapes-generator_after_the_critic")
NATIVE = [e for e in ENTRIES if not (e.xla or e.alone)]


@pytest.mark.parametrize("entry", [
    pytest.param(e, id=f"{e.group}-{e.name}",
                 marks=() if f"{e.group}-{e.name}" in DAILY else pytest.mark.nightly)
    for e in NATIVE])
def test_trains_alike_with_the_pass(entry):
    if entry.group == "distribution" and not distribution.available():
        pytest.skip("TensorFlow ran in this process before the zoo could ask for logical CPUs")
    with zoo.conditions(entry):
        wanted = zoo.train(entry, rewrite=False)
        with grappler_ext.enabled():
            found = zoo.train(entry, rewrite=False)
            reports = grappler_ext.reports()
        process.without_pass()
    assert not zoo.differences(found, wanted, entry.xla)
    if f"{entry.group}-{entry.name}" in DAILY:
        assert any(r.applied and r.recomputed_ops for r in reports.values())
