"""Terms of executed graphs: what they tell apart, and what they do not."""

from __future__ import annotations

import functools

import pytest
import tensorflow as tf

from tfckpt.ir.edits import COPY
from tfckpt.verify.arithmetic.same import compared
from tfckpt.verify.arithmetic.terms import Computation, first_differences, terms_of

ARGUMENTS = ("x", "y", "z", "variable")


def op(name, kind, *inputs, **attrs):
    """Return a NodeDef; attributes are ints, floats or dtypes."""
    node = tf.compat.v1.NodeDef(name=name, op=kind, input=inputs)
    for key, value in attrs.items():
        if isinstance(value, tf.DType):
            node.attr[key].type = value.as_datatype_enum
        elif isinstance(value, float):
            node.attr[key].f = value
        else:
            node.attr[key].i = value
    return node


def given(*names):
    return [op(name, "_Arg", index=ARGUMENTS.index(name),
               T=tf.resource if name == "variable" else tf.float32) for name in names]


def result(tensor):
    return op("out", "_Retval", tensor, index=0)


def constant(name, value):
    node = op(name, "Const")
    node.attr["value"].tensor.CopyFrom(tf.make_tensor_proto(value))
    return node


def found(*graphs):
    return terms_of([Computation(nodes, ARGUMENTS, lambda name: None) for nodes in graphs])


def same(*graphs) -> bool:
    first, second = found(*graphs)
    return first.roots == second.roots


def binary(kind, *order, **attrs):
    return [*given("x", "y"), op("r", kind, *order, **attrs), result("r")]


@pytest.mark.parametrize("kind, swaps", [
    ("AddV2", True), ("Mul", True), ("SquaredDifference", True), ("Sub", False),
    ("MatMul", False), ("Maximum", False)])
def test_two_operands_change_places_only_where_no_bit_does(kind, swaps):
    assert same(binary(kind, "x", "y"), binary(kind, "y", "x")) == swaps


def test_names_private_attributes_and_what_passes_on_do_not_count():
    one = [*given("x", "y"), op("r", "Mul", "x", "y"), result("r")]
    other = [*given("y", "x"), op("i", "Identity", "x"), op("k", "IdentityN", "y", "i"),
             op("away", "Mul", "k:1", "k", _private=3), op("out2", "_Retval", "away", index=0)]
    assert same(one, other)
    assert not same(one, binary("Mul", "x", "y", transposed=1))


def test_a_reshape_does_not_count_and_what_it_reshapes_does():
    def reshaped(*names):
        return [*given("x", "y"), constant("s", [2, 3]), op("h", "Reshape", names[0], "s"),
                op("r", "Sub", "h", names[1]), result("r")]
    assert same(reshaped("x", "y"), binary("Sub", "x", "y"))
    assert not same(reshaped("x", "y"), reshaped("y", "x"))


@pytest.mark.parametrize("kind, value, gone", [
    ("LogicalAnd", [True, True], True), ("LogicalAnd", [True, False], False),
    ("LogicalOr", [False, False], True), ("LogicalOr", [True, True], False)])
@pytest.mark.parametrize("place", [0, 1])
def test_what_leaves_a_truth_value_as_it_is_does_not_count(kind, value, gone, place):
    read = ["t", "t"]
    read[place] = "k"
    compares = [*given("x", "y"), op("t", "Less", "x", "y")]
    assert same([*compares, constant("k", value), op("r", kind, *read), result("r")],
                [*compares, result("t")]) == gone


def test_what_is_known_to_leave_an_operand_as_it_is_in_one_graph_does_not_count():
    """Grappler writes an identity of it, where it knows shapes or a choice."""
    def comparing(*graphs):
        return compared(*(Computation(g, ARGUMENTS, lambda name: None) for g in graphs)).same

    def summed(*last):
        return [*given("x", "y"), op("axes", "Neg", "y"), op(*last), op("n", "Exp", "r"),
                result("n")]
    plain = summed("r", "Sum", "x", "axes")
    assert comparing(plain, summed("r", "Identity", "x", "^axes")) is True
    assert comparing(summed("r", "Identity", "x", "^axes"), plain) is True
    assert comparing(plain, summed("r", "Identity", "y", "^axes")) is False
    assert comparing(plain, summed("r", "Max", "x", "axes")) is False


