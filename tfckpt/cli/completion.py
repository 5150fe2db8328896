"""`tfckpt completion`: scripts for shells, made of the commands and flags that there are.

They complete commands, flags (with dashes or underscores) and the values of flags that have a
list; all else is completed as a path.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from absl import flags

from tfckpt.cli.arguments import CHOICES, COMMANDS, flags_of
from tfckpt.request.devices import PRESETS

_LISTS = {"budget": ("min",), "device": tuple(preset.name for preset in PRESETS)}
"""Completions of flags whose values are no enum."""
_PATHS = ("plot", "op_library")

_BASH = """\
# Completion of tfckpt, as `tfckpt completion {shell}` prints it.
_tfckpt() {{
    local word=$2 flag=$3 flags
    COMPREPLY=()
    # bash takes the = of --flag=value for a word of its own
    if [[ $flag == "=" ]]; then flag=${{COMP_WORDS[COMP_CWORD-2]}}; fi
    if [[ $word == "=" ]]; then word=""; fi
    if ((COMP_CWORD == 1)); then
        COMPREPLY=($(compgen -W "{commands} --help --version" -- "$word"))
        return
    fi
    case "${{COMP_WORDS[1]}}:${{flag//-/_}}" in
{values}
    esac
    if [[ $word != -* ]]; then
        case "${{COMP_WORDS[1]}}" in
{choices}
        esac
        return
    fi
    case "${{COMP_WORDS[1]}}" in
{flags}
    esac
    if [[ $word == --*-* ]]; then flags=${{flags//_/-}}; fi
    COMPREPLY=($(compgen -W "$flags" -- "$word"))
}}
complete -o default -F _tfckpt tfckpt
"""
_ZSH = """\
#compdef tfckpt
(( $+functions[compdef] )) || {{ autoload -Uz compinit && compinit; }}
autoload -Uz bashcompinit && bashcompinit
"""
_AS_COMMAND = "complete -c tfckpt -n __fish_use_subcommand"


def script(shell: str) -> str:
    """Return what a shell has to read.

    Args:
      shell: "bash", "zsh" or "fish".

    Returns:
      The script as text, for the shell's start-up file or its folder of completions.
    """
    if shell == "fish":
        return "\n".join(_fish())
    values = [f'        {command}:__{flag.name}) COMPREPLY=($(compgen -W "{" ".join(found)}" -- '
              '"$word")); return ;;'
              for command in COMMANDS for flag in _flags(command) if (found := _values(flag))]
    listed = [f'        {command}) flags="{" ".join(_spelled(command))}" ;;'
              for command in COMMANDS]
    chosen = [f'            {command}) COMPREPLY=($(compgen -W "{" ".join(found)}" -- "$word")) ;;'
              for command, found in CHOICES.items()]
    head = _ZSH.format() if shell == "zsh" else ""
    return head + _BASH.format(shell=shell, choices="\n".join(chosen),
                               commands=" ".join(COMMANDS), values="\n".join(values),
                               flags="\n".join(listed))


def _flags(command: str) -> list[flags.Flag]:
    values = flags_of(command)
    return [values[name] for name in sorted(values) if len(name) > 1]


def _values(flag: flags.Flag) -> tuple[str, ...]:
    return _LISTS.get(flag.name, tuple(getattr(flag.parser, "enum_values", None) or ()))


def _spelled(command: str) -> Iterator[str]:
    """Yield flags as absl spells them, with the negation of those that are on by default."""
    for flag in _flags(command):
        yield f"--{flag.name}"
        if flag.boolean and flag.default:
            yield f"--no{flag.name}"


def _fish() -> Iterator[str]:
    yield "# Completion of tfckpt, as `tfckpt completion fish` prints it."
    for command, (_, what) in COMMANDS.items():
        yield f"{_AS_COMMAND} -f -a {command} -d {_quoted(what)}"
    yield f"{_AS_COMMAND} -f -l help"
    yield f"{_AS_COMMAND} -f -l version"
    for command in COMMANDS:
        here = f"complete -c tfckpt -n '__fish_seen_subcommand_from {command}'"
        if command in CHOICES:
            yield f"{here} -f -a '{' '.join(CHOICES[command])}'"
        for flag in _flags(command):
            names = f"-l {flag.name}" + (
                f" -l {flag.name.replace('_', '-')}" if "_" in flag.name else "")
            more = f" -a '{' '.join(_values(flag))}'" if _values(flag) else ""
            kind = "" if flag.boolean else " -r -F" if flag.name in _PATHS else " -x"
            yield f"{here} {names}{kind}{more} -d {_quoted(flag.help)}"


def _quoted(text: str) -> str:
    """Return the first sentence of a flag's help as fish quotes it."""
    first = re.sub(r"^<[^>]*>: ", "", text).partition(". ")[0].rstrip(".")
    return "'" + first.replace("\\", "\\\\").replace("'", "\\'") + "'"
