"""Targets: what one says of a device and its runner, and devices by what a driver calls them."""

from __future__ import annotations

import dataclasses

import pytest

from tfckpt.ir.target import CPU, GPU, Target
from tfckpt.request.devices import PRESETS, find_device, preset_named


def test_an_executor_orders_by_control_and_xla_does_not():
    executor = Target()
    xla = executor.compiled()
    assert executor.orders_by_control and executor.delays_by_control
    assert executor.shares_list_entries and executor.repeats_loops and executor.spans_devices
    assert executor.reorders_operands and executor.clusters_ops
    assert not (xla.orders_by_control or xla.delays_by_control or xla.shares_list_entries
                or xla.repeats_loops or xla.spans_devices or xla.reorders_operands
                or xla.clusters_ops)
    assert xla.compiled(False) == executor
    assert dataclasses.replace(xla, guard="control").delays_by_control


def test_grappler_reorders_nothing_that_it_has_seen():
    assert not dataclasses.replace(Target(), optimised=True).reorders_operands


def test_allocators():
    assert Target(device=CPU).smallest_counted == 256 * 1024
    assert Target(device=GPU).smallest_counted == 0
    assert Target(device=GPU, allocator=False).smallest_counted is None
    assert Target(device=CPU).transposes_weights_early
    assert not Target(device=GPU).transposes_weights_early


def test_a_preset_gives_rates_and_kind():
    target = find_device("H100-80GB").target({"op": 1.0})
    assert target.device == GPU and target.rates.known == {"op": 1.0}
    assert target.rates.flops_per_second == pytest.approx(2 * 16896 * 1980e6)


@pytest.mark.parametrize("said, name", [
    ("NVIDIA H100 80GB HBM3", "H100-80GB"), ("Tesla T4", "T4"), ("NVIDIA A10G", "A10G"),
    ("NVIDIA A100-SXM4-40GB", "A100-40GB"), ("NVIDIA GeForce RTX 4090", "RTX-4090"),
    ("Tesla V100-SXM2-16GB", "V100-16GB")])
def test_presets_by_what_a_driver_calls_them(said, name):
    found = preset_named(said)
    assert found is not None and found.name == name


def test_an_unknown_device_has_no_preset():
    assert preset_named("Quadro FX 5800") is None and preset_named("") is None
    assert all(preset_named(preset.name) == preset for preset in PRESETS)
