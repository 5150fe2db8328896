"""Feeds mutated graphs to the command line and reports what is neither done nor refused.

    python -m tests.support.fuzz SECONDS [SEED]

Real GraphDefs, MetaGraphDefs (binary and text) and SavedModels are changed in structure, in bytes
and in characters. It runs in a process of its own, since TensorFlow may abort on a graph that it
does not check. A case is repeated by `SECONDS` 0 and its number as SEED.
"""

from __future__ import annotations

import contextlib
import io
import pathlib
import random
import shutil
import sys
import tempfile
import time

import tensorflow as tf

from tests.support import saved
from tfckpt.capture.files import Document, read_bytes, read_path
from tfckpt.cli import main

LETTERS = b"0123456789-:^{}\"\\ \n/_.eEinfatype\xc3\x00"


class Small(saved.Trainer):
    """Three layers, an op with several outputs, a branch and a loop."""

    def __init__(self):
        super().__init__()
        self.weights, self.slots = self.weights[:3], self.slots[:3]

    def _forward(self, x):
        x = super()._forward(x)
        x = tf.cond(tf.reduce_sum(x) > 0.0, lambda: tf.tanh(x), lambda: tf.nn.relu(x))
        return tf.while_loop(lambda i, h: i < 2, lambda i, h: (i + 1, tf.sin(h)), (0, x))[1]


def sources(folder: pathlib.Path) -> list[Document]:
    """Return what is mutated."""
    found = []
    for use_resource in (True, False):
        graph = saved.tf1_graph(width=64, depth=3, batch=512, use_resource=use_resource)
        data = graph.as_graph_def().SerializeToString()
        found += [read_bytes(data, "graph.pb"),
                  read_bytes(str(graph.as_graph_def()).encode(), "graph.pbtxt")]
    with graph.as_default():
        meta = tf.compat.v1.train.export_meta_graph()
    found.append(read_bytes(meta.SerializeToString(), "graph.meta"))
    tf.saved_model.save(Small(), str(folder / "model"))
    return [*found, read_path(str(folder / "model"))]


def mutate(document: Document, made: random.Random) -> bytes:
    """Return the bytes of a document with one to three things changed."""
    changed = document.copy()
    for _ in range(made.randint(1, 3)):
        nodes = made.choice([body for definition in changed.graph_defs() for body in (
            definition.node, *(f.node_def for f in definition.library.function)) if body])
        made.choice(_STRUCTURAL)(nodes, made)
    if made.random() < 0.3:
        _signature(changed, made)
    data = bytearray(changed.serialized())
    kind = made.random()
    if kind < 0.15:
        return bytes(data[:made.randrange(len(data))])
    if kind < 0.45:
        for _ in range(made.randint(1, 4)):
            data[made.randrange(len(data))] = (made.choice(LETTERS) if document.text
                                               else made.randrange(256))
    return bytes(data)


def _signature(document: Document, made) -> None:
    """Changes what a function takes or returns."""
    functions = [f for definition in document.graph_defs() for f in definition.library.function]
    if not functions:
        return
    function = made.choice(functions)
    arguments = function.signature.input_arg
    what = made.randrange(5)
    if what == 0 and arguments:
        del arguments[made.randrange(len(arguments))]
    elif what == 1 and arguments:
        made.choice(arguments).type = made.choice([0, 1, 3, 10, 20, 99])
    elif what == 2 and function.ret:
        function.ret[made.choice(sorted(function.ret))] = made.choice(["", "x", "a:b:c", "n:y:9"])
    elif what == 3:
        function.signature.name = made.choice(["", "x", made.choice(functions).signature.name])
    else:
        function.attr[made.choice(["_XlaMustCompile", "_input_shapes", "_noinline"])].b = True


def _node(nodes, made):
    return made.choice(nodes)


def _drop(nodes, made):
    if len(nodes) > 1:
        del nodes[made.randrange(len(nodes))]


def _double(nodes, made):
    nodes.add().CopyFrom(_node(nodes, made))


def _retype(nodes, made):
    _node(nodes, made).op = _node(nodes, made).op


def _rename(nodes, made):
    _node(nodes, made).name = made.choice(["", "x", "^", "a b", "gradients/", "?"])


def _rewire(nodes, made):
    node = _node(nodes, made)
    if node.input:
        node.input[made.randrange(len(node.input))] = made.choice(
            ["nobody", "", "^nobody", f"{_node(nodes, made).name}:7",
             _node(nodes, made).name, f"^{_node(nodes, made).name}"])


def _unplug(nodes, made):
    node = _node(nodes, made)
    if node.input:
        del node.input[made.randrange(len(node.input))]


def _attribute(nodes, made):
    node = _node(nodes, made)
    if node.attr:
        key = made.choice(sorted(node.attr))
        if made.random() < 0.5:
            node.attr[key].Clear()
        else:
            other = _node(nodes, made)
            if other.attr:
                node.attr[key].CopyFrom(other.attr[made.choice(sorted(other.attr))])


def _shape(nodes, made):
    found = [node for node in nodes if "shape" in node.attr]
    for dimension in made.choice(found).attr["shape"].shape.dim if found else ():
        dimension.size = made.choice([-1, 0, 1, 3, -7, 1 << 33, 1 << 62])


_STRUCTURAL = [_drop, _double, _retype, _rename, _rewire, _rewire, _unplug, _attribute, _shape]


def check(document: Document, data: bytes, folder: pathlib.Path) -> int:
    """Exit code of one rewrite; raises AssertionError on what must not happen."""
    source, target = folder / "in", folder / "out"
    if document.kind == "SavedModel":
        shutil.copytree(document.source, source)
        (source / "saved_model.pb").write_bytes(data)
    else:
        source.write_bytes(data)
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(["rewrite", str(source), str(target), "--batch_size", "64"])
    said = err.getvalue()
    assert code in (0, 1), f"exit code {code}"
    assert "Traceback" not in said and "fault of tfckpt" not in said, said
    left = sorted(path.name for path in folder.iterdir())
    if code:
        assert said.count("\n") == 1 and not out.getvalue(), said
        assert left == ["in"], left
    else:
        assert left == ["in", "out", "out.report.txt"], left
        read_path(str(target))
    return code


def run(seconds: float, seed: int) -> int:
    """Mutates until the time is over; returns the number of cases."""
    codes = {0: 0, 1: 0}
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        documents = sources(folder)
        stop = time.monotonic() + seconds
        while not sum(codes.values()) or time.monotonic() < stop:
            case = seed + sum(codes.values())
            print(f"case {case}", file=sys.stderr, flush=True)
            made = random.Random(case)
            document = made.choice(documents)
            inside = folder / "case"
            inside.mkdir()
            codes[check(document, mutate(document, made), inside)] += 1
            shutil.rmtree(inside)
    print(f"{codes[0]} rewritten, {codes[1]} refused")
    return sum(codes.values())


if __name__ == "__main__":
    run(float(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0)
