"""What the decorator returns: the step, rewritten whenever it is traced; and it as a method."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar, overload

import tensorflow as tf

from tfckpt.capture import tf_adapter
from tfckpt.capture.sizes.calls import CallSizes
from tfckpt.carriers.records import Mark, Records
from tfckpt.carriers.trace_hook import called_with, traces_compiled, wrap_body
from tfckpt.report.observed import observing
from tfckpt.report.report import Report
from tfckpt.request.options import Options

_Arguments = ParamSpec("_Arguments")
_Others = ParamSpec("_Others")
_Result = TypeVar("_Result")


class _Reported:
    """What has reports: a step, or one of an object, whose reports are those of the object."""

    __slots__ = ()
    _records: Any

    @property
    def report(self) -> Report | None:
        """Return the latest trace's report; None before the first trace."""
        report: Report | None = self._records.report
        return report

    @property
    def reports(self) -> dict[str, Report]:
        """Reports by traced signature."""
        return dict(self._records.reports)


class CheckpointedStep(_Reported, Generic[_Arguments, _Result]):
    """A training step whose traces are rewritten. Works as a function and as a method."""

    def __init__(self, fn: Any, options: Options) -> None:
        self.options = options
        self._records = Records()
        self._methods: dict[int, tuple[Callable[[], object], Records]] = {}
        self._is_function = tf_adapter.is_tf_function(fn)
        body = fn.python_function if self._is_function else fn
        name = getattr(body, "__name__", "step")
        mark = Mark(options, self._records, name,
                    self._is_function and tf_adapter.compiles_with_xla(fn))

        marked = wrap_body(body, mark, self._records_of_call)
        self._plain = fn
        self._fn = tf_adapter.clone_function(fn, marked) if self._is_function else marked
        # inside a compiled function: what was traced for the executor would be of no use there
        self._compiled = tf_adapter.clone_function(fn, marked) if self._is_function else marked
        functools.update_wrapper(self, body)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        """Look like the `tf.function` below, which a SavedModel then has as one of its object's."""
        return tf_adapter.TfFunction if self._is_function else CheckpointedStep

    @property
    def plain(self) -> Callable[_Arguments, _Result]:
        """Return the step as it was given."""
        return self._plain

    def become(self, other: CheckpointedStep) -> None:
        """Do from now on what another step over the same function does, its traces included.

        Args:
          other: the step whose options, reports and traces this one takes over.
        """
        self.options, self._records = other.options, other._records
        self._fn, self._compiled = other._fn, other._compiled

    def leave(self, report: Report, function: Any) -> None:
        """Be a function that is not rewritten from now on; `report` says why.

        Args:
          report: the latest report from now on.
          function: what calls run, compiled or not.
        """
        self._records = Records()
        self._records.report = report
        self._fn = self._compiled = function

    def records_of(self, instance: object) -> Records:
        """Return where the reports of one object go, whose method the step is.

        Args:
          instance: the object; it is not kept alive where it can be referred to weakly.

        Returns:
          Its own records, made when it is asked for the first time.
        """
        owner, records = self._methods.get(id(instance), (lambda: None, self._records))
        if owner() is not instance:
            records = Records(around=self._records)
            forget = functools.partial(_forget, weakref.ref(self), id(instance))
            self._methods[id(instance)] = (_reference(instance, forget), records)
        return records

    def _records_of_call(self, args: tuple) -> Records:
        owner, records = self._methods.get(id(args[0]) if args else 0, (lambda: None, None))
        return records if records is not None and owner() is args[0] else self._records

    def __call__(self, *args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        """Run the step, rewritten; trace it first where the call needs that.

        Args:
          *args: as the step takes them.
          **kwargs: as the step takes them.

        Returns:
          What the step returns.

        Raises:
          TfckptError: at the first trace, as `checkpoint` says.
        """
        function = self._compiled if traces_compiled() else self._fn
        return self._run(function, self._records_of_call(args), args, kwargs)

    def _run(self, function: Callable, records: Records, args: tuple, kwargs: dict) -> Any:
        if not tf.executing_eagerly():
            return called_with(function, *args, **kwargs)
        with observing(lambda: records.report):
            if not self._records.opened:
                return called_with(function, *args, **kwargs)
            with records.watching(CallSizes.of((args, kwargs)), self.__name__):
                return called_with(function, *args, **kwargs)

    def __set_name__(self, owner: type, name: str) -> None:
        if name == "train_step" and hasattr(owner, "make_train_function"):
            from tfckpt.keras import look_at_batches

            look_at_batches(owner)

    @overload
    def __get__(self, instance: None, owner: type | None = None
                ) -> CheckpointedStep[_Arguments, _Result]: ...

    @overload
    def __get__(self: CheckpointedStep[Concatenate[Any, _Others], _Result], instance: object,
                owner: type | None = None) -> BoundStep[_Others, _Result]: ...

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        if instance is None:
            return self
        if not tf_adapter.is_tf_function(self._fn):
            return BoundStep(self, instance)
        bound = tf_adapter.bind(self._fn, instance, BoundFunction)
        bound.of(self, instance)
        return bound

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_fn":
            raise AttributeError(name)
        found = getattr(self._fn, name)
        if name == "get_concrete_function":  # traces as a call does
            return functools.partial(called_with, found)
        return found


def _forget(step: Callable[[], CheckpointedStep | None], number: int, _: object) -> None:
    """Drop the records of an object that is gone."""
    found = step()
    if found is not None:
        found._methods.pop(number, None)


def _reference(instance: object, gone: Callable[[object], None]) -> Callable[[], object]:
    try:
        return weakref.ref(instance, gone)
    except TypeError:  # it has no place for one: kept for as long as the step is
        return lambda: instance


class BoundStep(_Reported, functools.partial, Generic[_Others, _Result]):
    """A method: the step with its instance filled in, and the instance's reports."""

    @property
    def _records(self) -> Records:
        step: Any = self.func
        return step.records_of(self.args[0])

    def __call__(self, /, *args: _Others.args, **kwargs: _Others.kwargs) -> _Result:
        """Run the step as a method of the instance."""
        _ = self._records  # from now on reports go there
        result: _Result = super().__call__(*args, **kwargs)
        return result


class BoundFunction(tf_adapter.TfFunction, _Reported):  # first: `bind` needs its layout
    """A method over a `tf.function`, and one itself: it is saved with its object."""

    def of(self, step: CheckpointedStep, instance: object) -> None:
        """Note what it was bound from: the step, and the instance.

        Args:
          step: has the instance's reports.
          instance: the first argument; not kept alive.
        """
        self._step, self._instance = step, weakref.ref(instance)
        step.records_of(instance)  # from now on reports go there

    @property
    def _records(self) -> Records:
        return self._step.records_of(self._instance())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the step as a method of the instance."""
        function, instance = super().__call__, self._instance()
        if traces_compiled():
            function = self._step._compiled.__get__(instance, type(instance))
        return self._step._run(function, self._records, args, kwargs)

    def get_concrete_function(self, *args: Any, **kwargs: Any) -> Any:
        """Trace the step as a call does, and return the trace.

        Args:
          *args: arguments, or their `tf.TensorSpec`, without the instance.
          **kwargs: such by name.
        """
        return called_with(super().get_concrete_function, *args, **kwargs)
