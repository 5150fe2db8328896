"""Pictures of a step's memory (matplotlib, an optional extra)."""

from __future__ import annotations

import importlib
import io
import pathlib
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

from tfckpt.common import atomic
from tfckpt.errors import TfckptError
from tfckpt.ir.graph import BACKWARD, FORWARD, UPDATE
from tfckpt.request.budget import format_bytes

if TYPE_CHECKING:
    from tfckpt.report.report import Report
    from tfckpt.report.values import Curve, Front
    from tfckpt.simulate.timeline import Ran

_MB = 1e6
_SHADES = {FORWARD: "#4c8bf5", BACKWARD: "#f2994a", UPDATE: "#6fbf73"}
_AGAIN, _AGAIN_AT = "#a44fc4", 0.985
"""Colour and height of the line above what is recomputed."""
_MINIMUM_SHARE = 0.004
"""Intervals in one region below this fraction of the step are joined to their neighbours."""
_NAMED = 4
_NAMED_ALONG = 0.07
"""Share of the step from which there is room for a region's name."""
LIGHT = {"ink": "#222222", "faint": "#bbbbbb", "plain": "#707070", "ours": "#0b6fb8",
         "paper": "#ffffff"}
DARK = {"ink": "#e6e6e6", "faint": "#555555", "plain": "#a8a8a8", "ours": "#58b0f0",
        "paper": "#16181c"}


def _matplotlib(module: str) -> Any:
    """Return a module of matplotlib (never pyplot: the caller's backend is left alone)."""
    try:
        return importlib.import_module(f"matplotlib.{module}")
    except ImportError as error:
        raise TfckptError("pictures: drawing needs matplotlib, which is not installed; run "
                          "pip install 'tfckpt[plots]'") from error


def _figure(width: float, height: float, colours: Mapping[str, str]) -> Any:
    return _matplotlib("figure").Figure(figsize=(width, height), layout="constrained",
                                        facecolor=colours["paper"])


def kind_of(path: str) -> str:
    """Return the kind of picture that a path asks for by its ending, such as "png".

    Args:
      path: of the file that is to be drawn; it need not exist.

    Raises:
      TfckptError: matplotlib is not installed, or cannot write that kind.
    """
    kinds = _matplotlib("backend_bases").FigureCanvasBase.get_supported_filetypes()
    kind = pathlib.PurePath(path).suffix.lstrip(".").lower()
    if kind not in kinds:
        raise TfckptError(f"pictures: {path!r} names no kind of picture; end the name in .png, "
                          ".svg or .pdf")
    return kind


def drawn(figure: Any, kind: str) -> bytes:
    """Return a figure as the bytes of a file.

    Args:
      figure: of matplotlib; not changed.
      kind: what matplotlib is to write, such as "png".
    """
    buffer = io.BytesIO()
    figure.savefig(buffer, format=kind, dpi=130, facecolor=figure.get_facecolor())
    return buffer.getvalue()


def save(figure: Any, path: str) -> None:
    """Write a figure; the kind follows from the path's ending.

    Args:
      figure: of matplotlib; not changed.
      path: of the file; one that is there is replaced.

    Raises:
      TfckptError: see `kind_of`.
      OSError: the file cannot be written.
    """
    atomic.write(path, drawn(figure, kind_of(path)))


def step_figure(reports: Mapping[str, Report], colours: Mapping[str, str] = LIGHT) -> Any:
    """Live bytes over the step: a column for each report, before above after.

    Args:
      reports: by the column's title.
      colours: `LIGHT` or `DARK`.
    """
    figure = _figure(8.6 * len(reports), 7.2, colours)
    panels = figure.subplots(2, len(reports), squeeze=False)
    for column, (title, report) in enumerate(reports.items()):
        curves = report.curves
        highest = max(c.live_peak_bytes for c in curves) / _MB
        names = "plain peak", "planned peak" if report.applied else "left as it is, plain peak"
        for row, (name, curve, colour) in enumerate(
                zip(names, curves, ("plain", "ours"), strict=True)):
            axes = panels[row][column]
            _style(axes, colours)
            _shade(axes, curve.steps, colours)
            _curve(axes, curve, colours[colour], colours)
            axes.set_title(f"{title or report.name}: {name} {_peaks(curve)}",
                           loc="left", color=colours["ink"], fontsize=11)
            axes.set_xlim(0, max(len(curve.live_bytes), 1))
            axes.set_ylim(0, 1.36 * highest or 1.0)  # the labels stand above the curves
            axes.set_ylabel("live memory (MB)")
        panels[1][column].set_xlabel(
            "allocations and releases in XLA's schedule of the compiled step" if curves[1].by_xla
            else "operations run since the step began, as simulated")
    return figure