@pytest.mark.parametrize("order, equal", [
    (("x", "y", "z"), True), (("y", "x", "z"), True), (("x", "z", "y"), False)])
def test_a_sum_may_only_exchange_its_first_two_terms(order, equal):
    graph = [[*given("x", "y", "z"), op("r", "AddN", *terms, N=3), result("r")]
             for terms in (("x", "y", "z"), order)]
    assert same(*graph) == equal


def test_a_sum_of_many_is_sums_of_two_one_after_the_other():
    start = given("x", "y", "z")
    whole = [*start, op("r", "AddN", "x", "y", "z", N=3, T=tf.float32), result("r")]

    def pairs(first, second, third):
        return [*start, op("p", "AddV2", first, second, T=tf.float32),
                op("r", "AddN", third, "p", N=2, T=tf.float32), result("r")]
    assert same(whole, pairs("x", "y", "z")) and same(whole, pairs("y", "x", "z"))
    assert not same(whole, pairs("y", "z", "x"))


@pytest.mark.parametrize("dtype", [tf.float16, tf.bfloat16, tf.float32, tf.float64])
@pytest.mark.parametrize("count, groups", [
    (3, [3]), (8, [8]), (9, [9]), (10, [2, 8]), (16, [8, 8]), (17, [9, 8]), (26, [2, 8, 8, 8])])
def test_the_terms_of_a_sum_are_taken_in_groups(count, groups, dtype):
    """Both by the kernel of TensorFlow and in the term."""
    numbers = tf.random.stateless_normal((count, 999), (1, count), dtype=tf.float64)
    terms = list(tf.unstack(tf.cast(numbers, dtype)))
    whole = tf.raw_ops.AddN(inputs=terms)
    start = [op(f"x{i}", "Exp", "x", number=i) for i in range(1, count + 1)]
    names, pairs, sums = [node.name for node in start], [], []
    for size in groups:
        sums.append(functools.reduce(tf.add, [terms.pop(0) for _ in range(size)]))
        pairs.append(functools.reduce(adding := _adding(start), [
            names.pop(0) for _ in range(size)]))
    assert tf.reduce_all(functools.reduce(tf.add, sums) == whole)
    split = functools.reduce(adding, pairs)
    summed = [node for node in start if node.name.startswith("x")]
    summed.append(op("s", "AddN", *(node.name for node in summed), N=count, T=tf.float32))
    assert same([*given("x"), *summed, result("s")], [*given("x"), *start, result(split)])


def _adding(nodes):
    def add(first, second):
        nodes.append(op(f"p{len(nodes)}", "AddV2", first, second, T=tf.float32))
        return nodes[-1].name
    return add


def test_what_is_added_to_itself_is_twice_as_much():
    def made(*r, **attrs):
        return [*given("x"), constant("k", 2.0), constant("m", 3.0), constant("l", [2.0]),
                op("r", *r, **attrs), result("r")]
    twice = made("Mul", "k", "x")
    assert same(twice, made("AddV2", "x", "x")) and same(twice, made("AddN", "x", "x", N=2))
    assert not same(twice, made("Mul", "x", "m")) and not same(twice, made("Mul", "x", "l"))


def test_one_times_something_does_not_count():
    def made(value):
        return [*given("x"), constant("k", value), op("r", "Mul", "x", "k"), result("r")]
    assert same(made(1.0), [*given("x"), result("x")])
    assert not same(made([1.0]), [*given("x"), result("x")])  # may have another shape
    assert not same(made(1.5), [*given("x"), result("x")])


