"""The installed `tfckpt` command as a process: pipes, terminals, signals."""

from __future__ import annotations

import os
import pathlib
import pty
import random
import re
import subprocess
import sys
import sysconfig
import time

import pytest

import tfckpt
from tests.support.cli import contents, listing
from tfckpt.cli.output import progress

ROOT = pathlib.Path(tfckpt.__file__).parents[1]
SCRIPT = pathlib.Path(sysconfig.get_path("scripts"), "tfckpt")
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}
installed = pytest.mark.skipif(not SCRIPT.is_file(), reason="tfckpt is not installed")


@installed
def test_the_script_reads_a_pipe_and_is_quiet_in_one(files, tmp_path):
    done = subprocess.run(
        [SCRIPT, "rewrite", "-", "out.pb", "--solver", "acg"], cwd=tmp_path, env=ENVIRONMENT,
        input=(files / "graph.pb").read_bytes(), capture_output=True, timeout=800, check=False)
    said = done.stderr.decode()
    assert done.returncode == 0 and said == "wrote out.pb and out.pb.report.txt\n", said
    assert re.fullmatch(r"standard input: .* -> .* planned, .* time\n", done.stdout.decode())
    assert listing(tmp_path) == ["out.pb", "out.pb.report.txt"]


@installed
@pytest.mark.parametrize("arguments, code", [
    (["--help"], 0), (["plan"], 2),
    pytest.param(["inspect", "missing.pb"], 1, marks=pytest.mark.nightly)])
def test_exit_codes_of_the_script(tmp_path, arguments, code):
    done = subprocess.run([SCRIPT, *arguments], cwd=tmp_path, env=ENVIRONMENT,
                          capture_output=True, text=True, timeout=800, check=False)
    assert done.returncode == code, done.stderr
    assert bool(done.stdout) == (code == 0) and bool(done.stderr) == (code != 0)


@installed
def test_progress_is_shown_on_a_terminal(files, tmp_path):
    """Standard error is a terminal, standard output a file."""
    ours, theirs = pty.openpty()
    with open(tmp_path / "results.txt", "wb") as results:
        process = subprocess.Popen([SCRIPT, "plan", files / "graph.pb"], stdin=theirs,
                                   stdout=results, stderr=theirs, env=ENVIRONMENT)
    os.close(theirs)
    said = b""
    try:
        while chunk := os.read(ours, 4096):
            said += chunk
    except OSError:  # the last one has closed the terminal
        pass
    os.close(ours)
    assert process.wait(timeout=800) == 0, said
    assert re.search(rb"planning .*graph\.pb \.\.\. \d+ s", said), said
    assert said.endswith(b"\r\x1b[K")  # and gone again
    results = (tmp_path / "results.txt").read_text()
    assert "planned peak" in results and "\r" not in results and "..." not in results


def test_progress_is_not_shown_in_a_pipe(capsys):
    with progress("planning"):
        time.sleep(0.7)
    assert capsys.readouterr().err == ""


_SIGNALLED = """
import os, sys, signal, time
from tfckpt.cli import main
real = os.fsync
def fsync(number):
    real(number)
    os.kill(os.getpid(), wanted)
    while True:  # the signal may arrive in another thread, and a little later
        time.sleep(0.01)
os.fsync = fsync
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
for wanted in (signal.SIGTERM, signal.SIGINT, signal.SIGKILL):
    try:
        code = main(sys.argv[1:])
    except SystemExit as stop:
        code = stop.code
    print(code, os.listdir("."), flush=True)
"""


def test_a_run_that_is_stopped_while_it_writes(files, tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", _SIGNALLED, "rewrite", str(files / "graph.pb"), "out.pb",
         "--solver", "chen"], cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True,
        timeout=800, check=False)
    assert done.stdout == "143 []\n130 []\n" and "Traceback" not in done.stderr, done.stderr
    assert done.stderr.count("interrupted; nothing was left half-written") == 1
    assert done.returncode == -9
    left, = listing(tmp_path)  # a temporary file, which nothing takes for the output
    assert left.startswith(".out.pb.")


_WRITER = """
import itertools, sys
from tfckpt.cli.output import staged_file, staged_saved_model
target, like, kind = sys.argv[1:]
assert "tensorflow" not in sys.modules
for turn in itertools.cycle("AB"):
    data = turn.encode() * (3 << 20)
    staged = (staged_saved_model(target, like, data, force=True) if kind == "directory"
              else staged_file(target, data, force=True))
    with staged as put_in_place:
        put_in_place()
        print(turn, flush=True)
"""


@pytest.mark.parametrize("kind", ["file", "directory"])
def test_killed_at_any_moment_the_output_is_whole_or_absent(files, tmp_path, kind):
    """A writer that replaces its output all the time is killed at random moments."""
    target = tmp_path / "out"
    made = random.Random(0)
    whole = [{} if kind == "directory" else None]
    for letter in (b"A", b"B"):
        data = letter * (3 << 20)
        whole.append(data if kind == "file" else
                     {**contents(files / "model"), "saved_model.pb": data})
    for tree in whole[1:]:
        if kind == "directory":
            tree.pop("fingerprint.pb", None)
    present = 0
    for _ in range(12):
        writer = subprocess.Popen(
            [sys.executable, "-c", _WRITER, str(target), str(files / "model"), kind], cwd=ROOT,
            stdout=subprocess.PIPE)
        writer.stdout.read(2)  # it has written once
        time.sleep(0.05 * made.random())
        writer.kill()
        writer.wait(timeout=800)
        writer.stdout.close()
        found = contents(target) if kind == "directory" else (
            target.read_bytes() if target.exists() else None)
        assert found in whole
        present += bool(found)
    assert present  # the last kill may come between two names of a directory, not every one
    if kind == "file":
        assert present == 12
