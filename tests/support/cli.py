"""Fixtures for the command line: graphs in files, and a way to run commands on them."""

from __future__ import annotations

import pathlib

import pytest
import tensorflow as tf

from tests.support import saved
from tfckpt.cli import main, quiet_import

BATCH = ["--batch_size", str(saved.BATCH)]


@pytest.fixture(scope="session")
def files(tmp_path_factory):
    """Return a folder with a SavedModel `model` and one TF1 graph as `graph.pb`, `.pbtxt` and
    `.meta`.
    """
    folder = tmp_path_factory.mktemp("graphs")
    saved.save_trainer(folder / "model")
    graph = saved.tf1_graph()
    with graph.as_default():
        meta = tf.compat.v1.train.export_meta_graph()
    (folder / "graph.pb").write_bytes(graph.as_graph_def().SerializeToString())
    (folder / "graph.pbtxt").write_text(str(graph.as_graph_def()))
    (folder / "graph.meta").write_bytes(meta.SerializeToString())
    return folder


@pytest.fixture
def tool(files, tmp_path, capfd, monkeypatch):
    """Run a command line in an empty folder beside the files: (code, stdout, stderr).

    An argument that begins with @ names one of the files.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(quiet_import, "SILENCED", True)  # a busy machine is no reason to say more

    def run(*arguments):
        capfd.readouterr()
        code = main([str(files / a[1:]) if isinstance(a, str) and a.startswith("@") else str(a)
                     for a in arguments])
        out, err = capfd.readouterr()
        return code, out, err

    return run


def listing(folder) -> list[str]:
    """Everything below a folder."""
    return sorted(str(p.relative_to(folder)) for p in pathlib.Path(folder).rglob("*"))


def contents(folder) -> dict[str, bytes]:
    """Return the bytes of every file below a folder."""
    return {str(p.relative_to(folder)): p.read_bytes()
            for p in sorted(pathlib.Path(folder).rglob("*")) if p.is_file()}
