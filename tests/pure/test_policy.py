"""Ops that a user asks to be kept or recomputed: which are meant, and schedules that obey."""

from __future__ import annotations

import dataclasses

import pytest

from tests.support.graphs import random_joint_graph
from tests.support.passes import graph_of
from tfckpt.cost.build import build_cost_graph
from tfckpt.errors import PlanError
from tfckpt.ir.costgraph import BACKWARD, FORWARD
from tfckpt.ir.layers import LayerNames
from tfckpt.ir.schedule import check_schedule, plain_plan
from tfckpt.plan.planner import plan_step
from tfckpt.plan.policy import recompute_as_asked
from tfckpt.request.policy import matched, parse_patterns, with_policy


@pytest.mark.parametrize("pattern, name, found", [
    ("dense_1", "model/dense_1/Relu", "dense_1"), ("dense", "model/dense_1/Relu", ""),
    ("dense_1/Relu", "model/dense_1/Relu", "dense_1/Relu"), ("model/Relu", "model/x/Relu", ""),
    ("block?/conv*", "net/block3/conv_a/Conv2D", "block3/conv_a"), ("*Relu", "a/b/Relu", "Relu"),
    ("a/b/c/d", "a/b", ""), ("/dense_1/", "dense_1", "dense_1")])
def test_a_pattern_stands_for_whole_parts_of_names(pattern, name, found):
    assert matched(pattern, name) == found


def graph(*scopes):
    ops, source = [("x", "Placeholder", (), FORWARD)], "x"
    for scope in scopes:
        ops.append((f"{scope}/Tanh", "Tanh", (source,), FORWARD))
        source = f"{scope}/Tanh"
    for scope in reversed(scopes):
        ops.append((f"gradient/{scope}", "TanhGrad", (f"{scope}/Tanh", source), BACKWARD))
        source = f"gradient/{scope}"
    return graph_of(ops, fetches=[source])


def policies(made):
    return {op.name: op.policy for op in made.ops if op.policy}


def test_numbered_scopes_are_found_where_no_other_is_meant():
    keras = graph("conv2d_1", "conv2d_1_2", "dense_1")
    assert policies(with_policy(keras, ("dense",), ())) == {"dense_1/Tanh": "keep"}
    assert policies(with_policy(keras, (), ("conv2d_1_2",))) == {"conv2d_1_2/Tanh": "recompute"}
    assert policies(with_policy(keras, ("=conv2d_1",), ())) == {"conv2d_1/Tanh": "keep"}
    assert policies(with_policy(keras, ("conv2d*",), ("dense",))) == {
        "conv2d_1/Tanh": "keep", "conv2d_1_2/Tanh": "keep", "dense_1/Tanh": "recompute"}
    with pytest.raises(PlanError, match="'conv2d_1'.*or 'conv2d_1_2'.*'=conv2d_1'"):
        with_policy(keras, ("conv2d_1",), ())


KERAS_2 = ("conv2d", "conv2d_1", "dense")
KERAS_3 = ("net_1/conv2d_1", "net_1/conv2d_1_2", "net_1/dense_1", "net_1/conv2d_3")


@pytest.mark.parametrize("scopes, shown", [
    (KERAS_2, ["conv2d", "conv2d_1", "dense"]),
    (KERAS_3, ["net/conv2d", "net/conv2d_1", "net/dense", "net/conv2d"])])  # called twice
def test_names_are_those_of_layers_where_they_are_known(scopes, shown):
    known = LayerNames.of({"net", "conv2d", "conv2d_1", "dense"},
                          [f"{scope}/Tanh" for scope in scopes])
    assert [known.layer(f"{scope}/Tanh") for scope in scopes] == shown
    assert [known.shown(f"gradient_tape/{scope}/mul_1/Tanh") for scope in scopes] == [
        f"gradient_tape/{name}/mul_1/Tanh" for name in shown]
    for layer in ("conv2d", "conv2d_1", "dense"):
        made = with_policy(graph(*scopes), (layer,), (), known)
        assert {known.layer(name).rpartition("/")[2] for name in policies(made)} == {layer}
    numbered = with_policy(graph(*KERAS_3), ("=conv2d_1", "conv2d_1_2"), (), known)
    assert list(policies(numbered)) == ["net_1/conv2d_1/Tanh", "net_1/conv2d_1_2/Tanh"]


def test_the_gradient_of_a_loop_is_of_its_layer():
    known = LayerNames.of({"net", "lstm"}, ())
    assert known.layer("gradient_tape/net_1/lstm_1/while/net_1/lstm_1/while_grad") == "net/lstm"


