"""The command line on bad input and full disks: one line, and nothing half-written."""

from __future__ import annotations

import contextlib
import errno
import os
import pathlib
import re
import resource
import subprocess
import sys
import time

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfckpt
from tests.support.cli import BATCH, contents, listing
from tfckpt.capture.files import read_path

ROOT = pathlib.Path(tfckpt.__file__).parents[1]



def _broken(folder: pathlib.Path, files: pathlib.Path) -> dict[str, str]:
    """Files that cannot be planned, and what must be said of them."""
    data = (files / "graph.pb").read_bytes()
    graph = read_path(str(files / "graph.pb")).proto

    def write(name, content):
        (folder / name).write_bytes(content)

    write("empty.pb", b"")
    write("truncated.pb", data[:len(data) // 2 + 7])
    write("noise.pb", np.random.default_rng(0).bytes(4096))
    write("prose.txt", b"Dear graph,\nplease train.\n")
    write("almost.pbtxt", b'node { name: "x" op: "Placeholder" frob: 3 }\n')
    write("no_ops.pbtxt", b"versions { producer: 1 }\n")
    cut = type(graph)()
    cut.CopyFrom(graph)
    del cut.node[3]
    write("dangling.pb", cut.SerializeToString())
    custom = type(graph)()
    custom.CopyFrom(graph)
    next(n for n in custom.node if n.op == "Tanh").op = "MyFastTanh"
    write("custom.pb", custom.SerializeToString())
    forward = tf.Graph()
    with forward.as_default():
        tf.tanh(tf.compat.v1.placeholder(tf.float32, (3,)))
    write("inference.pb", forward.as_graph_def().SerializeToString())
    open_ended = tf.Graph()
    with open_ended.as_default():
        x = tf.compat.v1.placeholder(tf.float32, (None, 8), name="x")
        tf.gradients(tf.reduce_sum(tf.tanh(x @ x[:8])), x)
    write("open.pb", open_ended.as_graph_def().SerializeToString())
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    for name in ("saved.keras", "saved.weights.h5"):
        (model.save if name.endswith("keras") else model.save_weights)(folder / name)
    (folder / "hollow").mkdir()
    (folder / "cut").mkdir()
    write("cut/saved_model.pb", (files / "model/saved_model.pb").read_bytes()[:9000])
    os.symlink("nowhere", folder / "link.pb")
    with open(folder / "vast.pb", "wb") as file:
        file.truncate(1 << 31)  # sparse: one byte more than a protobuf message can have
    return {"missing.pb": "No such file", "link.pb": "No such file", "empty.pb": "empty",
            "saved.keras": "Keras saved.*tfckpt.keras.checkpoint",
            "saved.weights.h5": "Keras saved.*tf.saved_model.save",
            "truncated.pb": "truncated or corrupt", "noise.pb": "truncated or corrupt",
            "prose.txt": "is text, but no GraphDef or MetaGraphDef",
            "almost.pbtxt": "frob", "no_ops.pbtxt": "has no ops",
            "dangling.pb": "does not accept", "custom.pb": "MyFastTanh.*--op_library",
            "inference.pb": "inference graph", "open.pb": "--batch_size",
            "hollow": "without saved_model.pb", "cut": "truncated or corrupt",
            "vast.pb": r"2.00 GiB of graph.* 2 GiB; keep large constants in variables"}


NAMES = ["missing.pb", "saved.keras", "saved.weights.h5", "link.pb", "empty.pb", "truncated.pb",
         "noise.pb", "prose.txt", "almost.pbtxt", "no_ops.pbtxt", "dangling.pb", "custom.pb",
         "inference.pb", "open.pb", "hollow", "cut", "vast.pb"]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory, files):
    folder = tmp_path_factory.mktemp("broken")
    return folder, _broken(folder, files)


@pytest.mark.parametrize("command", ["inspect", "plan", "rewrite", "compare"])
@pytest.mark.parametrize("name", NAMES)
def test_bad_input_is_one_line_and_leaves_nothing(tool, corpus, name, command):
    folder, said = corpus
    assert sorted(said) == sorted(NAMES)
    more = {"rewrite": ["out"], "compare": ["@graph.pb"]}.get(command, [])
    code, out, err = tool(command, folder / name, *more)
    assert code == 1 and out == "", (out, err)
    assert err.startswith("tfckpt: error: ") and err.count("\n") == 1, err
    assert "Traceback" not in err and "fault of tfckpt" not in err
    assert re.search(said[name], err), err
    assert listing(".") == []


def test_output_paths_that_cannot_be(tool, files):
    for target, said in (("no/where.pb", "no directory"), (str(files / "graph.pb"), "--force")):
        code, out, err = tool("rewrite", "@graph.pb", target)
        assert code == 1 and out == "" and said in err and err.count("\n") == 1
    pathlib.Path("folder").mkdir()
    for source in ("@graph.pb", "@model"):
        code, out, err = tool("rewrite", source, "folder", *BATCH, "--force")
        assert code == 1 and "choose another path" in err
    assert listing(".") == ["folder"]


def test_a_missing_op_library(tool):
    code, out, err = tool("inspect", "@graph.pb", "--op_library", "nothing.so")
    assert code == 1 and "nothing.so" in err and err.count("\n") == 1


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read and write everything")
def test_permissions(tool, files, tmp_path):
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o500)
    code, out, err = tool("rewrite", "@graph.pb", closed / "out.pb")
    assert code == 1 and "permissions" in err


