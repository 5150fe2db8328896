"""Fences under a distribution strategy: each waits for its own device, and for no collective."""

from __future__ import annotations

import pytest
import tensorflow as tf

import tfckpt
from tests.support import process
from tests.zoo import distribution
from tests.zoo.entry import Wrap
from tfckpt.capture.devices import device_key
from tfckpt.request.budget import format_bytes

pytestmark = pytest.mark.skipif("not distribution.available()")


class Kept(Wrap):
    """Keeps the wrapped step."""

    def __init__(self, rewrite, **options):
        super().__init__(rewrite)
        self.options = options

    def step(self, fn):
        self.wrapped = tfckpt.checkpoint(fn, **self.options) if self.rewrite else fn
        return self.wrapped


def _traced(replicas, **options):
    process.fresh()
    wrap = Kept(True, **options)
    training = distribution.custom_loop(wrap, replicas)
    graph = wrap.wrapped.get_concrete_function(*training.batches[0]).graph
    return wrap.wrapped.report, graph.get_operations()


def test_each_replica_has_the_same_plan_and_waits_for_nobody():
    replicas = 2
    report, operations = _traced(replicas)
    assert report.applied and report.recomputed_ops > 0
    assert len(report.devices) == replicas
    assert len({(d.baseline_bytes, d.planned_bytes) for d in report.devices}) == 1
    fences = [op for op in operations if op.name.startswith("tfckpt/fence_")]
    by_device: dict[str, list] = {}
    for fence in fences:
        by_device.setdefault(device_key(fence.device), []).append(fence)
    counts = {device: len(found) for device, found in by_device.items()}
    assert len(counts) == replicas and len(set(counts.values())) == 1
    copies = [op for op in operations if "-tfckpt" in op.name and op.name[-1].isdigit()
              and op.name.rpartition("-tfckpt")[2].isdigit()]
    assert len({sum(device_key(c.device) == d for c in copies) for d in counts}) == 1
    for fence in fences:
        behind = _ancestors(fence)
        assert {device_key(op.device) for op in behind if op.device} == {device_key(fence.device)}
        assert not [op.name for op in behind if op.type.startswith("Collective")]


def test_the_plans_of_all_replicas_come_from_the_store(tmp_path, monkeypatch):
    first, operations = _traced(2)
    monkeypatch.setenv("TFCKPT_CACHE", str(tmp_path))
    _traced(2)
    report, again = _traced(2)
    assert report.stored and not first.stored and report.devices == first.devices
    assert [op.type for op in again] == [op.type for op in operations]


def _ancestors(op) -> list:
    seen = {op.name: op}
    stack = [op]
    while stack:
        current = stack.pop()
        for source in [*(t.op for t in current.inputs), *current.control_inputs]:
            if source.name not in seen:
                seen[source.name] = source
                stack.append(source)
    return list(seen.values())


def _trained(rewrite, **options):
    """Return the wrapped step, and losses and variables after each of its steps."""
    process.fresh()
    wrap = Kept(rewrite, **options)
    training = distribution.custom_loop(wrap, 2)
    history = []
    for batch in training.batches:
        history.append([t.numpy().tobytes() for t in tf.nest.flatten(training.step(*batch))])
        history[-1] += [t.numpy().tobytes() for t in training.state()]
    return wrap.wrapped, history


def test_each_device_keeps_to_its_own_budget():
    _, plain = _trained(False)
    least, _ = _traced(2)
    wide = least.baseline_peak_bytes - 1
    ours, history = _trained(True, budget={
        "CPU:0": wide + least.devices[0].resident_bytes, "CPU:1": "min"})
    assert history == plain
    found = {device_key(d.device): d for d in ours.report.devices}
    first, second = found["/device:CPU:0"], found["/device:CPU:1"]
    assert first.planned_bytes <= wide < first.baseline_bytes
    assert second.planned_bytes == least.planned_peak_bytes < first.planned_bytes
    assert (first.budget, second.budget) == (format_bytes(wide + first.resident_bytes), "min")
    for device in (first, second):
        assert f"budget {device.budget}" in str(ours.report)


@pytest.mark.parametrize(("budget", "said"), [
    ({"CPU:0": "min"}, "no entry for CPU:1"),
    ({"CPU:9": 0.5, "*": "min"}, "'CPU:9', and there is no such device; there are CPU:0, CPU:1"),
    ({"CPU:0": "min", "CPU:1": 1}, "cannot be met on .*CPU:1; the smallest"),
])
def test_budgets_that_no_device_or_plan_fits(budget, said):
    with pytest.raises(tfckpt.PlanError, match=said):
        _traced(2, budget=budget)


def test_devices_that_the_backward_does_not_name_are_parts_too():
    """Layers placed by hand: the tape gives the ops of their gradients no device."""
    process.fresh()
    wrap = Wrap(True)
    training = distribution.layers_on_two_devices(wrap)
    training.step.get_concrete_function(*training.batches[0])
    [report] = wrap.reports()
    assert sorted(device_key(d.device) for d in report.devices) == [
        "/device:CPU:0", "/device:CPU:1"]


@pytest.mark.nightly
def test_a_budget_is_that_of_each_device():
    least, _ = _traced(2)
    whole = least.resident_bytes + least.baseline_peak_bytes - 1
    report, _ = _traced(2, budget=whole)
    for device in report.devices:
        assert device.planned_bytes + report.resident_bytes <= whole < (
            device.baseline_bytes + report.resident_bytes)
    with pytest.raises(tfckpt.InfeasibleBudgetError):
        _traced(2, budget=1)
