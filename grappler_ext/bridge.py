"""Between the native pass and Python: bytes in, bytes out, and no exception in between."""

from __future__ import annotations

import ctypes
import dataclasses
import hashlib
import threading
from typing import Any

import tensorflow as tf
from absl import logging

from grappler_ext import build
from grappler_ext.item import Item, Names, failing
from tfckpt.capture.inlining.inline import readable
from tfckpt.capture.shapes import uncaptured_inputs
from tfckpt.carriers.records import Mark, Records
from tfckpt.carriers.traced import Traced
from tfckpt.driver import run, switched_off
from tfckpt.driving.carrier import Outcome
from tfckpt.errors import InfeasibleBudgetError, TfckptError
from tfckpt.report.report import Report
from tfckpt.request.device_budgets import Budgets
from tfckpt.request.options import Options

UNCHANGED, REWRITTEN, INTERRUPTED = 1, 2, 3
_KEY = "rewriter"
_NOT_LOADED = (tf.errors.OpError, OSError, RuntimeError)
_CALLBACK = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p,
                             ctypes.c_size_t, ctypes.c_void_p)


class Bridge:
    """The loaded library. One for each process: a pass can be registered once only.

    Attributes:
      rewriters: by key; the pass's parameters say which of them a function was configured for.
    """

    def __init__(self, path: str | None = None) -> None:
        path = _load(path) if path else _load_built()
        self.rewriters: dict[str, Rewriter] = {}
        self._latest: Rewriter  # connected last: that of a configuration that names none
        self._library = ctypes.CDLL(path)
        self._library.tfckpt_skips.restype = ctypes.c_long
        self._library.tfckpt_answer.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_size_t]
        self._callback = _CALLBACK(self._called)  # for good: a call may be under way at any time

    def connect(self, rewriter: Rewriter | None) -> None:
        """Have the pass call a rewriter; none takes it out of service.

        Args:
          rewriter: takes the calls from now on that name no other; None for no rewriter.
        """
        if rewriter is not None:
            self.rewriters[rewriter.key] = self._latest = rewriter
        self._library.tfckpt_set_callback(None if rewriter is None else self._callback)

    def _called(self, graph: int, graph_size: int, names: int, names_size: int,
                answer: int) -> int:
        try:
            item = Names.parse(ctypes.string_at(names, names_size).decode())
            rewriter = self.rewriters.get(item.parameters.get(_KEY, ""), self._latest)
            status, reply = rewriter(ctypes.string_at(graph, graph_size), item)
        except Exception:  # nothing may cross the boundary; of graphs, a rewriter says it itself
            logging.exception("tfckpt: the native pass failed; a function is left as it was")
            return UNCHANGED
        if reply:
            self._library.tfckpt_answer(answer, reply, len(reply))
        return status

    def skips(self) -> tuple[int, float]:
        """Return how many graphs without gradients were skipped, and the last one's seconds."""
        seconds = ctypes.c_double()
        return self._library.tfckpt_skips(ctypes.byref(seconds)), seconds.value


def _load(path: str) -> str:
    tf.load_op_library(path)
    return path


def _load_built() -> str:
    """Load the built library, and return its path; one that cannot be loaded is built anew, once.

    Raises:
      BuildError: it cannot be built, or not be loaded then.
    """
    try:
        return _load(str(build.shared_object()))
    except _NOT_LOADED as error:
        logging.warning("tfckpt: the native pass is built anew: %s", error)
    try:
        return _load(str(build.shared_object(force=True)))
    except _NOT_LOADED as error:
        raise build.BuildError("grappler_ext: what was built just now cannot be loaded; this "
                               "TensorFlow and its headers do not belong together: "
                               f"{error}") from error


class Rewriter:
    """Rewrites the items it is called with, and traces for XLA.

    Called by TensorFlow's threads; items are planned one at a time.

    Args:
      minimum: whether a function whose budget cannot be met is planned for the minimum peak.

    Attributes:
      key: the same for the same options.
      reports: by function name.
      failures: why functions were not rewritten, by name.
    """

    def __init__(self, options: Options, strict: bool, minimum: bool = False) -> None:
        self.options, self.strict, self.minimum = options, strict, minimum
        times = hashlib.sha256(repr(sorted(options.op_seconds.items())).encode()).hexdigest()
        self.key = repr((options, strict, minimum, times))
        self.reports: dict[str, Report] = {}
        self.failures: dict[str, str] = {}
        self._lock = threading.Lock()

    @property
    def parameters(self) -> dict[str, str]:
        """For the pass, by which it knows its rewriter.

        TensorFlow optimises a function once for each configuration, of which these are a part.
        """
        return {_KEY: self.key}

    def __call__(self, graph: bytes, item: Names) -> tuple[int, bytes]:
        """Status and the graph to run instead. What goes wrong is said, or fails in that graph."""
        definition = tf.compat.v1.GraphDef()
        try:
            definition.ParseFromString(graph)
            with self._lock:
                return self._rewrite(definition, item)
        except KeyboardInterrupt:
            self._say_once(readable(item.id), "interrupted")
            return INTERRUPTED, b""
        except Exception as error:
            return self._fail(definition, readable(item.id), _said(error))

    def _rewrite(self, definition: tf.compat.v1.GraphDef, names: Names) -> tuple[int, bytes]:
        item = Item(definition, names)
        try:
            outcome = Outcome() if switched_off() else run(item, self.options)
        except InfeasibleBudgetError:
            if not self.minimum:
                raise
            item = Item(definition, names)
            outcome = run(item, dataclasses.replace(self.options, budgets=Budgets()))
        if outcome.report is not None:
            self.reports[outcome.report.name] = outcome.report
        if outcome.unwanted:
            return self._fail(definition, readable(names.id), outcome.unwanted)
        if item.rewritten is None:
            return UNCHANGED, b""
        return REWRITTEN, item.rewritten.SerializeToString()

    def trace(self, func_graph: Any) -> None:
        """Rewrite, in place, what TensorFlow has traced for XLA.

        Args:
          func_graph: a FuncGraph whose trace is complete; changed.

        Raises:
          TfckptError: with `strict`, where the graph cannot be rewritten.
        """
        name = func_graph.name
        if switched_off():
            return
        try:
            report = Traced(func_graph, Mark(self.options, Records(), name),
                            uncaptured_inputs(func_graph)).rewrite().report
        except Exception as error:
            if self.strict:
                raise
            self._say_once(name, _said(error))
        else:
            if report is not None:
                self.reports[name] = report

    def _fail(self, definition: tf.compat.v1.GraphDef, name: str, why: str) -> tuple[int, bytes]:
        message = self._say_once(name, why)
        if not self.strict:
            return UNCHANGED, b""
        return REWRITTEN, failing(definition, message).SerializeToString()

    def _say_once(self, name: str, why: str) -> str:
        message = f"tfckpt: {name} is not rewritten: {why}"
        if name not in self.failures:
            self.failures[name] = why
            logging.warning("%s", message)
        return message


def _said(error: Exception) -> str:
    """Return what an error says; one that is none of ours says too little without its type."""
    return str(error) if isinstance(error, TfckptError) else repr(error)
