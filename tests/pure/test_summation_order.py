"""Which terms of a sum are retained so that a kernel begins with the same term as in the plain
step: by hand, on captured graphs written as words.

The kernel writes into the first term, by name, whose buffer nothing else uses. If that is the third
or a later one, the terms before it are retained; else all but the first two, which commute.
"""

from __future__ import annotations

import pytest

from tfckpt.cost.build import build_cost_graph
from tfckpt.errors import RewriteError
from tfckpt.ir.edits import Clone, Rewire
from tfckpt.ir.graph import BACKWARD, FORWARD, OTHER, Graph, Op, Tensor, check_graph
from tfckpt.rewrite.edit_builder import EditBuilder
from tfckpt.rewrite.names import copy_name
from tfckpt.rewrite.summation_starts import retained_terms
from tfckpt.simulate.fences import fenced

BIG = Tensor("float32", (512, 512), 1 << 20)
FOUR = "x=Placeholder a=Tanh:x b=Exp:x c=Sin:x d=Cos:x sum=AddN:a,b,c,d end=Tanh:sum"


def graph_of(words: str, fetches=("g",)) -> Graph:
    """Return a graph of ops "name=Type:inputs"; the backward begins at the first name with g."""
    names: list[str] = []
    ops = []
    for word in words.split():
        name, _, rest = word.partition("=")
        kind, _, inputs = rest.partition(":")
        region = (OTHER if kind == "Placeholder" else
                  BACKWARD if name.startswith("g") else FORWARD)
        read = tuple((names.index(i), 0) for i in inputs.split(",") if i)
        small = kind == "Shape"
        ops.append(Op(name, kind, read, (), (Tensor("int32", (2,), 8) if small else BIG,), region,
                      kind != "Placeholder"))
        names.append(name)
    graph = Graph("made", tuple(ops), tuple((names.index(f), 0) for f in fetches), ())
    check_graph(graph)
    return graph


def kept_in(graph: Graph, again: str, added=(), rewires=()) -> list[str]:
    """Return retained terms, as "tensor" or "tensor for copy 1", of a plan that repeats vertices.
    """
    cost = build_cost_graph(graph)
    where = {vertex.name: v for v, vertex in enumerate(cost.vertices)}
    first = min(v for v, vertex in enumerate(cost.vertices) if vertex.region == BACKWARD)
    copies = [(where[name], 1) for name in again.split()]
    schedule = [(v, 0) for v in range(len(cost.vertices))]
    plan = fenced(cost, (*schedule[:first], *copies, *schedule[first:]))
    builder = EditBuilder(graph, cost, plan)
    builder.added += added
    builder.rewires += rewires
    found = retained_terms(builder)
    sums = {vertex.name for vertex in cost.vertices}
    assert all(cost.vertices[h.step[0]].name in sums and h.dtype == "float32" for h in found)
    return [h.tensor + (f" for copy {h.step[1]}" if h.step[1] else "") for h in found]


@pytest.mark.parametrize(("read_later", "retained"), [
    ("", ["c:0", "d:0"]),  # a is written into: a + b, then c and d in their order
    ("a", ["c:0", "d:0"]),  # b is, and a + b is b + a
    ("a,b", ["a:0", "b:0"]),  # c is: c + a + b + d
    ("a,b,c", ["a:0", "b:0", "c:0"]),
    ("b", ["c:0", "d:0"]), ("c", ["c:0", "d:0"]), ("b,c,d", ["c:0", "d:0"]),
    ("a,b,d", ["a:0", "b:0"]),
    ("a,b,c,d", ["c:0", "d:0"]),  # none may be written into
])
@pytest.mark.parametrize("again", ["a", "c", "d"])
def test_what_is_read_later_decides(read_later, retained, again):
    more = f",{read_later}" if read_later else ""
    graph = graph_of(f"{FOUR} g=AddN:end,end{more}")
    assert kept_in(graph, again) == retained
    assert kept_in(graph, "") == []
    assert kept_in(graph, "end") == []  # neither the sum nor what it adds is repeated


