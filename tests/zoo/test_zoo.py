"""Every entry of the zoo: three steps plain and rewritten give the same numbers.

Losses, gradients, variables and optimizer slots agree bit for bit (under XLA within 1e-5
relative), the planned peak is not above the plain one, and where nothing is saved the report
says why.
"""

from __future__ import annotations

import pytest

from tests.zoo import alone, distribution, groups
from tests.zoo import entry as zoo


def _parameters():
    return [pytest.param(entry, id=f"{entry.group}-{entry.name}",
                         marks=() if entry.smoke else pytest.mark.nightly)
            for entry in groups.ENTRIES]


@pytest.mark.parametrize("entry", _parameters())
def test_trains_as_without_us(entry):
    if entry.group == "distribution" and not (entry.alone or distribution.available()):
        pytest.skip("TensorFlow ran in this process before the zoo could ask for logical CPUs")
    different, reports = (alone.compare_alone if entry.alone else alone.compare)(entry)
    assert not different, f"{len(different)} differ: " + "; ".join(different[:6])
    _check_reports(entry, reports)


def _check_reports(entry, reports):
    if entry.expect == zoo.NO_REPORT:
        assert not reports
        return
    assert reports, "the step was not rewritten, and no report says why"
    for report in reports:
        assert report["planned"] <= report["plain"]
        assert report["applied"] or report["reason"], "left alone without a reason"
    if entry.expect in (zoo.RECOMPUTES, zoo.LESS):
        assert any(r["applied"] and r["planned"] < r["plain"] for r in reports), reports
    if entry.expect == zoo.RECOMPUTES:
        assert any(r["applied"] and r["recomputed"] for r in reports), reports
    if entry.expect == zoo.UNCHANGED:
        assert not any(r["applied"] for r in reports)
        assert entry.refused and all(entry.refused in r["reason"] for r in reports), reports
    said = [text for r in reports for text in (*r["refused"], r["reason"])]
    assert entry.refused in "\n".join(said), said


def test_names_are_unique():
    names = [(entry.group, entry.name) for entry in groups.ENTRIES]
    assert len(names) == len(set(names))
