"""What the labels of an Einsum say: how much it computes, and what its kernel copies.

The kernel multiplies matrices. An operand has to have its dimensions in one of two orders for that,
and is copied with its dimensions rearranged where it has neither; so is the product, where the
result is wanted in another order (TensorFlow's `kernels/linalg/einsum_op_impl.h`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

Shape = tuple[int, ...]
ANY = "..."
"""Stands for the dimensions that are not named."""
_BROADCAST, _BATCH, _FREE, _CONTRACTED, _REDUCED = _ORDER = tuple(range(5))
_SWAPPED = (_BROADCAST, _BATCH, _CONTRACTED, _FREE, _REDUCED)


def computed(inputs: Sequence[Shape], output: Shape, attrs: Mapping[str, object]) -> float:
    """Return two operations for each point of the space that the labels span.

    Args:
      inputs: shapes of the operands.
      output: shape of the result.
      attrs: of the op.
    """
    sizes: dict[str, int] = {}
    for shape, labels in zip(inputs, _equation(attrs, [len(s) for s in inputs])[0], strict=False):
        for label, size in zip(labels, shape, strict=False):
            sizes[label] = max(size, sizes.get(label, 1))
    return 2.0 * math.prod(sizes.values())


def copied(attrs: Mapping[str, object], ranks: Sequence[int]) -> tuple[tuple[int, ...], bool]:
    """Return which operands the kernel copies in another order, and whether the product too.

    A single operand is rearranged into the result.

    Args:
      attrs: of the op.
      ranks: of the operands.
    """
    operands, result = _equation(attrs, ranks)
    number = {label: n for n, label in enumerate(dict.fromkeys("".join((*operands, result))))}

    def kind(label: str) -> int:
        if label.isdigit():
            return _BROADCAST
        if all(label in labels for labels in operands) and len(operands) > 1:
            return _BATCH if label in result else _CONTRACTED
        return _FREE if label in result else _REDUCED

    def in_order(labels: str, order: Sequence[int]) -> bool:
        keys = [(order.index(kind(label)), number[label]) for label in labels]
        return keys == sorted(keys)

    moved = tuple(n for n, labels in enumerate(operands)
                  if not in_order(labels, _SWAPPED) and not in_order(labels, _ORDER))
    made = sorted(label for label in number if kind(label) == _BROADCAST)
    made += sorted((label for label in operands[0] if kind(label) == _BATCH),
                   key=number.__getitem__)
    made += [label for labels in operands for label in sorted(set(labels), key=number.__getitem__)
             if kind(label) == _FREE]
    return moved, len(operands) > 1 and "".join(made) != result


def _equation(attrs: Mapping[str, object], ranks: Sequence[int]) -> tuple[list[str], str]:
    """Return the labels of operands and result, the dimensions that "..." stands for as digits."""
    equation = attrs.get("equation", b"")
    text = equation.decode() if isinstance(equation, bytes) else str(equation)
    named, _, result = text.replace(" ", "").partition("->")
    operands = named.split(",")
    open_ranks = [rank - len(labels.replace(ANY, "")) if ANY in labels else 0
                  for labels, rank in zip(operands, ranks, strict=False)]
    most = max(open_ranks, default=0)
    digits = "".join(str(n) for n in range(most))
    return [labels.replace(ANY, digits[most - rank:])
            for labels, rank in zip(operands, open_ranks, strict=False)], result.replace(
                ANY, digits)
