"""The native pass in a fresh process: how it is built and found again, and what enabling starts."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time

import pytest

from grappler_ext import build

pytestmark = pytest.mark.skipif(not shutil.which(os.environ.get("CXX", "g++")),
                                reason="no C++ compiler")


class TestBuilding:
    """In processes of their own, since a pass is loaded once."""

    def run(self, folder, code="", **variables):
        command = ["-c", code] if code else ["-m", "grappler_ext.build"]
        return subprocess.run([sys.executable, *command], capture_output=True, text=True,
                              env={**os.environ, "XDG_CACHE_HOME": str(folder), **variables})

    def test_no_compiler_is_one_clear_line(self, tmp_path):
        done = self.run(tmp_path, CXX="no-such-compiler")
        assert done.returncode == 1 and not done.stdout
        assert "install g++" in done.stderr.splitlines()[-1]
        assert "Traceback" not in done.stderr

    @pytest.mark.parametrize("compiler, said", [
        ("{junk}", "cannot be run"), ("'g++", "cannot be run"), ("nobody -pipe", "'nobody'")])
    def test_a_compiler_that_cannot_run_is_one_clear_line(self, compiler, said, tmp_path,
                                                          monkeypatch):
        (tmp_path / "junk").write_text("no program")
        (tmp_path / "junk").chmod(0o755)
        monkeypatch.setenv("CXX", compiler.format(junk=tmp_path / "junk"))
        with pytest.raises(build.BuildError, match=f"grappler_ext: .*{said}.*CXX|CXX.*{said}") as e:
            build.compiler()
        assert "\n" not in str(e.value)

    @pytest.mark.parametrize("given, wanted", [
        ("", ["g++"]), ("g++ -pipe", ["g++", "-pipe"]), ("'g++' -I 'a b'", ["g++", "-I", "a b"])])
    def test_a_compiler_may_have_arguments(self, given, wanted, monkeypatch):
        monkeypatch.setenv("CXX", given)
        command, version = build.compiler()
        assert command == wanted and "g++" in version

    def test_a_user_without_a_home(self, monkeypatch):
        def nobody():
            raise RuntimeError("Could not determine home directory.")

        monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
        monkeypatch.setattr(build.pathlib.Path, "home", nobody)
        with pytest.raises(build.BuildError, match="name a folder in XDG_CACHE_HOME"):
            build.shared_object()

    @pytest.mark.parametrize("argument, code", [("--help", 0), ("--fast", 2)])
    def test_what_may_be_written(self, argument, code, monkeypatch, capsys):
        monkeypatch.setattr(sys, "argv", ["build", argument])
        assert build.main() == code
        out, err = capsys.readouterr()
        assert "python -m grappler_ext.build [--force]" in out + err
        assert bool(out) is (code == 0)

    def test_a_compiler_that_fails_leaves_nothing_behind(self, tmp_path):
        done = self.run(tmp_path, CXX="false")
        assert done.returncode == 1 and "the compiler failed" in done.stderr
        assert not list((tmp_path / "tfckpt").glob("*.so"))

    def test_a_cache_that_cannot_be_written(self, tmp_path):
        (tmp_path / "file").write_text("")
        done = self.run(tmp_path / "file")
        assert done.returncode == 1 and "XDG_CACHE_HOME" in done.stderr

    @pytest.mark.nightly
    def test_the_sanitizers_find_nothing(self):
        done = subprocess.run([sys.executable, "-m", "tests.support.sanitizers"],
                              capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-2000:]
        assert "no finding" in done.stdout

    def test_what_is_built_is_found_again(self):
        before = build.shared_object()
        started = time.perf_counter()
        assert build.shared_object() == before and before.exists()
        assert time.perf_counter() - started < 1


FIRST = """
import grappler_ext
grappler_ext.enable()
import tensorflow as tf
from tensorflow.python.eager import context
assert not context.context()._initialized
tf.config.threading.set_inter_op_parallelism_threads(1)
tf.config.threading.set_intra_op_parallelism_threads(2)
cpu, = tf.config.list_physical_devices("CPU")
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
for gpu in tf.config.list_physical_devices("GPU"):
    tf.config.experimental.set_memory_growth(gpu, True)
tf.config.optimizer.set_experimental_options({"layout_optimizer": False})
tf.config.optimizer.set_jit(False)
tf.config.set_soft_device_placement(True)
tf.config.experimental.enable_op_determinism()
assert not context.context()._initialized

weights = [tf.Variable(tf.random.stateless_normal((64, 64), (k, 0)) / 8) for k in range(4)]

@tf.function
def step(x):
    with tf.GradientTape() as tape:
        h = x
        for weight in weights:
            h = tf.nn.gelu(h @ weight)
        loss = tf.reduce_mean(h * h)
    for weight, gradient in zip(weights, tape.gradient(loss, weights)):
        weight.assign_sub(gradient)

step(tf.ones((2048, 64)))
config = context.context().config
assert (config.inter_op_parallelism_threads, config.intra_op_parallelism_threads) == (1, 2)
assert config.graph_options.rewrite_options.layout_optimizer
assert len(tf.config.list_logical_devices("CPU")) == 2
assert grappler_ext.reports()["step"].applied
grappler_ext.disable()
assert not context.context().config.graph_options.rewrite_options.custom_optimizers
"""


def test_enabling_first_leaves_tensorflow_to_be_configured():
    done = subprocess.run([sys.executable, "-c", FIRST], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
