"""The functions of a loop, as graphs: what they hand on, and what uses their arguments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfckpt.capture import tf_adapter
from tfckpt.capture.variables import argument, origin
from tfckpt.ops import record


class Refusal(Exception):  # noqa: N818 - it ends nothing, and says why
    """Why a loop cannot be recomputed segment by segment."""


def static_number(tensor: tf.Tensor) -> int | None:
    """Return the number that a tensor always is; None where it is none.

    Args:
      tensor: of a live graph.
    """
    value = tf_adapter.static_value(origin(tensor))
    return int(value) if value is not None and value.size == 1 else None


class Body:
    """A function of a loop: what it hands on, and what uses its arguments.

    Args:
      loop: the op.
      attr: names the function: "body" or "cond".

    Attributes:
      graph, inputs, outputs: of the function.
      slots: the number of an argument, by the name of its tensor.
      passed: which argument a result is, by the number of the result.
    """

    def __init__(self, loop: tf.Operation, attr: str) -> None:
        graph: Any = tf_adapter.called_graph(loop, attr)
        self.graph, self.inputs, self.outputs = graph, list(graph.inputs), list(graph.outputs)
        self.slots = {tensor.name: n for n, tensor in enumerate(self.inputs)}
        self.passed = {slot: found for slot, made in enumerate(self.outputs)
                       if (found := argument(graph, origin(made))) is not None}
        self._uses: dict[int, list[tf.Operation]] = {}
        for op in graph.get_operations():
            if record(op.type).passes_on:
                continue
            for n in dict.fromkeys(self.arguments(op)):
                if n is not None:
                    self._uses.setdefault(n, []).append(op)

    def arguments(self, op: tf.Operation) -> list[int | None]:
        """Return which argument each input of an op is; None for those that are none.

        Args:
          op: of the function.
        """
        return [self.slots.get(origin(tensor).name) for tensor in op.inputs]

    def uses(self, slot: int) -> list[tf.Operation]:
        """Return the ops that read an argument, those that pass it on left out.

        Args:
          slot: number of the argument.
        """
        return self._uses.get(slot, [])

    def is_only(self, slot: int, ops: Sequence[tf.Operation]) -> bool:
        """Return whether an argument is used by some ops alone, and handed on nowhere.

        Args:
          slot: number of the argument.
          ops: all that may read it, in the order of the function.
        """
        return ([op.name for op in self.uses(slot)] == [op.name for op in ops]
                and slot not in self.passed.values())

    def adds_one(self, slot: int) -> bool:
        """Return whether an argument is handed on with one added to it.

        Args:
          slot: number of the argument, and of the result.
        """
        op = origin(self.outputs[slot]).op
        return (record(op.type).adds and len(op.inputs) == 2
                and any(self.slots.get(origin(one).name) == slot and static_number(other) == 1
                        for one, other in (tuple(op.inputs), tuple(op.inputs)[::-1])))

    def check_only_set(self, slot: int) -> bool:
        """Raise `Refusal` unless entries of a list are set, and nothing but its length is read.

        Args:
          slot: number of the argument, and of the result.

        Returns:
          Whether its length is read.

        Raises:
          Refusal: something reads the list.
        """
        chain: list[tf.Operation] = []
        tensor = origin(self.outputs[slot])
        while self.slots.get(tensor.name) != slot:
            use = record(tensor.op.type).lists
            if use.entry is None or use.index is None:
                raise Refusal(f"its body reads the list that it hands on in slot {slot}")
            chain.append(tensor.op)
            tensor = origin(tensor.op.inputs[0])
        readers = [op for op in self.graph.get_operations()
                   if not record(op.type).passes_on
                   for read in op.inputs if any(origin(read).op is made for made in chain)]
        readers = [*self.uses(slot), *readers]
        others = [op.name for op in readers if not record(op.type).lists.counts]
        handed = [n for n, made in enumerate(self.outputs)
                  if any(origin(made).op is one for one in chain)]
        if (slot in self.passed.values() or handed != [slot]
                or others != [op.name for op in reversed(chain)]):
            raise Refusal(f"its body reads the list that it hands on in slot {slot}")
        return len(others) < len(readers)

    def idle(self, wanted: Sequence[int]) -> tuple[int, ...]:
        """Return the slots that are handed on, and those from which no wanted result follows.

        However often the body runs.

        Args:
          wanted: numbers of results.
        """
        needed, left = set(wanted), list(wanted)
        while left:
            seen: set[str] = set()
            pending = [self.outputs[left.pop()]]
            while pending:
                tensor = pending.pop()
                slot = self.slots.get(tensor.name)
                if slot is not None and slot not in needed:
                    needed.add(slot)
                    left.append(slot)
                if tensor.op.name not in seen:
                    seen.add(tensor.op.name)
                    pending += tensor.op.inputs
        return tuple(n for n in range(len(self.outputs))
                     if n not in needed or self.passed.get(n) == n)

    def check_sums(self) -> None:
        """Raise `Refusal` for a sum as in rule 4.

        Raises:
          Refusal: it has a sum as in rule 4 of `tfckpt.capture.loops.segments`.
        """
        for op in self.graph.get_operations():
            if record(op.type).adds and len(op.inputs) > 2 and sum(
                    n is not None for n in self.arguments(op)) > 1:
                raise Refusal(f"its body adds several things that it is handed ({op.name}), in an "
                               "order that depends on names")
