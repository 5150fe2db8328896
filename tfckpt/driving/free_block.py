"""A free block of memory from which the allocator cuts the one request of a compiled step.

XLA asks for all its temporary memory at once. TensorFlow's allocator for CPUs begins with nothing;
for such a request it gets a region of memory whose size is a power of two, and hands that out whole
where it is less than twice the request and less than 128 MiB more: 128 MiB for 65. Its statistics
then show up to twice what the step asked for, in a process that does nothing else, and no other
request gets the rest. Where a larger block is free, as after training the plain step, the request
is cut from that. So before a step runs for the first time a block is asked for that is large
enough, and released: none of it is written to, so that it is addresses alone, and no memory.

GPUs are left alone. TensorFlow takes their memory in one piece; where it is told to let that grow,
a larger region would be memory.
"""

from __future__ import annotations

import tensorflow as tf

from tfckpt.errors import VerificationError
from tfckpt.ir.target import CPU_SMALLEST, Target
from tfckpt.request.budget import OVER
from tfckpt.simulate.best_fit import splittable
from tfckpt.verify.memory import addresses_are_limited, memory_info

_DEVICE = "CPU:0"


def leave_free_block(target: Target, request: int) -> None:
    """Have the allocator own a free block that it splits for a request; do nothing where it cannot.

    Its statistics are afterwards what they were, the highest count less at most 512 KiB.

    Args:
      target: what runs the step; anything but XLA on a CPU is left alone.
      request: bytes of the largest request of the step.
    """
    block = splittable(request)
    matters = request >= CPU_SMALLEST and block > OVER * request
    if not target.asks_for_a_region or not matters or addresses_are_limited():
        return
    with tf.init_scope(), tf.device(_DEVICE):
        if tf.executing_eagerly():
            _allocate_once(block)


def _allocate_once(size: int) -> None:
    """Allocate so many bytes and release them; then put the allocator's highest count back."""
    try:
        before = memory_info(_DEVICE)
        block = _empty(size)
    except (VerificationError, tf.errors.OpError):  # it keeps no statistics, or has no more
        return
    raised = memory_info(_DEVICE)["peak"] > before["peak"]
    del block
    if raised:
        _count_up_to(before["peak"])


def _count_up_to(peak: int) -> None:
    """Have the highest count begin anew, and bring it to a former one, without passing it.

    A chunk is less than twice the request, so one of half of what is missing never is too much.
    """
    now = memory_info(_DEVICE, reset=True)["current"]
    held = []
    while peak - now >= 2 * CPU_SMALLEST:
        held.append(_empty((peak - now) // 2))
        now = memory_info(_DEVICE)["current"]


def _empty(size: int) -> tf.Tensor:
    """Return a tensor of so many bytes, which are not written to."""
    return tf.raw_ops.Empty(shape=[size], dtype=tf.uint8, init=False)
