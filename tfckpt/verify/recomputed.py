"""What XLA made of recomputed ops: computed, merged with their originals, or part of other ops.

Instructions carry the names of the ops they came from. A name alone does not tell: of two ops that
XLA merged one name is left, but so it is where one of them became part of a library call (a bias,
the sum with a residual, the padding of a convolution) and the other did not. So what reads an op
is looked up, too: an op was merged where its readers read what the other one computes.
"""

from __future__ import annotations

import collections
import functools
import re
from collections.abc import Iterable, Iterator
from typing import Any

from tfckpt.ops import record

COMPUTED, MERGED, FOLDED = "computed", "merged", "folded"
_COPY = re.compile(r"-tfckpt\d+$")
_VIEWS = ("bitcast", "get-tuple-element", "tuple")
_PASSES_ON = (*_VIEWS, "copy", "opt-barrier", "reshape", "transpose")
_KNOWN = ("constant", "iota", "parameter")
_CALLS = ("call", "fusion")


class Module:
    """The instructions of an HloModuleProto, by op, seen through fusions and calls."""

    def __init__(self, module: Any) -> None:
        parts = {part.id: part for part in module.computations}
        self._inside = {part.id: {i.id: i for i in part.instructions} for part in parts.values()}
        self._root = {part.id: self._inside[part.id][part.root_id] for part in parts.values()}
        self._called: dict[int, tuple[int, Any]] = {}  # what calls a computation, and where
        self.named: dict[str, list[tuple[int, Any]]] = collections.defaultdict(list)
        for part in parts.values():
            for made in part.instructions:
                for name in _names(made):
                    self.named[name].append((part.id, made))
                if made.opcode in _CALLS:
                    self._called[made.called_computation_ids[0]] = part.id, made

    def computes(self, name: str) -> bool:
        """Return whether instructions of an op do more than to pass something on.

        Args:
          name: of a TensorFlow op; False where no instruction came from it.
        """
        return any(made.opcode not in _VIEWS and not self._is_known(part, made)
                   for part, made in self.named.get(name, ()))

    def _is_known(self, part: int, made: Any) -> bool:
        if made.opcode == "broadcast":
            return self._is_known(part, self._inside[part][made.operand_ids[0]])
        return made.opcode in _KNOWN

    def reads(self, name: str) -> set[str]:
        """Return the ops whose results the instructions of an op read.

        Args:
          name: of a TensorFlow op.

        Returns:
          Names of TensorFlow ops, without `name`; empty where no instruction came from it.
        """
        found: set[str] = set()
        pending, seen = list(self.named.get(name, ())), set()
        while pending:
            part, made = pending.pop()
            for source in self._operands(part, made):
                if (source[0], source[1].id) in seen:
                    continue
                seen.add((source[0], source[1].id))
                others = _names(source[1]) - {name}
                found |= others
                if not others or source[1].opcode in _PASSES_ON:
                    pending.append(source)
        return found

    def _operands(self, part: int, made: Any) -> Iterator[tuple[int, Any]]:
        """Return what an instruction reads: inside of fusions, and outside where it is inside."""
        if made.opcode == "parameter":
            if part in self._called:
                outer, call = self._called[part]
                yield self._result(outer, call.operand_ids[made.parameter_number])
            return
        for operand in made.operand_ids:
            if made.opcode == "get-tuple-element":
                yield self._element(part, operand, made.tuple_index)
            else:
                yield self._result(part, operand)

    def _result(self, part: int, number: int) -> tuple[int, Any]:
        """Return the instruction that computes what another one stands for."""
        made = self._inside[part][number]
        while made.opcode in _CALLS:
            part = made.called_computation_ids[0]
            made = self._root[part]
        return part, made

    def _element(self, part: int, number: int, index: int) -> tuple[int, Any]:
        part, made = self._result(part, number)
        return (self._result(part, made.operand_ids[index]) if made.opcode == "tuple"
                else (part, made))


