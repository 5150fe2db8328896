"""The installed `tfckpt` command as a process: pipes, terminals, signals."""

from __future__ import annotations

import contextlib
import os
import pathlib
import pty
import random
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time

import pytest

import tfckpt
from tests.support.cli import contents, listing
from tfckpt.cli import output, quiet_import
from tfckpt.cli.arguments import COMMANDS, SHELLS, flags_of
from tfckpt.cli.completion import script
from tfckpt.cli.output import progress

ROOT = pathlib.Path(tfckpt.__file__).parents[1]
SCRIPT = pathlib.Path(sysconfig.get_path("scripts"), "tfckpt")
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}
LONG = re.compile(r"tfckpt: (reading|pricing|planning|running) .* (\.\.\.|took \d+ s)")
installed = pytest.mark.skipif(not SCRIPT.is_file(), reason="tfckpt is not installed")


@installed
def test_the_script_reads_a_pipe_and_is_quiet_in_one(files, tmp_path):
    done = subprocess.run(
        [SCRIPT, "rewrite", "-", "out.pb", "--solver", "acg"], cwd=tmp_path, env=ENVIRONMENT,
        input=(files / "graph.pb").read_bytes(), capture_output=True, timeout=800, check=False)
    said = [line for line in done.stderr.decode().splitlines() if not LONG.fullmatch(line)]
    assert done.returncode == 0 and said == ["wrote out.pb and out.pb.report.txt"], said
    assert re.fullmatch(r"standard input: .* -> .* planned, .* time\n(  bits .*\n)?",
                        done.stdout.decode())
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
        process = subprocess.Popen([SCRIPT, "plan", files / "graph.pb", "--effort=40"],
                                   stdin=theirs, stdout=results, stderr=theirs, env=ENVIRONMENT)
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


def test_a_pipe_is_told_of_long_work_only(capsys, monkeypatch):
    with progress("planning"):
        time.sleep(0.1)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(output, "LONG", 0.1)
    for silence, said in ((True, ""), (False, "tfckpt: planning ...\ntfckpt: planning took 0 s\n")):
        monkeypatch.setattr(quiet_import, "SILENCED", silence)
        with progress("planning"):
            time.sleep(0.3)
        assert capsys.readouterr().err == said


@pytest.mark.parametrize("arguments", [
    "--help", "--version", "help plan", "completion bash", "inspect GRAPH --top 100000",
    *(pytest.param(arguments, marks=pytest.mark.nightly) for arguments in (
        *(f"{command} --help" for command in COMMANDS), "completion zsh", "completion fish",
        "plan GRAPH --json", "rewrite GRAPH out.pb", "compare GRAPH GRAPH --norun"))])
def test_a_reader_that_has_seen_enough(files, tmp_path, arguments):
    """Standard output is closed already: nothing is said of it, wherever the output breaks off."""
    done = subprocess.run(
        ["bash", "-c", 'exec 3>&1; { "$@" 2>&3; echo $? >&3; } | true', "-", sys.executable, "-c",
         _SLOW_START, *arguments.replace("GRAPH", str(files / "graph.pb")).split()],
        cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True, timeout=800, check=False)
    said = [line for line in done.stdout.splitlines() if not LONG.fullmatch(line)]
    assert said in (["0"], ["wrote out.pb and out.pb.report.txt", "0"]) and done.stderr == ""


_SLOW_START = """
import os, select, sys
poll = select.poll()
poll.register(1, 0)
poll.poll()  # until the other end of the pipe is closed
from tfckpt.cli import main
sys.exit(main())
"""


def test_a_reader_that_leaves_in_the_middle():
    """The output is longer than a pipe's buffer."""
    program = ("from tfckpt import cli; cli._answer = lambda _: print('x' * 70 + chr(10), end='') "
               "or [print('y' * 70) for _ in range(100000)] or 0; raise SystemExit(cli.main([]))")
    done = subprocess.run(
        ["bash", "-c", '"$@" | head -1; echo ${PIPESTATUS[0]}', "-", sys.executable, "-c",
         program], env=ENVIRONMENT, capture_output=True, text=True, timeout=800, check=False)
    assert done.stdout == "x" * 70 + "\n0\n" and done.stderr == ""


@pytest.mark.parametrize("closed, out, err", [
    ("0<&-", "result\n", "log\n"), ("1>&-", "", "log\n"), ("2>&-", "result\n", ""),
    ("1>&- 2>&-", "", "")])
def test_streams_that_are_closed(tmp_path, closed, out, err):
    """An output file never gets the number, and so the text, of a stream that was closed."""
    program = ("import sys\nfrom tfckpt import cli\n"
               "def answer(_):\n    print('result')\n    print('log', file=sys.stderr)\n"
               "    assert open('out', 'w').fileno() > 2\n    return 0\n"
               "cli._answer = answer\nsys.exit(cli.main([]))")
    done = subprocess.run(["bash", "-c", f'"$@" {closed}', "-", sys.executable, "-c", program],
                          cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True,
                          timeout=800, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, out, err)


def test_help_version_and_usage_load_no_tensorflow():
    program = ("import sys; from tfckpt.cli import main; assert not {'absl', 'numpy'} & "
               "set(sys.modules); code = main(sys.argv[1:]); "
               "assert 'tensorflow' not in sys.modules; print('code', code)")
    for arguments, code in ((["--version"], 0), (["plan", "--help"], 0), (["completion", "zsh"], 0),
                            (["cache", "list"], 0), (["cache", "clear", "--json"], 0),
                            (["plan", "a", "--budget", "much"], 2), (["planned"], 2)):
        done = subprocess.run([sys.executable, "-c", program, *arguments], env=ENVIRONMENT,
                              capture_output=True, text=True, timeout=800, check=False)
        assert done.stdout.endswith(f"code {code}\n"), done.stderr


