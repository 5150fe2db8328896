"""Counts what the structure of the source is judged by.

    python -m benchmarks.structure

Of `tfckpt/` and `grappler_ext/`:

  op types       modules outside `tfckpt/ops/` with a string that is the name of an op type, or
                 what the names of a family begin with (TensorFlow's registry, and the records)
  XLA or a GPU   modules with a parameter, keyword or attribute `in_xla` or `smallest` (the smallest
                 request that an allocator counts: 0 says that it is a GPU's), or the string "GPU"
  orchestrators  modules that call both the planner of a step or part and what makes its edits
  code lines     without blank lines, comments and docstrings

Modules are parsed, not imported.
"""

from __future__ import annotations

import ast
import functools
import pathlib
from collections.abc import Callable, Iterable, Iterator

from benchmarks.rows import head, line
from tfckpt.ops import families, registered

ROOT = pathlib.Path(__file__).parents[1]
PACKAGES = ("tfckpt", "grappler_ext")
RECORDS = ROOT / "tfckpt" / "ops"
_TARGET = frozenset({"in_xla", "smallest"})
_PLANS, _EDITS = frozenset({"plan_parts", "plan_graph"}), frozenset({"join", "realise"})


def modules() -> list[pathlib.Path]:
    """Return the source files that are counted."""
    return sorted(path for name in PACKAGES for path in (ROOT / name).rglob("*.py"))


@functools.cache
def parsed(path: pathlib.Path) -> ast.Module:
    """Return the syntax tree of a module."""
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def docstrings(path: pathlib.Path) -> list[ast.Constant]:
    """Return strings that stand by themselves: docstrings, and what is said of a name."""
    return [node.value for node in ast.walk(parsed(path)) if isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)]


def strings(path: pathlib.Path) -> Iterator[str]:
    """Yield all other strings."""
    said = {id(node) for node in docstrings(path)}
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in said:
            yield node.value


def op_types() -> frozenset[str]:
    """Return the names of op types: of TensorFlow where it can be imported, and of the records."""
    known = {entry.type for entry in (*registered(), *families())}
    try:
        from tensorflow.core.framework import op_def_pb2
        from tensorflow.python.client import pywrap_tf_session as session
    except ImportError:
        return frozenset(known)
    listed = op_def_pb2.OpList.FromString(session.TF_GetBuffer(session.TF_GetAllOpList()))
    return frozenset(known | {entry.name for entry in listed.op})


def op_literals(path: pathlib.Path, types: frozenset[str]) -> list[str]:
    """Return the op types that a module names, sorted; none for the records themselves."""
    return [] if path.is_relative_to(RECORDS) else sorted(set(strings(path)) & types)


def asks_for_target(path: pathlib.Path) -> bool:
    """Return whether a module asks whether a step is compiled by XLA or runs on a GPU."""
    for node in ast.walk(parsed(path)):
        name = (node.attr if isinstance(node, ast.Attribute)
                else node.arg if isinstance(node, ast.arg | ast.keyword) else "")
        if name in _TARGET:
            return True
    return "GPU" in strings(path)


def orchestrates(path: pathlib.Path) -> bool:
    """Return whether a module calls both the planner and what makes edits."""
    called = {node.func.id for node in ast.walk(parsed(path))
              if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
    return not (_PLANS.isdisjoint(called) or _EDITS.isdisjoint(called))


def code_lines(path: pathlib.Path) -> int:
    """Return the number of lines that are neither blank, comment nor docstring."""
    said = {number for node in docstrings(path)
            for number in range(node.lineno, (node.end_lineno or node.lineno) + 1)}
    text = path.read_text(encoding="utf-8").splitlines()
    return sum(1 for number, entry in enumerate(text, 1)
               if number not in said and entry.strip() and not entry.lstrip().startswith("#"))


def _row(what: str, wanted: Callable[[pathlib.Path], object], found: Iterable[pathlib.Path]
         ) -> str:
    names = [str(path.relative_to(ROOT)) for path in found if wanted(path)]
    shown = ", ".join(names) if len(names) <= 6 else ", ".join(names[:6]) + " ..."
    return line([what, str(len(names)), shown])


def main() -> None:
    """Print the table."""
    types = op_types()
    found = modules()
    print(head(["what", "count", "where"]))
    print(_row("modules with an op type", lambda path: op_literals(path, types), found))
    print(_row("modules that ask for XLA or a GPU", asks_for_target, found))
    print(_row("orchestrators", orchestrates, found))
    print(line(["code lines", str(sum(map(code_lines, found))), ""]))


if __name__ == "__main__":
    main()
