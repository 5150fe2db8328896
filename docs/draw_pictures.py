"""Draws the pictures of docs/memory.md: `python docs/draw_pictures.py` from the project's folder.

The model is that of examples/01_stock_keras_fit.py.
"""

from __future__ import annotations

import importlib
import pathlib
import sys

FOLDER = pathlib.Path(__file__).parent
sys.path.insert(0, str(FOLDER.parent))


def main() -> None:
    """Writes docs/images/step.png and docs/images/front.png."""
    import tfckpt
    from examples import data, saving

    example = importlib.import_module("examples.01_stock_keras_fit")
    saving.repeatable()
    model = tfckpt.keras.checkpoint(example.build(8), budget="min")
    example.train(model, *data.digits(512), batch=512)
    report = tfckpt.keras.report(model)
    (FOLDER / "images").mkdir(exist_ok=True)
    report.plot(str(FOLDER / "images" / "step.png"))
    report.front.plot(str(FOLDER / "images" / "front.png"))


if __name__ == "__main__":
    main()
