"""The batches that Keras trains with, looked at before a step is traced.

Sizes that a trace leaves open (`fit` on data that the batch size does not divide, generators,
padded sequences) are read from the first batch of an epoch. It is taken from Keras' own iterator
and still handed to the step, so that data pipelines run once and random ones give the same data.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from tfckpt.capture import tf_adapter
from tfckpt.capture.sizes.calls import CallSizes
from tfckpt.carriers.records import GROWTH, Records, knowing
from tfckpt.errors import PlanError


def require_tensorflow(model: Any) -> None:
    """Raise `PlanError` for a model that another backend than TensorFlow trains.

    Args:
      model: of any kind; one that is no `keras.Model` of Keras 3 passes.

    Raises:
      PlanError: names the backend, and what to set.
    """
    keras = sys.modules.get("keras")
    if keras is None or not isinstance(model, getattr(keras, "Model", ())):
        return
    backend = keras.backend.backend()
    if backend != "tensorflow":
        raise PlanError(f"plan: tfckpt rewrites TensorFlow graphs, and Keras runs on {backend!r} "
                        "in this process; set KERAS_BACKEND=tensorflow before keras is imported")


def look_at_batches(owner: Any, records: Records | None = None) -> None:
    """Have the training function of a model, or of those of a class, look at its batches.

    Args:
      owner: a Keras model, or a class of such; its `make_train_function` and `fit` are wrapped.
      records: of the model; of a class those of each model's `train_step`.
    """
    is_class = isinstance(owner, type)
    original = (owner if is_class else type(owner)).make_train_function
    if getattr(original, "_tfckpt_looks", False):  # the class does already
        return
    fit = (owner if is_class else type(owner)).fit
    set_on = setattr if is_class else object.__setattr__
    bound = (lambda function: function) if is_class else functools.partial(_bound, owner)
    set_on(owner, "make_train_function", bound(_looking(original, records)))
    set_on(owner, "fit", bound(_telling(fit)))


def _bound(model: Any, method: Callable) -> Callable:
    """Return a method of one object, which it does not keep alive."""
    this = weakref.ref(model)

    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        return method(this(), *args, **kwargs)

    return call


def _looking(original: Callable, records: Records | None) -> Callable:
    @functools.wraps(original)
    def make_train_function(self: Any, *args: Any, **kwargs: Any) -> Any:
        require_tensorflow(self)
        made = original(self, *args, **kwargs)
        function = self.train_function
        if function is not None and not isinstance(function, BatchesSeen):
            self.train_function = BatchesSeen(function, self, records or _records_of(self))
        return made if made is None else self.train_function

    make_train_function._tfckpt_looks = True  # type: ignore[attr-defined]
    return make_train_function


def _records_of(model: Any) -> Records:
    """Those of a decorated `train_step`; a class may put another method in its place."""
    of = getattr(type(model).train_step, "records_of", None)
    return Records() if of is None else of(model)


def _telling(fit: Callable) -> Callable:
    """`fit`, which under a strategy says what a replica's batch is: there no batch is looked at."""
    @functools.wraps(fit)
    def fit_telling(self: Any, *args: Any, **kwargs: Any) -> Any:
        with knowing(CallSizes(batch=_replica_batch(fit, self, args, kwargs))):
            return fit(self, *args, **kwargs)

    return fit_telling


