"""Writes the table of stages and carriers into `docs/architecture.md`.

    python docs/carrier_table.py

It follows from the driver's stages, the rewrite passes and what each carrier says of itself.
"""

from __future__ import annotations

import pathlib
import sys

from grappler_ext.item import Item
from tfckpt.carriers.files import InFile
from tfckpt.carriers.trace_hook import Traced, TracedApart
from tfckpt.driver import LAST, STAGES
from tfckpt.ir.graph import Graph
from tfckpt.ir.target import Target
from tfckpt.rewrite.passes.manager import Context
from tfckpt.rewrite.realise import PASSES, refusals

PAGE = pathlib.Path(__file__).with_name("architecture.md")
BEGIN, END = "<!-- carriers: python docs/carrier_table.py -->", "<!-- end of carriers -->"
CARRIERS = (Traced, TracedApart, InFile, Item)


class _AtHand:
    """A step that can be asked, as every carrier has one."""

    def attributes(self, op: str) -> str:
        """Return nothing."""
        return op

    def is_stateful(self, op: str) -> bool:
        """Return no."""
        return False

    def optimised(self) -> None:
        """Return nothing."""


def ways(carrier: type) -> tuple[bool, ...]:
    """Return whether Grappler has made the steps of a carrier; both where only some of them."""
    made = carrier.optimised  # type: ignore[attr-defined]
    return (made,) if isinstance(made, bool) else (False, True)


def reasons(carrier: type, optimised: bool) -> dict[str, str]:
    """Return for each stage and pass why a carrier leaves it out; "" where it does not."""
    context = Context(Graph("", (), (), ()), plain=_AtHand(), target=Target(optimised=optimised))
    return {**{stage: carrier.leaves_out.get(stage, "")  # type: ignore[attr-defined]
               for stage in (*STAGES, *LAST)}, **refusals(context)}


def _cell(carrier: type, stage: str) -> str:
    found = dict.fromkeys(reasons(carrier, way).get(stage, "") or "yes" for way in ways(carrier))
    return ", unless ".join(found)


def table() -> str:
    """Return the table as Markdown."""
    names = [*STAGES, *(f"pass: {each.name}" for each in PASSES), *LAST]
    lines = [f"| stage | {' | '.join(carrier.kind for carrier in CARRIERS)} |",
             f"| --- |{' --- |' * len(CARRIERS)}"]
    for name in names:
        cells = [_cell(carrier, name.removeprefix("pass: ")) for carrier in CARRIERS]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def written(text: str) -> str:
    """Return the page with the table between its marks."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{table()}\n\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    sys.exit(0)
