"""Counts by which the structure of the source is judged.

    python -m benchmarks.structure

Of `tfckpt/` and `grappler_ext/`:

  op types       modules outside `tfckpt/ops/` with a string that is the name of an op type, or
                 what the names of a family begin with (TensorFlow's registry, and the records)
  XLA or a GPU   modules that call or define `in_xla`, compare anything with "GPU" or "XLA" (or
                 with the names of these in `tfckpt.ir.target`), or pass one of the strings to a
                 call; tables that describe devices do not count
  orchestrators  modules that call both what searches plans for a step and what applies its edits
  fullest folder modules in the folder of `tfckpt/` that has most, and at its top
  documented     public functions and methods with parameters whose docstring tells them, of all
  code lines     without blank lines, comments and docstrings

Modules are parsed, not imported.
"""

from __future__ import annotations

import ast
import collections
import functools
import pathlib
import re
from collections.abc import Callable, Iterable, Iterator

from benchmarks.rows import head, line
from tfckpt.ops import families, registered

ROOT = pathlib.Path(__file__).parents[1]
PACKAGES = ("tfckpt", "grappler_ext")
RECORDS = ROOT / "tfckpt" / "ops"
_TARGET = frozenset({"GPU", "XLA", "EXECUTOR", "xla", "executor"})
_PLANS = frozenset({"searches", "decisions_of", "plans_of", "plan_step"})
_EDITS = frozenset({"apply", "edit_graph_def", "import_edited", "realise"})


def modules() -> list[pathlib.Path]:
    """Return the source files that are counted."""
    return sorted(path for name in PACKAGES for path in (ROOT / name).rglob("*.py"))


@functools.cache
def parsed(path: pathlib.Path) -> ast.Module:
    """Return the syntax tree of a module."""
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def docstrings(path: pathlib.Path) -> list[ast.Constant]:
    """Return strings that stand by themselves: docstrings of modules, functions and names."""
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
        if isinstance(node, ast.Compare) and _TARGET & set(map(_said, (node.left,
                                                                       *node.comparators))):
            return True
        if isinstance(node, ast.Call) and (_said(node.func) == "in_xla" or any(
                isinstance(a, ast.Constant) and a.value in _TARGET for a in node.args)):
            return True
        if isinstance(node, ast.FunctionDef | ast.arg) and "in_xla" in (
                getattr(node, "name", ""), getattr(node, "arg", "")):
            return True
    return False


def _said(node: ast.expr) -> str:
    """Return the name or the string that an expression is; "" for any other."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    return getattr(node, "attr", getattr(node, "id", ""))


def orchestrates(path: pathlib.Path) -> bool:
    """Return whether a module calls both the planner and what makes edits."""
    called = {_said(node.func) for node in ast.walk(parsed(path)) if isinstance(node, ast.Call)}
    return not (_PLANS.isdisjoint(called) or _EDITS.isdisjoint(called))


def code_lines(path: pathlib.Path) -> int:
    """Return the number of lines that are neither blank, comment nor docstring."""
    said = {number for node in docstrings(path)
            for number in range(node.lineno, (node.end_lineno or node.lineno) + 1)}
    text = path.read_text(encoding="utf-8").splitlines()
    return sum(1 for number, entry in enumerate(text, 1)
               if number not in said and entry.strip() and not entry.lstrip().startswith("#"))


def lines_by_folder() -> dict[str, int]:
    """Return the code lines of the modules in each folder, most first; folders of `tfckpt/` by
    what follows that.
    """
    counted: collections.Counter[str] = collections.Counter()
    for path in modules():
        folder = path.relative_to(ROOT).parent
        counted["/".join(folder.parts[1:]) or str(folder)] += code_lines(path)
    return dict(counted.most_common())


def folders() -> dict[str, int]:
    """Return how many modules each folder of `tfckpt/` has, by its path."""
    found: dict[str, int] = {}
    for path in modules():
        if path.is_relative_to(ROOT / "tfckpt"):
            folder = str(path.parent.relative_to(ROOT))
            found[folder] = found.get(folder, 0) + 1
    return found


def public_functions() -> list[ast.FunctionDef]:
    """Return the functions and methods that take parameters and whose names are public."""
    found = []
    for path in modules():
        for node in ast.walk(parsed(path)):
            members = node.body if isinstance(node, ast.Module) or (
                isinstance(node, ast.ClassDef) and not node.name.startswith("_")) else []
            found += [member for member in members if isinstance(member, ast.FunctionDef)
                      and not member.name.startswith("_") and _parameters(member)
                      and "overload" not in map(_said, member.decorator_list)]
    return found


def _parameters(function: ast.FunctionDef) -> list[str]:
    told = function.args
    return [argument.arg for argument in (*told.posonlyargs, *told.args, *told.kwonlyargs)
            if argument.arg not in ("self", "cls")]


def is_documented(function: ast.FunctionDef) -> bool:
    """Return whether a docstring has an entry for every parameter."""
    said = ast.get_docstring(function) or ""
    told = said.partition("Args:")[2]
    return all(re.search(rf"^\s*(\w+, )*\*{{0,2}}{name}\b.*:", told, re.MULTILINE)
               for name in _parameters(function))


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
    counted = folders()
    fullest = max(counted, key=lambda folder: (counted[folder], folder))
    print(line(["modules in the fullest folder", str(counted[fullest]), fullest]))
    print(line(["modules at the top", str(counted["tfckpt"]), "tfckpt"]))
    public = public_functions()
    print(line(["public functions with documented parameters",
                f"{sum(map(is_documented, public))} of {len(public)}", ""]))
    lines = lines_by_folder()
    print(line(["code lines", str(sum(lines.values())),
                ", ".join(f"{folder} {count}" for folder, count in lines.items())]))


if __name__ == "__main__":
    main()
