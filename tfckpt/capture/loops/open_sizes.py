"""Sizes that a trace leaves open in a loop's lists: XLA has to be told the shape of their entries.

Where it is not told, XLA infers that from the body, which it reads twice, and what a segment runs
again may be read once. `fit` leaves the size of a batch open always. So lists get shapes that are
made from the size of a state of the loop, which XLA knows when it compiles a call. Which sizes
those are, shapes for two batches tell: what is as large as the state's in both is that size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import tensorflow as tf

from tfckpt.capture.loops.lists import entries_shape
from tfckpt.capture.variables import origin
from tfckpt.ir.graph import OpenList, OpenSizes
from tfckpt.ops import record

Known = Callable[[tf.Operation], tf.Operation]
"""Gives an op of a graph with as much known of its shapes as can be."""


class UntoldError(Exception):
    """Why XLA cannot be told the shape of a list's entries."""


def open_sizes(forward: tf.Operation, gradient: tf.Operation, states: Sequence[int],
               known: Sequence[Known]) -> OpenSizes | None:
    """Return what is open of the lists that two loops are given, and of the first's states.

    Args:
      forward: the loop.
      gradient: that of its gradient.
      states: slots that an iteration hands on to the next.
      known: for the sizes that are planned for, and for others.

    Returns:
      None where every size is fixed.

    Raises:
      UntoldError: XLA would have to infer the shape of the entries of a list.
    """
    lists = [(*found, loop is gradient) for loop in (forward, gradient)
             for found in _begun(loop, forward)]
    open_states = tuple(slot for slot in states
                        if not forward.inputs[slot].shape.is_fully_defined())
    lists = [found for found in lists if found[2] is None or -1 in found[2]]
    if not open_states and not lists:
        return None
    for size in (None, *_sizes(forward, open_states, known)):
        told = [OpenList(is_gradient, n, made.name, made.get_attr("element_dtype").name, shape)
                for n, made, dims, is_gradient in lists if (shape := _told(
                    (gradient if is_gradient else forward).outputs[n], dims,
                    size and size[2], known)) is not None]
        if len(told) == len(lists) and (size or not open_states):
            return OpenSizes(size and size[:2], open_states, tuple(told))
    raise _untold(lists[0][1] if lists else forward)


def _begun(loop: tf.Operation, forward: tf.Operation
           ) -> Iterator[tuple[int, tf.Operation, tuple[int, ...] | None]]:
    """Yield the lists that begin empty for a loop: slot, the op, and the shape of an entry.

    None where nothing is said of that, not even a rank.
    """
    for slot, tensor in enumerate(loop.inputs):
        if tensor.dtype != tf.variant:
            continue
        made = origin(tensor)
        zeros = False
        while record(made.op.type).fills == 0.0 and made.op.inputs:  # like those of a list
            made, zeros = origin(made.op.inputs[0]), True
        use = record(made.op.type).lists
        if made.op is forward or use.rows:
            continue
        shape = tf.get_static_value(origin(made.op.inputs[0])) if use.begins else None
        if shape is None or zeros and (shape < 0).any():
            raise _untold(made.op)
        yield slot, made.op, tuple(int(d) for d in shape) if shape.ndim else None


def _untold(op: tf.Operation) -> UntoldError:
    return UntoldError(f"XLA would have to infer the shape of the entries of {op.name}; "
                       "inputs of a fixed batch size and length tell it")


def _sizes(forward: tf.Operation, states: Sequence[int], known: Sequence[Known]
           ) -> Iterator[tuple[int, int, tuple[int, ...]]]:
    """Yield the open sizes of states that are not the same in both: slot, dimension, sizes."""
    for slot in states:
        shapes = [k(forward).inputs[slot].shape for k in known]
        if len(shapes) < 2 or not all(shape.is_fully_defined() for shape in shapes):
            continue
        for d, dimension in enumerate(forward.inputs[slot].shape):
            sizes = tuple(shape[d] for shape in shapes)
            if dimension is None and len(set(sizes)) == len(sizes):
                yield slot, d, sizes


def _told(filled: tf.Tensor, dims: Sequence[int] | None, sizes: Sequence[int] | None,
          known: Sequence[Known]) -> tuple[int, ...] | None:
    """Return the shape of a list's entries, -1 for the size that the state has in each call.

    None where another size is open.
    """
    shapes = [entries_shape(filled, one) for one in (known if sizes else [lambda op: op])]
    if not all(shape.is_fully_defined() for shape in shapes) or (
            len({shape.rank for shape in shapes}) > 1):
        return None
    found = []
    for d, here in enumerate(zip(*shapes, strict=True)):
        if sizes and tuple(here) == tuple(sizes) and (dims is None or dims[d] < 0):
            found.append(-1)
        elif len(set(here)) == 1 and (dims is None or dims[d] in (-1, here[0])):
            found.append(here[0])
        else:
            return None
    return tuple(found)
