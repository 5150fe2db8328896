"""Each example runs in small, as a user runs it, and what it says it saved is a real saving."""

from __future__ import annotations

import ast
import os
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]
LINES = re.compile(r"^plain +([\d.]+) (kB|MB|GB) measured peak, last loss (\S+)\n"
                   r"tfckpt +([\d.]+) (kB|MB|GB) measured peak, last loss (\S+)\n"
                   r"saved +(-?\d+) % of the peak \(ratio ([\d.]+)\); (.+)$", re.MULTILINE)
UNIT = {"kB": 1e3, "MB": 1e6, "GB": 1e9}
SAME = re.compile(r"all \d+ losses agree in every bit")
# the example, how many savings it prints, and how many of them keep every bit of the losses
EXAMPLES = [
    pytest.param("01_stock_keras_fit", 1, 1),
    pytest.param("02_custom_train_step", 1, 1, marks=pytest.mark.nightly),
    pytest.param("03_custom_loop_two_tapes", 1, 1, marks=pytest.mark.nightly),
    pytest.param("04_offline_saved_model", 1, 1),
    pytest.param("05_transformer", 2, 1, marks=pytest.mark.nightly),
    pytest.param("06_multi_worker", 2, 2),
]


def run(name: str) -> str:
    """Return what an example prints in small, from a process of its own."""
    done = subprocess.run([sys.executable, "-m", f"examples.{name}", "--small"], cwd=ROOT,
                          env={**os.environ, "CUDA_VISIBLE_DEVICES": ""}, text=True,
                          capture_output=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.parametrize("name, count, identical", EXAMPLES)
def test_saves(name, count, identical):
    printed = run(name)
    found = LINES.findall(printed)
    assert len(found) == count, printed
    for plain, plain_unit, _, ours, ours_unit, _, percent, ratio, _ in found:
        plain_bytes, our_bytes = float(plain) * UNIT[plain_unit], float(ours) * UNIT[ours_unit]
        assert plain_bytes > 2**20  # well above what the allocator does not count
        assert our_bytes < 0.8 * plain_bytes
        assert float(ratio) == pytest.approx(our_bytes / plain_bytes, abs=0.02)
        assert float(percent) == pytest.approx(100 * (1 - our_bytes / plain_bytes), abs=2)
    for _, _, loss, _, _, our_loss, *_, words in found[:identical]:
        assert SAME.fullmatch(words) and loss == our_loss, words
    for *_, words in found[identical:]:
        difference = re.search(r"at most (\S+) of", words)
        assert SAME.fullmatch(words) or difference and float(difference[1]) < 1e-5, words


def test_the_pictures_of_the_documentation_are_drawn(tmp_path):
    done = subprocess.run([sys.executable, "docs/draw_pictures.py", str(tmp_path)], cwd=ROOT,
                          env={**os.environ, "CUDA_VISIBLE_DEVICES": ""}, text=True,
                          capture_output=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == sorted(path.name for path in (ROOT / "docs" / "images").iterdir())
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in tmp_path.iterdir())


def test_each_example_is_tested():
    numbered = sorted(path.stem for path in (ROOT / "examples").glob("[0-9]*.py"))
    assert numbered == [param.values[0] for param in EXAMPLES]


def decides_compilation(call: ast.expr) -> bool:
    """Return whether an expression is `model.compile`, `tf.function`, or a call of one of these."""
    return ast.unparse(call.func if isinstance(call, ast.Call) else call) == "tf.function" or (
        isinstance(call, ast.Call) and ast.unparse(call.func).endswith(".compile")
        and ast.unparse(call.func) != "re.compile")


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.py")), ids=lambda p: p.stem)
def test_whether_xla_compiles_a_step_is_said(path):
    """On a GPU Keras would decide otherwise than on a CPU, and what is printed would differ."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    bare = [each for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)
            for each in node.decorator_list if not isinstance(each, ast.Call)]
    for call in filter(decides_compilation, [*calls, *bare]):
        said = [word.arg for word in getattr(call, "keywords", [])]
        assert "jit_compile" in said, f"{path.name}:{call.lineno}"


@pytest.mark.nightly
def test_what_did_not_fit_fits():
    attempts = run("too_large").strip().split("\n\n")
    assert [a.splitlines()[0].partition(",")[0] for a in attempts] == [
        "plain", "plain", "tfckpt", "tfckpt"]
    free, limited, fitted, refused = attempts
    limit = float(re.search(r"limit (\d+) MiB$", limited.splitlines()[0])[1]) * 2**20 / 1e6
    losses = [re.findall(r"loss (\S+)", text) for text in attempts]
    peaks = [re.search(r"peak of the device (\d+) MB", text) for text in attempts]
    assert len(losses[0]) == 3 and float(peaks[0][1]) > limit
    assert "OOM" in limited and not losses[1]
    assert losses[2] == losses[0] and float(peaks[2][1]) <= limit
    assert "smallest feasible" in refused and not losses[3]
