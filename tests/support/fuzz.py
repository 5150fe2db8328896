"""Feeds mutated GraphDefs to the command line and reports what is neither done nor refused.

    python -m tests.support.fuzz SECONDS [SEED]

It runs in a process of its own, since TensorFlow may abort on a graph that it does not check.
"""

from __future__ import annotations

import contextlib
import io
import os
import pathlib
import random
import sys
import tempfile
import time

import tensorflow as tf

from tests.support import saved
from tfckpt.cli import main


def mutate(definition, made: random.Random) -> bytes:
    """The bytes of a graph with one to three things changed."""
    changed = tf.compat.v1.GraphDef()
    changed.CopyFrom(definition)
    for _ in range(made.randint(1, 3)):
        made.choice(_STRUCTURAL)(changed, made)
    data = bytearray(changed.SerializeToString())
    kind = made.random()
    if kind < 0.2:
        return bytes(data[:made.randrange(len(data))])
    if kind < 0.5:
        for _ in range(made.randint(1, 4)):
            data[made.randrange(len(data))] = made.randrange(256)
    return bytes(data)


def _node(definition, made):
    return made.choice(definition.node)


def _drop(definition, made):
    del definition.node[made.randrange(len(definition.node))]


def _double(definition, made):
    definition.node.add().CopyFrom(_node(definition, made))


def _retype(definition, made):
    _node(definition, made).op = _node(definition, made).op


def _rename(definition, made):
    _node(definition, made).name = made.choice(["", "x", "^", "a b", "gradients/", "?"])


def _rewire(definition, made):
    node = _node(definition, made)
    if node.input:
        node.input[made.randrange(len(node.input))] = made.choice(
            ["nobody", "", "^nobody", f"{_node(definition, made).name}:7",
             _node(definition, made).name, f"^{_node(definition, made).name}"])


def _unplug(definition, made):
    node = _node(definition, made)
    if node.input:
        del node.input[made.randrange(len(node.input))]


def _attribute(definition, made):
    node = _node(definition, made)
    if node.attr:
        key = made.choice(sorted(node.attr))
        if made.random() < 0.5:
            node.attr[key].Clear()
        else:
            other = _node(definition, made)
            if other.attr:
                node.attr[key].CopyFrom(other.attr[made.choice(sorted(other.attr))])


def _shape(definition, made):
    found = [node for node in definition.node if "shape" in node.attr]
    for dimension in made.choice(found).attr["shape"].shape.dim:
        dimension.size = made.choice([-1, 0, 1, 3, -7, 1 << 33, 1 << 62])


_STRUCTURAL = [_drop, _double, _retype, _rename, _rewire, _rewire, _unplug, _attribute, _shape]


def check(data: bytes, folder: str) -> tuple[int, str]:
    """Exit code and messages of one rewrite; raises AssertionError on what must not happen."""
    source, target = os.path.join(folder, "in.pb"), os.path.join(folder, "out.pb")
    pathlib.Path(source).write_bytes(data)
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(["rewrite", source, target, "--force"])
    said = err.getvalue()
    assert code in (0, 1), f"exit code {code}"
    assert "Traceback" not in said and "fault of tfckpt" not in said, said
    if code:
        assert said.count("\n") == 1 and not out.getvalue(), said
    return code, said


def run(seconds: float, seed: int) -> int:
    """Mutates until the time is over; returns the number of cases."""
    definition = saved.tf1_graph(width=64, depth=3, batch=512).as_graph_def()
    stop = time.monotonic() + seconds
    codes = {0: 0, 1: 0}
    with tempfile.TemporaryDirectory() as folder:
        while time.monotonic() < stop:
            case = seed + sum(codes.values())
            print(f"case {case}", file=sys.stderr, flush=True)
            code, _ = check(mutate(definition, random.Random(case)), folder)
            codes[code] += 1
    print(f"{codes[0]} rewritten, {codes[1]} refused")
    return sum(codes.values())


if __name__ == "__main__":
    run(float(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0)