def _batch_of(source: str) -> list[str]:
    """Return flags for the batch of a graph, where it leaves one open."""
    return [] if source == "@graph.pb" else BATCH


@pytest.mark.parametrize("source, target, call", [
    ("@graph.pb", "out.pb", "fsync"), ("@model", "out", "rename"), ("@graph.pb", "out.pb", "link")])
def test_a_full_disk_leaves_the_old_output_or_none(tool, monkeypatch, source, target, call):
    real, fsync = getattr(os, call), os.fsync

    def full(*arguments, **options):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "somewhere")

    monkeypatch.setattr(os, call, full)
    options = [*_batch_of(source), "--solver", "chen"]
    code, out, err = tool("rewrite", source, target, *options)
    assert code == 1 and "No space left on device" in err and err.count("\n") == 1
    assert listing(".") == []
    monkeypatch.setattr(os, call, real)
    assert tool("rewrite", source, target, *options)[0] == 0
    before = {name: pathlib.Path(name).read_bytes() for name in listing(".")
              if pathlib.Path(name).is_file()}
    monkeypatch.setattr(os, "fsync" if call == "link" else call, full)
    code, out, err = tool("rewrite", source, target, *options, "--force", "--budget", "0.9")
    assert code == 1
    monkeypatch.setattr(os, "fsync" if call == "link" else call,
                        real if call != "link" else fsync)
    assert {name: pathlib.Path(name).read_bytes() for name in before} == before


@contextlib.contextmanager
def full_disk(folder: pathlib.Path, size: int):
    """Mount a disk of `size` bytes."""
    if subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)],
                      capture_output=True, check=False).returncode:
        pytest.skip("no disk can be mounted here")
    try:
        yield
    finally:
        subprocess.run(["umount", str(folder)], check=True)


@contextlib.contextmanager
def full_quota(folder: pathlib.Path, size: int):
    """Limit every file of this process to `size` bytes."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.parametrize("limit", [full_disk, full_quota])
@pytest.mark.parametrize("source, target", [("@graph.pb", "out.pb"), ("@model", "out")])
def test_a_disk_that_is_really_full(tool, tmp_path, source, target, limit):
    disk = tmp_path / "disk"
    disk.mkdir()
    options = [*_batch_of(source), "--solver", "chen"]
    with limit(disk, 64 << 10):
        code, out, err = tool("rewrite", source, disk / target, *options)
        assert code == 1 and out == "" and err.count("\n") == 1, err
        assert re.search("No space left on device|File too large", err), err
        assert listing(disk) == []
        old = disk / target if source == "@graph.pb" else disk / target / "saved_model.pb"
        old.parent.mkdir(exist_ok=True)
        old.write_bytes(b"what was there before")
        code, out, err = tool("rewrite", source, disk / target, *options, "--force")
        assert code == 1 and list(contents(disk).values()) == [b"what was there before"]


def test_standard_output_to_a_full_disk(tool, monkeypatch):
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        code, out, err = tool("inspect", "@graph.pb")
        monkeypatch.undo()
        os.dup2(os.open(os.devnull, os.O_WRONLY), full.fileno())  # so that it can be closed
    assert code == 1 and "No space left on device" in err and err.count("\n") == 1


def test_who_reads_the_results_may_stop(tool, monkeypatch):
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as closed:
        monkeypatch.setattr(sys, "stdout", closed)
        code, out, err = tool("inspect", "@graph.pb")
        monkeypatch.undo()
    assert code == 0 and err == ""


def test_a_closed_standard_input(tool, monkeypatch):
    monkeypatch.setattr(sys, "stdin", None)
    code, out, err = tool("inspect", "-")
    assert code == 1 and "standard input is closed" in err and err.count("\n") == 1


@pytest.mark.parametrize("seconds, seed", [
    (10, 0), pytest.param(300, time.time_ns() % 10 ** 9, marks=pytest.mark.nightly)],
    ids=["short", "long"])
def test_fuzzed_graphs_are_rewritten_or_refused(seconds, seed):
    """A child, since TensorFlow itself may abort; FUZZ_SECONDS and FUZZ_SEED change the run."""
    seconds = os.environ.get("FUZZ_SECONDS", str(seconds))
    seed = os.environ.get("FUZZ_SEED", str(seed))
    done = subprocess.run([sys.executable, "-m", "tests.support.fuzz", seconds, seed], cwd=ROOT,
                          capture_output=True, text=True, timeout=float(seconds) + 800,
                          check=False)
    assert done.returncode == 0, f"from seed {seed}: {done.stderr[-3000:]}"
    rewritten, refused = map(int, re.findall(r"\d+", done.stdout))
    assert rewritten > 0 and refused > 0, f"from seed {seed}: {done.stdout}"


def test_a_file_that_is_not_there_is_named_before_tensorflow_is_loaded(tmp_path):
    code = ("import sys; from tfckpt.cli import main; code = main(sys.argv[1:]); "
            "sys.exit(code if 'tensorflow' not in sys.modules else 9)")
    done = subprocess.run([sys.executable, "-c", code, "plan", str(tmp_path / "none.pb")],
                          capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "none.pb' cannot be read: No such file" in done.stderr
