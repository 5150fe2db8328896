"""The Keras layers that a training step may call: those that its function can reach."""

from __future__ import annotations

import functools
import types
from collections.abc import Iterable, Iterator
from typing import Any

from absl import logging

from tfckpt.capture import tf_adapter

_MOST = 2000
"""Objects that are looked at."""
_DEEPEST = 4
_DEEPEST_LAYER = 20
_LIBRARIES = ("builtins", "tensorflow", "numpy", "keras", "tf_keras", "tfckpt")
"""Packages whose objects are not searched for layers."""


def layer_names(objects: Iterable[object]) -> tuple[str, ...]:
    """Return the names of layers, and of those inside of them, ascending.

    Args:
      objects: layers and models, or what holds some: functions, by what they refer to, methods,
        containers, objects by their attributes.
    """
    return tuple(sorted({inside.name for layer in _layers(objects)
                         for inside in tf_adapter.layers_in(layer)}))


def with_paths(patterns: Any, model: Any) -> Any:
    """Return patterns of layers and ops with the paths of layers in the place of layers.

    Args:
      patterns: what `keep=` and `recompute=` take: a name or a layer, or several.
      model: in which the layers are looked for; one that is not in it is left as it is.
    """
    several = patterns if isinstance(patterns, list | tuple | set | frozenset) else [patterns]
    if not any(map(tf_adapter.layers_in, several)):
        return patterns
    return [found for pattern in several
            for found in (list(_paths(model, pattern)) if tf_adapter.layers_in(pattern) else ())
            or [pattern]]


def _paths(around: Any, layer: Any, names: tuple[str, ...] = ()) -> Iterator[str]:
    """Yield the names, from the outermost on, of the layers around a layer, and its own."""
    names = (*names, around.name)
    if around is layer:
        yield "/".join(names)
    elif len(names) <= _DEEPEST_LAYER:
        for inside in tf_adapter.layers_directly_in(around):
            yield from _paths(inside, layer, names)


def _layers(objects: Iterable[object]) -> Iterator[Any]:
    """Return the outermost layers that objects lead to, breadth-first."""
    seen: dict[int, object] = {}
    level = list(objects)
    for _ in range(_DEEPEST):
        following: list[object] = []
        for each in level:
            if id(each) in seen or len(seen) > _MOST:
                continue
            seen[id(each)] = each
            try:
                if tf_adapter.layers_in(each):
                    yield each
                else:  # not +=, which is another's where that is a proxy
                    following.extend(_held(each))
            except Exception as error:  # whatever objects of others do when they are asked
                logging.debug("tfckpt: no layers are looked for in %s: %s", type(each), error)
        level = following


def _held(each: Any) -> Iterable[object]:
    """Return what an object refers to by itself."""
    if isinstance(each, dict):  # other mappings may have to read what they hold
        return each.values()
    if isinstance(each, list | tuple | set | frozenset):
        return each
    if isinstance(each, types.MethodType):
        return (each.__self__, each.__func__)
    if isinstance(each, types.FunctionType):
        return _referred(each)
    if isinstance(each, functools.partial):
        return (each.func, *each.args, *each.keywords.values())
    if tf_adapter.is_tf_function(each):
        return (each.python_function,)
    if isinstance(each, type | types.ModuleType) or (
            str(type(each).__module__).partition(".")[0] in _LIBRARIES):
        return ()
    return getattr(each, "__dict__", {}).values()


def _referred(function: types.FunctionType) -> Iterator[object]:
    """Return the values of a function's free variables, globals and defaults."""
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # it has no value yet
            continue
    yield from function.__defaults__ or ()
    yield from (function.__globals__[name] for name in _global_names(function.__code__)
                if name in function.__globals__)


def _global_names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield from _global_names(inner)
