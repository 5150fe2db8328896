"""Every test here trains; see `tests.support.process` for the shared settings."""

from __future__ import annotations

from tests.support import process

process.prepare()
_seeded = process.seeded
apart = process.apart
