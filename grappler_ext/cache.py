"""Checks of files in the cache: only whole ones that nobody else could have put there are loaded.

A library runs with all the rights of the process that loads it. So file and folder have to belong
to the user, or to root, and others must not be able to write them. A file cut short would end the
process when it is loaded; so beside each library lies what it has to hash to.
"""

from __future__ import annotations

import hashlib
import os
import pathlib
import stat

_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH


def may_be_loaded(library: pathlib.Path) -> bool:
    """Return whether a library is whole, and the user's or root's alone, with its folder.

    Args:
      library: path of the library; its seal lies beside it.
    """
    seal = _seal_of(library)
    try:
        return (all(_is_safe(os.lstat(path)) for path in (library, seal))
                and _is_safe(os.stat(library.parent))
                and seal.read_text() == _digest(library))
    except OSError:
        return False


def put(built: pathlib.Path, library: pathlib.Path) -> None:
    """Move a library that was just built to its place, and seal it.

    Args:
      built: path of the library that was just built; its folder is on the same file system.
      library: path of its place; one that is there is replaced.

    Raises:
      OSError: it cannot be moved.
    """
    seal = built.with_name("seal")
    seal.write_text(_digest(built))
    built.chmod(0o755)
    seal.chmod(0o644)
    os.replace(seal, _seal_of(library))
    os.replace(built, library)


def make_folder(folder: pathlib.Path) -> None:
    """Make a folder that the user alone can write; one of the user's own is made so.

    Args:
      folder: path; those above it are made, too.

    Raises:
      PermissionError: it belongs to somebody else.
      OSError: it cannot be made.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = os.stat(folder)
    if not _is_safe(found) and found.st_uid == os.geteuid():
        folder.chmod(stat.S_IMODE(found.st_mode) & ~_BY_OTHERS)
    elif not _is_safe(found):
        raise PermissionError(f"it belongs to user {found.st_uid}, who could put anything there")


def _is_safe(found: os.stat_result) -> bool:
    return (found.st_uid in (0, os.geteuid()) and not found.st_mode & _BY_OTHERS
            and not stat.S_ISLNK(found.st_mode))


def _seal_of(library: pathlib.Path) -> pathlib.Path:
    return library.with_suffix(".sha256")


def _digest(library: pathlib.Path) -> str:
    return hashlib.sha256(library.read_bytes()).hexdigest()
