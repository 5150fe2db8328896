"""The cost of a loop follows from its typed field, not from its op's attributes."""

from __future__ import annotations

import pytest

from tfckpt.cost.bodies.working import working_bytes
from tfckpt.cost.build import build_cost_graph
from tfckpt.cost.storage import RESIDENT, roots
from tfckpt.cost.time import Rates, is_expensive, seconds
from tfckpt.ir.graph import BACKWARD, FORWARD, Graph, Loop, Op, Tensor, check_graph

RATES = Rates(flops_per_second=1.0, bytes_per_second=1.0, overhead_seconds=0.0)
LIST, MATRIX = Tensor("variant", (), 600), Tensor("float32", (5, 5), 100)


def body(kind: str) -> Graph:
    given = Op("given", "Placeholder", (), (), (MATRIX,), FORWARD, False)
    return Graph("body", (given, Op("made", kind, ((0, 0), (0, 0)), (), (MATRIX,), FORWARD,
                                    False)), (), ())


def step(loop: Loop | None) -> Graph:
    """Return a loop that is given a list and fills two, and a backward that reads both."""
    graph = Graph("step", (
        Op("given", "Sub", (), (), (LIST,), FORWARD, False),
        Op("loop", "While", ((0, 0),), (), (LIST, LIST), FORWARD, True, loop=loop),
        Op("back", "Sum", ((1, 0), (1, 1)), (), (Tensor("float32", (), 4),), BACKWARD, False)),
        ((2, 0),), ())
    check_graph(graph)
    return graph


@pytest.mark.parametrize("kind, once, expensive", [("AddV2", 300.0, False),
                                                   ("MatMul", 300.0, True)])
def test_a_loop_takes_as_often_what_its_body_does(kind, once, expensive):
    graph = step(Loop(7, body(kind)))
    assert seconds(graph, graph.ops[1], RATES) == 7 * once
    assert is_expensive(graph.ops[1]) is expensive


def test_lists_of_the_same_entries_share_their_memory():
    assert roots(step(Loop(7, body("AddV2"), shares={1: 0})))[1] == ((1, 0), (1, 0))
    assert roots(step(Loop(7, body("AddV2"))))[1] == ((1, 0), (1, 1))
    assert roots(step(None))[1] == ((1, 0), (1, 1))


def test_a_list_takes_over_the_memory_of_one_that_the_loop_empties():
    def reused(loop):
        cost = build_cost_graph(step(loop))
        (vertex,) = [v for v in cost.vertices if v.name == "loop"]
        return [(cost.storages[w].name, cost.storages[r].name) for w, r in vertex.reuses]

    assert reused(Loop(7, body("AddV2"), takes={1: (0,)})) == [("loop:1", "given:0")]
    assert reused(Loop(7, body("AddV2"))) == reused(None) == []


def test_iterations_make_tensors_before_they_have_read_what_they_take_out_of_lists():
    """By itself one has room for what it makes in what it has read by then."""
    number, held = Tensor("int32", (), 4), Tensor("variant", (), 0)
    kinds: list[tuple[str, tuple[tuple[int, int], ...], tuple[Tensor, ...]]] = [
        ("Placeholder", (), (number,)), ("Placeholder", (), (held,)),
        ("Placeholder", (), (MATRIX,)), ("TensorListPopBack", ((1, 0),), (held, MATRIX)),
        ("Sum", ((3, 1),), (Tensor("float32", (), 4),)), ("Tile", ((0, 0),), (MATRIX,)),
        ("Mul", ((5, 0), (4, 0)), (MATRIX,)), ("AddV2", ((2, 0), (6, 0)), (MATRIX,)),
        ("AddV2", ((0, 0), (0, 0)), (number,))]
    inner = Graph("body", tuple(Op(f"op{i}", kind, read, (), made, FORWARD, False)
                                for i, (kind, read, made) in enumerate(kinds)),
                  ((8, 0), (3, 0), (7, 0)), ())

    def taken(at_once):
        loop = Op("loop", "While", (), (), (number, held, MATRIX), BACKWARD, False,
                  loop=Loop(4, inner, at_once=at_once, arguments=(0, 1, 2)))
        return working_bytes(Graph("step", (loop,), (), ()), loop)

    assert taken(1) < 10
    assert 4 * MATRIX.bytes <= taken(4) <= 4 * (MATRIX.bytes + 10)