def test_a_shape_that_is_known_in_one_graph_alone_does_not_count():
    def comparing(*graphs):
        return compared(*(Computation(g, ARGUMENTS, lambda name: None) for g in graphs)).same

    asked = [*given("x"), op("s", "Shape", "x"), op("r", "Tile", "x", "s"), result("r")]
    known = [*given("x"), constant("s", [4, 8]), op("r", "Tile", "x", "s"), result("r")]
    assert comparing(asked, known) is False  # Grappler's would wait for what it is the shape of
    known[1].input.append("^x")
    assert comparing(asked, known) is True and comparing(known, asked) is True
    other = [*given("x"), constant("s", [4, 9]), op("r", "Tile", "x", "s"), result("r")]
    assert comparing(known, other) is False


def test_another_order_of_products_is_found_where_it_begins():
    plain = [*given("x", "y", "z"), op("a", "Mul", "x", "y"), op("b", "Mul", "a", "z"),
             op("c", "Exp", "b"), result("c")]
    other = [*given("x", "y", "z"), op("a", "Mul", "y", "z"), op("b", "Mul", "a", "x"),
             op("c", "Exp", "b"), result("c")]
    before, after = found(plain, other)
    assert before.roots != after.roots and first_differences(before, after) == ("a",)


@pytest.mark.parametrize("bias_waits, filter_waits, merged", [
    ((), (), True), (("^z",), ("^z",), True), ((), ("^z",), False), (("^z",), (), False)])
def test_a_gradient_of_a_bias_that_onednn_merges_is_another(bias_waits, filter_waits, merged):
    def step(bias_waits, filter_waits):
        return [*given("x", "y", "z"), constant("sizes", [3, 3, 8, 8]),
                op("filter", "Conv2DBackpropFilter", "x", "sizes", "y", *filter_waits),
                op("bias", "BiasAddGrad", "y", *bias_waits), result("bias")]

    assert same(step((), ()), step(bias_waits, filter_waits)) is merged


def test_constants_count_by_value_and_type():
    def with_constant(value):
        return [constant("k", value), *given("x"), op("r", "Mul", "x", "k"), result("r")]
    assert same(with_constant([1.5, 2.0]), with_constant([1.5, 2.0]))
    for value in ([1.5, 2.5], [[1.5, 2.0]], [1, 2]):
        assert not same(with_constant([1.5, 2.0]), with_constant(value))


def variable(reads_after: bool, writes: int = 1):
    """Return a step that writes a variable, and returns what it read before or after that."""
    wrote = [op(f"w{i}", "AssignSubVariableOp", "variable", "x", *([f"^w{i - 1}"] if i else []))
             for i in range(writes)]
    read = op("r", "ReadVariableOp", "variable", *(["^w0"] if reads_after else []))
    if not reads_after:
        wrote[0].input.append("^r")
    return [*given("variable", "x"), *wrote, read, result("r")]


def test_a_read_is_told_by_the_writes_that_come_before():
    assert same(variable(True), variable(True)) and same(variable(False), variable(False))
    assert not same(variable(True), variable(False))
    unordered = variable(False)
    unordered[2].input.remove("^r")
    assert not same(unordered, variable(False)) and not same(unordered, variable(True))


def test_the_shape_of_a_variable_does_not_depend_on_writes():
    asked = [*given("variable", "x"), op("w", "AssignSubVariableOp", "variable", "x"),
             op("s", "VariableShape", "variable"), result("s")]
    late = [*asked[:3], op("s", "VariableShape", "variable", "^w"), result("s")]
    assert same(asked, late)


def test_an_order_that_is_open_in_the_plain_step_alone_may_be_decided():
    """As it turns out there: a read that may come before a write does."""
    def comparing(*graphs):
        return compared(*(Computation(g, ARGUMENTS, lambda name: None) for g in graphs)).same

    unordered = variable(False)
    unordered[2].input.remove("^r")
    assert comparing(unordered, variable(False)) is True
    assert comparing(unordered, variable(True)) is False
    assert comparing(variable(False), unordered) is False
    assert comparing(variable(True), unordered) is False


