"""Draws the pictures of docs/memory.md: `make docs`, or `python docs/draw_pictures.py [FOLDER]`.

The model is that of examples/01_stock_keras_fit.py.
"""

from __future__ import annotations

import importlib
import pathlib
import sys

FOLDER = pathlib.Path(__file__).parent
sys.path.insert(0, str(FOLDER.parent))


def main(folder: pathlib.Path = FOLDER / "images") -> None:
    """Write step.png and front.png."""
    import tfckpt
    from examples import data, saving

    example = importlib.import_module("examples.01_stock_keras_fit")
    saving.repeatable()
    model = tfckpt.keras.checkpoint(example.build(8), budget="min")
    example.train(model, *data.digits(512), batch=512)
    report = tfckpt.keras.report(model)
    folder.mkdir(exist_ok=True)
    report.plot(str(folder / "step.png"))
    report.front.plot(str(folder / "front.png"))


if __name__ == "__main__":
    main(*map(pathlib.Path, sys.argv[1:]))
