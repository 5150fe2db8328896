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
ORDER = ("errors", "clock", "say", "target", "hlo", "graph", "ops", "branches", "edits", "capture",
         "fad", "cost", "plan", "rewrite", "verify")
NOT_ALLOWED = {"fad": {"capture"}, "cost": {"capture"}, "plan": {"capture"}}
PURE = ("errors", "clock", "say", "target", "hlo", "graph", "ops", "branches", "edits", "fad",
        "cost", "plan")
HEAVY = {"tensorflow", "keras"}
# Everything else at the top level (api, keras, cli, report ...) is a front end.
FRONT_END = len(ORDER)


def modules():
    return sorted(PACKAGE.rglob("*.py"))


def parts_of(path: pathlib.Path) -> tuple[str, ...]:
    """Dotted name below the package, as a tuple: ("plan", "solvers", "chen")."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return parts[:-1] if parts[-1] == "__init__" else parts


def imports(path: pathlib.Path):
    """Absolute dotted names that a module imports anywhere, functions included."""
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
    seen = set(imports(PACKAGE / "plan" / "simulate.py"))
    assert "tfckpt.cost.costgraph" in seen
    assert "tfckpt.plan.schedule" in seen


def test_importing_the_planner_loads_no_tensorflow():
    script = (
        "import importlib, pkgutil, sys\n"
        "import grappler_ext, tfckpt, tfckpt.fad, tfckpt.cost, tfckpt.plan, tfckpt.ops\n"
        "import tfckpt.errors, tfckpt.graph, tfckpt.report, tfckpt.parts, tfckpt.pictures\n"
        "import tfckpt.rewrite.realise\n"  # with the passes
        "for package in (tfckpt.ops, tfckpt.fad, tfckpt.cost, tfckpt.plan):\n"
        "    for module in pkgutil.walk_packages(package.__path__, package.__name__ + '.'):\n"
        "        importlib.import_module(module.name)\n"
        "heavy = sorted(name for name in sys.modules if name.split('.')[0] in "
        f"{sorted(HEAVY)})\n"
        "assert not heavy, heavy[:5]\n"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True,
                          text=True, check=False)
    assert done.returncode == 0, done.stderr
