"""The checker of edits against what networkx makes of the edited graph; branches by hand."""

from __future__ import annotations

import random

import networkx
import pytest
from hypothesis import given, settings

from tests.support.graphs import seeds
from tfckpt.errors import RewriteError
from tfckpt.ir.edits import AddControl, Clone, Create, Edits, Rewire, check_edits, edited
from tfckpt.ir.graph import FORWARD, Graph, Op, Tensor

F32 = Tensor("float32", (4,), 16)


def graph_of(rows, **options) -> Graph:
    """Return a graph from (name, type, inputs as "op:slot", ops waited for); every op has two
    outputs.
    """
    names = [row[0] for row in rows]
    ops = []
    for name, kind, inputs, controls in rows:
        read = tuple((names.index(t.partition(":")[0]), int(t.partition(":")[2])) for t in inputs)
        ops.append(Op(name, kind, read, tuple(map(names.index, controls)), (F32, F32), FORWARD,
                      True, conditional=name in options.get("conditional", ())))
    return Graph("made", tuple(ops), (), ())


def random_graph(rng) -> Graph:
    rows = []
    for i in range(rng.randint(1, 8)):
        before = [row[0] for row in rows]
        rows.append((f"op{i}", rng.choice(("Tanh", "Mul", "NoOp")),
                     [f"{rng.choice(before)}:{rng.randrange(2)}" for _ in range(rng.randrange(3))]
                     if before else [],
                     rng.sample(before, min(len(before), rng.choice((0, 0, 1))))))
    return graph_of(rows)


def random_edits(graph: Graph, rng) -> Edits:
    """Return edits, mostly valid: some names are missing or taken, some edges close cycles."""
    names = [op.name for op in graph.ops]
    fresh = [f"new{i}" for i in range(rng.randrange(4))]
    every = [*names, *fresh, *(["nobody"] if rng.random() < 0.1 else [])]
    added = []
    for name in fresh if rng.random() < 0.9 else [*fresh, names[0]]:
        inputs = tuple(f"{rng.choice(every)}:0" for _ in range(rng.randrange(3)))
        controls = tuple(rng.sample(every, rng.choice((0, 1))))
        added.append(Clone(name, rng.choice(every), inputs, controls) if rng.random() < 0.5
                     else Create(name, "NoOp", inputs, controls, (), {}))
    return Edits(tuple(added),
                 tuple(Rewire(rng.choice(every), rng.choice((0, 0, 1)), f"{rng.choice(every)}:0")
                       for _ in range(rng.randrange(3))),
                 tuple(AddControl(rng.choice(every), rng.choice(every))
                       for _ in range(rng.randrange(2))))


def expected(graph: Graph, edits: Edits):
    """Return (inputs, controls) of each op of the edited graph, or None if it does not exist."""
    inputs = {op.name: [f"{graph.ops[s].name}:{slot}" for s, slot in op.inputs]
              for op in graph.ops}
    controls = {op.name: [graph.ops[c].name for c in op.controls] for op in graph.ops}
    for n, new in enumerate(edits.added):
        known = {*(op.name for op in graph.ops), *(other.name for other in edits.added[:n])}
        if new.name in known or (isinstance(new, Clone) and new.source not in known):
            return None
        inputs[new.name], controls[new.name] = list(new.inputs), list(new.controls)
    for rewire in edits.rewires:
        if rewire.op not in inputs or rewire.index >= len(inputs[rewire.op]):
            return None
        inputs[rewire.op][rewire.index] = rewire.tensor
    for control in edits.controls:
        if control.op not in inputs:
            return None
        controls[control.op].append(control.control)
    return inputs, controls


def exists(inputs, controls, added) -> bool:
    """Return whether all ops read and awaited exist, new ones in time, without a cycle."""
    for n, new in enumerate(added):
        needed = {*(t.partition(":")[0] for t in new.inputs), *new.controls}
        if needed & {other.name for other in added[n:]}:
            return False
    edges = networkx.DiGraph()
    edges.add_edges_from((t.partition(":")[0], name) for name in inputs for t in inputs[name])
    edges.add_edges_from((c, name) for name in controls for c in controls[name])
    return set(edges) <= set(inputs) and networkx.is_directed_acyclic_graph(edges)


