"""`TFCKPT_DUMP=dir`: everything that was decided about each step, for a bug report.

Each step gets a folder of its own: `graph.json` (the step as captured), `options.json`,
`plans.json`, `edits.json`, `compiled.json` (what XLA answered), `versions.json`, `report.txt`, and
`graph.pb`, TensorFlow's own graph before it was edited. `tfckpt replay FOLDER` plans the captured
step again and says whether the same comes out.
"""

from __future__ import annotations

import base64
import dataclasses
import itertools
import json
import os
import pathlib
import platform
import re
import tempfile
from collections.abc import Mapping
from importlib import metadata
from typing import Any

from absl import logging

import tfckpt
from tfckpt.errors import CaptureError
from tfckpt.ir import edits, graph, hlo, schedule, target
from tfckpt.request import budget, device_budgets, options

FORMAT = 1
_MODULES = (graph, options, budget, device_budgets, target, schedule, edits, hlo)
_CLASSES: dict[str, Any] = {
    name: kind for module in _MODULES for name, kind in sorted(vars(module).items())
            if dataclasses.is_dataclass(kind) and kind.__module__ == module.__name__}
_PACKAGES = ("tensorflow", "keras", "numpy", "networkx", "absl-py")
_numbers = itertools.count(1)


def folder() -> str:
    """Return the folder that dumps go to; "" where none are asked for."""
    return os.environ.get("TFCKPT_DUMP", "").strip()


def write(name: str, files: Mapping[str, bytes]) -> pathlib.Path:
    """Write the dump of a step, whole or not at all, and return its folder.

    Args:
      name: of the step; the folder's name begins with it.
      files: their contents, by name.
    """
    above = pathlib.Path(folder())
    above.mkdir(parents=True, exist_ok=True)
    readable = re.sub(r"[^A-Za-z0-9_.-]+", "_", name)[:60] or "step"
    target_folder = above / f"{readable}-{os.getpid()}-{next(_numbers)}"
    with tempfile.TemporaryDirectory(dir=above, prefix=".tfckpt.") as around:
        made = pathlib.Path(around) / "new"
        made.mkdir()
        for file, data in files.items():
            (made / file).write_bytes(data)
        made.rename(target_folder)
    return target_folder


def write_or_say(name: str, files: Mapping[str, bytes]) -> None:
    """Write a dump, and say where, or why not; a full disk does not end the training.

    Args:
      name: of the step; the folder's name begins with it.
      files: their contents, by name.
    """
    try:
        where = write(name, files)
    except OSError as error:
        logging.warning("tfckpt: %s is not dumped: %s", name, error)
    else:
        logging.info("tfckpt: %s is dumped to %s", name, where)


def definition_of(name: str, live: Any) -> bytes:
    """Return TensorFlow's graph of a step, before it is edited; empty where none can be written.

    Args:
      name: of the step, for the message.
      live: TensorFlow's graph of the step, as it was captured; None where there is none.

    Returns:
      A serialized GraphDef.
    """
    try:
        return b"" if live is None else live.as_graph_def().SerializeToString()
    except ValueError as error:  # more than a protobuf message can have
        logging.warning("tfckpt: %s is not dumped: %s", name, error)
        return b""


def to_json(value: Any) -> bytes:
    """Return a value of ours as JSON, with a format version.

    Args:
      value: of basic types, sequences, mappings and our dataclasses; of all else its text is kept.
    """
    return json.dumps({"format": FORMAT, "value": _encoded(value)}, indent=1).encode()


def from_json(data: bytes, source: str = "a dump") -> Any:
    """Return the value that `to_json` wrote.

    Args:
      data: what `to_json` returned.
      source: what the data was read from, for the message.

    Raises:
      CaptureError: it is none, or of another version.
    """
    try:
        read = json.loads(data)
        if read["format"] != FORMAT:
            raise CaptureError(f"capture: {source!r} has format {read['format']}, this tfckpt "
                               f"reads {FORMAT}; replay it with the version that wrote it")
        return _decoded(read["value"])
    except (ValueError, KeyError, TypeError) as error:
        raise CaptureError(f"capture: {source!r} is no dump of tfckpt: {error}") from error


def versions() -> dict[str, str]:
    """Return the versions of what took part."""
    found = {"tfckpt": tfckpt.__version__, "python": platform.python_version(),
             "platform": platform.platform()}
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found


def _encoded(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, tuple | list):
        return [_encoded(entry) for entry in value]
    if isinstance(value, bytes):
        return {"bytes": base64.b64encode(value).decode()}
    if isinstance(value, Mapping):
        return {"map": [[_encoded(k), _encoded(v)] for k, v in value.items()]}
    if type(value).__name__ in _CLASSES:
        return {"is": type(value).__name__,
                **{field.name: _encoded(getattr(value, field.name))
                   for field in dataclasses.fields(value)}}
    return {"text": str(value)}


def _decoded(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(_decoded(entry) for entry in value)
    if not isinstance(value, dict):
        return value
    if "is" in value:
        fields = {key: _decoded(entry) for key, entry in value.items() if key != "is"}
        return _CLASSES[value["is"]](**fields)
    if "map" in value:
        return {_decoded(k): _decoded(v) for k, v in value["map"]}
    if "bytes" in value:
        return base64.b64decode(value["bytes"])
    return value["text"]
