"""The shape of the source: one driver, one value that says what runs a step."""

from __future__ import annotations

import pathlib

from benchmarks.structure import (
    ROOT,
    asks_for_target,
    folders,
    is_documented,
    modules,
    orchestrates,
    public_functions,
)

ASK = {
    "tfckpt/ir/target.py": "the value itself",
    "tfckpt/capture/tf_adapter.py": "asks TensorFlow what a graph is traced for",
    "tfckpt/carriers/trace_hook.py": "knows what its trace is compiled by",
}
"""Modules that may ask whether XLA compiles a step or a GPU runs it, and why."""


def _named(found) -> set[str]:
    return {str(path.relative_to(ROOT)) for path in found}


def test_few_modules_ask_what_runs_a_step():
    assert _named(filter(asks_for_target, modules())) == set(ASK)


def test_the_driver_is_the_only_orchestrator():
    assert _named(filter(orchestrates, modules())) == {"tfckpt/driver.py"}


def test_folders_are_small_enough_to_be_read():
    assert max(folders().values()) <= 14 and folders()["tfckpt"] <= 8


def test_every_parameter_of_a_public_function_is_documented():
    assert [function.name for function in public_functions() if not is_documented(function)] == []


def test_what_asks_is_noticed(tmp_path):
    """The counters themselves, on small modules."""
    def written(text: str) -> pathlib.Path:
        path = tmp_path / f"m{len(list(tmp_path.iterdir()))}.py"
        path.write_text(text)
        return path

    for text in ("x = target.runner == XLA", "x = kind == 'GPU'", "def f(in_xla): pass",
                 "in_xla(graph)", "tf.config.list_logical_devices('GPU')", "if 'xla' != r: pass"):
        assert asks_for_target(written(text)), text
    for text in ("x = target.orders_by_control", "PRESETS = ('GPU',)", "'''Runs on a GPU.'''"):
        assert not asks_for_target(written(text)), text
    assert orchestrates(written("searches(graph)\ncarrier.apply(edits)"))
    assert not orchestrates(written("searches(graph)"))
