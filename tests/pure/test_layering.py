"""Who may import whom: data flows one way, and the planner knows no TensorFlow."""

from __future__ import annotations

import ast
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]
PACKAGE = ROOT / "tfckpt"

# Left to right; a stage imports itself and what stands to its left.
ORDER = ("errors", "common", "ops", "ir", "capture", "fad", "cost", "simulate", "solvers", "plan",
         "rewrite", "verify")
PLANNING = ("fad", "cost", "simulate", "solvers", "plan")
NOT_ALLOWED = {stage: {"capture"} for stage in PLANNING}
PURE = ("errors", "common", "ops", "ir", *PLANNING)
HEAVY = {"tensorflow", "keras"}
# Everything else at the top level (api, keras, cli, report ...) is a front end.
FRONT_END = len(ORDER)


def modules():
    return sorted(PACKAGE.rglob("*.py"))


def parts_of(path: pathlib.Path) -> tuple[str, ...]:
    """Return the dotted name below the package, as a tuple: ("plan", "solvers", "chen")."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return parts[:-1] if parts[-1] == "__init__" else parts


def imports(path: pathlib.Path):
    """Return the absolute dotted names that a module imports anywhere, functions included."""
    here = ("tfckpt", *parts_of(path))
    if path.name != "__init__.py":
        here = here[:-1]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), str(path))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = here[:len(here) - node.level + 1] if node.level else ()
            name = ".".join([*base, *([node.module] if node.module else [])])
            yield name
            yield from (f"{name}.{alias.name}" for alias in node.names)


def rank(stage: str) -> int:
    return ORDER.index(stage) if stage in ORDER else FRONT_END


@pytest.mark.parametrize("path", modules(), ids=lambda path: ".".join(parts_of(path)) or "init")
def test_a_module_imports_only_to_its_left(path):
    parts = parts_of(path)
    if not parts:
        pytest.skip("the package itself re-exports its front ends")
    stage = parts[0]
    for name in imports(path):
        root, *rest = name.split(".")
        if stage in PURE:
            assert root not in HEAVY, f"{path.name} imports {name}"
        if root != "tfckpt":
            continue
        target = rest[0] if rest else None
        if target is None or not _is_module(target):
            assert rank(stage) == FRONT_END or target is None, (
                f"{path.name} imports {name}: a stage may not use what the package re-exports")
            continue
        assert rank(target) <= rank(stage), f"{stage} imports {name}, which lies to its right"
        assert target not in NOT_ALLOWED.get(stage, ()), f"{stage} imports {name}"


def _is_module(name: str) -> bool:
    return (PACKAGE / name).is_dir() or (PACKAGE / f"{name}.py").is_file()


def test_the_test_itself_sees_what_it_should():
    seen = set(imports(PACKAGE / "simulate" / "simulate.py"))
    assert "tfckpt.ir.costgraph" in seen
    assert "tfckpt.ir.schedule" in seen


def test_importing_the_planner_loads_no_tensorflow():
    script = (
        "import importlib, pkgutil, sys\n"
        "import grappler_ext, tfckpt\n"
        "import tfckpt.report.report, tfckpt.driving.parts, tfckpt.report.pictures\n"
        "import tfckpt.rewrite.realise\n"  # with the passes
        f"for stage in {PURE}:\n"
        "    package = importlib.import_module(f'tfckpt.{stage}')\n"
        "    path = getattr(package, '__path__', ())\n"
        "    for module in pkgutil.walk_packages(path, package.__name__ + '.'):\n"
        "        importlib.import_module(module.name)\n"
        "heavy = sorted(name for name in sys.modules if name.split('.')[0] in "
        f"{sorted(HEAVY)})\n"
        "assert not heavy, heavy[:5]\n"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True,
                          text=True, check=False)
    assert done.returncode == 0, done.stderr
