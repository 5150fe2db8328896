"""The command line: `tfckpt inspect | plan | rewrite | replay | compare`.

Results go to standard output, messages to standard error. Exit codes: 0 done, 1 could not,
2 usage. TensorFlow is loaded only once the arguments are known to be good.
"""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Sequence

from absl import flags

from tfckpt.cli.arguments import COMMANDS, Request, parse, usage
from tfckpt.cli.quiet import load_tensorflow, warnings_off
from tfckpt.errors import TfckptError

DONE, COULD_NOT, USAGE = 0, 1, 2
_LONGEST = 600
_AS_FLAGS = (
    (re.compile(r"pass batch_size=\.\.\. \(or [^)]*\)"), "pass --batch_size N"),
    (re.compile(r'budget=("?)([0-9.]+\w*|min)\1'), r"--budget \2"),
)
"""What messages of the library say about arguments, and how it is said here."""


class UsageError(Exception):
    """The command line cannot be understood."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command line; returns the exit code.

    Args:
      argv: arguments without the program's name; default those of the process.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] in (["--help"], ["-h"], ["help"], ["--helpfull"]):
        print(usage())
        return DONE
    try:
        if not arguments or arguments[0] not in COMMANDS:
            named = f"unknown command {arguments[0]!r}" if arguments else "no command"
            raise UsageError(f"{named}; choose one of {', '.join(COMMANDS)}")
        request = parse(arguments[0], arguments[1:])
        if request.help:
            print(usage(arguments[0]))
            return DONE
    except (UsageError, flags.Error) as error:
        _say(str(error), "usage error")
        command = arguments[:1] if arguments and arguments[0] in COMMANDS else []
        print(" ".join(["try: tfckpt", *command, "--help"]), file=sys.stderr)
        return USAGE
    return _run(request)


def _run(request: Request) -> int:
    _stop_cleanly()
    try:
        load_tensorflow()
        from tfckpt.cli import commands
        with warnings_off():
            code = commands.run(request)
        sys.stdout.flush()  # a full disk or a closed pipe shows here, not when Python ends
        return code
    except (UsageError, flags.Error) as error:
        _say(str(error), "usage error")
        return USAGE
    except TfckptError as error:
        _say(str(error))
    except BrokenPipeError:  # who read our results has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return DONE
    except OSError as error:
        where = f" {error.filename!r}" if error.filename else ""
        _say(f"{error.strerror or error}{where}; nothing was left half-written")
    except KeyboardInterrupt:
        _say("interrupted; nothing was left half-written")
        return 130
    except Exception as error:
        if request.debug:
            raise
        _say(f"{type(error).__name__}: {error}; this is a fault of tfckpt: run again with --debug "
             "and report what it prints")
    return COULD_NOT


def _say(text: str, kind: str = "error") -> None:
    """One line on standard error, however many the message has."""
    line = re.sub(r"\s+", " ", text).strip()
    for pattern, flag in _AS_FLAGS:
        line = pattern.sub(flag, line)
    if len(line) > _LONGEST:
        line = f"{line[:_LONGEST]} ..."
    print(f"tfckpt: {kind}: {line}", file=sys.stderr)


def _stop_cleanly() -> None:
    """Has a request to stop unwind the stack, so that temporary files are removed."""
    try:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    except ValueError:
        pass  # not the main thread: whoever called us handles signals
