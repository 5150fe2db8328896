"""Random training steps without Keras models: `draw_spec(seed)`, `build(spec)`."""

from __future__ import annotations

from tests.support.random_steps.assembly import RandomStep, Spec, build, draw_spec

__all__ = ["RandomStep", "Spec", "build", "draw_spec"]
