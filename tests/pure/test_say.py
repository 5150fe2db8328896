"""Single lines on stderr: after some seconds, and not where TensorFlow is silenced."""

from __future__ import annotations

import logging as standard
import time

import pytest
from absl import logging

from tfckpt.common.messages import say, waiting_for


@pytest.fixture(autouse=True)
def heard(monkeypatch):
    monkeypatch.delenv("TF_CPP_MIN_LOG_LEVEL", raising=False)
    logger, verbosity = standard.getLogger("tensorflow"), logging.get_verbosity()
    level = logger.level
    yield
    logger.setLevel(level)
    logging.set_verbosity(verbosity)


def test_a_line_names_the_package(capsys):
    say("planning step")
    assert capsys.readouterr() == ("", "tfckpt: planning step\n")


@pytest.mark.parametrize("silence", [
    lambda patch: patch.setenv("TF_CPP_MIN_LOG_LEVEL", "1"),
    lambda patch: patch.setenv("TF_CPP_MIN_LOG_LEVEL", "3"),
    lambda patch: logging.set_verbosity(logging.ERROR),
    lambda patch: standard.getLogger("tensorflow").setLevel("ERROR"),
], ids=["1", "3", "absl", "tensorflow"])
def test_silenced_as_people_silence_tensorflow(capsys, monkeypatch, silence):
    silence(monkeypatch)
    say("planning step")
    assert capsys.readouterr().err == ""


def test_what_is_quick_is_not_spoken_of(capsys):
    with waiting_for("planning step", after=5.0) as done:
        done("planned")
    assert capsys.readouterr().err == ""


def test_what_takes_long_is_said_before_and_after(capsys):
    with waiting_for("planning step", after=0.05) as done:
        time.sleep(0.3)
        assert capsys.readouterr().err == "tfckpt: planning step ...\n"
        done("planned")
    assert capsys.readouterr().err == "tfckpt: planned\n"


def test_an_error_ends_the_waiting_without_a_result(capsys):
    with pytest.raises(ZeroDivisionError), waiting_for("planning step", after=0.05):
        time.sleep(0.3)
        raise ZeroDivisionError
    assert capsys.readouterr().err == "tfckpt: planning step ...\n"
