"""Atomic writes, tables, and progress on a terminal."""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import pathlib
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence

from tfckpt.cli import quiet_import
from tfckpt.common import atomic
from tfckpt.errors import RewriteError

_MAIN_FILES = ("saved_model.pb", "saved_model.pbtxt")


def check_target(path: str, *, directory: bool, force: bool) -> None:
    """Refuse an output path that cannot be written, before any work is done.

    Args:
      path: of the output.
      directory: whether the output is a SavedModel, which is a directory, and not a file.
      force: whether an output that exists may be replaced.

    Raises:
      RewriteError: it exists (and `force` is off), is of the other kind, or its folder is
        missing or closed to us.
    """
    target = pathlib.Path(path)
    parent = target.absolute().parent
    if not parent.is_dir():
        raise RewriteError(f"rewrite: {str(parent)!r} is no directory; make it first")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise RewriteError(f"rewrite: {str(parent)!r} cannot be written to; check its permissions")
    if not (target.exists() or target.is_symlink()):
        return
    if not force:
        raise RewriteError(f"rewrite: {path!r} exists; pass --force to replace it")
    if directory and not any((target / name).is_file() for name in _MAIN_FILES):
        raise RewriteError(f"rewrite: {path!r} is no SavedModel, so it is not replaced by one; "
                           "choose another path")
    if not directory and target.is_dir():
        raise RewriteError(f"rewrite: {path!r} is a directory, so it is not replaced by a file; "
                           "choose another path")


def write_file(path: str, data: bytes, *, force: bool) -> None:
    """Write a file whole or not at all.

    Args:
      path: of the output.
      data: the whole content of the file.
      force: whether an output that exists may be replaced.

    Raises:
      RewriteError: see `check_target`.
      OSError: it cannot be written.
    """
    with staged_file(path, data, force=force) as put_in_place:
        put_in_place()


@contextlib.contextmanager
def staged_file(path: str, data: bytes, *, force: bool) -> Iterator[Callable[[], None]]:
    """Write a file beside `path`; the function that it gives moves it there.

    Outputs that belong together are staged first and moved then, so that a full disk leaves
    none of them.

    Args:
      path: of the output.
      data: the whole content of the file.
      force: whether an output that exists may be replaced.

    Yields:
      A function without parameters that puts the file in place, to be called within the context.

    Raises:
      RewriteError: see `check_target`.
      OSError: it cannot be written.
    """
    check_target(path, directory=False, force=force)
    target = pathlib.Path(path).absolute()
    with atomic.staged(path, data) as temporary:
        yield functools.partial(os.replace if force else _move_new, temporary, target)


def _move_new(temporary: pathlib.Path, target: pathlib.Path) -> None:
    """Move a file to a name that must still be free."""
    try:
        os.link(temporary, target)
    except FileExistsError:
        raise RewriteError(f"rewrite: {str(target)!r} exists by now; pass --force to replace "
                           "it") from None
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EMLINK):
            raise
        os.rename(temporary, target)  # a file system without hard links


@contextlib.contextmanager
def staged_saved_model(path: str, like: str, main: bytes, *,
                       force: bool) -> Iterator[Callable[[], None]]:
    """Write a SavedModel beside `path`, that of `like` with other graphs; see `staged_file`.

    Args:
      path: of the output, a directory.
      like: the SavedModel that is copied but for its graphs.
      main: the SavedModel message with the other graphs, serialized as that of `like` is.
      force: whether an output that exists may be replaced.

    Yields:
      A function without parameters that puts the SavedModel in place, to be called within the
      context.

    Raises:
      RewriteError: see `check_target`; `like` itself is read before `path` is replaced.
      OSError: it cannot be written.
    """
    check_target(path, directory=True, force=force)
    source, target = pathlib.Path(like).absolute(), pathlib.Path(path).absolute()
    if source.resolve() in target.resolve().parents:
        raise RewriteError(f"rewrite: {path!r} lies inside {like!r}; choose another path")
    name = next(name for name in _MAIN_FILES if (source / name).is_file())
    around = pathlib.Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name}."))
    try:
        made = around / "new"
        try:
            shutil.copytree(source, made, ignore=lambda folder, _: (
                # what was computed from the old graphs no longer describes the new ones
                [name, "fingerprint.pb"] if pathlib.Path(folder) == source else []))
        except shutil.Error as error:  # one entry for each file
            raise OSError(error.args[0][0][2]) from error
        (made / name).write_bytes(main)
        yield functools.partial(_swap, made, target, around / "old")
    finally:
        shutil.rmtree(around, ignore_errors=True)


def _swap(made: pathlib.Path, target: pathlib.Path, old: pathlib.Path) -> None:
    """Move a directory to a path, and what is there out of the way."""
    if target.exists():
        os.rename(target, old)
    try:
        os.rename(made, target)
    except OSError:
        if old.exists():
            os.rename(old, target)
        raise


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return rows under a header: the first column to the left, the others to the right.

    Args:
      header: one text for each column.
      rows: the cells, as many in each row as the header has.
    """
    lines = [list(header), *(list(row) for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    return "\n".join("  ".join(
        cell.ljust(width) if i == 0 else cell.rjust(width)
        for i, (cell, width) in enumerate(zip(line, widths, strict=True))).rstrip()
        for line in lines)


LONG = 2.0
"""Seconds after which work is said to be going on, where there is no terminal to show it on."""


@contextlib.contextmanager
def progress(what: str) -> Iterator[None]:
    """Say on standard error what takes long.

    A terminal shows for how long already, until it is done; elsewhere there is a line after
    `LONG` seconds, and one with the time that it took, unless `TF_CPP_MIN_LOG_LEVEL` asks for
    silence.

    Args:
      what: is being done, as a person reads it, such as "reading model.pb".

    Yields:
      Nothing; what takes long is done within the context.
    """
    terminal = sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
    done = threading.Event()
    thread = threading.Thread(target=_count if terminal else _announce, args=(what, done),
                              daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _count(what: str, done: threading.Event) -> None:
    """Show seconds on a line of a terminal, and clear it."""
    started = time.monotonic()
    while not done.wait(0.5):
        _message(f"\r{what} ... {time.monotonic() - started:.0f} s", end="")
    _message("\r\033[K", end="")


def _announce(what: str, done: threading.Event) -> None:
    """Write a line once it takes long, and another at its end."""
    started = time.monotonic()
    if not done.wait(LONG) and not quiet_import.SILENCED:
        _message(f"tfckpt: {what} ...")
        done.wait()
        _message(f"tfckpt: {what} took {time.monotonic() - started:.0f} s")


def _message(text: str, end: str = "\n") -> None:
    with contextlib.suppress(OSError):  # nobody listens: no reason to stop the work
        print(text, end=end, file=sys.stderr, flush=True)
