"""Edits in the making, and what a plan says about the graph that they change."""

from __future__ import annotations

from collections.abc import Iterable

from tfckpt.cost.merging import only_reader
from tfckpt.cost.storage import RESIDENT, roots
from tfckpt.ir.costgraph import CostGraph
from tfckpt.ir.edits import FACTOR, AddControl, Clone, Create, Edits, Rewire
from tfckpt.ir.graph import Graph, Op, Tensor, TensorId
from tfckpt.ir.schedule import Plan, Resolved, Step, resolve
from tfckpt.ir.target import HERE, Target
from tfckpt.ops import Access, Source, record
from tfckpt.rewrite.names import copy_name, marks_of_copies

LARGE = 1 << 16
"""Bytes from which a tensor that a compiler keeps alive matters."""
FLOATS = ("float32", "float64", "float16", "bfloat16")
_REFERENCES = (Source.REFERENCE, Source.TEMPORARY)
_HANDS_ON = (Access.ASSIGN_REFERENCE, Access.CHANGE_REFERENCE)


class EditBuilder:
    """The state that the parts of the rewriter share.

    Attributes:
      device, label: of the part, where the step has several devices.
      root: per op and slot, the tensor whose storage it is, or `RESIDENT`.
      readers: per op, the ops that read it.
      marks: attributes that every copy gets.
      storage: index in `cost.storages` by root.
      index: position in `graph.ops` by name.
      added, rewires, controls: the edits so far; `added` grows in an order in which everything
        read exists.
      moved: results of originals with several readers, one of which moved to a copy, in order;
        of a loop each list that did.
      replaced: results of originals in whose place the edits make others.
    """

    def __init__(self, graph: Graph, cost: CostGraph, plan: Plan, target: Target = HERE,
                 device: str = "", label: str = "") -> None:
        self.graph, self.cost, self.plan = graph, cost, plan
        self.device, self.label = device, label
        self.resolved: Resolved = resolve(cost, plan.schedule)
        self.root, self.fused = roots(graph, target.fusion), target.fusion is not None
        self.readers = graph.consumers()
        self.marks = marks_of_copies(target.clusters_ops)
        self.storage = {s.tensor: i for i, s in enumerate(cost.storages)}
        self.index = {op.name: i for i, op in enumerate(graph.ops)}
        self.added: list[Create | Clone] = []
        self.rewires: list[Rewire] = []
        self.controls: list[AddControl] = []
        self.moved: dict[TensorId, None] = {}
        self.replaced: dict[TensorId, str] = {}
        self._views: set[tuple[int, int]] = set()

    def edits(self) -> Edits:
        """Return the edits as a value."""
        return Edits(tuple(self.added), tuple(self.rewires), tuple(self.controls))

    # What a step is and reads.

    def op(self, vertex: int) -> Op:
        """Return the op that a vertex stands for.

        Args:
          vertex: index in the cost graph.
        """
        return self.graph.ops[self.cost.vertices[vertex].ops[0]]

    def name_of(self, step: Step) -> str:
        """Return the name of the op that a step runs.

        Args:
          step: of the schedule: a vertex, and the number of its copy.
        """
        name = self.op(step[0]).name
        return name if not step[1] else copy_name(name, step[1])

    def tensor(self, tensor: TensorId) -> Tensor:
        """Return dtype, shape and bytes of a tensor.

        Args:
          tensor: (op index, output slot) in `graph`.
        """
        return self.graph.ops[tensor[0]].outputs[tensor[1]]

    def tensor_name(self, tensor: TensorId) -> str:
        """Return a tensor of the graph as edits name it.

        Args:
          tensor: (op index, output slot) in `graph`.

        Returns:
          `op:slot`: that of the original, or of what the edits make in its place.
        """
        if tensor in self.replaced:
            return self.replaced[tensor]
        return f"{self.graph.ops[tensor[0]].name}:{tensor[1]}"

    def is_resident(self, tensor: TensorId) -> bool:
        """Return whether a tensor shares the memory of a constant, a variable or a fed input.

        Args:
          tensor: (op index, output slot) in `graph`.
        """
        return self.root[tensor[0]][tensor[1]] == RESIDENT

    def storage_of(self, tensor: TensorId) -> int | None:
        """Return the storage of the cost graph in which a tensor lies, if there is one.

        Args:
          tensor: (op index, output slot) in `graph`.

        Returns:
          Index in `cost.storages`; None for tensors that are resident or not counted.
        """
        return self.storage.get(self.root[tensor[0]][tensor[1]])

    def lists_of(self, index: int) -> list[int]:
        """Return which results of a loop or branches are lists or optionals that are read.

        Args:
          index: of the op in `graph`.

        Returns:
          Output slots, in the order in which they are first read.
        """
        return [slot for slot in self.computed(index)
                if self.tensor((index, slot)).dtype == "variant"]

    def computed(self, index: int) -> list[int]:
        """Return which results of a loop or branches are computed because they are read.

        Optionals are left out in which nothing is that takes memory: no lowered branch reads them,
        or they hold a variable.

        Args:
          index: of the op in `graph`.

        Returns:
          Output slots, in the order in which they are first read.
        """
        op = self.graph.ops[index]
        chooses = record(op.type).chooses
        read = dict.fromkeys(slot for r in self.readers[index]
                             for source, slot in self.graph.ops[r].inputs if source == index)
        return [slot for slot in read if not (
            chooses and op.outputs[slot].dtype == "variant" and slot not in op.shares
            and not op.outputs[slot].bytes)]

    def made_by(self, tensor: TensorId) -> TensorId:
        """Return the tensor whose memory this is: the one before ops that only hand it on.

        Args:
          tensor: (op index, output slot) in `graph`.
        """
        while (known := record((op := self.graph.ops[tensor[0]]).type)).aliases or (
                not self.fused  # rows of a tensor, a broadcast within a shape undone
                and self.root[tensor[0]][tensor[1]][0] not in (tensor[0], RESIDENT[0])):
            slot = tensor[1] if known.aliases or op.loop else known.slices or 0
            tensor = op.inputs[op.loop.entries.get(slot, slot) if op.loop else slot]
        return tensor

    def read_by_several(self, index: int) -> bool:
        """Return whether an original has several readers, so that nothing merges it into one.

        Pass-throughs do not count, since TensorFlow removes them.

        Args:
          index: of the op in `graph`.
        """
        return bool(self.readers[index]) and only_reader(
            self.graph, index, self.readers) is None

    def instance(self, position: int, tensor: TensorId) -> int | None:
        """Return the instance of a storage that the step at a position reads for `tensor`.

        Args:
          position: of the step in the schedule.
          tensor: (op index, output slot) in `graph`.

        Returns:
          Index as in `resolved`; None where the step reads no storage with the tensor in it.
        """
        s = self.storage_of(tensor)
        if s is None:
            return None
        reads = self.cost.vertices[self.plan.schedule[position][0]].reads
        return self.resolved.reads[position][reads.index(s)] if s in reads else None

    def read(self, position: int, tensor: TensorId) -> tuple[str, int]:
        """Return what a step reads for `tensor`, and the number of the copy it comes from.

        Args:
          position: of the step in the schedule.
          tensor: (op index, output slot) in `graph`.

        Returns:
          The tensor as `op:slot`, and the copy's number: 0 for the original.
        """
        instance = self.instance(position, tensor)
        copy = 0 if instance is None else self.resolved.copy[instance]
        return self.view(tensor, copy), copy

    def view(self, tensor: TensorId, copy: int) -> str:
        """Return `tensor` as seen on a copy of its storage; pass-through ops are cloned with it.

        Args:
          tensor: (op index, output slot) in `graph`.
          copy: number of the copy; 0 for the original.

        Returns:
          The tensor as `op:slot`; clones that it needs are added to the edits.
        """
        op = self.graph.ops[tensor[0]]
        if not copy:
            return self.tensor_name(tensor)
        if self.root[tensor[0]][tensor[1]][0] == tensor[0]:
            return f"{copy_name(op.name, copy)}:{tensor[1]}"
        known = record(op.type)
        skipped = known.passes_on and FACTOR not in op.name and not self._names_in_bodies(tensor[0])
        if skipped or known.source is Source.DEFAULT or op.loop:  # which hands on what it was given
            return self.view(op.inputs[tensor[1]], copy)
        name, key = copy_name(op.name, copy), (tensor[0], copy)
        if key not in self._views:
            root = self.root[tensor[0]][tensor[1]]
            inputs = [self.view(t, copy) if self.root[t[0]][t[1]] == root else self.tensor_name(t)
                      for t in op.inputs]
            self.added.append(Clone(name, op.name, tuple(inputs), attrs=self.marks))
            self._views.add(key)
        return f"{name}:{tensor[1]}"

    def _names_in_bodies(self, op: int) -> bool:
        """Return whether ops of lowered loops and branches are named by an op: by what these read.

        TensorFlow adds the terms of sums of three and more in the order of names.
        """
        return any(record(self.graph.ops[r].type).has_bodies
                   for r in self.readers[op])

    # Inputs at which an op can be delayed.

    def fuses(self, tensor: TensorId) -> bool:
        """Return whether TensorFlow may merge what makes a tensor into its reader.

        Args:
          tensor: (op index, output slot) in `graph`.
        """
        s = self.storage_of(tensor)
        return s is not None and self.cost.vertices[self.cost.storages[s].producer].fusible

    def guardable(self, op: Op, inputs: Iterable[int]) -> list[int]:
        """Return those of an op's inputs that a guard can pass on, largest first.

        A reference is none: what passes it on hands on a value, which nothing can write to.

        Args:
          op: one of `graph`.
          inputs: positions among its inputs.

        Returns:
          Positions among its inputs; an unknown size counts as 0 bytes.
        """
        made = {i: record(self.graph.ops[op.inputs[i][0]].type) for i in inputs}
        usable = [i for i, known in made.items()
                  if self.tensor(op.inputs[i]).dtype not in ("resource", "variant", "string")
                  and known.source not in _REFERENCES and known.access not in _HANDS_ON
                  and not known.is_constant]
        return sorted(usable, key=lambda i: (-(self.tensor(op.inputs[i]).bytes or 0), i))
