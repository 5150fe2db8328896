"""The packages that `pip install` gets: the wheel and the source distribution, and their types."""

from __future__ import annotations

import os
import pathlib
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile

import pytest

ROOT = pathlib.Path(__file__).parents[2]
PACKAGES = ("tfckpt", "grappler_ext")
BESIDE = ("pyproject.toml", "README.md", "LICENSE")
_SDIST = "import sys, setuptools.build_meta as b; b.build_sdist(sys.argv[1])"


def shipped(root: pathlib.Path) -> set[str]:
    """Return the files that users need: all modules, the native pass and the markers for types."""
    return {str(path.relative_to(root)) for name in PACKAGES for path in (root / name).rglob("*")
            if path.is_file() and path.suffix in (".py", ".cc", ".typed")}


def run(*command: object, cwd: pathlib.Path, **environment: str) -> str:
    """Return the standard output of a command that has to succeed."""
    done = subprocess.run([str(part) for part in command], cwd=cwd, text=True, timeout=800,
                          capture_output=True, check=False, env={**os.environ, **environment})
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def wheel_of(source: pathlib.Path, folder: pathlib.Path) -> pathlib.Path:
    """Return the wheel that pip builds with what is installed here."""
    pytest.importorskip("setuptools")
    run(sys.executable, "-m", "pip", "wheel", source, "--no-deps", "--no-build-isolation",
        "--quiet", "--wheel-dir", folder, cwd=folder)
    found, = folder.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """Return a copy of the source: a build makes folders in it, and uses those of older builds."""
    folder = tmp_path_factory.mktemp("source")
    for name in PACKAGES:
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in BESIDE:
        shutil.copy(ROOT / name, folder)
    return folder


@pytest.fixture(scope="module")
def wheel(source, tmp_path_factory):
    return wheel_of(source, tmp_path_factory.mktemp("wheel"))


def test_the_wheel_contains_all_that_is_needed(wheel):
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert names == shipped(ROOT)
    assert names >= {"tfckpt/py.typed", "grappler_ext/py.typed",
                     "grappler_ext/pass/tfckpt_optimizer.cc"}


def test_the_wheel_has_the_version_and_the_command(wheel):
    with zipfile.ZipFile(wheel) as archive:
        texts = {name.rpartition("/")[2]: archive.read(name).decode()
                 for name in archive.namelist() if ".dist-info/" in name}
    line, = (line for line in (ROOT / "tfckpt" / "__init__.py").read_text().splitlines()
             if line.startswith("__version__"))
    assert f"\nVersion: {line.split()[-1].strip(chr(34))}\n" in texts["METADATA"]
    assert "tfckpt = tfckpt.cli:main" in texts["entry_points.txt"]
    assert "LICENSE" in texts


def test_the_source_distribution_builds_the_same_wheel(source, wheel, tmp_path):
    run(sys.executable, "-c", _SDIST, tmp_path, cwd=source)
    packed, = tmp_path.glob("*.tar.gz")
    with tarfile.open(packed) as archive:
        archive.extractall(tmp_path, filter="data")
    unpacked, = (path for path in tmp_path.iterdir() if path.is_dir())
    (tmp_path / "built").mkdir()
    again = wheel_of(unpacked, tmp_path / "built")
    assert zipfile.ZipFile(again).namelist() == zipfile.ZipFile(wheel).namelist()


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """Return the interpreter of an environment with the wheel, and all else from this one."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=False)
    packages = next(folder.glob("lib/python*/site-packages"))
    zipfile.ZipFile(wheel).extractall(packages)
    (packages / "shared.pth").write_text(sysconfig.get_path("purelib"))
    return folder / "bin" / "python"


_USER = '''
import grappler_ext
import tfckpt

def activation(x: float) -> float:
    return x

reveal_type(tfckpt.nested_forward_ad(activation)(1.0))
reveal_type(grappler_ext.reports())
with tfckpt.eager_fad() as sequences:
    reveal_type(sequences.counts)
reveal_type(tfckpt.keras.report(object()))
with grappler_ext.enabled(budget=0.5, strict=True):
    tfckpt.keras.PeakMemory(compare=True, log_dir="logs")
tfckpt.chekpoint
grappler_ext.enabel()
'''
_REVEALED = ("float", "dict[str, tfckpt.report.report.Report]", "dict[str, int]",
             "tfckpt.report.report.Report | None")


def checked(program: str, installed: pathlib.Path, folder: pathlib.Path) -> tuple[list, list]:
    """Return what mypy reveals and what it finds wrong in a user's program."""
    (folder / "user.py").write_text(program)
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--config-file=", "--no-color-output",
         "--disable-error-code=import-untyped", "--cache-dir", str(installed.parents[1] / "mypy"),
         "--python-executable", str(installed), "user.py"],
        cwd=folder, text=True, capture_output=True, timeout=800, check=False)
    lines = done.stdout.splitlines()
    assert lines, done.stderr
    return ([line.partition('"')[2].rstrip('"') for line in lines if "Revealed type" in line],
            [line.partition("error: ")[2] for line in lines if ": error: " in line])


