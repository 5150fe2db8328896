"""A traced step made to be what runs: its ops give way to those that Grappler makes of them.

Grappler merges, moves and fuses ops once the trace is over, so that neither the tensors of the
trace are those that are kept, nor is a rewritten step rearranged as the plain one would be. Here
Grappler is asked first. Its answer takes the place of the ops of the trace, each op marked so that
Grappler leaves it alone when the step is called: what is planned is what runs, and what a plan
repeats is computed as in the plain step.

  1. The answer reads the inputs of the trace, and computes its results, which a loop or branch
     passes on through an op of its own; control outputs are those that are left. Ops of the trace
     are hidden, and shown again where the change is taken back.
  2. Ops are called as Grappler calls them, in a scope of their own, and stand in the order of the
     trace.
  3. What a marked sum of three and more reads is sorted by name all the same. Where that would
     change its order, it reads its terms through ops with names in that order. And x * f(x) that
     Grappler left as it is, it may still merge, marked or not: such a product reads x through an
     op of its own.
  4. Which ops follow a gradient is known from the trace: Grappler merges and renames them.
  5. Grappler's ops have no gradients, nor do they know of custom ones. Where a tape that is outside
     of the step asks for its gradient, that has to be made of the ops of the trace: who applies
     edits sees to it.
  6. What loops and branches read, they read by the names of the trace, since ops of their bodies
     are named by them.
  7. Functions that the step calls are inlined, as TensorFlow does it. Loops and branches stay, and
     Grappler optimises them as in the plain step once they are lowered. Left alone is a step that
     does not run on one CPU or GPU alone (DTensor lays it out before Grappler sees it, and knows
     none of the ops that Grappler makes), and one whose constants are so large that copies of them
     matter.
"""

from __future__ import annotations

import dataclasses
import functools
import heapq
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol

import tensorflow as tf
from absl import logging

from tfckpt.capture import tf_adapter
from tfckpt.capture.grappler.control_edges import write_after_reads
from tfckpt.capture.grappler.machine import is_relaid, on_one_device, says_more
from tfckpt.capture.inlining.inline import is_call, is_rewritten, lines_of
from tfckpt.capture.inlining.live_changes import LiveChanges
from tfckpt.capture.nodes import bodies_of, calls_functions, op_of
from tfckpt.capture.regions import around_gradients, is_gradient_scope
from tfckpt.ir.edits import FACTOR, OPTIMIZED, PROTECTED
from tfckpt.ops import record
from tfckpt.ops.names import ADD_N, ARG, IDENTITY, RETVAL

_PASSED = "Func/"
"""Before the names of what passes arguments and results of an inlined function on."""
_READ, _RESULT = "_read", "_result"
"""End the names of what stands for inputs of loops and branches, and for what they return last."""
_FUNCTIONS = 2
"""Element-wise functions in a row of which Grappler merges the last with a product."""
_MOST_CONSTANTS = 64 << 20
"""Bytes of constants that are copied: the ops of the trace are hidden and not gone."""


@dataclasses.dataclass(frozen=True)
class Body:
    """What took the place of a trace.

    Attributes:
      scope: in which its ops stand, with a slash at the end.
      forward, later: names of ops that follow no gradient, and one.
      inlined: a line for each function that was inlined.
      answer: what Grappler made; None where loops and branches are lowered after that.
    """

    scope: str
    forward: frozenset[str]
    later: frozenset[str]
    inlined: tuple[str, ...]
    answer: tf.compat.v1.GraphDef | None


def wanted() -> bool:
    """Return whether no `TFCKPT_OPTIMIZED=off` keeps it from being done."""
    return os.environ.get("TFCKPT_OPTIMIZED", "").strip().lower() not in ("off", "0", "false")


class Asked(Protocol):
    """What is asked about a function."""

    def answer(self, inlined: Callable[[tf.compat.v1.GraphDef], object]) -> tf.compat.v1.GraphDef:
        """Return what Grappler makes of it.

        Args:
          inlined: is told of it with the functions inlined that it calls.
        """


