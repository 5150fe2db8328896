"""The flags of each command (absl), parsed into a `Request`."""

from __future__ import annotations

import dataclasses
import difflib
import os
import re
from collections.abc import Collection, Sequence
from typing import Any

from absl import flags

from tfckpt.errors import PlanError, unreadable
from tfckpt.plan.names import AUTO, OBJECTIVES, SOLVER_NAMES
from tfckpt.request.budget import parse_budget

COMMANDS = {
    "inspect": ("GRAPH", "what it is: ops, regions, parameters, plain peak, tensors at the peak"),
    "plan": ("GRAPH", "the plans that no other beats in both peak and time, as a table"),
    "rewrite": ("GRAPH OUT", "writes a graph that needs less memory, and a report beside it"),
    "replay": ("FOLDER", "plans a step that TFCKPT_DUMP=DIR wrote again: does the same come out?"),
    "compare": ("A B", "two graphs: ops, planned peaks and, where both run, what they measure"),
    "cache": ("ACTION", "the plan store: list what is kept there, or clear it"),
    "completion": ("SHELL", "prints what has bash, zsh or fish complete commands and flags"),
}
SHELLS = ("bash", "zsh", "fish")
CHOICES = {"completion": SHELLS, "cache": ("list", "clear")}
"""The arguments of each command that takes no paths."""
_NOT_READ = ("OUT", "FOLDER")
"""What is written, and what says by itself what it misses."""
_GRAPH = """\
GRAPH is a SavedModel directory, a GraphDef or a MetaGraphDef, binary or text; - reads a GraphDef
or MetaGraphDef from standard input. Results go to standard output, messages to standard error.
Exit codes: 0 done, 1 could not, 2 usage, 130 interrupted, 143 terminated; whichever it is, outputs
are whole or not there."""
_CACHE = """\
list prints of each plan when it was last used, its size in the store, the step and its operations,
the budget, the device and the planned peak; clear removes all. Plans lie in the folder
$XDG_CACHE_HOME/tfckpt/plans (~/.cache/tfckpt/plans), or in the one that TFCKPT_CACHE names;
TFCKPT_CACHE=off has nothing kept or taken from there."""
_FLAGS = "In names of flags - and _ are the same: --batch-size is --batch_size."
_COMPLETION = """\
bash: tfckpt completion bash > ~/.local/share/bash-completion/completions/tfckpt
      or, without the package bash-completion: source <(tfckpt completion bash) in ~/.bashrc
zsh:  source <(tfckpt completion zsh) in ~/.zshrc
fish: tfckpt completion fish > ~/.config/fish/completions/tfckpt.fish"""
FAD = {"auto": "auto", "true": True, "false": False}
"""The values of --fad, and of the option in Python."""
_FRACTION = re.compile(r"^[0-9]*\.[0-9]+$")


class _Whole(flags.IntegerParser):
    """A number, of which what is none is said in words of ours, not Python's."""

    def convert(self, argument: str | int) -> int:
        try:
            return super().convert(argument)
        except (TypeError, ValueError) as error:
            least = f" of {self.lower_bound} or more" if self.lower_bound is not None else ""
            raise ValueError(f"write a whole number{least}") from error


@dataclasses.dataclass(frozen=True)
class Request:
    """A parsed command line. `values` has the values of the command's flags, by name."""

    command: str
    paths: tuple[str, ...]
    values: dict[str, object]
    help: bool
    debug: bool

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name not in self.values:
            raise AttributeError(name)
        return self.values[name]


