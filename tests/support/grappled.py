"""Where two executed graphs part: the plain step's, and that of what tfckpt made of it."""

from __future__ import annotations

import re

_GUARD = re.compile(r"-tfckpt_(?:guard|wait)\d+_(\d+)\w*$")
_COPY = re.compile(r"-tfckpt\d+(?=:|$)")
_OURS = re.compile(r"tfckpt/|-tfckpt_")


def first_difference(plain, rewritten) -> str:
    """The first op that computes something else than in the plain step; "" where none does.

    Copies are held against their originals, and what reads a copy or a guard against what reads
    the original. Equal ops that are merged under another name differ here, and need not in value.

    Args:
      plain, rewritten: executed NodeDefs, as `tfckpt.verify.executed.Executed.nodes`.
    """
    wanted = {node.name: node for node in plain}
    for node in rewritten:
        if _OURS.search(node.name):
            continue
        original = wanted.get(_COPY.sub("", node.name))
        if original is None:
            return f"{node.name}, {node.op}{_reads(node)}: the plain step has no such op"
        if (node.op, _reads(node)) != (original.op, _reads(original)):
            return (f"{node.name}: {node.op}{_reads(node)} instead of "
                    f"{original.op}{_reads(original)}")
    return ""


def _reads(node) -> list[str]:
    """The tensors that a node reads, by the names they have in the plain step."""
    return [_plain_name(name) for name in node.input if not name.startswith("^")]


def _plain_name(name: str) -> str:
    guarded = _GUARD.search(name)
    if guarded:
        slot = guarded[1]
        name = name[:guarded.start()] + (f":{slot}" if slot != "0" else "")
    return _COPY.sub("", name)