def optimise_in_place(graph: Any, changes: LiveChanges, plain: Asked) -> Body | None:
    """Have a traced graph compute what Grappler makes of it.

    Args:
      graph: a FuncGraph whose trace is complete.
      changes: of the graph.
      plain: what it is.

    Returns:
      None where the graph is left as it is.
    """
    shown = graph.get_operations()
    if tf_adapter.uses_custom_device(graph) or not _may_give_way(shown):
        return None
    before = changes.point()
    try:
        asked = tf.compat.v1.GraphDef()
        found = plain.answer(asked.CopyFrom)
        write_after_reads(asked, found)
        return _take(graph, shown, asked, found, changes) if _gives_way(asked) else None
    except Exception as error:  # whatever TensorFlow makes of it: the step is planned as traced
        logging.info("tfckpt: %s is planned as it was traced: %s", graph.name, error)
        changes.revert(before)
        return None


def _may_give_way(shown: Sequence[tf.Operation]) -> bool:
    """Return whether ops may give way (rule 7), as far as is known before functions are inlined."""
    return (on_one_device(op.device for op in shown)
            and all(record(op.type).branch is None for op in shown)
            and any(is_gradient_scope(op.name) or is_call(op.type) for op in shown)
            and sum(_constant_bytes(op) for op in shown) <= _MOST_CONSTANTS)


def _gives_way(asked: tf.compat.v1.GraphDef) -> bool:
    """Return whether ops give way, functions inlined."""
    return (on_one_device(node.device for node in asked.node)
            and any(is_gradient_scope(node.name) for node in asked.node)
            and not any(is_rewritten(node.name) for node in asked.node)
            and asked.ByteSize() <= _MOST_CONSTANTS + (asked.library.ByteSize()))


def _constant_bytes(op: tf.Operation) -> int:
    if not record(op.type).is_constant:
        return 0
    made = op.outputs[0]
    return int(made.shape.num_elements() or 0) * int(made.dtype.size)


def _take(graph: Any, shown: Sequence[tf.Operation], asked: tf.compat.v1.GraphDef,
          found: tf.compat.v1.GraphDef, changes: LiveChanges) -> Body:
    """Put what Grappler made in the place of what is shown.

    Args:
      graph: a FuncGraph whose trace is complete.
      shown: the ops that it shows.
      asked: what Grappler was asked about: the step, functions inlined.
      found: what it made of it.
      changes: of the graph.
    """
    inputs = {tensor.op.name: tensor for tensor in graph.inputs}
    scope = tf_adapter.free_scope(graph, OPTIMIZED)
    results = {node.attr["index"].i: node.input[0] for node in found.node if node.op == RETVAL}
    body = tf.compat.v1.GraphDef(versions=found.versions)
    turns = _turns(asked, shown)
    nodes = {node.name: node for node in found.node}
    for node in _in_traced_order([n for n in found.node if n.op not in (RETVAL, ARG)], turns):
        body.node.extend(_marked(node, inputs, nodes))
    made = {op.name.removeprefix(scope): op
            for op in tf_adapter.import_nodes(graph, body, inputs, scope)}
    traced, relaid = {op.name: op for op in shown}, is_relaid(found)
    for name, op in made.items():
        _tell_shapes(op, traced.get(name), relaid)

    def tensor(text: str) -> tf.Tensor:
        name, _, slot = text.partition(":")
        return inputs[name] if name in inputs else made[name].outputs[int(slot or 0)]

    def result(text: str) -> tf.Tensor:
        """Return a result, passed on where a loop or branch makes it: another may take its place.

        A `tf.function` passes on what it returns; the body of a loop does not.
        """
        given = tensor(text)
        if not record(given.op.type).has_bodies:
            return given
        passed = tf_adapter.create_op(graph, IDENTITY, [given], [given.dtype],
                                      f"{given.op.name}{_RESULT}", {}, "")
        made[passed.name.removeprefix(scope)] = passed
        return passed.outputs[0]

    outputs = [result(results[i]) for i in range(len(graph.outputs))]
    for output, plain in zip(outputs, graph.outputs, strict=True):
        output.set_shape(plain.shape)
    changes.replace_results("outputs", outputs)
    changes.replace_results("control_outputs", [
        made[op.name] for op in graph.control_outputs if op.name in made])
    before = _name_what_bodies_read(graph, asked, made)
    changes.show([name for op in made.values() for name in (*before.get(op.name, ()), op.name)],
                 [op.name for op in shown if op.name not in inputs])
    forward, later = _around_gradients(asked)
    calls = [tf_adapter.called_function(op) for op in shown
             if is_call(op.type) and not _is_left(op.name, made)]
    return Body(scope, _in_scope(forward, made, scope), _in_scope(later, made, scope),
                lines_of(calls, functools.partial(tf_adapter.find_function, graph)),
                None if any(map(calls_functions, found.node)) else found)


