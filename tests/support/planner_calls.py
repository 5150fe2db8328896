"""Every call that the oracle tests make into allocator, executor, fences and waits.

When one of these interfaces changes, this is the only place in the tests that must follow.
"""

from __future__ import annotations

from collections.abc import Sequence

from tfckpt.ir.schedule import Fence, Wait, resolve
from tfckpt.simulate.allocator import BEFORE, allocated_peaks
from tfckpt.simulate.best_fit import BestFit
from tfckpt.simulate.executor import ORDERS, executor_order
from tfckpt.simulate.fences import fences
from tfckpt.simulate.simulate import Timeline, simulate, simulate_order
from tfckpt.simulate.waits import place_waits

__all__ = ["BEFORE", "POLICIES", "WORKSPACE_IS_ALLOCATED", "Fence", "Wait", "allocator",
           "fences_of", "heap_peaks", "order_of", "timeline_of", "waits_of"]

POLICIES = ORDERS
WORKSPACE_IS_ALLOCATED = True
"""True if `heap_peaks` counts what a vertex uses while it runs."""


def allocator() -> BestFit:
    """Return an empty allocator with `allocate`, `release`, `in_use` and `peak`."""
    return BestFit()


def heap_peaks(graph, schedule, order: Sequence[int] | None, *smallest: int) -> tuple[int, ...]:
    """Peaks of a step in allocators that began differently, ascending."""
    return allocated_peaks(graph, resolve(graph, schedule), order, *smallest)


def timeline_of(graph, schedule, order: Sequence[int] | None = None) -> Timeline:
    """Return the bytes live when the steps run in an order; None: as scheduled."""
    if order is None:
        return simulate(graph, schedule)
    return simulate_order(graph, resolve(graph, schedule), order)


def order_of(graph, schedule, policy: str, *, released=(), waits=(), found=()) -> list[int]:
    """Positions of the steps in the order in which a simulated executor runs them."""
    return executor_order(graph, resolve(graph, schedule), released, waits, found, policy)


def fences_of(graph, schedule, **await_updates: bool) -> tuple[Fence, ...]:
    """Return the fences of a schedule."""
    return fences(graph, resolve(graph, schedule), **await_updates)


def waits_of(graph, schedule, target: int, *, released=(), found=(), **await_updates: bool
             ) -> tuple[tuple[Wait, ...], Timeline, tuple[int, ...]]:
    """Return the single waits that bring executors down to a target, the worst timeline, its order.
    """
    return place_waits(graph, resolve(graph, schedule), released, found, target,
                       **await_updates)
