"""One self-contained page about a step: it opens from disk and asks the network for nothing."""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tfckpt.common import atomic
from tfckpt.report import pictures
from tfckpt.request.budget import format_bytes

if TYPE_CHECKING:
    from tfckpt.report.report import Report
    from tfckpt.report.values import Fate
    from tfckpt.simulate.timeline import Ran

_CARDS = ("planned for", "plain peak", "planned peak", "budget", "measured peak", "resident",
          "planned overhead", "recomputed ops", "applied", "identical")
"""What the page says of what the report says, beside what XLA or Grappler told."""
_STYLE = """
:root { color-scheme: light dark; --ink: #222; --faint: #ccc; --paper: #fff; --card: #f4f5f7; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e6e6; --faint: #444; --paper: #16181c; --card: #22252b; } }
body { margin: 0 auto; padding: 1rem; max-width: 1200px; color: var(--ink);
  background: var(--paper); font: 16px/1.45 system-ui, sans-serif; }
h1 { font-size: 1.4rem; overflow-wrap: anywhere; } h2 { font-size: 1.1rem; margin-top: 2rem; }
.cards { display: grid; gap: .6rem; grid-template-columns: repeat(auto-fit, minmax(12rem, 1fr)); }
.card { background: var(--card); border-radius: 6px; padding: .5rem .8rem; }
.card b { display: block; font-size: 1.1rem; overflow-wrap: anywhere; }
.scroll { overflow-x: auto; }
.scroll img, .scroll svg { display: block; width: 100%; min-width: 640px; height: auto; }
.small { max-width: 760px; }
.small img { min-width: 0; }
table { border-collapse: collapse; width: 100%; }
th, td { text-align: left; padding: .25rem .6rem; border-bottom: 1px solid var(--faint); }
td:first-child { overflow-wrap: anywhere; }
@media (max-width: 600px) { table { font-size: .8rem; } th, td { padding: .2rem .3rem; } }
td.number, th.number { text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums; }
th button { all: unset; cursor: pointer; font-weight: 600; }
th button:focus-visible { outline: 2px solid currentColor; }
th[aria-sort=ascending] button::after { content: " \\2191"; }
th[aria-sort=descending] button::after { content: " \\2193"; }
svg text { fill: var(--ink); font-size: 15px; }
@media (max-width: 600px) { svg text { font-size: 20px; } }
"""
_SCRIPT = """
for (const table of document.querySelectorAll("table.sortable")) {
  const heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, column) => head.firstElementChild.addEventListener("click", () => {
    const down = head.getAttribute("aria-sort") !== "descending";
    heads.forEach(other => other.removeAttribute("aria-sort"));
    head.setAttribute("aria-sort", down ? "descending" : "ascending");
    const value = row => row.cells[column].dataset.value ?? row.cells[column].textContent;
    const body = table.tBodies[0];
    [...body.rows].sort((a, b) => {
      const [x, y] = [value(a), value(b)];
      const order = head.className === "number" ? x - y : x.localeCompare(y);
      return down ? -order : order;
    }).forEach(row => body.append(row));
  }));
}
"""
_ROWS = {"forward": 20, "again": 80, "backward": 140, "update": 190, "other": 190}
_MARGIN, _WIDTH, _HEIGHT = 120, 1200, 205
_MOST_EDGES = 3000


def write(report: Report, path: str) -> None:
    """Write the page.

    Args:
      report: of the step.
      path: of the HTML file; one that is there is replaced.

    Raises:
      TfckptError: matplotlib is not installed.
      OSError: the file cannot be written.
    """
    atomic.write(path, render(report).encode())


def render(report: Report) -> str:
    """Return the page as text.

    Args:
      report: of the step.

    Raises:
      TfckptError: matplotlib is not installed.
    """
    name = html.escape(report.name)
    parts = [
        "<!doctype html>", '<html lang="en">', '<meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>tfckpt: {name}</title>", f"<style>{_STYLE}</style>",
        f"<h1>Memory of {name}</h1>", _cards(report),
        "<h2>Live memory over the step</h2>",
        _picture("Live memory over the step, before and after",
                 *(pictures.step_figure({"": report}, c)
                   for c in (pictures.LIGHT, pictures.DARK))),
        "<h2>Peak against time</h2>",
        _picture("Peak against extra time of the plans that no other beats",
                 *(pictures.front_figure(report.front, c)
                   for c in (pictures.LIGHT, pictures.DARK)), kind="scroll small"),
        "<h2>The step, coloured by segment</h2>",
        "<p>Operations in the order in which they run. A colour is one recomputation segment: what "
        "it runs again, and the backward up to the next. Lines lead from forward results to where "
        "they are read later.</p>", _graph(report.steps_after),
        "<h2>Forward tensors that the backward reads, by layer</h2>",
        "<p>A layer of which some tensors are kept and others recomputed has a row for each.</p>",
        _table(report.fates),
        f"<script>{_SCRIPT}</script>", "</html>"]
    return "\n".join(parts)


