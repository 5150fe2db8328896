"""Checks that all that README and docs/ name exists, and that the API's pages can be built."""

from __future__ import annotations

import importlib
import importlib.util
import os
import pathlib
import re
import shutil
import subprocess
import sys

import keras
import pytest
import tensorflow as tf

import tfckpt
from tfckpt.cli.arguments import COMMANDS, usage

ROOT = pathlib.Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "BUILD_NOTES.md", *sorted((ROOT / "docs").rglob("*.md"))]
DOTTED = re.compile(r"\btfckpt((?:\.[A-Za-z_]\w*)+)")
MODULE = re.compile(r"python -m ([\w.]+)")
FILE = re.compile(r"`((?:tfckpt|examples|docs|benchmarks|tests)/[\w/]+\.\w+)`")
COMMAND = re.compile(r"^(?:\$ )?tfckpt (\w+) (.*)$", re.MULTILINE)


def page(function):
    return pytest.mark.parametrize("text", [p.read_text(encoding="utf-8") for p in PAGES],
                                   ids=[p.name for p in PAGES])(function)


@page
def test_names_exist(text):
    for dotted in DOTTED.findall(text):
        found = tfckpt
        for name in dotted.strip(".").split("."):
            try:
                found = getattr(found, name)
            except AttributeError:
                found = importlib.import_module(f"{found.__name__}.{name}")


@page
def test_modules_and_files_exist(text):
    for module in MODULE.findall(text):
        assert importlib.util.find_spec(module) is not None, module
    for path in FILE.findall(text):
        assert (ROOT / path).is_file(), path


@page
def test_commands_and_flags_exist(text):
    for command, rest in COMMAND.findall(text):
        if command in COMMANDS:
            listed = usage(command)
            for flag in re.findall(r"--(\w+)", rest):
                assert f"--{flag}" in listed or f"--[no]{flag}" in listed, (command, flag)


@pytest.mark.nightly
def test_the_walk_is_what_its_script_writes(tmp_path):
    """But for what is measured; names of ops are those of the newest TensorFlow and Keras."""
    if not (tf.__version__.startswith("2.21.") and keras.__version__.startswith("3.15.")):
        pytest.skip("names of ops are those of TensorFlow 2.21 and Keras 3.15")
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    subprocess.run([sys.executable, tmp_path / "docs" / "walk.py"], check=True, timeout=300,
                   env={**os.environ, "PYTHONPATH": str(ROOT)})
    said, written = (re.sub(r"(?s)\n11\. .*?\n12\. ", "", (folder / "docs" / "walk.md").read_text())
                     for folder in (ROOT, tmp_path))
    assert said == written, "run python docs/walk.py"


@pytest.mark.nightly
def test_the_api_pages_are_built(tmp_path):
    pytest.importorskip("pdoc")
    done = subprocess.run([sys.executable, ROOT / "docs" / "build_api.py", tmp_path],
                          cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    written = (tmp_path / "tfckpt.html").read_text(encoding="utf-8")
    for name in tfckpt.__all__:
        assert f'id="{name}"' in written or (tmp_path / "tfckpt" / f"{name}.html").is_file(), name
