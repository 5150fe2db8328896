"""The native pass in a fresh process: how it is built and found again, and what enabling starts."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time

import pytest

from grappler_ext import build, cache

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

    def test_a_compiler_that_fails_leaves_no_library(self, tmp_path):
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

    def test_one_line_says_what_takes_so_long(self, tmp_path):
        told = self.run(tmp_path, CXX="false", TF_CPP_MIN_LOG_LEVEL="0")
        assert "tfckpt: building the native pass, some 20 seconds, once" in told.stderr
        assert "building" not in self.run(tmp_path, CXX="false", TF_CPP_MIN_LOG_LEVEL="1").stderr

    def test_what_is_built_is_found_again(self):
        before = build.shared_object()
        started = time.perf_counter()
        assert build.shared_object() == before and before.exists()
        assert time.perf_counter() - started < 1


COMPILER = """#!/bin/sh
[ "$1" = --version ] && echo copies && exit
echo >> {log}
while [ "$1" != -o ]; do shift; done
cp {library} "$2"
"""


class TestCache:
    """A cached library is loaded only if no other user could have written it, and if it is whole.
    """

    @pytest.fixture(autouse=True)
    def _compiler(self, tmp_path, monkeypatch):
        """Use a compiler that copies the existing library, and count its calls."""
        self.log, program = tmp_path / "log", tmp_path / "copies"
        program.write_text(COMPILER.format(log=self.log, library=build.shared_object()))
        program.chmod(0o755)
        monkeypatch.setenv("CXX", str(program))
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        self.library = build.shared_object()

    def builds(self):
        return len(self.log.read_text().splitlines())

    def test_it_is_built_once(self):
        assert build.shared_object() == self.library and self.builds() == 1
        assert self.library.parent.stat().st_mode & 0o777 == 0o700

    def test_a_file_that_others_may_write_is_built_anew(self):
        self.library.chmod(0o775)
        assert build.shared_object() == self.library and self.builds() == 2
        assert self.library.stat().st_mode & 0o777 == 0o755

    def test_a_link_is_built_anew(self, tmp_path):
        self.library.rename(tmp_path / "elsewhere.so")
        self.library.symlink_to(tmp_path / "elsewhere.so")
        assert build.shared_object() == self.library and self.builds() == 2
        assert not self.library.is_symlink()

    @pytest.mark.parametrize("damage", [
        lambda b: b[:len(b) // 2], lambda b: b"", lambda b: b + b"!"])
    def test_a_broken_file_is_built_anew(self, damage):
        whole = self.library.read_bytes()
        self.library.write_bytes(damage(whole))
        assert build.shared_object() == self.library and self.builds() == 2
        assert self.library.read_bytes() == whole

    def test_a_folder_that_others_may_write_is_closed_to_them(self):
        self.library.parent.chmod(0o777)
        build.shared_object()
        assert self.library.parent.stat().st_mode & 0o777 == 0o755 and self.builds() == 1

    def test_a_folder_of_somebody_else_is_refused(self):
        if os.geteuid():
            pytest.skip("only root can give a folder away")
        os.chown(self.library.parent, 12345, -1)
        with pytest.raises(build.BuildError, match="belongs to user 12345.* name another folder"):
            build.shared_object()

    def test_what_cannot_be_loaded_is_built_anew_once(self, tmp_path):
        (tmp_path / "junk").write_text("no library")
        cache.put(tmp_path / "junk", self.library)
        enable = [sys.executable, "-c", "import grappler_ext; grappler_ext.enable()"]
        assert subprocess.run(enable).returncode == 0 and self.builds() == 2
        program = tmp_path / "copies"
        program.write_text(COMPILER.format(log=self.log, library=program))
        cache.put(shutil.copy(program, tmp_path / "junk"), build.shared_object())
        done = subprocess.run(enable, capture_output=True, text=True)
        assert done.returncode == 1 and self.builds() == 3
        assert "BuildError: grappler_ext: what was built just now cannot be" in done.stderr


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
