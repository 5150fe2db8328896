"""Every front end takes every option, and hands it on."""

from __future__ import annotations

import inspect

import pytest

import grappler_ext
import tfckpt
from tfckpt.cli import arguments
from tfckpt.request import options
from tfckpt.request.options import Options, make_options

FUNCTIONS = {"decorator": tfckpt.checkpoint, "Keras": tfckpt.keras.checkpoint,
             "native pass": grappler_ext.enable}
OTHER = {"budget": 0.5, "solver": "chen", "objective": "memory", "batch_size": 7,
         "free_moves": False, "fad": "auto", "exact": True, "effort": 2.0,
         "keep": ["dense_1", "b*/relu"], "recompute": ["block?"]}
"""A value for each option that is not its default."""

OF_THE_DRIVER = ("target", "time_limit")
"""Fields of the value that are no option of every front end."""
OF_TRACES = {"xla_trials": 5, "op_seconds": {"dense/MatMul": 1e-3}}
"""Options of those that trace: nobody asks XLA about a step in a file."""


def test_the_names_are_those_of_the_value():
    others = (*OF_THE_DRIVER, *OF_TRACES)
    fields = [field for field in Options.__dataclass_fields__ if field not in others]
    assert ["budget", *fields[1:]] == list(options.NAMES) == list(OTHER)
    assert fields[0] == "budgets"


@pytest.mark.parametrize("front_end", FUNCTIONS)
def test_a_front_end_takes_every_option(front_end):
    taken = inspect.signature(FUNCTIONS[front_end]).parameters
    for name in (*options.NAMES, *OF_TRACES):
        assert name in taken, f"{front_end} lacks {name}"
        default = inspect.signature(make_options).parameters[name].default
        assert taken[name].default == default, f"{front_end} has another default for {name}"


@pytest.mark.parametrize("front_end", FUNCTIONS)
@pytest.mark.parametrize("name", [*OTHER, *OF_TRACES])
def test_a_front_end_hands_an_option_on(monkeypatch, front_end, name):
    """The option reaches `make_options` in the form that the front end gives it."""
    class Made(Exception):
        pass

    def made(*args, **kwargs):
        bound = inspect.signature(make_options).bind(*args, **kwargs)
        bound.apply_defaults()
        raise Made(bound.arguments)

    for module in (tfckpt.api, tfckpt.keras.wrapping, options):
        monkeypatch.setattr(module, "make_options", made)
    value = {**OTHER, **OF_TRACES}[name]
    subject = {"native pass": ()}.get(front_end, (lambda: None,))
    with pytest.raises(Made) as caught:
        FUNCTIONS[front_end](*subject, **{name: value})
    wanted = inspect.signature(make_options).bind(**{name: value})
    wanted.apply_defaults()
    assert caught.value.args[0] == wanted.arguments


@pytest.mark.parametrize("command", ["plan", "rewrite"])
def test_the_command_line_takes_every_option(command):
    given = [f"--{'' if value is not False else 'no'}{name}" + (
        "" if isinstance(value, bool) else "=" + (
            ",".join(value) if isinstance(value, list) else str(value)))
        for name, value in OTHER.items()]
    paths = ["in", "out"][:len(arguments.COMMANDS[command][0].split())]
    request = arguments.parse(command, [*paths, *given])
    assert {name: getattr(request, name) for name in options.NAMES} == OTHER


def test_budgets_of_several_devices_on_the_command_line():
    request = arguments.parse("plan", ["in", "--budget=GPU:0=30GB, GPU:1=0.5,*=min"])
    assert request.budget == {"GPU:0": "30GB", "GPU:1": 0.5, "*": "min"}
