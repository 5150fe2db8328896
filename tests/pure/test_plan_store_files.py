"""The files of the plan store: whole or not there, bounded, and never an error."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
import threading

import pytest

from tfckpt.store import files

ROOT = pathlib.Path(files.__file__).parents[2]
KEYS = [f"{number:064x}" for number in range(12)]
PLAN = {"schedule": [1, 2, 3], "time": 0.1, "said": "é"}


def names(folder: pathlib.Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


@pytest.mark.parametrize("given, cache, home, found", [
    ("", "/c", "/h", "/c/tfckpt/plans"), ("", "", "/h", "/h/.cache/tfckpt/plans"),
    ("", "not/absolute", "/h", "/h/.cache/tfckpt/plans"), ("/p", "/c", "/h", "/p"),
    ("~/p", "/c", "/h", "/h/p"), ("off", "/c", "/h", None), ("OFF", "/c", "/h", None),
    ("0", "/c", "/h", None), ("false", "/c", "/h", None),
    ("on", "/c", "/h", "/c/tfckpt/plans"), ("True", "/c", "/h", "/c/tfckpt/plans")])
def test_where_plans_are(monkeypatch, given, cache, home, found):
    for name, value in ((files.VARIABLE, given), ("XDG_CACHE_HOME", cache), ("HOME", home)):
        monkeypatch.setenv(name, value)
    assert files.folder() == (None if found is None else pathlib.Path(found))


def test_a_plan_comes_back_as_it_was(tmp_path):
    where = tmp_path / "made" / "when needed"
    assert files.read(where, KEYS[0]) is None
    files.write(where, KEYS[0], {"step": "s"}, PLAN)
    head, plan = files.read(where, KEYS[0])
    assert plan == PLAN and head["step"] == "s" and files.read(where, KEYS[1]) is None
    assert names(where) == {f"{KEYS[0]}.jsonl"}
    assert os.stat(where).st_mode & 0o077 == 0
    files.write(where, KEYS[0], {"step": "s"}, [4])
    assert files.read(where, KEYS[0])[1] == [4]


@pytest.mark.parametrize("damage", [
    lambda data: b"", lambda data: data[:-1], lambda data: data[:40], lambda data: b"\0" * 100,
    lambda data: data.replace(b"3]", b"7]"),
    lambda data: data.replace(b'"format": %d' % files.FORMAT, b'"format": 0'),
    lambda data: b"[]\n" + data, lambda data: b"{}\n{}", lambda data: b"[" * 10**5 + b"\n",
    lambda data: data.partition(b"\n")[0] + b"\nno JSON"])
def test_a_damaged_file_is_a_miss_and_goes(tmp_path, damage):
    files.write(tmp_path, KEYS[0], {}, PLAN)
    path = tmp_path / f"{KEYS[0]}.jsonl"
    path.write_bytes(damage(path.read_bytes()))
    assert files.read(tmp_path, KEYS[0]) is None and names(tmp_path) == set()


def test_a_folder_that_cannot_be_used_is_no_error(tmp_path):
    (tmp_path / "file").write_text("in the way")
    for where in (tmp_path / "file", tmp_path / "file" / "below"):
        files.write(where, KEYS[0], {}, PLAN)
        assert files.read(where, KEYS[0]) is None
        assert files.kept(where) == [] and files.clear(where) == (0, 0)
        files.remove(where, KEYS[0])
    assert (tmp_path / "file").read_text() == "in the way"


def test_what_was_not_used_for_longest_goes_first(tmp_path, monkeypatch):
    for age, key in enumerate(KEYS[:10]):
        files.write(tmp_path, key, {}, "x" * 1000)
        os.utime(tmp_path / f"{key}.jsonl", (1000.0 + age, 1000.0 + age))
    each = files.kept(tmp_path)[0].bytes
    assert files.read(tmp_path, KEYS[0])  # now it is the latest
    monkeypatch.setattr(files, "MOST_BYTES", 10 * each)
    files.write(tmp_path, KEYS[10], {}, "x" * 1000)
    assert names(tmp_path) == {f"{KEYS[i]}.jsonl" for i in (0, 3, 4, 5, 6, 7, 8, 9, 10)}
    monkeypatch.setattr(files, "MOST_BYTES", each // 2)
    files.write(tmp_path, KEYS[11], {}, "x" * 1000)
    assert names(tmp_path) == {f"{KEYS[11]}.jsonl"}


def test_what_a_killed_process_has_left_goes(tmp_path):
    for name, age in (("old", 2 * files._ABANDONED), ("new", 0)):
        path = tmp_path / f"{files._UNFINISHED}{name}"
        path.write_text("half")
        os.utime(path, (path.stat().st_mtime - age,) * 2)
    files.write(tmp_path, KEYS[0], {}, PLAN)
    assert names(tmp_path) == {f"{KEYS[0]}.jsonl", f"{files._UNFINISHED}new"}


def test_clearing_leaves_what_is_not_ours(tmp_path):
    (tmp_path / "notes.jsonl").write_text("mine")
    for key in KEYS[:2]:
        files.write(tmp_path, key, {}, PLAN)
    size = sum(file.bytes for file in files.kept(tmp_path))
    assert size and files.clear(tmp_path) == (2, size) and names(tmp_path) == {"notes.jsonl"}


def test_the_list_tells_of_damaged_files_too(tmp_path):
    files.write(tmp_path, KEYS[0], {"step": "s"}, PLAN)
    (tmp_path / f"{KEYS[1]}.jsonl").write_bytes(b"\xff\n")
    (tmp_path / f"{KEYS[2]}.jsonl").write_bytes(b"[]\n")
    heads = {file.path.stem: file.head.get("step") for file in files.kept(tmp_path)}
    assert heads == {KEYS[0]: "s", KEYS[1]: None, KEYS[2]: None}


_WRITER = """
import sys, pathlib
from tfckpt.store import files
where, plan = pathlib.Path(sys.argv[1]), [int(sys.argv[2])] * 20000
for _ in range(60):
    files.write(where, sys.argv[3], {}, plan)
"""


def test_readers_see_whole_plans_while_processes_write(tmp_path):
    writers = [subprocess.Popen([sys.executable, "-c", _WRITER, tmp_path, str(n), KEYS[0]],
                                cwd=ROOT) for n in (1, 2)]
    seen: set[tuple[int, ...]] = set()
    done = threading.Event()

    def look() -> None:
        while not done.is_set():
            found = files.read(tmp_path, KEYS[0])
            if found is not None:
                seen.add((len(found[1]), *sorted(set(found[1]))))

    reader = threading.Thread(target=look)
    reader.start()
    codes = [writer.wait(timeout=300) for writer in writers]
    done.set()
    reader.join()
    assert codes == [0, 0] and seen and seen <= {(20000, 1), (20000, 2)}
    assert files.read(tmp_path, KEYS[0]) is not None
    assert names(tmp_path) == {f"{KEYS[0]}.jsonl"}