def parse(command: str, arguments: Sequence[str]) -> Request:
    """Read a command's arguments.

    Args:
      command: one of `COMMANDS`.
      arguments: what follows the command: flags, with dashes or underscores, and paths.

    Returns:
      The command with its paths and the values of its flags; with `help`, paths are not checked.

    Raises:
      flags.Error: an unknown flag, a malformed value, or too few or many paths.
    """
    values = flags_of(command)
    rest = values(["tfckpt", *_underscored(arguments, set(values))])[1:]
    wanted = COMMANDS[command][0].split()
    if len(rest) != len(wanted) and not values.help:
        raise flags.Error(f"tfckpt {command} takes {' and '.join(wanted)}, not "
                          f"{len(rest)} {'path' if len(rest) == 1 else 'paths'}")
    choices = CHOICES.get(command, ())
    if choices and not values.help and rest[0] not in choices:
        raise flags.Error(f"{rest[0]!r} is no {wanted[0]}; choose one of {', '.join(choices)}")
    found: dict[str, Any] = {name: values[name].value for name in values}
    if "budget" in found:
        found["budget"] = budget_value(found["budget"])
        found["fad"] = FAD[found["fad"]]
    return Request(command, tuple(rest), found, bool(values.help), bool(values.debug))


def check_inputs(request: Request) -> None:
    """Raise what reading an input would, if it is not there: TensorFlow takes seconds to load.

    Args:
      request: a parsed command line.

    Raises:
      CaptureError: it names the path, and why that cannot be read.
    """
    if request.command in CHOICES:
        return
    names = COMMANDS[request.command][0].split()
    for name, path in zip(names, request.paths, strict=True):
        if name in _NOT_READ or path == "-" or "://" in path:
            continue
        try:
            os.stat(path)
        except OSError as error:
            raise unreadable(path, error) from error


def command_name(text: str = "") -> str:
    """Return the command that an argument names.

    Args:
      text: the first argument; "" where there is none.

    Raises:
      flags.Error: none; says which one may have been meant.
    """
    if text in COMMANDS:
        return text
    if not text:
        raise flags.Error(f"no command; choose one of {', '.join(COMMANDS)}")
    if text.startswith("-"):
        raise flags.Error(f"{text!r} stands before the command; write tfckpt COMMAND ... {text}")
    if os.path.exists(text):
        raise flags.Error(f"{text!r} is a path, not a command; write tfckpt inspect {text}, say")
    near = difflib.get_close_matches(text, COMMANDS, 1)
    raise flags.Error(f"unknown command {text!r}; " + (
        f"did you mean {near[0]}?" if near else f"choose one of {', '.join(COMMANDS)}"))


def _underscored(arguments: Sequence[str], known: Collection[str]) -> list[str]:
    """Return arguments with the names of flags as absl spells them."""
    result: list[str] = []
    for number, argument in enumerate(arguments):
        if argument == "--":
            return [*result, *arguments[number:]]
        name, equals, value = argument.removeprefix("--").partition("=")
        name = name.replace("-", "_")
        if name.startswith("no_") and name.removeprefix("no_") in known:
            name = "no" + name.removeprefix("no_")
        result.append(f"--{name}{equals}{value}" if argument.startswith("--") else argument)
    return result


def budget_value(text: str) -> object:
    """Return a budget as `tfckpt.checkpoint` takes it.

    "0.5" is a fraction, "GPU:0=30GB,*=min" a mapping from devices; all else stays text.

    Args:
      text: the value of the flag.

    Returns:
      A float for a fraction, a dict for a mapping, else the text.

    Raises:
      flags.Error: it cannot be read.
    """
    if "=" in text:
        entries = [entry.partition("=") for entry in text.split(",")]
        return {device.strip(): budget_value(one) for device, _, one in entries}
    found = float(text) if _FRACTION.match(text.strip()) else text
    try:
        checked = parse_budget(found)
    except PlanError as error:
        raise flags.Error(str(error)) from error
    if checked.of_device:
        raise flags.Error(f"{text!r} is what the device has free that a step runs on, and nothing "
                          'runs here; write a size such as "6GiB"')
    return found


def usage(command: str | None = None) -> str:
    """Return the help on the tool or on one command.

    Args:
      command: one of `COMMANDS`; None for the tool.
    """
    if command is None:
        width = max(len(f"{name} {paths}") for name, (paths, _) in COMMANDS.items())
        lines = [f"  tfckpt {f'{name} {paths}':<{width}}  {what}"
                 for name, (paths, what) in COMMANDS.items()]
        return "\n".join(["usage:", *lines, "", _GRAPH, "",
                          "tfckpt COMMAND --help lists the flags of a command, tfckpt --version",
                          "prints the versions of tfckpt, TensorFlow and Keras."])
    paths, what = COMMANDS[command]
    listed = flags_of(command).get_help(include_special_flags=False)
    listed = listed.partition(":\n")[2]  # absl heads the list with the name of this module
    more = {"completion": _COMPLETION, "cache": _CACHE}.get(command, f"{_GRAPH}\n\n{_FLAGS}")
    return f"usage: tfckpt {command} {paths} [flags]\n\n{what}\n\n{more}\n\n{listed}"


