"""The user's policies for single layers and ops: which are kept, and which are recomputed.

A pattern names layers or ops as `keras.RematScope` names layers and JAX's checkpoint policies name
values. What patterns decide becomes part of the captured graph (`tfckpt.ir.graph.Op.policy`), so
that costs, plans and the plan store read it there.
"""

from __future__ import annotations

import dataclasses
import difflib
import fnmatch
import functools
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tfckpt.errors import PlanError
from tfckpt.ir.edits import traced
from tfckpt.ir.graph import FORWARD, KEEP, RECOMPUTE, Graph
from tfckpt.ir.layers import UNKNOWN, LayerNames
from tfckpt.ops import record

_NEAR = 5
"""Names that an error lists."""
_EXACTLY = "="
"""Before a pattern that takes no numbered scopes."""
_NUMBER = re.compile(r"_[0-9]+$")


def parse_patterns(option: str, given: Any) -> tuple[str, ...]:
    """Return the patterns of an option.

    Args:
      option: its name, for the error.
      given: None, a pattern, or several; a Keras layer stands for its path, or its name.

    Raises:
      PlanError: something else.
    """
    if given is None:
        return ()
    patterns = given if isinstance(given, Iterable) and not isinstance(
        given, str | bytes | dict) else (given,)
    found: tuple[Any, ...] = tuple(map(_path, patterns))
    if not all(isinstance(pattern, str) and pattern.strip("/") for pattern in found):
        raise PlanError(f"plan: {option}={given!r} must be a name of a layer or an op, or a list "
                        'of such; * and ? stand for other letters: "dense_1", "block*/relu"')
    return found


def _path(pattern: Any) -> Any:
    """Return the path of a Keras layer, or its name where it is not built; else what is given."""
    return getattr(pattern, "path", None) or getattr(pattern, "name", pattern)


def with_policy(graph: Graph, keep: Sequence[str], recompute: Sequence[str],
                layers: LayerNames = UNKNOWN) -> Graph:
    """Return a graph whose forward ops know what is asked of them.

    Args:
      graph: the step as captured.
      keep: patterns of what is never computed again.
      recompute: patterns of what the backward pass computes again instead of keeping it.
      layers: the step's Keras layers, where they are known.

    Raises:
      PlanError: a pattern matches nothing in the forward pass, or an op matches one of each.
    """
    if not keep and not recompute:
        return graph
    ops = {i: op.name for i, op in enumerate(graph.ops)
           if op.region == FORWARD and record(op.type).source is None}
    asked: dict[int, tuple[str, str]] = {}
    for option, patterns in ((KEEP, keep), (RECOMPUTE, recompute)):
        for pattern in patterns:
            for i in _matching(option, pattern, ops, layers):
                other, why = asked.setdefault(i, (option, pattern))
                if other != option:
                    where = layers.layer(ops[i]) if layers.layers else layers.shown(ops[i])
                    raise PlanError(f"plan: {where!r} matches {other}={why!r} and "
                                    f"{option}={pattern!r}; leave it out of one of them")
    return dataclasses.replace(graph, ops=tuple(
        dataclasses.replace(op, policy=asked[i][0]) if i in asked else op
        for i, op in enumerate(graph.ops)))


def matched(pattern: str, name: str, numbered: bool = False) -> str:
    """Return which parts of an op's name, one after the other, are as a pattern says; "" if none.

    Parts stand between slashes: "dense" names all ops of a layer "dense", wherever it is.

    Args:
      pattern: parts between slashes, in each of which * and ? stand for other letters.
      name: of an op, with its scopes.
      numbered: whether parts may end in a number besides, as in "dense_1": TensorFlow numbers a
        scope that is opened again, which Keras does for each layer.
    """
    expressions, parts = _expressions(pattern), name.split("/")
    for start in range(len(parts) - len(expressions) + 1):
        found = parts[start:start + len(expressions)]
        if all(e.match(part) or numbered and e.match(_NUMBER.sub("", part))
               for e, part in zip(expressions, found, strict=True)):
            return "/".join(found)
    return ""


@functools.cache
def _expressions(pattern: str) -> tuple[re.Pattern[str], ...]:
    """Return a pattern's parts, compiled once for all names."""
    return tuple(re.compile(fnmatch.translate(part)) for part in pattern.strip("/").split("/"))


def _matching(option: str, pattern: str, ops: Mapping[int, str], layers: LayerNames) -> list[int]:
    """Return the ops whose names a pattern matches.

    Their names are those that reports show, where the step's layers are known; else TensorFlow's,
    with numbered scopes where no other is meant.

    Raises:
      PlanError: there are none, or several scopes of which the pattern does not say which is meant.
    """
    shown = {i: layers.shown(name) for i, name in ops.items()}
    exactly = pattern.startswith(_EXACTLY)
    found = [] if exactly or not layers.layers else _those(pattern, shown)
    found = found or _in_scopes(option, pattern, {i: traced(name) for i, name in ops.items()})
    if not found:
        if pattern in layers.layers:
            raise PlanError(f"plan: {option}={pattern!r}: that layer has no operation in the "
                            f"forward pass of this step; leave it out of {option}=")
        raise PlanError(f"plan: {option}={pattern!r} matches no layer and no op of the forward "
                        f"pass; there are {_near(pattern, shown, layers)}")
    return found


def _those(pattern: str, names: Mapping[int, str]) -> list[int]:
    return [i for i, name in names.items() if matched(pattern, name)]


def _in_scopes(option: str, pattern: str, names: Mapping[int, str]) -> list[int]:
    """Return the ops whose scopes a pattern matches; those of numbered ones where no other is.

    Raises:
      PlanError: there are both, and the pattern does not say which are meant.
    """
    exactly = pattern.startswith(_EXACTLY)
    pattern = pattern.removeprefix(_EXACTLY)
    same = _those(pattern, names)
    if exactly or same and any(letter in pattern for letter in "*?["):
        return same
    exact = frozenset(same)
    again = {i: found for i, name in names.items()
             if i not in exact and (found := matched(pattern, name, numbered=True))}
    if same and again:
        others = ", ".join(map(repr, dict.fromkeys(again.values())))
        raise PlanError(f"plan: {option}={pattern!r} may be the scope of that name or {others}, as "
                        "TensorFlow numbers scopes that are opened again (a Keras layer's ops are "
                        f"in a numbered one); write the latter, or '={pattern}' for the former")
    return same or list(again)


def _near(pattern: str, shown: Mapping[int, str], layers: LayerNames) -> str:
    """Return the names that are most like a pattern, in words: layers first.

    Of a pattern with slashes they are paths of layers, where one is like it.
    """
    paths = list(dict.fromkeys(map(layers.path, shown.values())))
    near = _close(pattern, paths, 0.6) if "/" in pattern else []
    parts = sorted(dict.fromkeys(part for name in shown.values() for part in name.split("/")),
                   key=lambda part: part not in layers.layers)
    wanted = max(pattern.strip("/").split("/"), key=len)
    near = near or list(dict.fromkeys([*_close(wanted.strip("*?"), parts, 0.4), *parts]))[:_NEAR]
    more = len(parts) - len(near)
    return ", ".join(map(repr, near)) + (f" and {more} more names" if more > 0 else "")


def _close(wanted: str, names: Sequence[str], cutoff: float) -> list[str]:
    """Return the names that are most like what is wanted, in capitals or not."""
    spelt: dict[str, list[str]] = {}
    for name in names:
        spelt.setdefault(name.lower(), []).append(name)
    near = difflib.get_close_matches(wanted.lower(), spelt, _NEAR, cutoff)
    return [name for one in near for name in spelt[one]][:_NEAR]