def test_of_two_reads_one_may_stay_open_as_it_is_in_the_plain_step():
    def comparing(*graphs):
        return compared(*(Computation(g, ARGUMENTS, lambda name: None) for g in graphs)).same

    def reading_twice(*waits):
        return [*given("variable", "x"), op("r", "ReadVariableOp", "variable"),
                op("q", "ReadVariableOp", "variable"), op("e", "Exp", "q"),
                op("w", "AssignSubVariableOp", "variable", "x", *waits),
                op("sum", "Sub", "r", "e"), result("sum")]
    assert comparing(reading_twice(), reading_twice("^r")) is True
    assert comparing(reading_twice("^q"), reading_twice("^r")) is False


def test_each_write_counts():
    first, second = found(variable(True), variable(True, writes=2))
    assert set(first.roots) == {"result 0", "write 1 of variable"}
    assert set(second.roots) == {"result 0", "write 1 of variable", "write 2 of variable"}


def test_a_copy_of_what_draws_numbers_draws_others():
    def drawing(**attrs):
        return [constant("s", [4]), op("r", "RandomUniform", "s", seed=1, **attrs), result("r")]
    assert same(drawing(), drawing()) and not same(drawing(), drawing(seed2=1))
    assert not same(drawing(), drawing(**{COPY: 1}))


def test_what_is_shown_counts():
    shown = [*given("x"), op("p", "PrintV2", "x"), result("x")]
    assert not same(shown, [*given("x"), result("x")])


def test_an_assertion_whose_condition_is_known_in_one_graph_does_not_count():
    asked = [*given("x", "y"), op("c", "Less", "x", "y"), op("a", "Assert", "c", "x"), result("x")]
    known = [*given("x"), constant("c", False), op("a", "Assert", "c", "x"), result("x")]
    assert same(asked, known)
    assert not same(asked, [*known[:-1], op("z", "Neg", "x"), result("z")])


def loop(body, bound="y"):
    """Return a loop that applies an op to x while it is less than a bound, as TensorFlow lowers it.
    """
    return [*given("x", "y"), op("enter", "Enter", "x", frame=1), op("m", "Merge", "enter", "next"),
            op("more", "Less", "m", bound), op("c", "LoopCond", "more"),
            op("s", "Switch", "m", "c"), op("b", body, "s:1"), op("next", "NextIteration", "b"),
            op("exit", "Exit", "s"), result("exit")]


def test_loops_are_told_apart_by_their_bodies():
    assert same(loop("Exp"), loop("Exp"))
    assert not same(loop("Exp"), loop("Tanh")) and not same(loop("Exp"), loop("Exp", "x"))


def test_the_order_of_ops_tells_no_loops_apart():
    """What one variable of a loop is given anew is not made of that variable."""
    def graph(first, second):
        return [*given("x", "y"), *first, *second, result("bm")]

    def variable(name, other):
        return [op(f"{name}e", "Enter", "x"), op(f"{name}m", "Merge", f"{name}e", f"{name}n"),
                op(f"{name}f", "Exp", f"{other}m"), op(f"{name}n", "NextIteration", f"{name}f")]

    assert same(graph(variable("a", "a"), variable("b", "a")),
                graph(variable("a", "a"), variable("b", "a")[::-1]))


def test_what_one_device_sends_to_another_is_the_same_tensor():
    def moved(node):
        node.attr["tensor_name"].s = b"edge"
        return node
    away = [*given("x"), moved(op("s", "_Send", "x")), moved(op("r", "_Recv")),
            op("e", "Exp", "r"), result("e")]
    assert same(away, [*given("x"), op("e", "Exp", "x"), result("e")])


