"""Trains steps of other people's packages plain, decorated and by the native pass.

    python -m tests.third_party [NAME ...]     (make third-party installs the packages first)

A row for each: planned peak in MB of the plain step, of the decorated and of that by the native
pass, the ratio of both to plain, whether two steps agree with plain in every bit, what the
certificate says, and seconds to plan. Each has a process of its own; a package that is not
installed is left out, and said. The exit status is 1 where numbers differ that no report names, or
a step cannot be trained.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from typing import Any

TIMEOUT = 600.0
ENVIRONMENT = {"TF_USE_LEGACY_KERAS": "1", "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "",
               "TFCKPT_CACHE": "off", "TFCKPT_CERTIFICATES": "on"}
"""Keras 2 where `tf.keras` is asked for: some of the packages know no other."""


def measured(name: str) -> dict[str, Any]:
    """Train a step three ways in this process, and return its row."""
    import tfckpt
    from tests.third_party import steps
    from tests.zoo import alone
    from tests.zoo import entry as zoo

    alone.prepare()
    entry = next(e for e in steps.ENTRIES if e.name == name)
    try:
        with zoo.conditions(entry):
            plain = zoo.train(entry, rewrite=False)
            again = zoo.train(entry, rewrite=False)
            ours = zoo.train(entry, rewrite=True)
            tfckpt.verify.wait_for_certificates()  # which are of the options that are set now
            native, by_pass = natively(entry)
    except ModuleNotFoundError as error:
        return {"missing": str(error)}
    report = max(ours.reports, key=lambda r: r.baseline_peak_bytes, default=None)
    if report is None:
        return {"failed": "no report"}
    passed = max(by_pass, key=lambda r: r.baseline_peak_bytes, default=None)
    return {"plain": report.baseline_peak_bytes, "planned": report.planned_peak_bytes,
            "native": [passed.baseline_peak_bytes, passed.planned_peak_bytes] if passed else None,
            "repeats": not zoo.differences(again, plain, False),
            "alike": not zoo.differences(ours, plain, False),
            "native alike": not zoo.differences(native, plain, False),
            "identical": report.identical, "seconds": report.plan_seconds,
            "applied": report.applied, "why": report.reason or report.certificate}


def natively(entry: Any) -> tuple[Any, list]:
    """Train a step with the native pass; return what came of it, and the reports."""
    import grappler_ext
    from tests.support import process
    from tests.zoo import entry as zoo

    process.without_pass()
    with grappler_ext.enabled(budget="min"), zoo.conditions(entry):  # it sets options anew
        found = zoo.train(entry, rewrite=False)
        reports = list(grappler_ext.reports().values())
    process.without_pass()
    return found, reports


def row_of(name: str) -> dict[str, Any]:
    """Return the row that a process of its own measures."""
    done = subprocess.run([sys.executable, "-m", "tests.third_party", "--one", name],
                          capture_output=True, text=True, timeout=TIMEOUT, check=False,
                          env={**os.environ, **ENVIRONMENT})
    if done.returncode:
        return {"failed": (done.stderr.strip().splitlines() or ["no word"])[-1][:200]}
    return json.loads(done.stdout.strip().splitlines()[-1])


def text_of(package: str, name: str, row: dict[str, Any]) -> str:
    """Return a row of the table."""
    if "missing" in row or "failed" in row:
        return f"| {package} | {name} | {row.get('missing') or row['failed']} |"
    plain, planned = row["plain"], row["planned"]
    by_pass = row["native"]
    cells = [package, name, f"{plain / 1e6:.1f}", f"{planned / 1e6:.1f}",
             f"{planned / max(plain, 1):.2f}",
             "-" if by_pass is None else f"{by_pass[1] / max(by_pass[0], 1):.2f}",
             "yes" if row["alike"] else "plain does not repeat itself" if not row["repeats"]
             else "no", "yes" if row["native alike"] else "no",
             {True: "yes", False: "no", None: "not known"}[row["identical"]],
             f"{row['seconds']:.1f}", "" if row["applied"] else row["why"]]
    return f"| {' | '.join(cells)} |"


def main(arguments: list[str]) -> int:
    """Print the table; return the exit status."""
    if arguments[:1] == ["--one"]:
        print(json.dumps(measured(arguments[1])))
        return 0
    os.environ.update(ENVIRONMENT)
    from tests.third_party import steps

    print("| package | step | plain MB | tfckpt MB | ratio | native ratio | same bits | native "
          "same bits | certified | s to plan | |\n" + "| --- " * 11 + "|")
    ratios, wrong = [], 0
    for entry in steps.ENTRIES:
        if arguments and not {entry.name, entry.group} & set(arguments):
            continue
        row = row_of(entry.name)
        print(text_of(entry.group, entry.name, row), flush=True)
        wrong += "failed" in row or row.get("repeats", False) and not (
            row["alike"] or row["identical"] is False)
        if row.get("plain"):
            ratios.append(row["planned"] / row["plain"])
    if ratios:
        print(f"\nmedian ratio of {len(ratios)} steps: {statistics.median(ratios):.2f}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