def _peaks(curve: Curve) -> str:
    """Return the peak, and the bytes of live tensors in it where these are told apart."""
    peak, live = format_bytes(curve.peak_bytes), format_bytes(curve.live_peak_bytes)
    return peak if peak == live else f"{peak} (live {live})"


def _style(axes: Any, colours: Mapping[str, str]) -> None:
    axes.set_facecolor(colours["paper"])
    axes.grid(alpha=0.25, color=colours["faint"])
    axes.tick_params(colors=colours["ink"])
    for side in axes.spines.values():
        side.set_color(colours["faint"])
    for label in (axes.xaxis.label, axes.yaxis.label):
        label.set_color(colours["ink"])


def _shade(axes: Any, steps: Sequence[Ran], colours: Mapping[str, str]) -> None:
    """Shade the background of each interval in one region, named where there is room.

    Of a region without room anywhere the widest is named, upright. A line above the curve shows
    where the forward runs again.
    """
    shaded = [(last - first, region, first) for region, first, last in intervals(
        [step.region for step in steps]) if region in _SHADES]
    widest = {region: (width, first) for width, region, first in sorted(shaded)}
    for width, region, first in shaded:
        axes.axvspan(first, first + width, color=_SHADES[region], alpha=0.13, linewidth=0)
        wide = width > _NAMED_ALONG * len(steps)
        if wide or (width, first) == widest[region]:
            axes.text(first + width / 2, 0.015, region, ha="center", va="bottom", fontsize=8,
                      rotation=0 if wide else 90, color=colours["ink"], alpha=0.75,
                      transform=axes.get_xaxis_transform())
    again = [(at, at + 1) for at, step in enumerate(steps) if step.copy]
    if again:
        axes.hlines([_AGAIN_AT] * len(again), *zip(*again, strict=True), color=_AGAIN,
                    linewidth=5, transform=axes.get_xaxis_transform(), label="recomputed")
        axes.text(1.0, 1.01, "recomputed", ha="right", va="bottom", fontsize=8, color=_AGAIN,
                  transform=axes.transAxes)  # the box of tensors would cover it inside


def intervals(regions: Sequence[str]) -> list[tuple[str, int, int]]:
    """Return (region, first, one past the last) of each run of ops in one region.

    A short run becomes part of the one before it.

    Args:
      regions: that of each executed op, in the order of execution.

    Returns:
      Indices of `regions`; empty where that is empty.
    """
    shortest = max(2, int(_MINIMUM_SHARE * len(regions)))
    found: list[tuple[str, int, int]] = []
    start = 0
    for region, entries in groupby(regions):
        stop = start + sum(1 for _ in entries)
        if found and (found[-1][0] == region or stop - start < shortest):
            found[-1] = (found[-1][0], found[-1][1], stop)
        else:
            found.append((region, start, stop))
        start = stop
    return found