class BatchesSeen:
    """A training function of Keras that knows the sizes of what it is traced with.

    Attributes:
      planned: what open dimensions of a dataset's batches were planned for; None until then.
    """

    def __init__(self, function: Callable, model: Any, records: Records) -> None:
        functools.update_wrapper(self, function)
        self._function, self._model, self._records = function, weakref.ref(model), records
        self._iterator: Callable[[], object] = lambda: None
        self.planned: CallSizes | None = None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_function":
            raise AttributeError(name)
        return getattr(self._function, name)

    def __call__(self, iterator: Any, *args: Any, **kwargs: Any) -> Any:
        """Train on the next batches, knowing their sizes where this traces the step."""
        tune, self._records.tune = self._records.tune, None
        if tune is not None and tf.executing_eagerly():
            batch, iterator = first_batch(iterator, self._steps)
            if batch is not None:
                tune(batch)
                self._trace_again()
        if not tf.executing_eagerly() or not self._is_new(iterator):
            return self._function(iterator, *args, **kwargs)
        instead, sizes = self._looked_at(iterator)
        with knowing(sizes), self._records.watching(sizes, "the model's step"):
            return self._function(instead, *args, **kwargs)

    def _looked_at(self, iterator: Any) -> tuple[Any, CallSizes]:
        """Return what to iterate in place of an iterator, and the sizes of its first batch.

        What a single batch is traced for TensorFlow decides, as it would without us: by shape at
        first, then with an open batch, in which it may round otherwise.
        """
        sizes, instead = look(iterator, self._steps)
        if sizes is None:
            return iterator, CallSizes()
        if isinstance(iterator, tf.data.Iterator):
            if self.planned is not None and sizes.elements > GROWTH * self.planned.elements:
                self._trace_again()
            if self.planned is None or sizes.elements > self.planned.elements:
                self.planned = sizes.without_values()
        return instead, sizes

    def _is_new(self, iterator: Any) -> bool:
        """Return whether an epoch or a single batch begins that is to be looked at.

        That is one whose sizes no specification tells, the first of all, since a specification
        tells no values, and one that is far larger than what was planned for: TensorFlow may have
        a trace for any batch by then, and use that.
        """
        if self._iterator() is iterator:
            return False
        if isinstance(iterator, tf.data.Iterator):
            self._iterator = weakref.ref(iterator)
            spec = iterator.element_spec
            return (self.planned is None or not _is_static(spec)
                    or CallSizes.of(spec).elements > GROWTH * self.planned.elements)
        return isinstance(iterator, Iterator) and not isinstance(
            iterator, tf.distribute.DistributedIterator)

    @property
    def _steps(self) -> int:
        """Return how many batches the training function takes in a call."""
        return getattr(self._model(), "steps_per_execution", 1)

    def _trace_again(self) -> None:
        """Take a new function of Keras, which TensorFlow traces, and tfckpt plans, anew."""
        model: Any = self._model()
        model.train_function = None
        model.make_train_function()
        self._function, model.train_function = model.train_function._function, self


def _is_static(spec: object) -> bool:
    return all(isinstance(part, tf.TensorSpec) and part.shape.is_fully_defined()
               for part in tf.nest.flatten(spec))


def look(iterator: Any, steps: int = 1) -> tuple[CallSizes | None, Any]:
    """Take the first batch from an iterator.

    Args:
      iterator: of tf.data, or of Python.
      steps: how many batches the training function takes in a call.

    Returns:
      The sizes of the batch, and what is to be iterated instead for one call; None, and the
      iterator, where there is no batch.
    """
    batch, instead = first_batch(iterator, steps)
    if batch is None:
        return None, iterator
    return CallSizes.of(tf.nest.map_structure(_without_optional, batch)), instead


def first_batch(iterator: Any, steps: int = 1) -> tuple[Any, Any]:
    """Return the first batch of an iterator, and what is to be iterated instead for one call.

    Args:
      iterator: of tf.data, or of Python.
      steps: how many batches the training function takes in a call.

    Returns:
      None, and the iterator, where there is no batch.
    """
    taken = list(itertools.islice(iterator, 1))
    if not taken:
        return None, iterator
    if not isinstance(iterator, tf.data.Iterator):
        return taken[0], itertools.chain(taken, iterator)
    batches = tf.data.Dataset.from_tensors(taken[0])
    if steps > 1:
        batches = batches.concatenate(_next(iterator, steps - 1))
    return taken[0], iter(tf.data.experimental.from_variant(
        tf.data.experimental.to_variant(batches), iterator.element_spec))


def _next(iterator: tf.data.Iterator, count: int) -> tf.data.Dataset:
    """Return the next batches of an iterator, no more than these, taken when they are asked for."""
    return tf.data.Dataset.from_generator(lambda: itertools.islice(iterator, count),
                                          output_signature=iterator.element_spec)


def _without_optional(leaf: Any) -> Any:
    return None if isinstance(leaf, tf.experimental.Optional) else leaf


def _replica_batch(fit: Callable, model: Any, args: tuple, kwargs: dict[str, Any]) -> int | None:
    """Return what one replica gets of a batch at most; None where that cannot be told."""
    try:
        bound = inspect.signature(fit).bind(model, *args, **kwargs).arguments
    except TypeError:
        return None  # fit itself will say what is wrong
    batch = _batch(bound.get("x"), bound.get("batch_size"))
    strategy = getattr(model, "distribute_strategy", None)
    replicas = 1 if strategy is None else strategy.num_replicas_in_sync
    return None if batch is None else -(-batch // replicas)


def _batch(data: Any, size: int | None) -> int | None:
    """Return the batch size that `fit` trains with."""
    if isinstance(data, tf.data.Dataset):
        return tf_adapter.batch_size(data)
    if hasattr(data, "__getitem__") and hasattr(data, "num_batches"):  # a keras PyDataset
        return _leading(data[0])
    count = _leading(data)
    return None if count is None else min(count, size or 32)


def _leading(data: Any) -> int | None:
    for leaf in tf.nest.flatten(data):
        shape = getattr(leaf, "shape", None)
        if shape is not None and len(shape):
            return int(shape[0])
    return None
