"""Small faults put into a module, one at a time: what `tests.mutation` runs the tests on.

A mutant is the module's source with one node of its syntax tree changed:

* a comparison moved by one or turned round, `in`, `is` and `==` negated;
* an integer one more, one less or twice as large, a float twice or half, True and False;
* an arithmetic operator, `and` and `or`, `min` and `max`, `any` and `all` for the other;
* a condition negated, a filter of a comprehension left out, `not`, a minus and `reversed` dropped;
* `sorted` in reverse or not at all, `key=` dropped;
* a statement left out; of a returned tuple, and of a call's first two arguments, the neighbour.

Annotations, docstrings, assertions, text of errors and decorators stay as they are.
"""

from __future__ import annotations

import ast
import copy
import dataclasses
from collections.abc import Iterator

_COMPARISONS = {
    ast.Lt: (ast.LtE, ast.GtE), ast.LtE: (ast.Lt, ast.Gt), ast.Gt: (ast.GtE, ast.LtE),
    ast.GtE: (ast.Gt, ast.Lt), ast.Eq: (ast.NotEq,), ast.NotEq: (ast.Eq,), ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,), ast.Is: (ast.IsNot,), ast.IsNot: (ast.Is,)}
_ARITHMETIC = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult,
    ast.Div: ast.Mult, ast.Mod: ast.Add, ast.LShift: ast.RShift, ast.RShift: ast.LShift,
    ast.BitOr: ast.BitAnd, ast.BitAnd: ast.BitOr, ast.Pow: ast.Mult}
_CALLS = {"min": "max", "max": "min", "any": "all", "all": "any"}
_DROPPED = (ast.Expr, ast.AugAssign, ast.Break, ast.Continue, ast.Delete, ast.Raise)


@dataclasses.dataclass(frozen=True)
class Mutant:
    """One fault.

    Attributes:
      function: dotted name of the function or class it is in, "" at the top level.
      line: of the original source.
      before, after: the changed node as source.
      source: the whole module.
    """

    function: str
    line: int
    before: str
    after: str
    source: str = dataclasses.field(repr=False)

    @property
    def key(self) -> str:
        """Return what names the mutant whatever line it is on."""
        return f"{self.function}: {self.before} -> {self.after}"


def mutants(source: str) -> list[Mutant]:
    """Return all mutants of a module, in the order of its lines."""
    tree = ast.parse(source)
    plain = ast.unparse(tree)
    found, seen = [], set()
    for function, node, parent, field, index in list(_places(tree)):
        for new in _changes(node):
            # a number alone says nothing
            shown = parent if isinstance(node, ast.Constant) else None
            before = ast.unparse(shown or node)
            mutated, after = _with(tree, parent, field, index, new, shown or new)
            if mutated != plain and mutated not in seen:
                seen.add(mutated)
                found.append(Mutant(function, node.lineno, before, after, mutated))
    return sorted(found, key=lambda m: m.line)


def _with(tree, parent, field, index, new, shown) -> tuple[str, str]:
    """Return the source of the tree and of a part of it with one node replaced; both stay as they
    are.
    """
    old = getattr(parent, field)
    setattr(parent, field, new if index is None else [*old[:index], new, *old[index + 1:]])
    try:
        return ast.unparse(ast.fix_missing_locations(tree)), ast.unparse(shown)
    finally:
        setattr(parent, field, old)


def _places(node, function="") -> Iterator[tuple[str, ast.AST, ast.AST, str, int | None]]:
    """(function, node, parent, field, index in the field) of all nodes that may change."""
    skipped = {"annotation", "returns", "decorator_list", "type_params", "exc"}
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        function = f"{function}.{node.name}".lstrip(".")
    for field, value in ast.iter_fields(node):
        if field in skipped:
            continue
        for index, child in enumerate(value if isinstance(value, list) else [value]):
            if not isinstance(child, ast.AST) or _stays(child):
                continue
            if hasattr(child, "lineno"):
                yield function, child, node, field, index if isinstance(value, list) else None
            yield from _places(child, function)


def _stays(node) -> bool:
    """Return whether a node is a docstring, an assertion, an import, or a string of its own."""
    text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    return text or isinstance(node, ast.Assert | ast.Import | ast.ImportFrom | ast.JoinedStr)


def _changes(node) -> Iterator[ast.AST]:
    """Yield what a node may become."""
    if isinstance(node, ast.Compare):
        for i, op in enumerate(node.ops):
            for new in _COMPARISONS[type(op)]:
                yield _replaced(node, ops=[*node.ops[:i], new(), *node.ops[i + 1:]])
    elif isinstance(node, ast.Constant):
        yield from (ast.Constant(value) for value in _constants(node.value))
    elif isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC:
        yield _replaced(node, op=_ARITHMETIC[type(node.op)]())
    elif isinstance(node, ast.BoolOp):
        yield _replaced(node, op=ast.And() if isinstance(node.op, ast.Or) else ast.Or())
        yield from (node.values if len(node.values) == 2 else ())
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not | ast.USub):
        yield node.operand
    elif isinstance(node, ast.Call):
        yield from _calls(node)
    elif isinstance(node, ast.If | ast.While | ast.IfExp):
        yield _replaced(node, test=ast.UnaryOp(ast.Not(), node.test))
    elif isinstance(node, ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp):
        yield from _unfiltered(node)
    elif isinstance(node, ast.Return) and isinstance(node.value, ast.Tuple):
        yield _replaced(node, value=ast.Tuple([*node.value.elts[1:], node.value.elts[0]],
                                              ast.Load()))
    if isinstance(node, _DROPPED):
        yield ast.Pass()
    elif isinstance(node, ast.Assign) and isinstance(
            node.targets[0], ast.Attribute | ast.Subscript | ast.Tuple):
        yield ast.Pass()


def _replaced(node, **fields):
    new = copy.copy(node)
    for field, value in fields.items():
        setattr(new, field, value)
    return new


def _constants(value) -> tuple:
    if isinstance(value, bool):
        return (not value,)
    if isinstance(value, int):
        return value + 1, value - 1, value * 2
    return (value * 2, value / 2) if isinstance(value, float) else ()


def _calls(node: ast.Call) -> Iterator[ast.AST]:
    name = node.func.id if isinstance(node.func, ast.Name) else ""
    if name in _CALLS:
        yield _replaced(node, func=ast.Name(_CALLS[name], ast.Load()))
    if name == "sorted":
        yield _replaced(node, keywords=[*node.keywords,
                                        ast.keyword("reverse", ast.Constant(True))])
        yield ast.Call(ast.Name("list", ast.Load()), node.args[:1], [])
    if name == "reversed":
        yield node.args[0]
    for i, keyword in enumerate(node.keywords):
        if keyword.arg == "key":
            yield _replaced(node, keywords=[*node.keywords[:i], *node.keywords[i + 1:]])
    if len(node.args) > 1 and name not in ("min", "max") and not any(
            isinstance(a, ast.Starred) for a in node.args[:2]):
        yield _replaced(node, args=[node.args[1], node.args[0], *node.args[2:]])


def _unfiltered(node) -> Iterator[ast.AST]:
    for i, part in enumerate(node.generators):
        for j in range(len(part.ifs)):
            new = _replaced(part, ifs=[*part.ifs[:j], *part.ifs[j + 1:]])
            yield _replaced(node, generators=[*node.generators[:i], new, *node.generators[i + 1:]])
