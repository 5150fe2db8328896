"""The tables of the papers, computed by this code, beside the papers' own figures.

    python -m benchmarks.paper_tables [--table NAME]

Nothing is trained and no TensorFlow is loaded: each table is planned on graphs built by hand.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable

from absl import app, flags


def _from_module(name: str) -> Callable[[], None]:
    """`print_tables` of a module of this package, loaded when it is asked for."""

    def print_tables() -> None:
        full = f"{__package__}.{name}"
        try:
            module = importlib.import_module(full)
        except ModuleNotFoundError as missing:
            if missing.name != full:
                raise
            print(f"{name}: skipped, there is no module {full}")
            return
        module.print_tables()

    return print_tables


TABLES: dict[str, Callable[[], None]] = {
    "reforwarding": _from_module("reforwarding"),  # Feng and Huang 2018 and 2021
    "kusumoto": _from_module("kusumoto"),  # Kusumoto et al. 2019
    "gaps": _from_module("gaps"),  # each solver against the proven optimum
}

FLAGS = flags.FLAGS
flags.DEFINE_enum("table", None, list(TABLES), "Which table to print; all by default.")


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {' '.join(argv[1:])}")
    for number, name in enumerate([FLAGS.table] if FLAGS.table else TABLES):
        if number:
            print()
        TABLES[name]()


if __name__ == "__main__":
    app.run(main)
