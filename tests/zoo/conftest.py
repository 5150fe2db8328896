"""Every test here trains; see `tests.support.process` for the shared settings."""

from __future__ import annotations

from tests.support import process
from tests.zoo import alone

alone.prepare()
_seeded = process.seeded
