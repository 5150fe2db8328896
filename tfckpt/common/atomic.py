"""Files that are written whole or not at all."""

from __future__ import annotations

import contextlib
import os
import pathlib
import tempfile
from collections.abc import Iterator


@contextlib.contextmanager
def staged(path: str, data: bytes) -> Iterator[pathlib.Path]:
    """Write data into a file beside a path, and yield that file; it is gone if nobody moves it.

    Args:
      path: where the file is wanted; its folder must exist, and it is written there.
      data: all bytes of the file.

    Raises:
      OSError: it cannot be written.
    """
    target = pathlib.Path(path).absolute()
    if not target.parent.is_dir():
        raise FileNotFoundError(f"{str(target.parent)!r} is no directory; make it first")
    number, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    temporary = pathlib.Path(name)
    try:
        with open(number, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.chmod(0o666 & ~_umask())
        yield temporary
    finally:
        temporary.unlink(missing_ok=True)


def write(path: str, data: bytes) -> None:
    """Write a file, in the place of another of that name.

    Args:
      path: where the file is wanted; its folder must exist.
      data: all bytes of the file.

    Raises:
      OSError: it cannot be written; what was there before is left.
    """
    with staged(path, data) as temporary:
        os.replace(temporary, path)


def _umask() -> int:
    current = os.umask(0)
    os.umask(current)
    return current