def _name_what_bodies_read(graph: Any, asked: tf.compat.v1.GraphDef,
                           made: Mapping[str, tf.Operation]) -> dict[str, list[str]]:
    """Have loops and branches read their inputs under the names that these have in the plain step.

    TensorFlow names ops of a lowered body by them, and sums of three and more add their terms in
    the order of names.

    Returns:
      for each loop and branch the ops that stand for its inputs.
    """
    found: dict[str, list[str]] = {}
    for node in asked.node:
        op = made.get(node.name)
        if op is None or not record(op.type).has_bodies:
            continue
        summed = _summed(node, asked)
        for i, (name, tensor) in enumerate(zip(node.input, op.inputs, strict=False)):
            if tensor.dtype.is_floating or tensor.dtype.is_complex or i in summed:
                called = tf_adapter.create_op(
                    graph, IDENTITY, [tensor], [tensor.dtype], name.partition(":")[0] + _READ, {},
                    "")
                tf_adapter.update_input(op, i, called.outputs[0])
                found.setdefault(op.name, []).append(called.name)
    return found


def _summed(node: tf.compat.v1.NodeDef, asked: tf.compat.v1.GraphDef) -> frozenset[int]:
    """Return which inputs of a loop or branch are terms of sums of three and more in its bodies."""
    found: set[int] = set()
    for function in bodies_of(node, asked):
        added = {name for made in function.node_def if made.op == ADD_N and made.attr["N"].i > 2
                 for name in made.input}
        places = [argument.name in added for argument in function.signature.input_arg]
        choosing = record(node.op).chooses  # the first input chooses
        found.update(i + choosing for i, is_added in enumerate(places) if is_added)
    return frozenset(found)


def _is_left(name: str, made: Mapping[str, tf.Operation]) -> bool:
    return name in made and is_call(made[name].type)


def _turns(asked: tf.compat.v1.GraphDef, shown: Sequence[tf.Operation]
           ) -> dict[str, tuple[int, int]]:
    """Return when each op has its turn: those of a function where it was called."""
    place = {op.name: i for i, op in enumerate(shown)}
    found = {}
    for number, node in enumerate(asked.node):
        name = node.name
        while name and name not in place:
            name = name.removeprefix(_PASSED).rpartition("/")[0]
        found[node.name] = place.get(name, len(place)), number
    return found


def _in_traced_order(nodes: Sequence[tf.compat.v1.NodeDef], turns: Mapping[str, tuple[int, int]]
                     ) -> list[tf.compat.v1.NodeDef]:
    """Return ops in the order in which the trace made those of their names.

    What Grappler made, it comes just before the first that needs it.
    """
    named = {node.name: node for node in nodes}
    needed = {node.name: {read for name in node.input
                          if (read := op_of(name)) in named}
              for node in nodes}
    readers: dict[str, list[str]] = {name: [] for name in named}
    for name, reads in needed.items():
        for read in reads:
            readers[read].append(name)
    turn = dict(turns)
    for name in reversed(_first_first(needed, readers, lambda name: 0)):
        if name not in turn:
            turn[name] = min((turn[reader] for reader in readers[name]), default=(len(turns), 0))
    return [named[name] for name in _first_first(needed, readers, turn.__getitem__)]


def _first_first(needed: Mapping[str, Collection[str]], readers: Mapping[str, Sequence[str]],
                 turn: Callable[[str], Any]) -> list[str]:
    """Return names in a topological order: of those that may come next the one of the first turn.

    Raises:
      ValueError: there is a cycle.
    """
    left = {name: len(reads) for name, reads in needed.items()}
    ready = [(turn(name), name) for name, count in left.items() if not count]
    heapq.heapify(ready)
    found = []
    while ready:
        _, name = heapq.heappop(ready)
        found.append(name)
        for reader in readers[name]:
            left[reader] -= 1
            if not left[reader]:
                heapq.heappush(ready, (turn(reader), reader))
    if len(found) != len(left):
        raise ValueError("what Grappler made has a cycle")
    return found