def test_sums_on_arrival_are_named():
    def summed(*order):
        return [*given("x", "y", "z"), op("t", "TemporaryVariable"), op("zero", "ZerosLike", "x"),
                op("begin", "Assign", "t", "zero"),
                *(op(f"add_{name}", "AssignAdd", "begin", name) for name in order),
                op("sum", "DestroyTemporaryVariable", "begin", *(f"^add_{n}" for n in order)),
                result("sum")]
    first, second = found(summed("x", "y", "z"), summed("z", "y", "x"))
    assert first.roots == second.roots and first.arrivals == ("sum",)
    said = compared(*(Computation(summed("x", "y", "z"), ARGUMENTS, lambda name: None)
                      for _ in range(2)))
    assert said.same is None and str(said).endswith("in several ways itself: sum")
    assert not same(summed("x", "y", "z"), summed("x", "y", "y"))
    # one that waits for another is all that is still to be awaited of the two
    plain, after = summed("x", "y", "z"), summed("x", "y", "z")
    by_name = {node.name: node for node in after}
    by_name["add_z"].input.append("^add_y")
    by_name["sum"].input.remove("^add_y")
    said = compared(*(Computation(nodes, ARGUMENTS, lambda name: None)
                      for nodes in (plain, after)))
    assert said.same is None and "arrive" in said.reason, said


def test_functions_are_told_apart_by_their_bodies_also_where_they_call_themselves():
    from tensorflow.core.framework.function_pb2 import FunctionDef

    def calling(name, kind):
        body = FunctionDef()
        for node in (op("a", kind, "x"), op("again", "PartitionedCall", "a:y:0")):
            body.node_def.add().CopyFrom(node)
        body.node_def[1].attr["f"].func.name = name
        call = op("r", "PartitionedCall", "x")
        call.attr["f"].func.name = name
        return Computation([*given("x"), call, result("r")], ARGUMENTS, {name: body}.get)

    one, other, different = terms_of([calling("f_1", "Exp"), calling("f_2", "Exp"),
                                      calling("f_3", "Tanh")])
    assert one.roots == other.roots != different.roots


def added(*others, terms=("a", "b", "c")):
    """Return a sum of three ops' results, and other ops."""
    made = [op(name, kind, "x") for name, kind in (("a", "Tanh"), ("b", "Exp"), ("c", "Sin"))]
    return [*given("x"), *made, op("s", "AddN", *terms, N=len(terms)), result("s"), *others]


@pytest.mark.parametrize("order, other, equal", [
    ("abc", None, True), ("acb", None, False),
    ("abc", ("Neg", "a", "^s"), True),  # then it begins with b, which is exchanged with a
    ("abc", ("Neg", "c", "^s"), True),
    ("cba", ("Neg", "c", "^s"), False)])  # with b: b + c + a
def test_a_sum_begins_with_a_term_that_nothing_else_uses(order, other, equal):
    later = [] if other is None else [op("later", *other)]
    assert same(added(), added(*later, terms=tuple(order))) == equal


def test_a_sum_that_must_not_write_into_the_first_two_begins_with_another():
    """The kernel adds c + b + a: `tests/e2e/test_same_arithmetic.py` has a step that shows it."""
    retained = [op("p", "Neg", "a", "^s"), op("q", "Neg", "b", "^s")]
    assert not same(added(), added(*retained))
    assert same(added(terms=("c", "b", "a")), added(*retained))
    twice = [*given("x"), op("a", "Tanh", "x"), op("c", "Sin", "x")]
    doubled = [*twice, op("s", "AddN", "a", "a", "c"), result("s")]
    assert same(doubled, [*twice, op("s", "AddN", "c", "a", "a"), result("s")])


def test_a_sum_whose_start_depends_on_what_runs_first_is_no_other():
    open_ = [op("p", "Neg", "a"), op("q", "Neg", "b")]
    assert same(added(*open_), added(*open_)) and not same(added(), added(*open_))