def test_terms_are_taken_by_name_and_where_each_is_read():
    graph = graph_of("x=Placeholder d=Tanh:x a=Exp:x c=Sin:x b=Cos:x sum=AddN:c,a,d,b "
                     "end=Tanh:sum g=Mul:end,end")
    assert kept_in(graph, "a") == ["c:0", "d:0"]
    later = graph_of("x=Placeholder d=Tanh:x a=Exp:x c=Sin:x b=Cos:x sum=AddN:c,a,d,b "
                     "end=Tanh:sum g=AddN:end,d,c")
    assert kept_in(later, "a") == ["c:0", "d:0"]
    assert kept_in(graph, "a", rewires=[Rewire("sum", 0, "seen:0"), Rewire("sum", 1, "no:0"),
                                        Rewire("end", 0, "no:0")]) == ["seen:0", "d:0"]


@pytest.mark.parametrize("more", ["v=Reshape:b,s g=AddN:end,end,a,v",
                                  "i=Identity:b g=AddN:end,end,a,i",
                                  "i=Identity:b j=Identity:i g=AddN:end,end,a,j",
                                  "g=AddN:end,end,a,b h=Shape:b"])
def test_what_shares_a_buffer_is_read_as_well(more):
    assert kept_in(graph_of(f"s=Placeholder {FOUR} {more}"), "d") == ["a:0", "b:0"]


@pytest.mark.parametrize("more", ["h=Shape:b g=AddN:end,end,a", "h=Shape:b g=AddN:end,end,a,h",
                                  "h=Shape:b h2=Identity:h g=AddN:end,end,a,h2",
                                  "i=Identity:b h=Shape:i g=AddN:end,end,a"])
def test_what_reads_a_shape_alone_reads_no_buffer(more):
    assert kept_in(graph_of(f"{FOUR} {more}"), "d") == ["c:0", "d:0"]


def test_what_is_fetched_is_live_to_the_end():
    graph = graph_of(f"{FOUR} g=AddN:end,end,a", fetches=("g", "b"))
    assert kept_in(graph, "d") == ["a:0", "b:0"]


def test_what_the_sum_needs_reads_before_it():
    """b and the sum read a, both before the sum has run; e reads b after it."""
    before = graph_of("x=Placeholder a=Tanh:x b=Exp:a c=Sin:b d=Cos:x sum=AddN:a,b,c,d "
                      "end=Tanh:sum g=Mul:end,end")
    assert kept_in(before, "d") == ["c:0", "d:0"]
    after = graph_of("x=Placeholder a=Tanh:x b=Exp:a c=Sin:b d=Cos:x sum=AddN:a,b,c,d "
                     "end=Tanh:sum e=Exp:b g=AddN:end,e,a")
    assert kept_in(after, "d") == ["a:0", "b:0"]


def test_inputs_and_variables_are_not_written_into():
    graph = graph_of("a=Placeholder b=Placeholder c=Sin:a d=Cos:a sum=AddN:a,b,c,d "
                     "end=Tanh:sum g=Mul:end,end")
    assert kept_in(graph, "c") == ["a:0", "b:0"]


@pytest.mark.parametrize("words", [
    "x=Placeholder a=Tanh:x b=Exp:x sum=AddN:a,b end=Tanh:sum g=AddN:end,a,b",
    "x=Placeholder a=Tanh:x b=Exp:x c=Sin:x sum=Mul:a,b end=Tanh:sum g=AddN:end,a,b,c",
    "x=Placeholder a=Tanh:x b=Exp:x c=Sin:x pick=SelectV2:a,b,c end=Tanh:pick g=AddN:end,a,b",
    "x=Placeholder a=Tanh:x b=Exp:x c=Sin:x end=Tanh:a g=AddN:end,a,b,c gg=AddN:g,a,b"])
def test_two_terms_products_and_sums_of_the_backward_are_left_alone(words):
    assert kept_in(graph_of(words), "a") == []


