"""Ops that TensorFlow merges or rearranges: Grappler (arithmetic optimizer, remapper), oneDNN."""

from __future__ import annotations

from tfckpt.cost.broadcasts import undoes_nothing
from tfckpt.ir.graph import Graph
from tfckpt.ops import BIAS, REARRANGED, SUM, record


def merges_into_its_reader(graph: Graph, i: int, readers: list[list[int]]) -> bool:
    """Return whether TensorFlow may merge an op into its only reader.

    `readers` are those of `Graph.consumers`.

    Args:
      graph: joint graph.
      i: index of the op.
      readers: for each op its consumers, as `Graph.consumers` returns them.
    """
    merges = record(graph.ops[i].type).merges_into
    wanted = REARRANGED if multiplies_by_one(graph, i) else merges
    reader = only_reader(graph, i, readers, equal=True) if wanted else None
    if reader is None or not record(graph.ops[reader].type).is_among(wanted):
        return False
    return BIAS not in merges or not _sums_alike(graph, reader)


def multiplies_by_one(graph: Graph, i: int) -> bool:
    """Return whether Grappler takes an op out: 1 * x, as `silu` has before its sigmoid.

    Args:
      graph: joint graph.
      i: index of the op.
    """
    return record(graph.ops[i].type).multiplies and any(
        graph.ops[source].attrs.get("value") == 1.0 for source, _ in graph.ops[i].inputs)


def _sums_alike(graph: Graph, op: int) -> bool:
    """Return whether an op adds tensors of one shape, none of which can be a bias."""
    shapes = {graph.ops[source].outputs[slot].shape for source, slot in graph.ops[op].inputs}
    shape = next(iter(shapes)) or ()
    return (SUM in record(graph.ops[op].type).kinds and len(shapes) == 1
            and any(n != 1 for n in shape[:-1]) and None not in shape)


def only_reader(graph: Graph, op: int, readers: list[list[int]],
                equal: bool = False) -> int | None:
    """Return the only op that reads an op's results, through pass-throughs; None if there is none.

    TensorFlow removes pass-throughs, and what undoes a broadcast that did not happen as well.

    Args:
      graph: the captured step.
      op: index of the op.
      readers: as `Graph.consumers`.
      equal: whether equal products count as one, since TensorFlow keeps only one of them: x * x
        has two gradients.
    """
    found: dict[object, int] = {}
    pending: list[tuple[int, int | None]] = [(op, None)]
    seen = set(pending)
    while pending:
        i, slot = pending.pop()
        for r in readers[i]:
            if slot is not None and (i, slot) not in graph.ops[r].inputs:
                continue
            reader = graph.ops[r]
            known = record(reader.type)
            if not (known.passes_on or undoes_nothing(graph, r)):
                key = (reader.type, tuple(sorted(reader.inputs)))
                found.setdefault(key if equal and known.multiplies else r, r)
                continue
            passed = [(r, n) for n, (source, k) in enumerate(reader.inputs)
                      if source == i and slot in (None, k)]
            pending += [p for p in passed if p not in seen]
            seen.update(passed)
        if len(found) > 1:
            return None
    return next(iter(found.values()), None)
