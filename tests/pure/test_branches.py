"""Which ops run in one branch only, and that no edit takes others along."""

from __future__ import annotations

import pytest

from tfckpt.errors import RewriteError
from tfckpt.ir.branches import conditions
from tfckpt.ir.edits import AddControl, Clone, Edits, check_edits
from tfckpt.ir.graph import FORWARD, Graph, Op, Tensor

# name, type, inputs, waits: x is doubled or negated, as a flag says
OPS = [
    ("x", "Placeholder", [], []), ("flag", "Placeholder", [], []),
    ("switch", "Switch", ["x:0", "flag:0"], []),
    ("double", "Mul", ["switch:1", "switch:1"], []),
    ("negative", "Neg", ["switch:0"], []),
    ("after_double", "NoOp", [], ["double"]),
    ("merge", "Merge", ["negative:0", "double:0"], []),
    ("loss", "Sum", ["merge:0"], []),
]


def test_what_reads_or_awaits_a_branch_is_in_it():
    found = conditions(OPS)
    taken, other = {("flag:0", 1)}, {("flag:0", 0)}
    assert found["double"] == found["after_double"] == taken
    assert found["negative"] == other
    assert all(not found[name] for name in ("x", "flag", "switch", "merge", "loss"))


def test_a_merge_inside_of_a_branch_is_in_that_branch():
    ops = [("x", "Placeholder", [], []), ("outer", "Placeholder", [], []),
           ("inner", "Placeholder", [], []),
           ("a", "Switch", ["x:0", "outer:0"], []), ("b", "Switch", ["a:1", "inner:0"], []),
           ("left", "Neg", ["b:0"], []), ("right", "Abs", ["b:1"], []),
           ("merge", "Merge", ["left:0", "right:0"], []),
           ("end", "Merge", ["a:0", "merge:0"], [])]
    found = conditions(ops)
    assert found["left"] == {("outer:0", 1), ("inner:0", 0)}
    assert found["merge"] == {("outer:0", 1)}
    assert not found["end"]


def test_a_merge_may_await_a_branch_that_is_not_taken():
    """As in the lowering of an assertion, after which everything else comes."""
    found = conditions([
        ("ok", "Placeholder", [], []), ("pred", "Switch", ["ok:0", "ok:0"], []),
        ("yes", "Identity", ["pred:1"], []), ("no", "Identity", ["pred:0"], []),
        ("assert", "Assert", ["no:0"], []),
        ("executed", "Merge", ["yes:0", "no:0"], ["assert"]), ("after", "NoOp", [], ["executed"])])
    assert found["assert"] == {("ok:0", 0)}
    assert not found["executed"] and not found["after"]


def _graph() -> Graph:
    index = {name: i for i, (name, *_) in enumerate(OPS)}
    needed = conditions(OPS)

    def tensor(text):
        op, _, slot = text.rpartition(":")
        return index[op], int(slot)

    return Graph("step", tuple(
        Op(name, kind, tuple(map(tensor, inputs)), tuple(index[c] for c in waits),
           (Tensor("float32", (4,), 16),) * 2, FORWARD, True, conditional=bool(needed[name]))
        for name, kind, inputs, waits in OPS), ((index["loss"], 0),), ())


def test_edits_may_not_have_others_wait_for_a_branch():
    graph = _graph()
    check_edits(graph, Edits((), (), (AddControl("double", "x"),)))  # into a branch
    with pytest.raises(RewriteError, match="'loss' would run in one branch only"):
        check_edits(graph, Edits((), (), (AddControl("loss", "negative"),)))
    copied = Clone("copy", "x", (), ("double",))
    check_edits(graph, Edits((copied,), (), ()))
    with pytest.raises(RewriteError, match="one branch only"):
        check_edits(graph, Edits((copied,), (), (AddControl("loss", "copy"),)))