def _marked(node: tf.compat.v1.NodeDef, inputs: Collection[str],
            nodes: Mapping[str, tf.compat.v1.NodeDef]) -> list[tf.compat.v1.NodeDef]:
    """Return an op as it is imported, after what it reads its terms through (rule 3)."""
    op = tf.compat.v1.NodeDef()
    op.CopyFrom(node)
    op.attr.pop("_class", None)
    op.device = ""
    tf_adapter.make_importable(op)
    if not calls_functions(node):
        op.attr[PROTECTED].b = True
    read = [name for name in node.input if not name.startswith("^")]
    waits = [name for name in node.input if name.startswith("^") and name[1:] not in inputs]
    terms = {place: _passed(op, f"/term_{place:06d}", name) for place, name in enumerate(read)
             } if _is_sorted_otherwise(node.op, read, inputs) else {
        place: _passed(op, f"{FACTOR}{place}", read[place])
        for place in _factors_apart(node.op, read, nodes)}
    del op.input[:]
    op.input.extend([*(terms[place].name if place in terms else name
                       for place, name in enumerate(read)), *waits])
    return [*terms.values(), op]


def _factors_apart(kind: str, read: Sequence[str], nodes: Mapping[str, tf.compat.v1.NodeDef]
                   ) -> list[int]:
    """Return which factor of a product the other is a function of, as x is of x * sigmoid(x).

    Grappler merges the two unless the function waits for something; a copy of it does not.
    """
    if not record(kind).multiplies or len(read) != 2:
        return []
    for place, other in ((1, read[0]), (0, read[1])):
        for _ in range(_FUNCTIONS):
            node = nodes.get(op_of(other))
            of = [] if node is None else [name for name in node.input if name[:1] != "^"]
            if node is None or len(of) != 1 or record(node.op).evaluate is None:
                break
            other = of[0]
            if other == read[place]:
                return [place]
    return []


def _is_sorted_otherwise(kind: str, read: Sequence[str], inputs: Collection[str]) -> bool:
    """Return whether Grappler might change the order of what an op adds."""
    return record(kind).adds and len(read) > 2 and (
        list(read) != sorted(read) or any(name.partition(":")[0] in inputs for name in read))


def _passed(reader: tf.compat.v1.NodeDef, name: str, tensor: str) -> tf.compat.v1.NodeDef:
    node = tf.compat.v1.NodeDef(name=reader.name + name, op=IDENTITY, input=[tensor])
    node.attr["T"].CopyFrom(reader.attr["T"])
    node.attr[PROTECTED].b = True
    return node


def _tell_shapes(op: tf.Operation, traced: tf.Operation | None, relaid: bool) -> None:
    """Tell an op the shapes that the trace knew of the one it has the place of.

    Of a call of which Grappler has dropped results, nobody says here which ones are left; nor which
    results are images whose channels come first now, where Grappler has made some so.
    """
    if traced is None or traced.type != op.type or len(op.outputs) != len(traced.outputs):
        return
    for output, known in zip(op.outputs, traced.outputs, strict=True):
        if says_more(known.shape, output.shape, relaid):
            output.set_shape(known.shape)


def _around_gradients(asked: tf.compat.v1.GraphDef) -> tuple[frozenset[str], frozenset[str]]:
    number = {node.name: i for i, node in enumerate(asked.node)}
    read = [[number[name.partition(":")[0]] for name in node.input if not name.startswith("^")]
            for node in asked.node]
    awaited = [[number[name[1:]] for name in node.input if name.startswith("^")]
               for node in asked.node]
    return around_gradients(
        list(number), read, awaited,
        {i for i, node in enumerate(asked.node) if record(node.op).lists.empty})


def _in_scope(names: Collection[str], made: Mapping[str, Any], scope: str) -> frozenset[str]:
    return frozenset(scope + name for name in names if name in made)
