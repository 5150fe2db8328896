"""Every number has one name: report, page, pictures, callback and command line say the same."""

from __future__ import annotations

import html
import json
import pathlib
import re

import keras
import numpy as np
import pytest

import tfckpt
from tests.support import cli, process
from tfckpt.report import pictures
from tfckpt.request.budget import format_bytes

files, tool = cli.files, cli.tool
NAMES = ("plain peak", "planned peak", "measured peak", "resident")
_SAID = re.compile(rf"({'|'.join(NAMES)})(?: of)?\W+([\d.]+) ([kMG]?B)\b")


def said(text: str) -> dict[str, set[str]]:
    """Return what a text says of each name: amounts as people read them."""
    found: dict[str, set[str]] = {}
    for name, amount, unit in _SAID.findall(re.sub(r"\s+", " ", text)):
        found.setdefault(name, set()).add(f"{amount} {unit}")
    return found


def dense() -> keras.Model:
    return keras.Sequential([keras.Input((64,)), *(
        keras.layers.Dense(256, "relu") for _ in range(6)), keras.layers.Dense(8)])


def convolutions() -> keras.Model:
    layers = []
    for _ in range(4):
        layers += [keras.layers.Conv2D(16, 3, padding="same"), keras.layers.BatchNormalization(),
                   keras.layers.ReLU()]
    return keras.Sequential([keras.Input((16, 16, 3)), *layers,
                             keras.layers.GlobalAveragePooling2D(), keras.layers.Dense(8)])


@pytest.mark.parametrize("build, batch, jit_compile", [
    (dense, 1024, False), (convolutions, 256, False), (dense, 1024, True)])
def test_what_is_said_of_a_model(build, batch, jit_compile, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    process.fresh()
    model = tfckpt.keras.checkpoint(build(), budget="min")
    with process.without_determinism():  # Keras compiles nothing with it
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True),
                      jit_compile=jit_compile)
    x = np.random.default_rng(0).standard_normal((4 * batch, *model.input_shape[1:]), np.float32)
    model.fit(x, np.zeros(len(x)), batch_size=batch, verbose=0,
              callbacks=[tfckpt.keras.PeakMemory(compare=True)])
    report = tfckpt.keras.report(model)
    if jit_compile:  # XLA knows better
        assert report.compiled.before.temp_bytes != report.simulated_bytes[0]
    path = tmp_path / "report.html"
    report.html(str(path))
    titles = [axes.get_title(loc="left") for axes in pictures.step_figure({"": report}).axes]
    places = {
        "report": said(str(report)), "explain": said(report.explain()),
        "callback": said(capsys.readouterr().out), "pictures": said("; ".join(titles)),
        "page": said(re.sub(r"<[^>]+>", " ", html.unescape(path.read_text())))}
    assert set(places["report"]) == set(NAMES)
    assert set(places["page"]) == set(NAMES)
    for name, size in (("plain peak", report.baseline_peak_bytes),
                       ("planned peak", report.planned_peak_bytes),
                       ("measured peak", report.measured_peak_bytes),
                       ("resident", report.resident_bytes)):
        assert format_bytes(size) in places["report"][name], name
    for place, found in places.items():
        assert {"plain peak", "planned peak"} <= set(found), place
        for name, amounts in found.items():
            assert amounts == places["report"][name], (place, name)


def test_what_the_command_line_says(tool):
    texts = {}
    for command in (["inspect", "@model"], ["plan", "@model"], ["rewrite", "@model", "ours"]):
        code, texts[command[0]], _ = tool(*command, *cli.BATCH)
        assert code == 0
    whole = said(pathlib.Path("ours.report.txt").read_text())
    for place, text in texts.items():
        for name, amounts in said(text).items():
            assert amounts == whole[name], (place, name)
    assert set(said(texts["plan"])) == {"plain peak", "planned peak"}
    planned, inspected = (json.loads(tool(command, "@model", *cli.BATCH, "--json")[1])["steps"][0]
                          for command in ("plan", "inspect"))
    rewritten = json.loads(tool("inspect", "ours", *cli.BATCH, "--json")[1])["steps"][0]
    assert rewritten["rewritten"] and not inspected["rewritten"]
    # the plan says the most that orders take which its edits leave open
    assert 0.7 < rewritten["baseline_peak_bytes"] / planned["planned_peak_bytes"] <= 1
    live, = re.findall(r"planned peak [^(]+\(live ([^,]+),", texts["plan"])
    chosen, = re.findall(r"^(\S+ \w+) .* \*$", texts["plan"], re.M)
    explained, = re.findall(r"live at the planned peak of [^:]+: (\S+ \w+) in",
                            pathlib.Path("ours.report.txt").read_text())
    assert live == chosen == explained
    for name, key in (("plain peak", "baseline_peak_bytes"),
                      ("planned peak", "planned_peak_bytes"), ("resident", "resident_bytes")):
        assert whole[name] == {format_bytes(planned[key])}
        assert inspected.get(key, planned[key]) == planned[key]