def test_gradients_outside_of_all_layers_are_of_the_layer_whose_result_they_are_of():
    """A sum of two gradients, which a layer's gradient reads; and one that an update reads."""
    step = graph_of([
        ("x", "Placeholder", [], FORWARD),
        ("net_1/conv_1/Relu", "Relu", ["x"], FORWARD),
        ("gradient_tape/net_1/dense_1/Relu", "Relu", ["net_1/conv_1/Relu"], BACKWARD),
        ("gradient_tape/net_1/add_1/Relu", "Relu", ["net_1/conv_1/Relu"], BACKWARD),
        ("AddN", "AddN", ["gradient_tape/net_1/dense_1/Relu", "gradient_tape/net_1/add_1/Relu"],
         BACKWARD),
        ("mul", "Relu", ["AddN"], BACKWARD),
        ("gradient_tape/net_1/conv_1/Relu", "Relu", ["mul"], BACKWARD),
        ("AddN_1", "Relu", ["gradient_tape/net_1/conv_1/Relu"], BACKWARD)])
    known = LayerNames.of({"net", "conv", "dense", "add"}, [op.name for op in step.ops])
    assert known.layer("AddN") == "AddN"
    known = known.with_gradients(step)
    assert [known.layer(name) for name in ("AddN", "mul", "AddN_1", "x")] == [
        "net/conv", "net/conv", "net/conv", "x"]


def test_a_layer_without_operations_is_not_called_misspelt():
    with pytest.raises(PlanError, match="recompute='input': that layer has no operation"):
        with_policy(graph("dense_1"), (), ("input",), LayerNames.of({"dense", "input"}, ()))
    with pytest.raises(PlanError, match="there are 'dense', 'Tanh'$"):
        with_policy(graph("dense_1"), (), ("conv",), LayerNames.of({"dense"}, ()))


def test_what_matches_nothing_lists_near_names():
    with pytest.raises(PlanError, match=r"keep='dens_3' matches no layer.*'dense_1'"):
        with_policy(graph("dense_1", "conv"), ("dens_3",), ())
    with pytest.raises(PlanError, match="there are 'Dense_1'"):  # whatever its capitals
        with_policy(graph("Dense_1", "conv"), ("dense_2",), ())
    with pytest.raises(PlanError, match="matches no layer"):  # of the backward pass
        with_policy(graph("dense_1"), (), ("gradient",))
    with pytest.raises(PlanError, match="matches keep='a' and recompute='Tanh'"):
        with_policy(graph("a", "b"), ("a",), ("Tanh",))


@pytest.mark.parametrize("given", [3, [1], [""], "/", b"x", {"a": 1}, [None]])
def test_malformed_patterns(given):
    with pytest.raises(PlanError, match="recompute=.* must be a name of a layer"):
        parse_patterns("recompute", given)


def asked(seed: int, of: int = 3):
    """Return a random joint graph of which every third recomputable vertex is to be recomputed."""
    made = random_joint_graph(seed, 18)
    chosen = [v for v, vertex in enumerate(made.vertices) if vertex.recomputable][seed % of::of]
    return dataclasses.replace(made, vertices=tuple(
        dataclasses.replace(vertex, again=v in chosen) for v, vertex in enumerate(made.vertices)))


def kept_against_the_policy(made, schedule, deferred=()):
    """Return vertices to be recomputed whose original result the backward reads."""
    found, originals = set(), set()
    left = [v for v, copy in schedule
            if not copy and made.vertices[v].region == FORWARD and v not in deferred]
    for v, copy in schedule:
        if not left:
            found |= originals & {made.storages[s].producer for s in made.vertices[v].reads}
        originals.discard(v)
        if made.vertices[v].again and not copy and left:
            originals.add(v)
        if not copy and v in left:
            left.remove(v)
    return found


@pytest.mark.parametrize("seed", range(40))
def test_nothing_is_kept_of_what_is_to_be_recomputed(seed):
    made = asked(seed)
    plain = plain_plan(made).schedule
    schedule = recompute_as_asked(made, plain)
    check_schedule(made, schedule, plain_plan(made).moves.released)
    assert not kept_against_the_policy(made, schedule)
    assert {v for v, copy in schedule if copy} <= made.again
    assert [s for s in schedule if not s[1]] == list(plain)
    planned = plan_step(made)
    assert not kept_against_the_policy(made, planned.plan.schedule, planned.plan.moves.deferred)


def test_the_cost_graph_knows_what_is_asked():
    made = build_cost_graph(with_policy(graph("a", "b", "c"), ("a",), ("b",)))
    vertices = {v.name: v for v in made.vertices if v.region == FORWARD}
    assert [vertices[f"{n}/Tanh"].recomputable for n in "abc"] == [False, True, True]
    assert [vertices[f"{n}/Tanh"].again for n in "abc"] == [False, True, False]
