"""Draws how many bytes are live over a training step, before and after tfckpt."""

from __future__ import annotations

from typing import Any

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot  # noqa: E402  (the backend has to be chosen first)

MB = 1_000_000
BEFORE_COLOUR = "#8a8a8a"
AFTER_COLOUR = "#0b6fb8"


def draw(reports: dict[str, Any], path: str) -> None:
    """Writes a picture with one panel per model.

    reports: title of the panel -> report with `timeline_before` and `timeline_after`.
    """
    figure, panels = pyplot.subplots(
        1, len(reports), figsize=(6.4 * len(reports), 4.8), squeeze=False, layout="constrained"
    )
    figure.suptitle("Memory asked for over one training step, as simulated", fontsize=14)
    for panel, (title, report) in zip(panels[0], reports.items(), strict=True):
        _draw_line(panel, report.timeline_before, "plain", BEFORE_COLOUR)
        _draw_line(panel, report.timeline_after, "tfckpt", AFTER_COLOUR)
        panel.set_title(title)
        panel.set_xlabel("operations run since the step began")
        panel.set_ylabel("live memory (MB)")
        panel.set_xlim(left=0)
        panel.set_ylim(0, 1.25 * report.timeline_before.peak_bytes / MB)
        panel.grid(alpha=0.25)
        panel.legend(loc="upper center", ncols=2, frameon=False)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def _draw_line(panel: Any, timeline: Any, name: str, colour: str) -> None:
    live = [size / MB for size in timeline.live_bytes]
    if not live:
        return
    highest = max(range(len(live)), key=live.__getitem__)
    panel.fill_between(range(len(live)), live, step="post", alpha=0.18, color=colour, linewidth=0)
    panel.step(
        range(len(live)),
        live,
        where="post",
        color=colour,
        linewidth=1.3,
        label=f"{name}: peak {live[highest]:.0f} MB",
    )
    panel.plot(highest, live[highest], "o", color=colour, markersize=6)
    panel.annotate(
        f"{live[highest]:.0f} MB",
        (highest, live[highest]),
        xytext=(0, 7),
        textcoords="offset points",
        ha="center",
        color=colour,
    )
