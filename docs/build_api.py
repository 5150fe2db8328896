"""Builds the pages of the API from the docstrings, with pdoc: `make docs`.

    python docs/build_api.py [FOLDER]        (default: build/docs)

Every public module of the package gets a page. A warning of pdoc (a name that does not resolve, a
link that leads nowhere) ends the build.
"""

from __future__ import annotations

import pathlib
import pkgutil
import sys
import warnings

import pdoc

import tfckpt
from tfckpt.cli.quiet_import import load_tensorflow

ROOT = pathlib.Path(__file__).parents[1]


def modules() -> list[str]:
    """Return what pdoc is to start from: it finds by itself what lies inside a package.

    Of the package itself it takes only what `__all__` names, so the other parts are named here;
    `__main__` is a program.
    """
    parts = [part.name for part in pkgutil.iter_modules(tfckpt.__path__)]
    return ["tfckpt", *(f"tfckpt.{part}" for part in parts
                        if part not in tfckpt.__all__ and part != "__main__")]


def main() -> None:
    """Writes the pages."""
    folder = pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "build" / "docs"
    load_tensorflow()
    for name in tfckpt.__all__:  # lazy until somebody asks; pdoc looks without asking
        setattr(tfckpt, name, getattr(tfckpt, name))
    warnings.filterwarnings("error", module="pdoc")
    pdoc.render.configure(docformat="google", footer_text=f"tfckpt {tfckpt.__version__}")
    pdoc.pdoc(*modules(), output_directory=folder)
    print(f"{folder / 'index.html'}: {len(list(folder.rglob('*.html')))} pages")


if __name__ == "__main__":
    main()
