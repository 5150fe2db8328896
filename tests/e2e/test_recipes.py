"""Every program of `docs/recipes.md` runs as it stands there, each in a process of its own."""

from __future__ import annotations

import os
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8")
PROGRAMS = [
    (title.strip(), program)
    for title, _, text in (part.partition("\n") for part in PAGE.split("\n## ")[1:])
    for program in re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)]


@pytest.mark.parametrize("program", [p for _, p in PROGRAMS], ids=[
    f"{title}, {n}" for n, (title, _) in enumerate(PROGRAMS)])
def test_runs(program, tmp_path):
    assert "assert" in program
    file = tmp_path / "program.py"  # AutoGraph reads the source of loops
    file.write_text(program, encoding="utf-8")
    done = subprocess.run([sys.executable, file], cwd=tmp_path, capture_output=True,
                          text=True, check=False, timeout=300, env={
                              **os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""})
    assert done.returncode == 0, done.stderr[-3000:]