def test_a_sum_of_three():
    words = "x=Placeholder a=Tanh:x b=Exp:x c=Sin:x sum=AddN:a,b,c end=Tanh:sum g=AddN:end,end"
    assert kept_in(graph_of(words), "b") == ["c:0"]
    assert kept_in(graph_of(f"{words},a,b"), "b") == ["a:0", "b:0"]


@pytest.mark.parametrize(("tree", "retained"), [
    ("s=AddV2:a,b sum=AddV2:s,c", ["c:0"]),
    ("s=AddV2:c,b sum=AddV2:a,s", ["c:0"]),  # by name, not as they stand
    ("s=AddV2:a,b i=Identity:s sum=AddN:i,c,d", ["c:0", "d:0"]),
    ("s=AddV2:d,c u=AddV2:b,a sum=AddV2:s,u", ["c:0", "d:0"]),
    ("s=AddV2:d,c t=AddV2:s,b sum=AddV2:t,a", ["c:0", "d:0"])])
def test_a_tree_of_sums_is_one_sum(tree, retained):
    leaves = "x=Placeholder a=Tanh:x b=Exp:x c=Sin:x d=Cos:x"
    assert kept_in(graph_of(f"{leaves} {tree} end=Tanh:sum g=Mul:end,end"), "b") == retained
    assert kept_in(graph_of(f"{leaves} {tree} end=Tanh:sum g=AddN:end,a,b"), "b") == ["a:0", "b:0"]


def test_a_sum_that_others_read_as_well_is_a_term():
    graph = graph_of("x=Placeholder a=Tanh:x b=Exp:x c=Sin:x d=Cos:x s=AddV2:a,b "
                     "sum=AddN:s,c,d end=Tanh:sum o=Exp:s g=AddN:end,o")
    assert kept_in(graph, "c") == ["s:0"]


def test_terms_are_named_without_the_pass_throughs_before_them():
    """i is a and sorts first, though its own name sorts last."""
    graph = graph_of("x=Placeholder a=Tanh:x b=Exp:x c=Sin:x i=Identity:a sum=AddN:b,c,i "
                     "end=Tanh:sum g=Mul:end,end")
    assert kept_in(graph, "b") == ["c:0"]


def test_copies_of_a_tree_read_what_each_of_its_sums_reads():
    graph = graph_of("x=Placeholder a=Tanh:x b=Exp:x c=Sin:x d=Cos:x s=AddV2:d,c u=AddV2:b,a "
                     "sum=AddV2:s,u end=Tanh:sum g=Mul:end,end")
    copies = [clone("s", "other:0", "c:0"), clone("u", "b:0", "a:0"),
              clone("sum", "s-1:0", "u-1:0")]
    assert kept_in(graph, "sum", copies) == ["c:0", "d:0", "c:0 for copy 1", "other:0 for copy 1"]


def clone(name: str, *inputs: str) -> Clone:
    return Clone(copy_name(name, 1), name, inputs)


def test_the_copy_of_a_sum_retains_what_it_reads():
    graph = graph_of(f"{FOUR} g=AddN:end,end")
    copies = [clone("c", "x:0"), clone("sum", "a:0", "b:0", "c-1:0", "d:0")]
    assert kept_in(graph, "c sum", copies) == [
        "c:0", "d:0", "c-1:0 for copy 1", "d:0 for copy 1"]


def test_a_sum_that_writes_into_what_is_kept_is_not_repeated():
    graph = graph_of(f"{FOUR} g=AddN:end,end,a,b")
    copies = [clone("c", "x:0"), clone("sum", "a:0", "b:0", "c-1:0", "d:0")]
    with pytest.raises(RewriteError, match="writes into 'c:0' is to be computed twice"):
        kept_in(graph, "sum", copies)
    # it may be where that is made again as well, and where the kernel begins with the second
    assert kept_in(graph, "c sum", copies) == [
        "a:0", "b:0", "a:0 for copy 1", "b:0 for copy 1"]
    assert kept_in(graph_of(f"{FOUR} g=AddN:end,end,a"), "sum", copies) == [
        "c:0", "d:0", "c-1:0 for copy 1", "d:0 for copy 1"]
