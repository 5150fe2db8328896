"""The files of the plan store: two lines of JSON for each plan, in the user's cache directory.

The first line says what the plan is of, the second is the plan. A file is written beside its place
and moved there, so that it is there whole or not at all, even if other processes write it too. All
files together are bounded in size; those that have not been used for longest go first. What cannot
be read or written is no error: a step whose plan is not here is planned.

`TFCKPT_CACHE` names another folder, or is `off`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import pathlib
import re
import tempfile
import time
from collections.abc import Callable, Mapping
from typing import Any

from absl import logging

VARIABLE = "TFCKPT_CACHE"
FORMAT = 5
"""Of the files: one of another format is not read."""
MOST_BYTES = 256 << 20
LOWERED = 0.9
"""Of the most, what the files take after some had to go: not each new one has others go."""
_NAME = re.compile(r"[0-9a-f]{64}\.jsonl")
_UNFINISHED = ".tfckpt."
_ABANDONED = 3600.0
"""Seconds after which nobody writes an unfinished file any more."""


@dataclasses.dataclass(frozen=True)
class Kept:
    """A file of the store.

    Attributes:
      bytes: its size.
      used: when it was last written or read, in seconds since the epoch.
      head: what its plan is of; empty where that cannot be read.
    """

    path: pathlib.Path
    bytes: int
    used: float
    head: Mapping[str, Any]


def folder() -> pathlib.Path | None:
    """Return where plans are kept; None where they are not."""
    given = os.environ.get(VARIABLE, "").strip()
    if given.lower() in ("off", "0", "false"):
        return None
    if given and given.lower() not in ("on", "1", "true"):  # which are not meant as folders
        return pathlib.Path(os.path.abspath(os.path.expanduser(given)))
    base = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(base):  # which its specification has ignored
        base = os.path.join(os.path.expanduser("~"), ".cache")
    return pathlib.Path(base, "tfckpt", "plans") if os.path.isabs(base) else None


def read(where: pathlib.Path, key: str) -> tuple[dict, Any] | None:
    """Return head and plan of a key, and note that they were used; None where there is no plan.

    A damaged file is removed.

    Args:
      where: the folder of the store.
      key: hash of what the plan depends on, 64 hexadecimal digits.
    """
    path = _path(where, key)
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        logging.debug("tfckpt: %s cannot be read: %s", path, error)
        return None
    try:
        first, body = data.split(b"\n", 1)
        head = json.loads(first)
        if head["format"] != FORMAT or head["sha256"] != _digest(body):
            raise ValueError("not what was written")
        plan = json.loads(body)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        logging.info("tfckpt: %s is damaged and removed: %s", path, error)
        remove(where, key)
        return None
    with contextlib.suppress(OSError):
        os.utime(path)
    return head, plan


def write(where: pathlib.Path, key: str, head: Mapping[str, Any], plan: Any) -> None:
    """Keep a plan, and have others go where there is no room for all.

    Args:
      where: the folder of the store; made where it does not exist.
      key: hash of what the plan depends on, 64 hexadecimal digits; what is kept of it is replaced.
      head: what the plan is of, as JSON can write it.
      plan: what is kept, as JSON can write it.

    Raises:
      ValueError, TypeError: JSON cannot write head or plan.
    """
    body = json.dumps(plan, separators=(",", ":"), allow_nan=False).encode()
    first = json.dumps({"format": FORMAT, "sha256": _digest(body), **head}).encode()
    try:
        where.mkdir(mode=0o700, parents=True, exist_ok=True)
        number, unfinished = tempfile.mkstemp(dir=where, prefix=_UNFINISHED)
        try:
            with open(number, "wb") as file:
                file.write(first + b"\n" + body)
            os.replace(unfinished, _path(where, key))
        except BaseException:
            os.unlink(unfinished)
            raise
        _make_room(where)
    except OSError as error:
        logging.debug("tfckpt: no plan can be kept in %s: %s", where, error)


def remove(where: pathlib.Path, key: str) -> None:
    """Forget a plan.

    Args:
      where: the folder of the store.
      key: hash of what the plan depends on; nothing happens where nothing is kept of it.
    """
    with contextlib.suppress(OSError):
        _path(where, key).unlink()


def kept(where: pathlib.Path) -> list[Kept]:
    """Return the files of the store, the latest used first.

    Args:
      where: the folder of the store; it need not exist.
    """
    found = []
    for path in _paths(where):
        with contextlib.suppress(OSError):
            status = path.stat()
            found.append(Kept(path, status.st_size, status.st_mtime, _head(path)))
    return sorted(found, key=lambda file: (-file.used, file.path.name))


def clear(where: pathlib.Path) -> tuple[int, int]:
    """Forget all plans; return how many there were, and their bytes. Other files stay.

    Args:
      where: the folder of the store; it need not exist.
    """
    gone = [file for file in kept(where) if _unlinked(file.path)]
    for path in _unfinished(where):
        _unlinked(path)
    return len(gone), sum(file.bytes for file in gone)


def _make_room(where: pathlib.Path) -> None:
    for path in _unfinished(where):
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime > _ABANDONED:
                path.unlink()
    files = []
    for path in _paths(where):
        with contextlib.suppress(OSError):
            status = path.stat()
            files.append((status.st_mtime, path.name, status.st_size, path))
    total = sum(size for _, _, size, _ in files)
    if total <= MOST_BYTES:
        return
    for _, _, size, path in sorted(files)[:-1]:  # but for what was just written
        if total <= LOWERED * MOST_BYTES:
            break
        total -= size if _unlinked(path) else 0


def _path(where: pathlib.Path, key: str) -> pathlib.Path:
    return where / f"{key}.jsonl"


def _paths(where: pathlib.Path) -> list[pathlib.Path]:
    return _listed(where, lambda name: _NAME.fullmatch(name) is not None)


def _unfinished(where: pathlib.Path) -> list[pathlib.Path]:
    return _listed(where, lambda name: name.startswith(_UNFINISHED))


def _listed(where: pathlib.Path, wanted: Callable[[str], bool]) -> list[pathlib.Path]:
    try:
        return sorted(path for path in where.iterdir() if wanted(path.name))
    except OSError:  # there is no folder
        return []


def _head(path: pathlib.Path) -> dict[str, Any]:
    try:
        with open(path, "rb") as file:
            head = json.loads(file.readline())
        return head if isinstance(head, dict) else {}
    except (OSError, ValueError):
        return {}


def _unlinked(path: pathlib.Path) -> bool:
    try:
        path.unlink()
    except OSError:  # another process was faster, or may do what this one may not
        return False
    return True


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
