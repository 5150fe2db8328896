"""Names and marks of new ops, and the pass-throughs of guards, extra readers and sorted sums."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

from tfckpt.ir.edits import COPY, PROTECTED, Clone, Create, Edits, Rewire
from tfckpt.ir.graph import Graph, Op
from tfckpt.ops.names import IDENTITY

SCOPE = "tfckpt"
FENCE = f"{SCOPE}/fence_"


def marks_of_copies(clustered: bool) -> dict[str, object]:
    """Return the attributes of copies; outside of XLA they are kept out of its clusters too.

    Args:
      clustered: whether TensorFlow may put ops into clusters for XLA.

    Returns:
      Plain attribute values by name, as in `Create.attrs`.
    """
    return {COPY: True, "_XlaCompile": False} if clustered else {COPY: True}


def copy_name(name: str, copy: int) -> str:
    """Return the name of a copy, which sorts where the original's does.

    Grappler puts the inputs of commutative ops in the order of their names, and which constants
    it then folds into which operand follows from that: a copy that sorted elsewhere would be
    multiplied in another order than the original, and round differently. No other character
    that names may contain sorts before the hyphen.

    Args:
      name: of the original.
      copy: number of the copy, 1 for the first.
    """
    return f"{name}-{SCOPE}{copy}"


def guard_name(tensor: str, number: int, label: str = "") -> str:
    """Return the name of a guard, which sorts where the guarded tensor's does.

    Args:
      tensor: what is guarded, named `op:slot`.
      number: of the recomputation segment, from 1; negative for single waits.
      label: what tells the name from those of other guards of the tensor; "" where nothing need.
    """
    op, _, slot = tensor.rpartition(":")
    kind = "guard" if number > 0 else "wait"
    return f"{op}-{SCOPE}_{kind}{abs(number)}_{slot}{label}"


def extra_reader_name(op: str, slot: int = 0) -> str:
    """Return the name of the pass-through that is an extra reader of a result of an op.

    Args:
      op: name of the op.
      slot: of the result.
    """
    return f"{op}-{SCOPE}_tap{slot or ''}"


def done_name(op: str) -> str:
    """Return the name of the op that runs once all that is read of a copy has been computed.

    Args:
      op: name of the copy.
    """
    return f"{op}-{SCOPE}_done"


def given_name(op: str, slot: int) -> str:
    """Return the name of the pass-through of what a loop is handed and waits for.

    Args:
      op: name of the loop.
      slot: of its inputs.
    """
    return f"{op}-{SCOPE}_given{slot}"


def result_name(op: str, slot: int) -> str:
    """Return the name of the pass-through of a result that waits for extra readers of others.

    Args:
      op: name of the op, or of its copy.
      slot: of the result.
    """
    return f"{op}-{SCOPE}_result{slot}"


def retained_name(op: str, number: int) -> str:
    """Return the name of the pass-through that keeps a term of a sum alive.

    Args:
      op: name of the op that adds.
      number: of the term, among all that are kept alive.
    """
    return f"{op}-{SCOPE}_held{number}"


def late_name(tensor: str, number: int) -> str:
    """Return the name of the pass-through of a factor, which sorts where the factor's does.

    Args:
      tensor: the factor, named `op:slot`.
      number: index of the op that reads it, which makes the name unique.
    """
    op, _, slot = tensor.rpartition(":")
    return f"{op}-{SCOPE}_late{number}_{slot}"


def term_name(op: str, place: int) -> str:
    """Return the name of the pass-through of a sum's term; such names sort by place.

    Args:
      op: name of the sum.
      place: of the term in the order of the sum, from 0; below 10000.
    """
    return f"{op}-{SCOPE}_term{place:04d}"


def base_name(cube: str, first: bool) -> str:
    """Return the name of the pass-through of x before x^3.

    Args:
      cube: name of the op that computes x^3.
      first: whether it sorts before what Grappler calls x^2, or after that.
    """
    scope, slash, name = cube.rpartition("/")
    return f"{scope}{slash}{'0' if first else 'z'}{name}-{SCOPE}_base"


def identity(name: str, tensor: str, controls: tuple[str, ...], dtype: str,
              device: str) -> Create:
    """Return a pass-through that Grappler may not replace by control edges on its readers.

    Args:
      name: of the pass-through.
      tensor: what it reads, named `op:slot`.
      controls: names of the ops that it waits for.
      dtype: of the tensor.
      device: where it runs; "" where TensorFlow may choose.
    """
    return Create(name, IDENTITY, (tensor,), controls, (dtype,),
                  {"T": f"dtype:{dtype}", PROTECTED: True}, device)


def read_through(edits: Edits, graph: Graph,
                 names: Mapping[str, Callable[[str], Sequence[tuple[int, str]]]]) -> Edits:
    """Return the edits, with pass-throughs before some inputs of ops and of their copies.

    Args:
      edits: what is done to the step so far.
      graph: the captured step.
      names: for each of the ops, what gives for its name, or a copy's, the inputs by index, and
        for each the name of its pass-through.
    """
    ops = {op.name: op for op in graph.ops}
    added: list[Create | Clone] = []

    def passed(op: Op, name: str, read: Sequence[str]) -> dict[int, str]:
        wanted = names[op.name](name)
        added.extend(identity(new, read[i], (), op.outputs[0].dtype, op.device)
                     for i, new in wanted)
        return {i: f"{new}:0" for i, new in wanted}

    for new in edits.added:
        if isinstance(new, Clone) and new.source in names:
            through = passed(ops[new.source], new.name, new.inputs)
            new = dataclasses.replace(
                new, inputs=tuple(through.get(i, t) for i, t in enumerate(new.inputs)))
        added.append(new)
    rewires = {(r.op, r.index): r for r in edits.rewires}
    for name in names:
        plain = [f"{graph.ops[source].name}:{slot}" for source, slot in ops[name].inputs]
        read = [rewires.get((name, i), Rewire(name, i, t)).tensor for i, t in enumerate(plain)]
        for i, tensor in passed(ops[name], name, read).items():
            rewires[name, i] = Rewire(name, i, tensor)
    return dataclasses.replace(edits, added=tuple(added), rewires=tuple(rewires.values()))