def test_a_users_program_is_type_checked(installed, tmp_path):
    pytest.importorskip("mypy")
    revealed, wrong = checked(_USER, installed, tmp_path)
    assert tuple(text.replace("builtins.", "") for text in revealed) == _REVEALED
    assert [text.split("  [")[0] for text in wrong] == [
        'Module has no attribute "chekpoint"; maybe "checkpoint"?',
        'Module has no attribute "enabel"; maybe "enable" or "enabled"?']


_STEPS = '''
import keras
import tensorflow as tf
import tfckpt

@tfckpt.checkpoint
def bare(x: int, *, flag: bool = False) -> float:
    return 1.0

@tfckpt.checkpoint(budget=0.5)
def with_options(x: int, y: str) -> str:
    return y

def plain(x: int) -> list[float]:
    return []

called = tfckpt.checkpoint(plain, budget="2GiB", fad=True)

@tfckpt.checkpoint(batch_size=32)
@tf.function
def traced(x): ...  # type: ignore

class Model(keras.Model):  # type: ignore
    @tfckpt.checkpoint(budget="min")
    def train_step(self, data: int) -> dict[str, float]:
        return {}

reveal_type(bare(1, flag=True))
reveal_type(with_options(1, "y"))
reveal_type(called(1))
reveal_type(called.plain(1))
reveal_type(bare.report)
reveal_type(with_options.reports)
reveal_type(traced.report)
reveal_type(Model().train_step(1))
reveal_type(Model.train_step.report)
reveal_type(tfckpt.report_of(bare))

class Built:
    def steps(self) -> int:
        return 1

    @tfckpt.checkpoint
    def train_step(self, data: int, scale: float = 1.0) -> dict[str, float]:
        return {}

reveal_type(tfckpt.keras.checkpoint(Built(), budget=0.5).steps())
reveal_type(Built().train_step(3, scale=2.0))
reveal_type(Built().train_step.report)
if (report := bare.report) is not None:
    reveal_type(report.planned_peak_bytes)
bare("a")
with_options(1)
called(1, 2)
Built().train_step("data")
tfckpt.checkpoint(plain, "2GiB")
tfckpt.checkpoint(budjet=0.5)
'''
_REPORT = "tfckpt.report.report.Report | None"
_KNOWN = ("float", "str", "list[float]", "list[float]", _REPORT,
          "dict[str, tfckpt.report.report.Report]",
          _REPORT, "dict[str, float]", _REPORT, _REPORT, "int", "dict[str, float]", _REPORT, "int")


def test_a_decorated_step_keeps_its_signature(installed, tmp_path):
    """Bare, with options, as a call, above `tf.function` and on a method."""
    pytest.importorskip("mypy")
    revealed, wrong = checked(_STEPS, installed, tmp_path)
    assert tuple(text.replace("builtins.", "") for text in revealed) == _KNOWN
    assert [text.partition(" ")[0] for text in wrong] == [
        "Argument", "Missing", "Too", "Argument", "No", "Unexpected"], wrong


_TRAINS = '''
import keras, numpy as np, tfckpt, grappler_ext.build
model = keras.Sequential([keras.Input((32,)), *(keras.layers.Dense(64, "gelu") for _ in range(6))])
tfckpt.keras.checkpoint(model)
model.compile("sgd", "mse", jit_compile=False)
x = np.ones((256, 32), "float32")
model.fit(x, np.ones((256, 64), "float32"), batch_size=64, verbose=0)
built = grappler_ext.build.shared_object()
print(tfckpt.keras.report(model).applied, built.is_file(), tfckpt.__file__)
'''


@pytest.mark.nightly
def test_a_clean_environment_trains(wheel, tmp_path):
    """With pip, which installs TensorFlow and all else that the wheel asks for."""
    venv.create(tmp_path / "clean", with_pip=True)
    bin_folder = tmp_path / "clean" / "bin"
    run(bin_folder / "python", "-m", "pip", "install", "--quiet", wheel, cwd=tmp_path)
    said = run(bin_folder / "python", "-c", _TRAINS, cwd=tmp_path,
               XDG_CACHE_HOME=str(tmp_path / "cache"), PYTHONPATH="")
    assert said.split()[:2] == ["True", "True"]
    assert said.split()[2].startswith(str(tmp_path / "clean"))
    assert "usage: tfckpt" in run(bin_folder / "tfckpt", "plan", "--help", cwd=tmp_path)
