"""Has who reads the result of branches or loops wait until what they kept for nobody is gone.

A gradient that reads a copy leaves what the original keeps to an extra reader (see
`tfckpt.rewrite.delays`), and what a copy of branches keeps besides what is wanted of it as well. An
executor with a few threads runs what follows from the result first, branch after branch and loop
after loop, and the extra readers, or what a loop pushes onto its lists, when it comes to them: all
that is kept would live until then. In a step's first calls, where most ops wait for a thread and
the newest is taken first, that is after all of the forward.
"""

from __future__ import annotations

from tfckpt.ir.edits import Clone, Create, Edits, Rewire, edited
from tfckpt.ir.graph import Graph, Op
from tfckpt.ops import record
from tfckpt.rewrite.names import extra_reader_name, identity, result_name
from tfckpt.rewrite.passes.manager import Pass, Property


def hold_results(graph: Graph, edits: Edits) -> Edits:
    """Return the edits, and pass-throughs of results that wait for extra readers of the others.

    Args:
      graph: the captured step.
      edits: what is done to the step so far.
    """
    with_bodies = {op.name: op for op in graph.ops if record(op.type).has_bodies}
    if not with_bodies or not edits.added:
        return edits
    made = {new.name for new in edits.added}
    copies = {new.name: with_bodies[new.source] for new in edits.added
              if isinstance(new, Clone) and new.source in with_bodies}
    added: list[Create] = []
    passed: dict[str, str] = {}
    for name, op in (with_bodies | copies).items():
        extra = [reader for slot, tensor in enumerate(op.outputs) if tensor.dtype == "variant"
                 and (reader := extra_reader_name(name, slot)) in made]
        for new in _results(name, op, tuple(extra)) if extra else ():
            added.append(new)
            passed[new.inputs[0]] = f"{new.name}:0"
    if not added:
        return edits
    tensors, _, _ = edited(graph, edits)
    rewires = [Rewire(reader, i, passed[tensor]) for reader, read in tensors.items()
               for i, tensor in enumerate(read) if tensor in passed]
    used = {rewire.tensor for rewire in rewires}
    return edits.then(Edits(tuple(new for new in added if f"{new.name}:0" in used),
                            tuple(rewires)))


def _results(name: str, op: Op, extra: tuple[str, ...]) -> list[Create]:
    return [identity(result_name(name, slot), f"{name}:{slot}", extra, tensor.dtype, op.device)
            for slot, tensor in enumerate(op.outputs)
            if tensor.dtype not in ("variant", "resource")]


PASS = Pass("body results", lambda context, edits: hold_results(context.graph, edits),
            requires=frozenset({Property.COPIES}))
