"""Every test here runs TensorFlow; see `tests.support.process` for the shared settings."""

from __future__ import annotations

from tests.support import cli, process

process.prepare()
_seeded = process.seeded
files, tool = cli.files, cli.tool
