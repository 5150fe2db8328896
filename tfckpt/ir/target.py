"""`Target`: what a step is planned and rewritten for, as one value that is passed along.

Every fact about a device or a compiler that a stage may ask for is here; no other module asks
whether there is a GPU, or whether XLA compiles a step.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping

CPU, GPU = "CPU", "GPU"
EXECUTOR, XLA = "executor", "xla"
CUDNN, EIGEN, EIGEN_ALONE = "cudnn", "eigen", "eigen alone"

READS, ORDER, FUSED = "reads", "order", "fused"
"""How XLA is made to follow a plan. `READS`: every read in the backward of what the forward kept
passes a guard. `ORDER`: so it does, and the backward keeps the plan's order. `FUSED`: only reads of
ops that XLA fuses pass a guard."""
SAFETY = 0.95
"""Of a budget, what a peak may take that is predicted and not asked for."""
CPU_SMALLEST = 256 * 1024
"""Bytes: the CPU allocator passes smaller requests on to malloc and does not count them."""
CUBLAS_WORKSPACE = 32 << 20
"""Bytes that XLA hands to cuBLAS on GPUs from Hopper on; 4 MiB on older ones."""
_COUNTED = {CPU: CPU_SMALLEST, GPU: 0}


@dataclasses.dataclass(frozen=True)
class Rates:
    """How fast a device is.

    Attributes:
      flops_per_second: floating-point operations.
      bytes_per_second: read and written.
      overhead_seconds: what any op takes.
      known: seconds by op name, of ops whose times were measured or estimated elsewhere.
    """

    flops_per_second: float = 1.0e11
    bytes_per_second: float = 1.0e10
    overhead_seconds: float = 2.0e-6
    known: Mapping[str, float] = dataclasses.field(default_factory=dict, repr=False)


SMALL_CPU = Rates()


@dataclasses.dataclass(frozen=True)
class Fusion:
    """XLA's treatment of element-wise ops and matrix products.

    Attributes:
      repeats: whether an element-wise op is computed again in each of its readers, though there
        are several: XLA for CPUs does that for few, and keeps the others.
      workspace_bytes: what a matrix product takes besides, where a library computes it.
      in_memory: ops whose results XLA is known to write to memory, by name, and their elements.
    """

    repeats: bool
    workspace_bytes: int = 0
    in_memory: Mapping[str, int] = dataclasses.field(default_factory=dict, repr=False)


@dataclasses.dataclass(frozen=True)
class Target:
    """A device, and what runs the step on it.

    Attributes:
      rates: speed of the device.
      device: `CPU` or `GPU`.
      runner: `EXECUTOR` (TensorFlow's own) or `XLA`.
      allocator: whether peaks are what the device's allocator counts, or requested bytes.
      optimised: whether Grappler has seen the graph already and will not change it again.
      guard: under XLA, what delays copies (`tfckpt.rewrite.xla.guards.XLA_GUARDS`), or "control"
        for control edges as elsewhere; only "data" works everywhere.
      model: what XLA's compiler for GPUs calls a described device; "" where it knows none.
      otherwise: under XLA, whether it is made to follow the plan in the second of two ways
        (`hold`), which takes less memory for some steps and more for others.
      asked: whether what a plan needs is found out before it is applied, so that a prediction
        needs no margin.
      in_memory: ops whose results XLA writes to memory in the plain step, where it was asked, by
        name, and their elements.
      threads: of the executor, that run ops at once.
      onednn: whether oneDNN computes on a CPU what it can.
    """

    rates: Rates = SMALL_CPU
    device: str = CPU
    runner: str = EXECUTOR
    allocator: bool = True
    optimised: bool = False
    guard: str = "data"
    model: str = ""
    otherwise: bool = False
    asked: bool = False
    in_memory: Mapping[str, int] = dataclasses.field(default_factory=dict, repr=False)
    threads: int = 1
    onednn: bool = True

    def compiled(self, by_xla: bool = True) -> Target:
        """Return the same device with XLA as the runner, or without.

        Args:
          by_xla: whether XLA is the runner; it is the executor otherwise.
        """
        return dataclasses.replace(self, runner=XLA if by_xla else EXECUTOR)

    def told(self, in_memory: Iterable[tuple[str, int]]) -> Target:
        """Return the same where what runs the step was asked, and what XLA writes to memory.

        Args:
          in_memory: ops whose results XLA writes to memory in the plain step, by name, and their
            elements; empty where XLA was not asked.
        """
        return dataclasses.replace(self, asked=True, in_memory=dict(in_memory))

    def with_threads(self, count: int) -> Target:
        """Return the same with so many threads of the executor; a GPU's ops are started by one.

        Args:
          count: threads that run ops at once; not looked at on a GPU.
        """
        return self if self.device == GPU else dataclasses.replace(self, threads=count)

    @property
    def orders_by_control(self) -> bool:
        """Return whether control edges order a step: XLA ignores them, and moves ops by itself."""
        return self.runner == EXECUTOR

    @property
    def delays_by_control(self) -> bool:
        """Return whether the rewriter delays copies by control edges rather than by data."""
        return self.orders_by_control or self.guard == "control"

    @property
    def fusion(self) -> Fusion | None:
        """Return what is computed as one where XLA compiles the step; None on the executor."""
        if self.runner == EXECUTOR:
            return None
        if self.device != GPU:
            # On a CPU the plain step's loops say little of the rewritten one's, which guards end.
            return Fusion(False)
        return Fusion(True, CUBLAS_WORKSPACE, self.in_memory)

    @property
    def kernels_by(self) -> str:
        """Return whose kernels compute convolutions and products: `CUDNN` or one of Eigen's.

        They may take memory besides, on TensorFlow's executor; under XLA that is part of what XLA
        says it takes: "" there. On a CPU oneDNN computes most, and takes nothing; Eigen has what
        oneDNN does not know (`EIGEN`), or all where it is switched off (`EIGEN_ALONE`).
        """
        if self.runner != EXECUTOR:
            return ""
        if self.device == GPU:
            return CUDNN
        return EIGEN if self.onednn else EIGEN_ALONE

    @property
    def asks_in_one_piece(self) -> bool:
        """Return whether a step's bytes are one request, of memory that the allocator has."""
        return self.device == GPU and self.runner == XLA

    @property
    def asks_for_a_region(self) -> bool:
        """Return whether they are one request, for which the allocator takes more memory."""
        return self.device == CPU and self.runner == XLA

    @property
    def starts_in_turn(self) -> bool:
        """Return whether one thread starts ops as they become ready, as a GPU's executor does."""
        return self.device == GPU

    @property
    def takes_all_memory(self) -> bool:
        """Return whether the allocator has the device's memory in one piece from the start.

        TensorFlow takes a GPU's. Where it is told to let that grow, trials of convolutions' kernels
        have taken a large piece of it before a step is measured.
        """
        return self.device == GPU

    @property
    def several_heaps(self) -> bool:
        """Return whether a peak depends on what the process allocated before: on the heap."""
        return (self.orders_by_control and self.smallest_counted is not None
                and not self.takes_all_memory)

    @property
    def shares_list_entries(self) -> bool:
        """Return whether a list refers to its entries without copying, as the executor's do."""
        return self.runner == EXECUTOR

    @property
    def repeats_loops(self) -> bool:
        """Return whether a loop may be recomputed: XLA has no guard for lists and variables."""
        return self.runner == EXECUTOR

    @property
    def reorders_operands(self) -> bool:
        """Return whether Grappler will still choose an order for what sums and products read."""
        return self.runner == EXECUTOR and not self.optimised

    @property
    def spans_devices(self) -> bool:
        """Return whether a step may run on several devices: XLA compiles for one."""
        return self.runner == EXECUTOR

    @property
    def clusters_ops(self) -> bool:
        """Return whether TensorFlow may put ops of the graph into clusters for XLA."""
        return self.runner == EXECUTOR

    @property
    def safety(self) -> float:
        """Return what a predicted peak may take of a budget: predictions are within percents."""
        return 1.0 if self.asked else SAFETY

    @property
    def transposes_weights_early(self) -> bool:
        """Return whether XLA keeps another layout of weights from the start, as on a CPU."""
        return self.device == CPU

    @property
    def keeps_barriers(self) -> bool:
        """Return whether XLA keeps its barriers until all is scheduled: on a CPU it does not."""
        return self.device == GPU

    @property
    def hold(self) -> str:
        """Return how XLA is made to follow the plan."""
        ways = (ORDER, READS) if self.keeps_barriers else (READS, FUSED)
        return ways[self.otherwise]

    @property
    def may_hold_otherwise(self) -> bool:
        """Return whether there is another way to make the runtime follow the plan."""
        return self.runner == XLA and not self.otherwise

    @property
    def smallest_counted(self) -> int | None:
        """Return the bytes of the smallest request that is counted; None without an allocator."""
        return _COUNTED[self.device] if self.allocator else None


HERE = Target()
"""The default target: the executor on a small CPU."""
