"""`tfckpt --version`: read from what is installed, so that TensorFlow need not be loaded."""

from __future__ import annotations

import platform
from importlib import metadata

import tfckpt


def version() -> str:
    """Return the versions of tfckpt and of what decides what it does, in a line."""
    return (f"tfckpt {tfckpt.__version__} (TensorFlow {_installed('tensorflow')}, "
            f"Keras {_installed('keras')}, Python {platform.python_version()})")


def _installed(package: str) -> str:
    """Return the version of a package, which a distribution of another name may contain."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        names = metadata.packages_distributions().get(package)
        return metadata.version(names[0]) if names else "not installed"
