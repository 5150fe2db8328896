"""Edits are values: what combines them, and what their checker refuses by name."""

from __future__ import annotations

import pytest

from tfckpt.errors import RewriteError
from tfckpt.ir.edits import AddControl, Clone, Create, Edits, Rewire, check_edits, edited, together
from tfckpt.ir.graph import FORWARD, Graph, Op, Tensor, check_graph

F32 = Tensor("float32", (4,), 16)


def chain() -> Graph:
    """x -> a = tanh(x) -> b = exp(a) -> c = b * a."""
    def op(name, kind, *inputs):
        return Op(name, kind, tuple((i, 0) for i in inputs), (), (F32,), FORWARD, True)

    graph = Graph("chain", (op("x", "Placeholder"), op("a", "Tanh", 0), op("b", "Exp", 1),
                            op("c", "Mul", 2, 1)), ((3, 0),), ())
    check_graph(graph)
    return graph


AGAIN = Edits(added=(Create("wait", "NoOp", (), ("b",), (), {}),
                     Clone("again", "a", ("x:0",), ("wait",))),
              rewires=(Rewire("c", 1, "again:0"),), controls=(AddControl("c", "wait"),))


def test_what_is_fine_passes():
    check_edits(chain(), Edits())
    check_edits(chain(), AGAIN)


@pytest.mark.parametrize("edits, said", [
    (Edits(rewires=(Rewire("a", 0, "c:0"),)), "cycle"),
    (Edits(rewires=(Rewire("a", 0, "a:0"),)), "cycle"),
    (Edits(controls=(AddControl("a", "c"),)), "cycle"),
    (Edits(added=(Create("wait", "NoOp", (), ("c",), (), {}),),
           controls=(AddControl("b", "wait"),)), "cycle"),
    (Edits(added=(Clone("again", "a", ("c:0",)),), rewires=(Rewire("b", 0, "again:0"),)), "cycle"),
    (Edits(rewires=(Rewire("c", 0, "nobody:0"),)), "nobody"),
    (Edits(rewires=(Rewire("nobody", 0, "a:0"),)), "nobody"),
    (Edits(rewires=(Rewire("c", 2, "a:0"),)), "no input 2"),
    (Edits(rewires=(Rewire("c", -1, "a:0"),)), "no input -1"),
    (Edits(controls=(AddControl("a", "nobody"),)), "nobody"),
    (Edits(controls=(AddControl("nobody", "a"),)), "nobody"),
    (Edits(added=(Clone("again", "nobody", ("x:0",)),)), "nobody"),
    (Edits(added=(Clone("again", "a", ("nobody:0",)),)), "nobody"),
    (Edits(added=(Clone("a", "b", ("x:0",)),)), "two ops would be named 'a'"),
    (Edits(added=(Clone("n", "a", ("x:0",)), Clone("n", "b", ("x:0",)))), "two ops"),
])
def test_what_is_wrong_is_refused_by_name(edits, said):
    with pytest.raises(RewriteError, match=said) as caught:
        check_edits(chain(), edits)
    assert str(caught.value).startswith("rewrite:")


# One after the other: the second edits were made for the graph that the first give.


def product(name: str, *inputs: str) -> Create:
    return Create(name, "Mul", inputs, (), ("float32",), {})


def test_later_edits_of_new_ops_are_written_into_their_creation():
    first = Edits(added=(product("d", "a:0", "a:0"),), rewires=(Rewire("c", 0, "d:0"),),
                  dropped=("b",))
    second = Edits(added=(Clone("again", "a", ("x:0",)),),
                   rewires=(Rewire("d", 1, "again:0"), Rewire("c", 0, "again:0")),
                   controls=(AddControl("d", "x"),), dropped=("x",))
    both = first.then(second)
    assert both.added == (second.added[0], product("d", "a:0", "again:0"))  # what it reads is first
    assert both.rewires == (Rewire("c", 0, "again:0"),)
    assert both.controls == second.controls and both.dropped == ("b", "x")
    check_edits(chain(), both)
    tensors, waits, _ = edited(chain(), both)
    assert tensors["d"] == ["a:0", "again:0"] and waits["d"] == ["x"]


def test_nothing_before_or_after_changes_nothing():
    assert Edits().then(AGAIN) == AGAIN.then(Edits()) == AGAIN


# Side by side: edits of different devices' parts.


def test_edits_of_several_parts_lose_nothing():
    other = Edits(added=(product("e", "x:0", "x:0"),), rewires=(Rewire("b", 0, "e:0"),),
                  dropped=("a",))
    first = Edits(AGAIN.added, AGAIN.rewires, AGAIN.controls, dropped=("b",))
    both = together([first, other])
    assert both.added == (*AGAIN.added, *other.added) and both.controls == AGAIN.controls
    assert both.rewires == (*AGAIN.rewires, *other.rewires) and both.dropped == ("b", "a")
    assert together([]) == Edits() and together([first]) == first
