"""Pictures and the page: they agree with the report, and the page needs no other file."""

from __future__ import annotations

import html.parser
import os
import pathlib
import re
import shutil
import subprocess
import sys
import warnings

import numpy as np
import pytest
from matplotlib.cbook import STEP_LOOKUP_MAP

from benchmarks.paper_tables.joint_graphs import from_edges, with_backward
from tests.support import liveness
from tests.support.graphs import residual_network
from tfckpt.driving.parts import Part, Proposal
from tfckpt.errors import TfckptError
from tfckpt.ir.edits import Edits
from tfckpt.ir.graph import Graph, Op
from tfckpt.ir.target import Target
from tfckpt.plan.forward_ad import Decision
from tfckpt.plan.planner import plan_step
from tfckpt.report import html_page, pictures
from tfckpt.report.of_step import report_of
from tfckpt.report.values import Front, FrontPoint
from tfckpt.request.budget import Budget
from tfckpt.simulate.timeline import ran

MB = 1_000_000


@pytest.fixture(scope="module")
def planned():
    sizes, times, edges = residual_network(6)
    cost = with_backward(from_edges([size * MB // 100 for size in sizes], times, edges))
    return cost, plan_step(cost)


@pytest.fixture(scope="module")
def report(planned):
    cost, plan = planned
    ops = tuple(Op(f"op{n}", "Tanh", (), (), (), v.region, v.recomputable)
                for n, v in enumerate(cost.vertices))
    graph = Graph("g", ops, (), ())
    part = Part("", None, Budget(), Target(), graph, cost, plan.plain)
    proposal = Proposal(part, Decision(graph, cost, plan))
    return report_of("a <step> & more", graph, (proposal,), Edits(), (), 0.0)


def test_the_steps_of_a_timeline_are_those_that_were_simulated(planned, report):
    """Derived from the report alone: every read comes from an earlier step, all steps are there."""
    cost, plan = planned
    assert len(report.steps_after) == len(report.timeline_after.live_bytes)
    assert sorted((s.name, s.copy) for s in report.steps_after) == sorted(
        (cost.vertices[v].name, copy) for v, copy in plan.plan.schedule)
    for i, step in enumerate(report.steps_after):
        assert all(source < i for source in step.reads)
        assert step.region == "backward" or not step.copy
    copies = [s for s in report.steps_after if s.copy]
    assert len(copies) == report.recomputed_ops > 0
    again = {s.name for s in copies}
    assert again == {s.name for s in report.steps_after
                     if s.region == "forward" and s.segment}


@pytest.mark.parametrize("compiled", [False, True])
def test_plans_know_the_order_of_their_timelines(planned, compiled):
    cost, _ = planned
    found = plan_step(cost, target=Target().compiled(compiled), solver="approx_dp")
    for plan, timeline in ((found.plan, found.timeline), (found.plain.plan, found.plain.timeline)):
        assert tuple(liveness.live_bytes(cost, plan.schedule, plan.order)) == timeline.live_bytes
        assert [s.name for s in ran(cost, plan)] == [
            cost.vertices[plan.schedule[p][0]].name for p in plan.order]



def test_fates_cover_what_the_plain_backward_reads(planned, report):
    cost, _ = planned
    wanted = {cost.vertices[s.producer].name: s.bytes for i, s in enumerate(cost.storages)
              if cost.vertices[s.producer].region == "forward"
              and any(cost.vertices[r].region == "backward" for r in cost.readers[i])}
    assert {f.op: f.bytes for f in report.fates} == wanted
    assert {f.fate for f in report.fates} == {"kept", "recomputed"}
    assert sum(f.bytes for f in report.fates if f.fate == "kept") <= report.kept_bytes


def test_the_curve_is_the_timeline_and_the_peak_is_labelled(report):
    figure = pictures.step_figure({"": report})
    before, after = figure.axes
    for axes, timeline, live in ((before, report.timeline_before, report.at_peak_before),
                                 (after, report.timeline_after, report.at_peak_after)):
        curve = max(axes.lines, key=lambda line: len(line.get_ydata()))
        assert [round(y * MB) for y in curve.get_ydata()] == list(timeline.live_bytes)
        said = " ".join(text.get_text() for text in axes.texts)
        assert live[0].op in said and "live at the peak" in said
        assert "forward" in said and "backward" in said
    assert before.get_ylim() == after.get_ylim()  # one scale, so that heights can be compared


def test_intervals_cover_the_step_once():
    regions = ["other"] * 3 + ["forward"] * 400 + ["update"] + ["forward"] * 99 + ["backward"] * 500
    found = pictures.intervals(regions)
    assert [entry[0] for entry in found] == ["other", "forward", "backward"]
    assert [first for _, first, _ in found] == [0] + [last for _, _, last in found[:-1]]
    assert found[-1][2] == len(regions)
    assert pictures.intervals([]) == []


def test_every_solver_of_the_front_and_the_choice_are_drawn():
    points = [FrontPoint(9 * MB, 0.0, "store_all"), FrontPoint(5 * MB, 0.1, "chen"),
              FrontPoint(4 * MB, 0.2, "chen"), FrontPoint(3 * MB, 0.3, "approx_dp")]
    front = Front.of(points, points[2], "step", 9 * MB)
    assert list(front) == [(p.live_peak_bytes, p.overhead) for p in points]
    axes, = pictures.front_figure(front).axes
    labels = [text.get_text() for text in axes.get_legend().get_texts()]
    assert labels == ["store_all", "chen", "approx_dp", "chosen"]
    drawn = {tuple(map(float, xy)) for found in axes.collections for xy in found.get_offsets()}
    assert drawn == {(p.live_peak_bytes / MB, 100 * p.overhead) for p in points}


def test_a_front_without_plans_says_so():
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # matplotlib warns of a legend without entries
        axes, = pictures.front_figure(Front.of([], None, "step", 9 * MB)).axes
    assert axes.get_legend() is None
    assert [text.get_text() for text in axes.texts] == ["no plan was looked for"]


def test_between_two_plans_the_line_shows_what_a_budget_there_gets():
    points = [FrontPoint(9 * MB, 0.0, "a"), FrontPoint(5 * MB, 0.1, "b"),
              FrontPoint(3 * MB, 0.3, "b")]
    axes, = pictures.front_figure(Front.of(points, None, "step", 9 * MB)).axes
    line, = axes.lines
    corners = STEP_LOOKUP_MAP[line.get_drawstyle()](*line.get_data())
    for budget in (3.5, 4.9, 5.1, 8.0):
        at = np.interp(budget, corners[0][::-1], corners[1][::-1])
        assert at == 100 * min(p.overhead for p in points if p.live_peak_bytes <= budget * MB)


def test_every_solver_is_shown_where_others_beat_it_too(planned, report):
    _, plan = planned
    front = report.front
    lines = str(front).splitlines()
    assert len(lines) == len(front) and all("% time" in line for line in lines)
    solvers = {p.solver.partition(",")[0] for p in (*front.points, *front.others)}
    assert {"store_all", "chen", "acg", "approx_dp"} <= solvers
    for other in front.others:
        assert any(p.live_peak_bytes <= other.live_peak_bytes
                   and p.overhead <= other.overhead + 1e-12 for p in front.points)
        assert not any(p.live_peak_bytes < other.live_peak_bytes and p.overhead < other.overhead
                       for p in front.others if p.solver == other.solver)
    axes, = pictures.front_figure(front).axes
    labels = [text.get_text() for text in axes.get_legend().get_texts()]
    drawn = {p.solver for p in (*front.points, *front.others)}
    assert sorted(labels) == sorted([*drawn, "chosen"])
    hollow = sum(len(found.get_offsets()) for found in axes.collections
                 if not len(found.get_facecolors()))
    assert hollow == len(front.others) + (front.chosen is not None)


def test_files_are_what_their_names_say(report, tmp_path):
    report.plot(str(tmp_path / "step.png"))
    report.front.plot(str(tmp_path / "front.svg"))
    assert (tmp_path / "step.png").read_bytes().startswith(b"\x89PNG")
    assert b"<svg" in (tmp_path / "front.svg").read_bytes()
    with pytest.raises(TfckptError, match="step.xyz.*png"):
        report.plot(str(tmp_path / "step.xyz"))


def test_without_matplotlib_the_error_names_the_extra(report, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    for draw in (report.plot, report.front.plot, report.html):
        with pytest.raises(TfckptError, match=r"pip install 'tfckpt\[plots\]'"):
            draw(str(tmp_path / "out.png"))
    assert not list(tmp_path.iterdir())


class _Page(html.parser.HTMLParser):
    """Collects what a page loads and the cells of its table."""

    def __init__(self):
        super().__init__()
        self.asked, self.cells, self.circles, self.text = [], [], 0, []

    def handle_starttag(self, tag, attrs):
        found = dict(attrs)
        self.asked += [found[key] for key in ("src", "href", "srcset") if key in found]
        self.circles += tag == "circle"
        if tag == "td":
            self.cells.append(found.get("data-value"))

    def handle_data(self, data):
        self.text.append(data)


def test_the_page_stands_alone_and_lists_every_tensor(report, tmp_path):
    path = tmp_path / "report.html"
    report.html(str(path))
    text = path.read_text(encoding="utf-8")
    seen = _Page()
    seen.feed(text)
    assert seen.asked and all(address.startswith("data:image/svg+xml") for address in seen.asked)
    outside = re.sub(r"data:image/svg\+xml;base64,[A-Za-z0-9+/=]+", "", text)
    assert "http" not in outside and "@import" not in outside and "url(" not in outside
    assert sum(int(value) for value in seen.cells[3::4]) == sum(f.bytes for f in report.fates)
    assert sum(int(value) for value in seen.cells[2::4]) == len(report.fates)
    assert seen.circles == len(report.steps_after)
    assert "a <step> & more" in "".join(seen.text)  # escaped in the file
    assert html_page.render(report) == text  # nothing that differs from run to run


CHROMIUM = os.environ.get("CHROMIUM") or next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
_PROBE = """<script>
addEventListener("load", () => {
  const bytes = () => [...document.querySelectorAll("tbody tr")].map(
    row => Number(row.cells[3].dataset.value));
  const buttons = document.querySelectorAll("th button");
  buttons[3].click(); const down = bytes();
  buttons[3].click(); const up = bytes();
  buttons[0].click(); buttons[0].click();
  const names = [...document.querySelectorAll("tbody tr")].map(row => row.cells[0].textContent);
  const root = document.documentElement;
  document.title = JSON.stringify({
    down, up, names, width: innerWidth, wide: root.scrollWidth,
    dark: matchMedia("(prefers-color-scheme: dark)").matches,
    paper: getComputedStyle(document.body).backgroundColor,
    pictures: [...document.images].map(image => image.naturalWidth > 0),
    drawn: [...document.images].map(image => image.currentSrc === image.src)});
});
</script>"""


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium (apt install chromium, or set CHROMIUM)")
@pytest.mark.parametrize("width", [400, 1600])
@pytest.mark.parametrize("dark", [False, True])
def test_in_a_browser(report, tmp_path, width, dark):
    """Sorting works, pictures load and follow the colour scheme, nothing sticks out sideways."""
    import html as escapes
    import json

    path = pathlib.Path(tmp_path, "page.html")
    # a window may be no narrower than some 500 pixels: the page is put into a frame of the width
    inner = html_page.render(report).replace("</html>", f"{_PROBE}</html>")
    inner = inner.replace("document.title =", "parent.document.title =")
    path.write_text(f'<!doctype html><title></title><iframe width="{width}" height="900" '
                    f'style="border:0" srcdoc="{escapes.escape(inner)}"></iframe>',
                    encoding="utf-8")
    out = subprocess.run(
        [CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", "--dump-dom",
         f"--user-data-dir={tmp_path / 'profile'}", "--window-size=1700,1000",
         f"--blink-settings=preferredColorScheme={0 if dark else 1}",
         "--virtual-time-budget=20000", path.as_uri()],
        capture_output=True, text=True, timeout=300, check=False).stdout
    found = json.loads(escapes.unescape(re.search(r"<title>(.*?)</title>", out, re.S)[1]))
    assert found["width"] == width and found["wide"] <= width
    assert found["down"] == sorted(found["up"], reverse=True) and found["up"] == found["down"][::-1]
    assert len(found["down"]) > 3 and found["names"] == sorted(found["names"], key=str.lower)
    assert found["pictures"] == [True, True]
    assert found["dark"] == dark and found["drawn"] == [not dark] * 2
    assert (found["paper"] == "rgb(255, 255, 255)") == (not dark)