def loop_of(kinds, fetches, outputs, arguments) -> tuple[Graph, Op]:
    """Return a step of one loop, whose body has ops of types, inputs, results and purity."""
    inner = Graph("body", tuple(Op(f"op{i}", kind, read, (), made, FORWARD, pure)
                                for i, (kind, read, made, pure) in enumerate(kinds)), fetches, ())
    loop = Op("loop", "While", (), (), outputs, BACKWARD, False,
              loop=Loop(4, inner, arguments=arguments))
    return Graph("step", (loop,), (), ()), loop


def test_a_state_is_gone_once_it_is_read():
    """It is there, or what is made of it: two at a time only where both are needed."""
    def taken(last):
        return working_bytes(*loop_of((
            ("Placeholder", (), (MATRIX,), False), ("MatMul", ((0, 0), (0, 0)), (MATRIX,), True),
            ("MatMul", ((1, 0), last), (MATRIX,), True)), ((2, 0),), (MATRIX,), (0,)))

    assert taken((1, 0)) == 100  # the result is counted with the loop
    assert taken((0, 0)) == 200


def test_states_that_change_places_are_there_all_the_time():
    graph, loop = loop_of((
        ("Placeholder", (), (MATRIX,), False), ("Placeholder", (), (MATRIX,), False),
        ("MatMul", ((0, 0), (1, 0)), (MATRIX,), True)), ((1, 0), (2, 0)), (MATRIX, MATRIX), (0, 1))
    assert working_bytes(graph, loop) == 100


def test_what_nothing_needs_does_not_run():
    def taken(pure):
        return working_bytes(*loop_of((
            ("Placeholder", (), (MATRIX,), False), ("MatMul", ((0, 0), (0, 0)), (MATRIX,), True),
            ("Exp", ((1, 0),), (MATRIX,), True), ("MatMul", ((1, 0), (2, 0)), (MATRIX,), pure),
            ("MatMul", ((1, 0), (1, 0)), (MATRIX,), True)), ((4, 0),), (MATRIX,), (0,)))

    assert taken(True) == 100
    assert taken(False) > 100


def test_a_list_of_rows_of_a_variable_takes_no_memory():
    rows = Tensor("float32", (4, 16), 256)
    body = Graph("body", (
        Op("list", "Placeholder", (), (), (LIST,), FORWARD, False),
        Op("weights", "Placeholder", (), (), (Tensor("resource", (), 0),), FORWARD, False),
        Op("read", "ReadVariableOp", ((1, 0),), (), (rows,), FORWARD, False),
        Op("number", "Const", (), (), (Tensor("int32", (1,), 4),), FORWARD, True),
        Op("row", "StridedSlice", ((2, 0), (3, 0), (3, 0), (3, 0)), (), (
            Tensor("float32", (16,), 64),), FORWARD, True,
           attrs={"shrink_axis_mask": 1, "new_axis_mask": 0}),
        Op("made", "Exp", ((4, 0),), (), (Tensor("float32", (16,), 64),), FORWARD, True),
        Op("push", "TensorListPushBack", ((0, 0), (4, 0)), (), (LIST,), FORWARD, False),
        Op("push_made", "TensorListPushBack", ((0, 0), (5, 0)), (), (LIST,), FORWARD, False)),
        ((6, 0), (7, 0)), ())
    assert roots(step(Loop(7, body)))[1] == (RESIDENT, (1, 1))