def _cards(report: Report) -> str:
    """Return the rows of the report that a reader looks for first, as cards."""
    return '<div class="cards">' + "".join(
        f'<div class="card">{html.escape(label)}<b>{html.escape(value)}</b></div>'
        for label, value in report.rows if label in _CARDS or report.compiled is not None
        and label == report.compiled.label) + "</div>"


def _picture(title: str, light: Any, dark: Any, *, kind: str = "scroll") -> str:
    """Return a picture that follows the reader's colour scheme."""
    return (f'<div class="{kind}"><picture><source media="(prefers-color-scheme: dark)" '
            f'srcset="{_data(dark)}"><img alt="{html.escape(title)}" src="{_data(light)}">'
            "</picture></div>")


def _data(figure: Any) -> str:
    from matplotlib import rc_context

    buffer = io.BytesIO()
    with rc_context({"svg.hashsalt": "tfckpt"}):  # the same page each time
        figure.savefig(buffer, format="svg", facecolor=figure.get_facecolor(),
                       metadata={"Date": None})
    return f"data:image/svg+xml;base64,{base64.b64encode(buffer.getvalue()).decode()}"


def _table(fates: Sequence[Fate]) -> str:
    """Tensors and bytes by layer and fate, largest first; headings sort."""
    groups: dict[tuple[str, str], list[int]] = {}
    for fate in fates:
        groups.setdefault((fate.layer, fate.fate), []).append(fate.bytes)
    rows = sorted(groups.items(), key=lambda entry: (-sum(entry[1]), entry[0]))
    heads = [("layer", ""), ("fate", ""), ("tensors", "number"), ("bytes", "number")]
    lines = ['<table class="sortable"><thead><tr>',
             *(f'<th class="{kind}"><button>{head}</button></th>' for head, kind in heads),
             "</tr></thead><tbody>"]
    lines += [f"<tr><td>{html.escape(layer)}</td><td>{fate}</td>"
              f'<td class="number" data-value="{len(sizes)}">{len(sizes)}</td>'
              f'<td class="number" data-value="{sum(sizes)}">{format_bytes(sum(sizes))}</td></tr>'
              for (layer, fate), sizes in rows]
    return "\n".join([*lines, "</tbody></table>"])


def _graph(steps: Sequence[Ran]) -> str:
    """Return the executed steps as dots, a row for each region, coloured by segment."""
    if not steps:
        return "<p>The order of the step's operations is not known.</p>"
    gap = (_WIDTH - _MARGIN - 10) / len(steps)
    x = [_MARGIN + gap * (i + 0.5) for i in range(len(steps))]
    y = [_ROWS["again" if step.copy else step.region] for step in steps]
    edges = [(source, i) for i, step in enumerate(steps) for source in step.reads
             if steps[source].region == "forward" and y[i] != y[source]]
    shown = edges[::-(-len(edges) // _MOST_EDGES) or 1]
    lines = [f'<div class="scroll"><svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" '
             'aria-label="Operations of the step by region and segment">']
    lines += [f'<text x="4" y="{_ROWS[row] + 5}">{label}</text>' for row, label in (
        ("forward", "forward"), ("again", "recomputed"), ("backward", "backward"),
        ("update", "update"))]
    for source, reader in shown:
        middle = (y[source] + y[reader]) / 2
        lines.append(
            f'<path d="M{x[source]:.1f} {y[source]}C{x[source]:.1f} {middle} {x[reader]:.1f} '
            f'{middle} {x[reader]:.1f} {y[reader]}" fill="none" stroke="{_colour(steps[reader])}" '
            'stroke-opacity=".35"/>')
    radius = max(2.2, min(5.0, 0.45 * gap))
    lines += [f'<circle cx="{x[i]:.1f}" cy="{y[i]}" r="{radius:.1f}" fill="{_colour(step)}">'
              f"<title>{html.escape(step.name)}{f' (again, {step.copy})' if step.copy else ''}"
              "</title></circle>" for i, step in enumerate(steps)]
    return "\n".join([*lines, "</svg></div>"])


def _colour(step: Ran) -> str:
    """Return a colour for each segment, neighbours far apart; readable on light and dark."""
    if not step.segment:
        return "hsl(215 15% 55%)"
    return f"hsl({(step.segment * 137) % 360} 65% 50%)"