def _names(made: Any) -> set[str]:
    """Return the ops that an instruction came from: of some it is several."""
    return set(filter(None, made.metadata.op_name.split(";")))


class _Fates:
    """What became of the recomputed ops of a traced step."""

    def __init__(self, graph: Any, module: Any) -> None:
        self.ops = {op.name: op for op in graph.get_operations()}
        self.module = Module(module)
        self.needed = _needed(graph)
        self.alike: dict[str, set[str]] = collections.defaultdict(set)
        for name in self.ops:
            self.alike[_COPY.sub("", name)].add(name)

    def of(self, names: Iterable[str]) -> dict[str, str]:
        """Return one of `COMPUTED`, `MERGED` and `FOLDED` for each."""
        copies = list(names)
        merged = {name for name in copies if self._is_merged(name)}
        pending = [name for name in merged if not self.module.computes(name)]
        while pending:  # what only lost ones read is not computed either: the originals are
            for tensor in self.ops[pending.pop()].inputs:
                read = tensor.op.name
                if _COPY.search(read) and read not in merged and not self.module.computes(read):
                    merged.add(read)
                    pending.append(read)
        return {name: MERGED if name in merged else
                COMPUTED if self.module.computes(name) else FOLDED for name in copies}

    def _is_merged(self, name: str) -> bool:
        """Return whether what reads a copy reads what another one computes, or the other way."""
        if self.module.computes(name):
            return any(name in self._read_below(twin) for twin in self._twins(name)
                       if not self.module.computes(twin))
        return bool(self._read_below(name) & self._stand_ins(name))

    def _twins(self, name: str) -> set[str]:
        """Return the original of a copy and its other copies, those that the step needs."""
        return (self.alike[_COPY.sub("", name)] - {name}) & self.needed

    def _read_below(self, name: str) -> set[str]:
        """Return what the next ops after an op read that are left of it, but not in the step."""
        found: set[str] = set()
        pending, seen = [name], {name}
        while pending:
            for tensor in self.ops[pending.pop()].outputs:
                for op in tensor.consumers():
                    if (op.name in seen or op.name not in self.ops  # a loop that gave way
                            or record(op.type).shape_only):
                        continue
                    seen.add(op.name)
                    if op.name in self.module.named:
                        found |= self.module.reads(op.name) - {t.op.name for t in op.inputs}
                    else:
                        pending.append(op.name)
        return found

    @functools.cache  # noqa: B019 - lives as long as one look at a module
    def _stand_ins(self, name: str) -> set[str]:
        """Return what would be read in the place of a copy that XLA merged.

        Its twins, and those of the copies that it reads: `max(z, 0) > 0` reads z.
        """
        found = {twin for twin in self._twins(name) if self.module.computes(twin)}
        for tensor in self.ops[name].inputs:
            if _COPY.search(tensor.op.name):
                found |= self._stand_ins(tensor.op.name)
        return found


def fates(graph: Any, module: Any) -> dict[str, str]:
    """Return what XLA made of each recomputed op of a traced step, but those that only reshape.

    Args:
      graph: the step's `FuncGraph`.
      module: the HloModuleProto that it was compiled to.

    Returns:
      For each op by name: `COMPUTED` where instructions of its own compute it; `MERGED` where its
      readers read what the original or another copy computes, or those of that read this one's;
      else `FOLDED`: it is part of the instructions of other ops, such as a library call, or XLA
      knows its value, or it is a view.
    """
    return _Fates(graph, module).of(op.name for op in graph.get_operations()
                                    if _COPY.search(op.name) and not record(op.type).aliases)


def _needed(graph: Any) -> set[str]:
    """Return the ops that a graph's results and effects need, by name."""
    pending: list[Any] = [*(t.op for t in graph.outputs), *graph.control_outputs]
    found = {op.name for op in pending}
    while pending:
        op = pending.pop()
        sources: Iterable[Any] = (*(t.op for t in op.inputs), *op.control_inputs)
        for source in sources:
            if source.name not in found:
                found.add(source.name)
                pending.append(source)
    return found