@pytest.mark.parametrize("depth, equal", [(0, None), (4, None), (5, False)])
def test_a_start_that_is_open_in_the_plain_step_is_not_known(depth, equal):
    """With few or as many ops before its readers it comes out as in the edited step, or may."""
    def long(name, count):
        names = [name, *(f"{name}{i}" for i in range(count))]
        return [op(after, "Exp", before) for before, after in zip(names, names[1:], strict=False)]

    def summed(*waits):
        made = [*given("x"), op("a", "Tanh", "x"), op("b", "Cos", "x"), op("c", "Sin", "x"),
                *long("c", 3), *long("x", depth),
                op("p", "Mul", "a", f"x{depth - 1}" if depth else "x"),
                op("q", "Mul", "b", f"x{depth - 1}" if depth else "x")]
        return [*made, op("s", "AddN", "a", "b", "c2", *waits, N=3), result("s")]

    def comparing(*graphs):
        return compared(*(Computation(g, ARGUMENTS, lambda name: None) for g in graphs)).same
    assert comparing(summed(), summed("^p", "^q")) is equal
    assert comparing(summed("^p", "^q"), summed()) is False
    assert comparing(summed(), summed()) is None


def numbers(name, *values):
    return constant(name, list(values))


def slices_added(*order, end=1, **attrs):
    """Return a sum of the gradients of [:, 1] and [:, 2], in an order of places."""
    masks = {"begin_mask": 1, "end_mask": end, "shrink_axis_mask": 2} | attrs
    given_ = ("x", "y")
    terms = [op(f"s{n}", "StridedSliceGrad", "shape", f"b{n}", f"e{n}", "ones", given_[n],
                T=tf.float32, **masks) for n in range(2)]
    return [*given("x", "y", "z"), numbers("shape", 4, 4), numbers("ones", 1, 1),
            *(numbers(f"b{n}", 0, 1 + n) for n in range(2)),
            *(numbers(f"e{n}", 2 if end == 0 else 0, 2 + n) for n in range(2)), *terms,
            op("zero", "ZerosLike", "z"), op("r", "AddN", *order, T=tf.float32), result("r")]


def slices_packed(*pieces, axis=1, before=1, zero=0.0):
    """Return pieces side by side between zeros, with a number added."""
    return [*given("x", "y"), op("p", "Pack", *pieces, axis=axis, T=tf.float32),
            constant("around", [[0, 0], [before, 1]]), constant("zero", zero),
            op("padded", "Pad", "p", "around", T=tf.float32),
            op("hidden", "PlaceholderWithDefault", "zero", dtype=tf.float32),
            op("r", "AddV2", "hidden", "padded", T=tf.float32), result("r")]


def test_gradients_of_slices_that_do_not_overlap_are_one_side_by_side():
    added = slices_added("s0", "s1")
    assert same(added, slices_added("s1", "s0"))
    assert same(added, slices_packed("x", "y"))


@pytest.mark.parametrize("other", [
    slices_packed("y", "x"), slices_packed("x", "y", before=0), slices_packed("x", "y", axis=0),
    slices_packed("x", "y", zero=1.0), slices_packed("x", "y", "x"),
    [node for node in slices_packed("x", "y") if node.name not in ("r", "out")] + [
        result("padded")]],
    ids=["order", "place", "axis", "no zero", "more", "nothing added"])
def test_what_is_put_side_by_side_otherwise_is_told_apart(other):
    assert not same(slices_added("s0", "s1"), other)


@pytest.mark.parametrize("attrs", [
    {"new_axis_mask": 1}, {"end": 0}, {"shrink_axis_mask": 3}], ids=["new", "part", "two axes"])
def test_slices_of_more_than_one_axis_are_added_in_their_order(attrs):
    """Of three, since two may change places."""
    added = slices_added("s0", "s1", "zero", **attrs)
    assert not same(added, slices_added("s1", "zero", "s0", **attrs))
