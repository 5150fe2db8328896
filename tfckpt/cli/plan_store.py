"""`tfckpt cache list | clear`: what the plan store keeps. TensorFlow is not loaded."""

from __future__ import annotations

import json
import pathlib
import time

from tfckpt.cli.arguments import Request
from tfckpt.cli.output import table
from tfckpt.request.budget import format_bytes
from tfckpt.store import files

_COLUMNS = ["used", "size", "step", "operations", "budget", "device", "planned peak"]
_AGES = ((86400, "d"), (3600, "h"), (60, "min"), (1, "s"))


def run(request: Request) -> int:
    """Run the command; 0 on success.

    Args:
      request: the parsed command line; its one path is "list" or "clear".

    Returns:
      The exit status of the process.
    """
    where, as_json = files.folder(), bool(request.json)
    if request.paths[0] == "list":
        print(_as_json(where) if as_json else _as_table(where))
        return 0
    gone, size = (0, 0) if where is None else files.clear(where)
    if as_json:
        print(json.dumps({"folder": _named(where), "removed": gone, "bytes": size}, indent=2))
    else:
        print(f"removed {_count(gone)}, {format_bytes(size)}" if where else _off())
    return 0


def _as_json(where: pathlib.Path | None) -> str:
    found = [] if where is None else files.kept(where)
    return json.dumps({"folder": _named(where), "plans": [
        {"key": file.path.stem, "bytes": file.bytes, "used": file.used, **file.head}
        for file in found]}, indent=2)


def _as_table(where: pathlib.Path | None) -> str:
    """Return a line for each plan, the latest used first, and one for all."""
    if where is None:
        return _off()
    found, now = files.kept(where), time.time()
    rows = [[_age(now - file.used), format_bytes(file.bytes), *_said(file)] for file in found]
    total = f"{_count(len(found))}, {format_bytes(sum(f.bytes for f in found))} in {where}"
    return "\n".join([*([table(_COLUMNS, rows)] if rows else []), total])


def _said(file: files.Kept) -> list[str]:
    """Return what the head of a file says of its plan; dashes for what it does not say."""
    head = file.head
    operations, plain, planned = (
        head.get(name) for name in ("ops", "plain_bytes", "planned_bytes"))
    peak = "-"
    if isinstance(plain, int) and isinstance(planned, int):
        peak = f"{format_bytes(planned)} of {format_bytes(plain)}"
    return [str(head.get("step", "-")),
            f"{operations:,}" if isinstance(operations, int) else "-",
            str(head.get("budget", "-")), str(head.get("device", "-")),
            str(head.get("kind", peak if head.get("applied", True) else "left as it is"))]


def _age(seconds: float) -> str:
    """Return a time in its largest unit."""
    size, unit = next(((size, unit) for size, unit in _AGES if seconds >= size), (1, "s"))
    return f"{max(0, int(seconds / size))} {unit} ago"


def _count(number: int) -> str:
    return f"{number} plan{'s' * (number != 1)}"


def _named(where: pathlib.Path | None) -> str | None:
    return None if where is None else str(where)


def _off() -> str:
    return f"the plan store is switched off ({files.VARIABLE}=off)"
