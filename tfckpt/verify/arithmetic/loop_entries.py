"""Whether loops of which the gradient's computes entries again compute what the plain loops do.

As in `loop_bodies`, by the ops that will run: those of the forward's
body, those of the gradient's, and the copies of the forward's in it, which are compared with what
they are copies of. A sum of several terms may begin with another one where others need these: so
there is to be no copy of one, and none that reads what is computed again.
"""

from __future__ import annotations

import re
from typing import Any

from tfckpt.ir.edits import Edits, traced
from tfckpt.ops import record
from tfckpt.plan.loops.segments import AGAIN, HANDED, PREFIX, RESULT
from tfckpt.verify.arithmetic.bodies import (
    WHAT_IS_HANDED,
    Body,
    Uses,
    alike,
    body_in,
    integers_in,
    meanings_in,
    named_as_in,
    needed_of,
    operands_of,
    otherwise,
    renamed,
    within,
    without_integers,
)


def differences(plain: Any, edited: Any, edits: Edits) -> tuple[str, ...]:
    """Return the ops of loops, some of whose entries are computed again, that are otherwise.

    Args:
      plain: GraphDef of what Grappler makes of the plain step, loops lowered.
      edited: that of the rewritten step.
      edits: what was done to it; its loops are named as in `edited`.

    Returns:
      Their names.
    """
    loops = [entry.old for entry in edits.replaced if entry.new.endswith(AGAIN)]
    if not loops:
        return ()
    plain, needed = needed_of(plain), needed_of(edited)
    found: list[str] = []
    for forward, gradient in zip(loops[::2], loops[1::2], strict=True):
        once, backward = (rf"{re.escape(traced(loop))}/body/_\d+/" for loop in (forward, gradient))
        first, second = (rf"{re.escape(loop + AGAIN)}/body/_\d+/" for loop in (forward, gradient))
        plain_first, made = body_in(plain, once), body_in(needed, second)
        integers, made_integers = integers_in(plain, once), integers_in(edited, second)
        taken = _taken(plain, backward, edited, second)
        copies = {name: op for name, op in made.items() if name.startswith(PREFIX)}
        own = {name: op for name, op in made.items()
               if name not in copies and name not in taken.values()}
        wanted = {name: renamed(op, taken) for name, op in body_in(plain, backward).items()}
        found += [name for name, op in own.items()
                  if _adds_several(op) and not set(taken.values()).isdisjoint(op[2])]
        found += _copied_otherwise(plain_first, copies, integers, made_integers)
        for loop, expected, there, scope, place, whole, known in (
                (forward, plain_first, body_in(needed, first), once, first, integers,
                 integers_in(edited, first)),
                (gradient, wanted, own, backward, second, integers_in(plain, backward),
                 made_integers)):
            there = named_as_in(expected, meanings_in(plain, scope), there,
                                meanings_in(needed, place))
            found += otherwise(expected, whole, there, known, Uses(edited, place)) if (
                there) else [loop]
    return tuple(dict.fromkeys(found))


def _taken(plain: Any, backward: str, edited: Any, second: str) -> dict[str, str]:
    """Return what was taken from lists, and what stands in its place, by name."""
    pops = {within(node.name, match[0]) for node in plain.node
            if (match := re.match(backward, node.name)) and record(node.op).lists.removes}
    found: dict[str, str] = {}
    for node in edited.node:
        match = re.match(second, node.name)
        if match and not record(node.op).lists.removes:
            name = within(node.name, match[0])
            found |= {f"{name}:1": name} if name in pops else {}
    return found


def _copied_otherwise(first: Body, copies: Body, integers: frozenset[str],
                      copied_integers: frozenset[str]) -> list[str]:
    """Return the copies that compute otherwise than what they are copies of, by name.

    Args:
      first: the forward's body.
      copies: of its ops, by the names that they have.
      integers: see `integers_in`; of the forward's body.
      copied_integers: of the body with the copies.
    """
    def original(operand: str) -> str:
        name, _, place = operand.removeprefix(PREFIX).partition(RESULT)
        if name.startswith(HANDED):
            return WHAT_IS_HANDED
        return f"{name}:{place}" if place else name

    found = []
    for name, op in copies.items():
        wanted = first.get(original(name))
        kind, attributes, operands = without_integers(op, copied_integers)
        made = kind, attributes, operands_of(kind, (
            operand if isinstance(operand, bytes) else original(operand) for operand in operands))
        if wanted is None or _adds_several(op) or not alike(
                without_integers(wanted, integers), made):
            found.append(name)
    return found


def _adds_several(op: tuple) -> bool:
    """Return whether with which term a sum begins depends on who else needs its terms."""
    return record(op[0]).adds and len(op[2]) > 2