def flags_of(command: str) -> flags.FlagValues:
    """Return the flags of a command, with their defaults.

    Args:
      command: one of `COMMANDS`.
    """
    values = flags.FlagValues()
    values.set_gnu_getopt(True)
    where: Any = {"flag_values": values}
    flags.DEFINE_bool("help", False, "Shows this help.", short_name="h", **where)
    flags.DEFINE_bool("debug", False, "Shows the traceback of an unexpected error.", **where)
    if command == "cache":
        flags.DEFINE_bool("json", False, "Prints JSON.", **where)
    if command in CHOICES:
        return values
    if command != "replay":
        _define_whole("batch_size", None, "What an unknown leading dimension stands for.", 1,
                      values)
        flags.DEFINE_list("fetch", [], "What a session runs of a GraphDef: tensors (loss:0) and "
                          "ops (train). Default: the gradients and all that follows from them.",
                          **where)
    flags.DEFINE_list("op_library", [], "Shared libraries with custom ops to load first.", **where)
    if command in ("plan", "rewrite"):
        flags.DEFINE_string("budget", "min", 'Bytes of the device ("2GiB"), a fraction of the '
                            'plain peak (0.5), or "min"; or one for each device '
                            "(GPU:0=30GB,*=min).", **where)
        flags.DEFINE_enum("solver", AUTO, list(SOLVER_NAMES), "Which solver proposes plans.",
                          **where)
        flags.DEFINE_enum("objective", OBJECTIVES[0], list(OBJECTIVES), "The fastest plan that "
                          "fits, or the one with the minimum peak.", **where)
        flags.DEFINE_bool("free_moves", True, "Whether moves that cost no time are used.", **where)
        flags.DEFINE_enum("fad", "false", list(FAD), "Whether derivatives of element-wise "
                          "activations may be kept instead of the tensors that they are computed "
                          "from; gradients then agree to rounding.", **where)
        flags.DEFINE_bool("exact", False, "Whether a step is left as it is where it is not certain "
                          "that no bit changes.", **where)
        flags.DEFINE_list("keep", [], "Layers or ops whose results are never computed again "
                          "(dense_1,block?/conv*).", **where)
        flags.DEFINE_list("recompute", [], "Layers or ops of which nothing is kept for the "
                          "backward pass.", **where)
        flags.DEFINE_float("effort", 1.0, "How much the search may evaluate, as a multiple of the "
                           "default.", **where)
    if command not in ("rewrite", "replay"):
        flags.DEFINE_bool("json", False, "Prints JSON.", **where)
    if command == "inspect":
        _define_whole("top", 12, "How many tensors at the peak are listed.", 0, values)
    if command == "plan":
        flags.DEFINE_string("device", None, "Plans with the times of a GPU that need not be here, "
                            "such as H100-80GB, and says whether the step fits there and which "
                            "batch does. Also: memory=24GB,bandwidth=600GB,clock=1.7GHz,cores=9216",
                            **where)
        flags.DEFINE_string("plot", None, "Also draws the table to this file (png, svg, pdf).",
                            **where)
    if command in ("rewrite", "plan"):
        flags.DEFINE_bool("force", False, "Replaces an output that exists.", **where)
    if command == "compare":
        flags.DEFINE_bool("run", True, "Whether both graphs are run and measured.", **where)
        _define_whole("repeats", 3, "Measured runs of each.", 1, values)
    return values


def _define_whole(name: str, default: int | None, text: str, least: int,
                  values: flags.FlagValues) -> None:
    flags.DEFINE(_Whole(lower_bound=least), name, default, text, flag_values=values,
                 serializer=flags.ArgumentSerializer())
