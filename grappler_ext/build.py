"""Builds the native part, once for each TensorFlow, compiler and source.

    python -m grappler_ext.build [--force]

The library lies in a cache of the user's (`$XDG_CACHE_HOME/tfckpt`, by default
`~/.cache/tfckpt`), under a name that changes with everything it was made from. One that is broken,
or that others could have put there, is built anew.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import pathlib
import shlex
import shutil
import subprocess
import sys
import tempfile

from grappler_ext import cache
from tfckpt.common.messages import say

SOURCE = pathlib.Path(__file__).parent / "pass" / "tfckpt_optimizer.cc"
COMPILER = "CXX"
"""The environment variable that names another compiler than g++, with arguments if need be."""

FLAGS = ("-O1", "-g0")


class BuildError(RuntimeError):
    """The native part cannot be built here; all of `tfckpt` works without it."""


def shared_object(force: bool = False, flags: tuple[str, ...] = FLAGS) -> pathlib.Path:
    """Return the built library, built first if need be.

    Processes that ask at the same time wait for one of them to build it.

    Args:
      force: whether to build what is there already.
      flags: for the compiler; each choice has a library of its own.

    Raises:
      BuildError: no compiler, no headers, a compiler that fails, or a cache that cannot be
        written or belongs to somebody else; says what to do.
    """
    found, version = compiler()
    target = _cache() / f"tfckpt_optimizer-{_key(version, (*found[1:], *flags))}.so"
    if cache.may_be_loaded(target) and not force:
        return target
    try:
        cache.make_folder(target.parent)
        with open(target.with_suffix(".lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if force or not cache.may_be_loaded(target):
                _build(found, flags, target)
    except OSError as error:
        raise BuildError(f"grappler_ext: {target.parent} cannot be used ({error}); name "
                         "another folder in XDG_CACHE_HOME") from error
    return target


def _cache() -> pathlib.Path:
    try:
        base = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    except RuntimeError as error:
        raise BuildError("grappler_ext: this user has no home folder for a cache; name a folder "
                         "in XDG_CACHE_HOME") from error
    return pathlib.Path(base) / "tfckpt"


def compiler() -> tuple[list[str], str]:
    """Return the compiler's command and what it calls itself.

    Raises:
      BuildError: there is none, or it cannot be run.
    """
    given = os.environ.get(COMPILER, "")
    try:
        command = shlex.split(given) or ["g++"]
        if shutil.which(command[0]) is None:
            raise BuildError(f"grappler_ext: no compiler {command[0]!r}; install g++ (Debian: apt "
                             f"install g++) or name one in {COMPILER}. The decorator needs none")
        said = subprocess.run([*command, "--version"], capture_output=True, text=True, check=False)
    except (OSError, ValueError) as error:
        raise BuildError(f"grappler_ext: {COMPILER}={given!r} cannot be run ({error}); name "
                         "another compiler there") from error
    return command, said.stdout.partition("\n")[0]


def _key(version: str, flags: tuple[str, ...]) -> str:
    import tensorflow as tf

    made_from = [tf.__version__, *tf.sysconfig.get_compile_flags(), version, *flags,
                 SOURCE.read_text()]
    return hashlib.sha256("\0".join(made_from).encode()).hexdigest()[:16]


def _build(program: list[str], flags: tuple[str, ...], target: pathlib.Path) -> None:
    """Compile beside the target and renames, so that no half-written library is loaded."""
    import tensorflow as tf

    headers = pathlib.Path(tf.sysconfig.get_include()) / "tensorflow/core/grappler"
    if not headers.is_dir():
        raise BuildError(f"grappler_ext: TensorFlow {tf.__version__} here has no C++ headers "
                         f"({headers}); install the wheel from the package index")
    folder = tf.sysconfig.get_lib()
    say("building the native pass, some 20 seconds, once")
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        made = pathlib.Path(scratch) / target.name
        command = [*program, *flags, "-w", "-shared", "-fPIC", str(SOURCE), "-o", str(made),
                   *tf.sysconfig.get_compile_flags(), f"-L{folder}", f"-Wl,-rpath,{folder}",
                   "-l:libtensorflow_framework.so.2", "-l:libtensorflow_cc.so.2"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise BuildError("grappler_ext: the compiler failed; a C++17 compiler such as g++ 9 or "
                             f"newer is needed\n{' '.join(command)}\n{done.stderr[-2000:]}")
        cache.put(made, target)


def main() -> int:
    """Build and print the path."""
    if "--help" in sys.argv[1:]:
        print((__doc__ or "").strip())
        return 0
    unknown = [a for a in sys.argv[1:] if a != "--force"]
    if unknown:
        print(f"usage: python -m grappler_ext.build [--force]; not {unknown[0]!r}",
              file=sys.stderr)
        return 2
    try:
        print(shared_object(force="--force" in sys.argv[1:]))
    except BuildError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