def _curve(axes: Any, curve: Curve, colour: str, colours: Mapping[str, str]) -> None:
    live, tensors = [size / _MB for size in curve.live_bytes], curve.at_peak
    if not live:
        return
    axes.fill_between(range(len(live)), live, step="post", alpha=0.25, color=colour, linewidth=0)
    axes.step(range(len(live)), live, where="post", color=colour, linewidth=1.3)
    peak = curve.peak_step
    axes.plot(peak, live[peak], "o", color=colour, markersize=6)
    left = peak > 0.5 * len(live)  # the label stands on the emptier side
    lines = [f"{format_bytes(h.bytes)}  {_short(h.op)}" for h in tensors[:_NAMED]]
    rest = tensors[_NAMED:]
    if rest:
        lines.append(f"{format_bytes(sum(h.bytes for h in rest))}  in {len(rest)} more")
    axes.annotate(
        "\n".join(["live at the peak", *lines]), (peak, live[peak]),
        xytext=(0.02 if left else 0.98, 0.95), textcoords="axes fraction",
        ha="left" if left else "right", va="top", multialignment="left", fontsize=8,
        color=colours["ink"],
        arrowprops={"arrowstyle": "-", "color": colours["faint"], "linewidth": 0.8},
        bbox={"boxstyle": "round", "facecolor": colours["paper"], "edgecolor": colours["faint"],
              "alpha": 0.9})


def _short(name: str, longest: int = 44) -> str:
    return name if len(name) <= longest else f"...{name[3 - longest:]}"


def front_figure(front: Front, colours: Mapping[str, str] = LIGHT) -> Any:
    """Draw peak against extra time.

    Filled is what no other plan beats, hollow the best of each solver.

    Args:
      front: the plans.
      colours: `LIGHT` or `DARK`.

    Returns:
      A figure of matplotlib.

    Raises:
      TfckptError: matplotlib is not installed.
    """
    figure = _figure(7.6, 4.8, colours)
    axes = figure.subplots()
    _style(axes, colours)
    points = front.points
    # between two peaks a budget has room for the smaller one only
    axes.step([p.live_peak_bytes / _MB for p in points], [100 * p.overhead for p in points],
              where="pre", color=colours["faint"], linewidth=1.0, zorder=1)
    solvers = list(dict.fromkeys(p.solver for p in (*points, *front.others)))
    markers = "osD^vP*X"
    for i, solver in enumerate(solvers):
        label = solver
        for found, style in ((points, {"color": f"C{i % 10}"}),
                             (front.others, {"facecolors": "none", "edgecolors": f"C{i % 10}",
                                             "alpha": 0.55})):
            mine = [p for p in found if p.solver == solver]
            if mine:
                axes.scatter([p.live_peak_bytes / _MB for p in mine],
                             [100 * p.overhead for p in mine], s=34,
                             marker=markers[i % len(markers)], label=label,
                             zorder=3 if found is points else 2, **style)
                label = "_nolegend_"
    if front.chosen is not None:
        at = (front.chosen.live_peak_bytes / _MB, 100 * front.chosen.overhead)
        axes.scatter(*at, s=170, facecolors="none", edgecolors=colours["ink"], linewidths=1.6,
                     label="chosen", zorder=4)
    axes.set_xlabel("live peak (MB)")
    axes.set_ylabel("extra time (%)")
    hollow = "; hollow: beaten" if front.others else ""
    axes.set_title(f"{front.name}: plans that no other beats in both{hollow}", loc="left",
                   color=colours["ink"], fontsize=11)
    axes.set_xlim(left=0)
    if not axes.collections:
        axes.text(0.5, 0.5, "no plan was looked for", transform=axes.transAxes, ha="center",
                  color=colours["ink"])
        return figure
    legend = axes.legend(frameon=False, fontsize=9)
    for text in legend.get_texts():
        text.set_color(colours["ink"])
    return figure


def add_measured(figure: Any, points: Sequence[tuple[int, float]],
                 colours: Mapping[str, str] = LIGHT) -> None:
    """Add measured (peak bytes, extra time as a fraction) to the picture of a front.

    Args:
      figure: what `front_figure` returned; changed.
      points: one for each measured plan.
      colours: those that the figure was drawn with.
    """
    axes = figure.axes[0]
    axes.scatter([peak / _MB for peak, _ in points], [100 * time for _, time in points], s=52,
                 marker="+", color=colours["ours"], label="measured", zorder=5)
    axes.set_xlabel("peak (MB): live as planned, or measured")
    legend = axes.legend(frameon=False, fontsize=9)
    for text in legend.get_texts():
        text.set_color(colours["ink"])
