"""All entries, group by group."""

from __future__ import annotations

from tests.zoo import (
    architectures,
    compilation,
    control,
    distribution,
    optimizers,
    precision,
    randomness,
    shapes,
    state,
    tapes,
)

ENTRIES = [*state.GROUP, *randomness.GROUP, *precision.GROUP, *optimizers.GROUP, *tapes.GROUP,
           *control.GROUP, *shapes.GROUP, *compilation.GROUP, *distribution.GROUP,
           *architectures.GROUP]
