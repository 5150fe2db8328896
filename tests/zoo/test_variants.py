"""Each entry of the zoo in one more variant every day, in all of them nightly."""

from __future__ import annotations

import os
import shutil

import pytest

from tests.zoo import distribution, groups, variants
from tests.zoo import entry as zoo

pytestmark = pytest.mark.skipif(not shutil.which(os.environ.get("CXX", "g++")),
                                reason="no C++ compiler")
HERE = [e for e in groups.ENTRIES if not e.alone and e.expect != zoo.NO_REPORT]


def _named(entries):
    return [pytest.param(e, id=f"{e.group}-{e.name}") for e in entries]


def _check(entry, variant):
    if entry.group == "distribution" and not distribution.available():
        pytest.skip("TensorFlow ran in this process before the zoo could ask for logical CPUs")
    found = variants.faults(entry, variant)
    assert not found, f"{variant}: {len(found)} faults: " + "; ".join(found[:4])


@pytest.mark.parametrize("entry", _named(e for e in HERE if e.smoke))
def test_one_more_variant(entry):
    _check(entry, variants.chosen(entry, groups.ENTRIES.index(entry)))


@pytest.mark.nightly
@pytest.mark.parametrize("variant", variants.VARIANTS)
@pytest.mark.parametrize("entry", _named(HERE))
def test_every_variant(entry, variant):
    if not variants.has(entry, variant):
        pytest.skip("it has no such variant")
    _check(entry, variant)