def test_an_interrupt_while_it_plans(files, tmp_path):
    """Ctrl-C reaches the whole process group of a terminal's job."""
    program = ("import os, signal, sys, time; signal.signal(signal.SIGINT, "
               "signal.default_int_handler)\nfrom tfckpt.cli import main, quiet_import\n"
               "load = quiet_import.load_tensorflow\n"
               "def loaded():\n    load()\n    print('loaded', flush=True)\n"
               "    from tfckpt.cli import commands\n"
               "    commands.plan_file_step = lambda *_: time.sleep(600)\n"
               "quiet_import.load_tensorflow = loaded\nsys.exit(main())")
    process = subprocess.Popen(
        [sys.executable, "-c", program, "rewrite", str(files / "graph.pb"), "out.pb"],
        cwd=tmp_path, env=ENVIRONMENT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout.readline() == "loaded\n"
    time.sleep(1.0)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=800)
    assert (process.returncode, out) == (130, ""), err
    assert err.endswith("tfckpt: error: interrupted; nothing was left half-written\n")
    assert "Traceback" not in err and listing(tmp_path) == []


# Completion, by the shells themselves.


def completed(words: list[str], cursor: int | None = None) -> list[str]:
    """Return what bash offers for the last word."""
    number = len(words) - 1 if cursor is None else cursor
    program = 'source "$1"; shift; COMP_WORDS=("${@:2}"); COMP_CWORD=$1; ' \
              '_tfckpt tfckpt "${COMP_WORDS[COMP_CWORD]}" "${COMP_WORDS[COMP_CWORD-1]}"; ' \
              'printf "%s\n" "${COMPREPLY[@]}"'
    with tempfile.NamedTemporaryFile("w", suffix=".bash") as file:
        file.write(script("bash"))
        file.flush()
        done = subprocess.run(["bash", "--norc", "-c", program, "-", file.name, str(number),
                               *words], capture_output=True, text=True, check=True, timeout=60)
    assert not done.stderr
    return done.stdout.split()


@pytest.mark.parametrize("words, offered", [
    (["tfckpt", "re"], ["rewrite", "replay"]), (["tfckpt", "--v"], ["--version"]),
    (["tfckpt", "plan", "--ba"], ["--batch_size"]),
    (["tfckpt", "plan", "--batch-"], ["--batch-size"]),
    (["tfckpt", "rewrite", "--free-"], ["--free-moves"]),
    (["tfckpt", "plan", "m", "--solver", "a"], ["auto", "acg", "approx_dp"]),
    (["tfckpt", "plan", "--solver", "=", "op"], ["optimal"]),
    (["tfckpt", "plan", "--objective", "="], ["time", "memory"]),
    (["tfckpt", "plan", "--device", "H1"], ["H100-80GB"]),
    (["tfckpt", "inspect", "--so"], []), (["tfckpt", "completion", ""], list(SHELLS)),
    (["tfckpt", "cache", ""], ["list", "clear"]), (["tfckpt", "cache", "--j"], ["--json"]),
    (["tfckpt", "inspect", "a"], []), (["tfckpt", "frobnicate", "--"], [])])
def test_what_bash_offers(words, offered):
    assert completed(words) == offered


def test_bash_offers_every_flag():
    for command in COMMANDS:
        named = {f"--{name}" for name in flags_of(command) if len(name) > 1}
        assert named <= set(completed(["tfckpt", command, "--"]))


def test_an_interactive_bash_completes(tmp_path):
    """Keys in, a command line out: readline asks the function, and paths are completed too."""
    (tmp_path / "completion.bash").write_text(script("bash"))
    (tmp_path / "some_model.pb").write_text("")
    (tmp_path / "tfckpt").write_text('#!/bin/sh\necho "got: $*"\n')
    (tmp_path / "tfckpt").chmod(0o755)
    ours, theirs = pty.openpty()
    shell = subprocess.Popen(
        ["bash", "--norc", "--noprofile", "-i"], cwd=tmp_path, stdin=theirs, stdout=theirs,
        stderr=theirs, start_new_session=True,
        env={**ENVIRONMENT, "PATH": f"{tmp_path}:{os.environ['PATH']}", "TERM": "dumb",
             "HOME": str(tmp_path), "INPUTRC": "/dev/null"})
    os.close(theirs)
    os.write(ours, b"source completion.bash\ntfckpt ins\tsome\t--batch-\t7\nexit\n")
    said = b""
    with contextlib.suppress(OSError):  # the last one has closed the terminal
        while chunk := os.read(ours, 4096):
            said += chunk
    os.close(ours)
    assert shell.wait(timeout=60) == 0
    assert b"got: inspect some_model.pb --batch-size 7" in said, said


@pytest.mark.parametrize("shell", SHELLS)
def test_a_shell_reads_its_script(shell, tmp_path):
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not here")
    (tmp_path / "script").write_text(script(shell))
    subprocess.run([shell, "-n", tmp_path / "script"], check=True, timeout=60)


def test_fish_gets_every_flag_in_both_spellings():
    lines = script("fish").splitlines()
    for command in COMMANDS:
        assert any(f"-a {command} -d " in line for line in lines)
        for name in flags_of(command):
            wanted = {f"-l {name} ", f"-l {name.replace('_', '-')} "} if len(name) > 1 else set()
            assert not wanted or any(f"from {command}'" in line and all(
                text in line for text in wanted) for line in lines), (command, name)


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
