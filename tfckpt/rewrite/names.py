"""Names and marks of new ops, and the pass-through that guards and taps are made of."""

from __future__ import annotations

from tfckpt.edits import COPY, PROTECTED, Create
from tfckpt.ops.names import IDENTITY

SCOPE = "tfckpt"
FENCE = f"{SCOPE}/fence_"


def marks_of_copies(clustered: bool) -> dict[str, object]:
    """Return the attributes of copies; outside of XLA they are kept out of its clusters too."""
    return {COPY: True, "_XlaCompile": False} if clustered else {COPY: True}


def copy_name(name: str, copy: int) -> str:
    """Name of a copy. It sorts where the original's does.

    Grappler puts the inputs of commutative ops in the order of their names, and which constants
    it then folds into which operand follows from that: a copy that sorted elsewhere would be
    multiplied in another order than the original, and round differently. No other character
    that names may contain sorts before the hyphen.
    """
    return f"{name}-{SCOPE}{copy}"


def guard_name(tensor: str, number: int, label: str = "") -> str:
    """Name of a guard, which sorts where the guarded tensor's does; negative for single waits."""
    op, _, slot = tensor.rpartition(":")
    kind = "guard" if number > 0 else "wait"
    return f"{op}-{SCOPE}_{kind}{abs(number)}_{slot}{label}"


def tap_name(op: str, slot: int = 0) -> str:
    """Name of the tap that reads a result of an op."""
    return f"{op}-{SCOPE}_tap{slot or ''}"


def held_name(op: str, number: int) -> str:
    """Name of the pass-through that holds a term of a sum."""
    return f"{op}-{SCOPE}_held{number}"


def term_name(op: str, place: int) -> str:
    """Name of the pass-through of a sum's term; such names sort by place."""
    return f"{op}-{SCOPE}_term{place:04d}"


def base_name(cube: str, first: bool) -> str:
    """Name of the pass-through of x before x^3, before or behind what Grappler calls x^2."""
    scope, slash, name = cube.rpartition("/")
    return f"{scope}{slash}{'0' if first else 'z'}{name}-{SCOPE}_base"


def identity(name: str, tensor: str, controls: tuple[str, ...], dtype: str,
              device: str) -> Create:
    """A pass-through that Grappler may not replace by control edges on its readers."""
    return Create(name, IDENTITY, (tensor,), controls, (dtype,),
                  {"T": f"dtype:{dtype}", PROTECTED: True}, device)