@given(seeds)
@settings(max_examples=400)
def test_random_edits(seed):
    rng = random.Random(seed)
    graph = random_graph(rng)
    edits = random_edits(graph, rng)
    known = expected(graph, edits)
    if known is not None:
        tensors, waits, kinds = edited(graph, edits)
        assert (tensors, waits) == known
        assert kinds.keys() == tensors.keys()
    if known is not None and exists(*known, edits.added):
        check_edits(graph, edits)
    else:
        with pytest.raises(RewriteError):
            check_edits(graph, edits)


def test_kinds_of_edited_ops():
    graph = graph_of([("x", "Placeholder", [], []), ("a", "Tanh", ["x:0"], [])])
    edits = Edits((Clone("b", "a", ("x:0",)), Clone("c", "b", ("b:0",)),
                   Create("d", "NoOp", (), (), (), {})))
    assert edited(graph, edits)[2] == {
        "x": "Placeholder", "a": "Tanh", "b": "Tanh", "c": "Tanh", "d": "NoOp"}
    assert edits.clones == edits.added[:2]


def test_errors_name_what_is_wrong():
    """The same of several every time, and of a cycle an op that cannot run."""
    graph = graph_of([("x", "Placeholder", [], []), ("a", "Tanh", ["x:0"], []),
                      ("b", "Mul", ["a:0", "x:0"], [])])
    early = Edits((Create("new", "Mul", (), ("late",), (), {}),
                   Create("late", "NoOp", (), (), (), {})))
    with pytest.raises(RewriteError, match="'new' is made before 'late', which it needs"):
        check_edits(graph, early)
    missing = Edits((Create("new", "Mul", ("q:0", "p:0", "r:0"), (), (), {}),))
    with pytest.raises(RewriteError, match="'new' reads 'p', which"):
        check_edits(graph, missing)
    with pytest.raises(RewriteError, match="cycle through '[ab]'"):
        check_edits(graph, Edits(rewires=(Rewire("a", 0, "b:0"),)))
    assert not Clone("c", "a", ()).alone


BRANCH = [("x", "Placeholder", [], []), ("p", "Placeholder", [], []),
          ("switch", "Switch", ["x:0", "p:0"], []), ("inside", "Tanh", ["switch:1"], []),
          ("other", "Exp", ["switch:0"], []), ("merge", "Merge", ["inside:0", "other:0"], []),
          ("after", "Tanh", ["x:0"], [])]


@pytest.mark.parametrize(("edits", "stays"), [
    (Edits(), True),
    (Edits(controls=(AddControl("inside", "after"),)), True),
    (Edits(controls=(AddControl("after", "merge"),)), True),
    (Edits(controls=(AddControl("after", "inside"),)), False),
    (Edits(rewires=(Rewire("after", 0, "inside:0"),)), False),
    (Edits((Clone("copy", "inside", ("switch:1",)),), controls=(AddControl("after", "copy"),)),
     False),
    (Edits((Clone("copy", "inside", ("switch:1",)),)), True),
    (Edits((Create("fence", "NoOp", (), ("other",), (), {}),),
           controls=(AddControl("after", "fence"),)), False)])
def test_what_always_ran_may_not_run_in_one_branch_only(edits, stays):
    graph = graph_of(BRANCH, conditional=("inside", "other"))
    if stays:
        check_edits(graph, edits)
    else:
        with pytest.raises(RewriteError, match="'after' would run in one branch only"):
            check_edits(graph, edits)
    plain = graph_of([(n, "Tanh" if k in ("Switch", "Merge") else k, i, c)
                      for n, k, i, c in BRANCH])
    check_edits(plain, edits)
