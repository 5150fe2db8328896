"""tfckpt for every `tf.function` of a process, where TensorFlow itself optimises graphs.

    import grappler_ext
    with grappler_ext.enabled(budget=0.5):
        model.fit(...)

A native Grappler pass (see `BUILD_NOTES.md`) sees each function after inlining and after
Grappler's own passes. Functions compiled by XLA, as Keras' default is on a GPU, do not pass through
it; they are rewritten where they are traced.

`grappler_ext.estimate(step, x, y, device="H100-80GB")` says what a step would need on a device that
is not here; it needs no compiler.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from grappler_ext.bridge import Bridge, Rewriter
    from grappler_ext.builtin import builtin_recomputation, recompute_hint
    from grappler_ext.estimates import Estimate, estimate
    from grappler_ext.tuner import Tuner
    from tfckpt.report.report import Report
    from tfckpt.request.devices import PRESETS, Device

__all__ = ["PRESETS", "Device", "Estimate", "builtin_recomputation", "disable", "enable", "enabled",
           "estimate", "failures", "recompute_hint", "reports", "session_config", "skipped"]

PASS = "TfckptOptimizer"

_bridge: Bridge | None = None
_rewriter: Rewriter | None = None  # the latest
_in_force: tuple[Tuner | None, bool] = (None, False)  # and whether it is XLA's as well


def enable(budget: object = "min", *, solver: str = "auto", objective: str = "time",
           batch_size: int | None = None, free_moves: bool = True, fad: str | bool = False,
           strict: bool = False, xla: bool = True, xla_trials: int = 2,
           op_seconds: Mapping[str, float] | None = None, tune: bool = False,
           time_limit: float = 300.0, exact: bool = False,
           effort: float = 1.0, keep: object = (), recompute: object = ()) -> None:
    """Rewrite every training function that TensorFlow instantiates from now on.

    Functions that ran before are optimised, and so rewritten, again. Builds the native pass if
    that has not been done. Calling it again replaces the options; a function is optimised once
    for each choice of options that it runs under, and what was made of it is used again.

    As with all of TensorFlow's options, a thread that has called functions before keeps those it
    began with: call this first, or in that thread too.

    Args:
      budget: as for `tfckpt.checkpoint`: bytes of the whole device, a fraction of the plain peak,
        "min" or "device", or a mapping from devices to these.
      solver: as for `tfckpt.checkpoint`: the method that plans, by name.
      objective: "time" (fastest plan that fits) or "memory" (minimum peak).
      batch_size: what a leading dimension stands for that a function's signature leaves open: the
        pass sees no call. Without it one is assumed, which the report names; a budget in bytes then
        leaves the function as it was.
      free_moves: whether moves that cost no time may be used.
      fad: as for `tfckpt.checkpoint`: False, True or "auto", whether derivatives of element-wise
        activations may be kept.
      strict: whether a failure to rewrite fails the function's call. By default it is logged
        once and the function runs as it was.
      xla: whether functions under `jit_compile=True`, as Keras' steps are on a GPU, are rewritten
        too, as the decorator would: those traced from now on, when a call traces them
        (`get_concrete_function` does not say that it traces for XLA).
      xla_trials: of those, as for `tfckpt.checkpoint`.
      op_seconds: as for `tfckpt.checkpoint`; of the others.
      tune: whether the first calls of each function that trains run with several plans, a few calls
        each, and from then on with the fastest whose measured peak fits. All plans compute the
        same: these calls train as any other. Of functions that XLA does not compile. The highest
        count of the device's allocator is reset meanwhile.
      time_limit: seconds after which the search for a plan ends with the best that it has found.
      exact: as for `tfckpt.checkpoint`, but that it refuses neither loops nor branches nor calls:
        Grappler has seen them.
      effort: how much the search of "auto" may evaluate, as a multiple of the default.
      keep: names of layers or ops of which nothing is ever computed again, one or several.
      recompute: names of layers or ops of which nothing is kept for the backward pass, one or
        several.

    Raises:
      PlanError: malformed options.
      grappler_ext.build.BuildError: the native pass cannot be built.
    """
    from grappler_ext.bridge import Bridge, Rewriter
    from grappler_ext.tuner import Tuner
    from tfckpt.request.options import make_options

    global _bridge
    options = make_options(budget, solver, objective, batch_size, free_moves, fad, xla_trials,
                           op_seconds, exact=exact, effort=effort, keep=keep,
                           recompute=recompute)
    made = Rewriter(options.limited_to(time_limit), strict)
    _bridge = _bridge or Bridge()
    _put_in_force(Tuner(_bridge.rewriters.get(made.key, made), _use, tune), xla)


def disable() -> None:
    """Take the pass out of service; functions run as TensorFlow makes them again. Idempotent."""
    _put_in_force(None, False)


@contextlib.contextmanager
def enabled(budget: object = "min", **options: Any) -> Iterator[None]:
    """Enable the pass inside a `with` statement; afterwards the previous options apply again.

    Args:
      budget: as for `enable`.
      **options: the other options of `enable`, by name.

    Yields:
      None; inside the statement the options apply.

    Raises:
      PlanError: malformed options.
      grappler_ext.build.BuildError: the native pass cannot be built.
    """
    before = _in_force
    enable(budget, **options)
    try:
        yield
    finally:
        _put_in_force(*before)


def _put_in_force(tuner: Tuner | None, xla: bool) -> None:
    if _bridge is None:
        return
    from tfckpt.capture import tf_adapter
    from tfckpt.carriers.trace_hook import on_compiled_graphs

    global _rewriter, _in_force
    _in_force = tuner, xla
    tf_adapter.watch_calls(tuner)
    if tuner is None:
        _bridge.connect(None)
        tf_adapter.set_custom_optimizer(None)
        on_compiled_graphs(None)
    else:
        _rewriter = tuner.rewriter
        _use(_rewriter)
        on_compiled_graphs(_rewriter.trace if xla else None)


def _use(rewriter: Rewriter) -> None:
    """Have the functions that are called from now on pass a rewriter."""
    from tfckpt.capture import tf_adapter

    assert _bridge is not None
    _bridge.connect(rewriter)
    tf_adapter.set_custom_optimizer(PASS, rewriter.parameters)


def session_config(config: Any = None) -> Any:
    """Return the configuration with which a session uses the pass, with the current options.

    Args:
      config: the `tf.compat.v1.ConfigProto` to start from, which is left as it is; None for an
        empty one.

    Returns:
      A new `tf.compat.v1.ConfigProto`.

    Raises:
      PlanError: no `enable` before.
    """
    import tensorflow as tf

    from tfckpt.capture import tf_adapter
    from tfckpt.errors import PlanError

    if _rewriter is None:
        raise PlanError("plan: session_config needs options; call grappler_ext.enable() first")
    found = tf.compat.v1.ConfigProto()
    if config is not None:
        found.CopyFrom(config)
    return tf_adapter.add_custom_optimizer(found, PASS, _rewriter.parameters)


def reports() -> dict[str, Report]:
    """Return the latest report of each function by name, under the current or the last options.

    Functions that TensorFlow restores or makes have its names: "restored_function_body" (called
    from a SavedModel), "multi_step_on_iterator" (Keras' `fit`), "tf_graph" (a session).
    """
    return dict(_rewriter.reports) if _rewriter else {}


def failures() -> dict[str, str]:
    """Return why functions could not be rewritten, by name, under the current or the last options.

    Each was logged once. A function that `reports` has too was rewritten for another call.
    """
    return dict(_rewriter.failures) if _rewriter else {}


def skipped() -> tuple[int, float]:
    """Return how many graphs without gradients were left alone, and the last one's seconds."""
    return _bridge.skips() if _bridge else (0, 0.0)


# Imported when asked for: most of it loads TensorFlow, which takes seconds.
_LAZY = {"PRESETS": "tfckpt.request.devices", "Device": "tfckpt.request.devices",
         **dict.fromkeys(("Estimate", "estimate"), "grappler_ext.estimates"),
         **dict.fromkeys(("builtin_recomputation", "recompute_hint"), "grappler_ext.builtin")}


if not TYPE_CHECKING:  # with it, checkers would let any name pass
    def __getattr__(name: str) -> Any:
        if name not in _LAZY:
            raise AttributeError(f"module 'grappler_ext' has no attribute {name!r}")
        return getattr(importlib.import_module(_LAZY[name]), name)
