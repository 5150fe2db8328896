"""The command line: `tfckpt inspect | plan | rewrite | replay | compare | cache | completion`.

Results go to standard output, messages to standard error. Exit codes: 0 done, 1 could not,
2 usage, 130 interrupted, 143 terminated. TensorFlow is loaded only once the arguments are known to
be good, and nothing else before `main` runs, so that an interrupt is never a traceback.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
from collections.abc import Sequence

DONE, COULD_NOT, USAGE, INTERRUPTED, TERMINATED = 0, 1, 2, 130, 143
_LONGEST = 600
_AS_FLAGS = (
    (re.compile(r"pass batch_size=\.\.\. \(or [^)]*\)"), "pass --batch_size N"),
    (re.compile(r"call the step with tensors of known shape \(or trace it ([^)]*)\)"),
     r"save it \1"),
    (re.compile(r"""budget=(["']?)([^\s"']+)\1"""), r"--budget \2"),
)
"""Names of arguments in messages of the library, and the flags that replace them here."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line; return the exit code.

    Args:
      argv: arguments without the program's name; default those of the process.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    _open_streams()
    try:
        code = _answer(arguments)
        sys.stdout.flush()  # a full disk or a closed pipe shows here, not when Python ends
        return code
    except BrokenPipeError:  # who read our results has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return DONE
    except OSError as error:
        where = f" {error.filename!r}" if error.filename else ""
        _say(f"{error.strerror or error}{where}; nothing was left half-written")
        return COULD_NOT
    except KeyboardInterrupt:
        _say("interrupted; nothing was left half-written")
        return INTERRUPTED
    except Exception as error:
        return _refused(error, arguments)


def _answer(arguments: list[str]) -> int:
    """Run a command line.

    Raises:
      flags.Error: it cannot be understood.
      TfckptError, OSError: it could not be done.
    """
    _stop_cleanly()
    if arguments[:1] in (["--version"], ["-V"]):
        from tfckpt.cli.version import version

        print(version())
        return DONE
    from tfckpt.cli import arguments as known
    from tfckpt.cli.quiet_import import load_tensorflow, warnings_off

    if arguments[:1] in (["--help"], ["-h"], ["help"], ["--helpfull"]):
        print(known.usage(*map(known.command_name, arguments[1:2])))
        return DONE
    command = known.command_name(*arguments[:1])
    request = known.parse(command, arguments[1:])
    if request.help:
        print(known.usage(command))
        return DONE
    if command == "completion":
        from tfckpt.cli.completion import script

        print(script(request.paths[0]))
        return DONE
    if command == "cache":
        from tfckpt.cli import plan_store

        return plan_store.run(request)
    known.check_inputs(request)
    load_tensorflow()
    from tfckpt.cli import commands
    from tfckpt.verify.memory import ask_for_statistics

    ask_for_statistics()
    with warnings_off():
        return commands.run(request)


def _refused(error: Exception, arguments: list[str]) -> int:
    """Say what is wrong, in a line; return the exit code."""
    from absl import flags

    from tfckpt.cli.arguments import COMMANDS
    from tfckpt.errors import TfckptError

    if isinstance(error, flags.Error):
        _say(str(error), "usage error")
        command = [name for name in arguments[:1] if name in COMMANDS]
        _write(" ".join(["try: tfckpt", *command, "--help"]))
        return USAGE
    if isinstance(error, TfckptError):
        _say(str(error))
    elif "--debug" in arguments:
        raise error
    else:
        _say(f"{type(error).__name__}: {error}; this is a fault of tfckpt: run again with --debug "
             "and report what it prints")
    return COULD_NOT


def _say(text: str, kind: str = "error") -> None:
    """Write one line to standard error, however many the message has."""
    line = re.sub(r"\s+", " ", text).strip()
    for pattern, flag in _AS_FLAGS:
        line = pattern.sub(flag, line)
    if len(line) > _LONGEST:
        line = f"{line[:_LONGEST]} ..."
    _write(f"tfckpt: {kind}: {line}")


def _write(line: str) -> None:
    """Write to standard error, if it is not closed."""
    try:
        print(line, file=sys.stderr, flush=True)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())


def _open_streams() -> None:
    """Open what the caller closed: an output must not become standard error, logs and all."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free: this one
    sys.stdout = sys.stdout or os.fdopen(os.open(os.devnull, os.O_WRONLY), "w")
    sys.stderr = sys.stderr or os.fdopen(os.open(os.devnull, os.O_WRONLY), "w")


def _stop_cleanly() -> None:
    """Have a request to stop unwind the stack, so that temporary files are removed."""
    with contextlib.suppress(ValueError):  # not the main thread: whoever called us handles signals
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(TERMINATED))
