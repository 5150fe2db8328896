"""Keras: `checkpoint(model)` makes `compile` and `fit` train in less memory, as ever.

`PeakMemory()` is a callback that measures what they really need.
"""

from __future__ import annotations

import functools
import inspect
import os
import statistics
import warnings
import weakref

import keras
import tensorflow as tf

from tfckpt.budget import format_bytes
from tfckpt.carriers.trace_hook import Mark, Records, set_batch_hint, wrap_body
from tfckpt.errors import PlanError, TfckptError, VerificationError
from tfckpt.options import make_options
from tfckpt.pictures import step_figure
from tfckpt.plan.planner import AUTO
from tfckpt.report import Report
from tfckpt.tensorboard import Board
from tfckpt.verify.memory import default_device, memory_info

_records: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


def checkpoint(model, *, budget: object = "min", solver: str = AUTO, objective: str = "time",
               batch_size: int | None = None, free_moves: bool = True, fad: str | bool = False):
    """Has the model's training step rewritten whenever Keras traces it.

    Args:
      model: a built `keras.Model`; it is returned, with its `train_step` and `fit` wrapped.
      budget, solver, objective, batch_size, free_moves, fad: see `tfckpt.checkpoint`. `batch_size`
        is needed only where `fit` cannot tell it (a dataset of unknown batch size).

    Raises:
      PlanError: malformed options, not a model, or a model that is not built yet.
    """
    options = make_options(budget, solver, objective, batch_size, free_moves, fad)
    if not hasattr(model, "train_step") or not hasattr(model, "fit"):
        raise PlanError(f"plan: tfckpt.keras.checkpoint takes a keras.Model, not "
                        f"{type(model).__name__}")
    if not getattr(model, "built", False):
        raise PlanError(f"plan: model {getattr(model, 'name', '')!r} is not built yet; call "
                        "model.build(input_shape) or run it once before tfckpt.keras.checkpoint")
    records = Records()
    mark = Mark(options, records, f"{model.name}.train_step")
    _wrap(model, mark)
    _records[model] = records
    model.train_function = None  # a step traced before must be traced again
    return model


def report(model) -> Report | None:
    """The report of the model's latest trace; None before the first.

    Raises:
      PlanError: the model was never wrapped.
    """
    if model not in _records:
        raise PlanError("plan: this model was not wrapped; call tfckpt.keras.checkpoint(model)")
    return _records[model].report


def _wrap(model, mark: Mark) -> None:
    step = type(model).train_step
    fit = type(model).fit
    owner = weakref.ref(model)

    @functools.wraps(step)
    def train_step(*args, **kwargs):
        return step(owner(), *args, **kwargs)

    @functools.wraps(fit)
    def fit_with_hint(*args, **kwargs):
        this = owner()
        previous = set_batch_hint(_replica_batch(
            this, _batch_of(inspect.signature(fit), this, args, kwargs)))
        try:
            return fit(this, *args, **kwargs)
        finally:
            set_batch_hint(previous)

    object.__setattr__(model, "train_step", wrap_body(train_step, mark))
    object.__setattr__(model, "fit", fit_with_hint)


def _batch_of(signature, model, args, kwargs) -> int | None:
    """The batch size that a call of `fit` will train with, where it can be told."""
    try:
        bound = signature.bind(model, *args, **kwargs).arguments
    except TypeError:
        return None  # fit itself will say what is wrong
    data, size = bound.get("x"), bound.get("batch_size")
    if isinstance(data, tf.data.Dataset):
        return _dataset_batch(data)
    if hasattr(data, "__getitem__") and hasattr(data, "num_batches"):  # a keras PyDataset
        return _leading(data[0])
    count = _leading(data)
    return None if count is None else min(count, size or 32)


def _replica_batch(model, batch: int | None) -> int | None:
    """What one replica gets of a batch, at most."""
    strategy = getattr(model, "distribute_strategy", None)
    replicas = strategy.num_replicas_in_sync if strategy is not None else 1
    return None if batch is None else -(-batch // replicas)


def _leading(data) -> int | None:
    for leaf in tf.nest.flatten(data):
        shape = getattr(leaf, "shape", None)
        if shape is not None and len(shape):
            return int(shape[0])
    return None


def _dataset_batch(dataset: tf.data.Dataset) -> int | None:
    """The batch size of the nearest batching step behind a dataset."""
    pending = [dataset]
    while pending:
        current = pending.pop(0)
        size = getattr(current, "_batch_size", None)
        if size is not None:
            value = tf.get_static_value(size)
            return None if value is None else int(value)
        pending.extend(current._inputs())
    return None


PEAK = "peak_memory_mib"
_MIB = float(1 << 20)
_ABOVE = 1.05
"""A measured peak this far above the plain one is worth a warning; less is allocator slack."""


class PeakMemory(keras.callbacks.Callback):
    """Measures the peak memory of each training batch and puts it into `logs`.

    `logs["peak_memory_mib"]` is the most that was allocated on the device while the batch ran,
    variables, optimizer state and inputs included, in MiB; of an epoch, the largest of its
    batches. With several devices it is that of the fullest, and each has a key of its own, such
    as `peak_memory_mib_gpu_1`. Progress bar and `History` show it; callbacks that write logs
    (`CSVLogger`, `TensorBoard`) must stand behind this one in `callbacks=[...]`, since Keras
    hands the logs from one to the next.

    The numbers are those of TensorFlow's allocator: on a CPU it also holds the input pipeline,
    counts only requests of 256 KiB and more, and serves all logical CPUs together. Validation is
    not measured. For a model that `checkpoint` wrapped, the report's `measured_peak_bytes` is
    filled in: the median over the batches of the peak above what was allocated when the batch
    began, without the first batch, which traces. Where the allocator keeps no statistics, a
    warning says what to set, and training goes on without the key.

    With `log_dir`, TensorBoard finds each epoch's peak under Scalars and, for a model that
    `checkpoint` wrapped, the live bytes of the planned step under Images (that needs matplotlib)
    and the rewritten graph under Graphs. TensorBoard itself need not be installed.

    Args:
      compare: also print planned against measured peak at the end of the first epoch.
      log_dir: directory for TensorBoard's event files; that of `keras.callbacks.TensorBoard` will
        do. None writes none.
    """

    def __init__(self, compare: bool = False, log_dir: str | os.PathLike | None = None):
        super().__init__()
        self._compare = compare
        self._log_dir = log_dir
        self._board: Board | None = None
        self._shown: Report | None = None
        self._devices: tuple[str, ...] = ()
        self._before: dict[str, int] = {}
        self._largest: dict[str, int] = {}
        self._dynamic: list[int] = []

    def on_train_begin(self, logs=None):
        """Finds the devices and whether they can be measured."""
        self._dynamic = []
        self._devices = ()
        found = _devices_of(self.model)
        try:
            for device in found:
                memory_info(device)
        except VerificationError as error:
            warnings.warn(f"tfckpt: PeakMemory measures nothing. {error}", stacklevel=2)
        else:
            self._devices = found
        if self._log_dir is not None:
            self._board, self._shown = Board(os.fspath(self._log_dir)), None

    def on_epoch_begin(self, epoch, logs=None):
        """Forgets the batches of the epoch before."""
        self._largest = dict.fromkeys(self._devices, 0)

    def on_train_batch_begin(self, batch, logs=None):
        """Has the peak count from here."""
        for device in self._devices:
            self._before[device] = memory_info(device, reset=True)["current"]

    def on_train_batch_end(self, batch, logs=None):
        """Reads the peak of the batch."""
        peaks = {device: memory_info(device)["peak"] for device in self._devices}
        if not peaks:
            return
        for device, peak in peaks.items():
            self._largest[device] = max(self._largest.get(device, 0), peak)
        self._dynamic.append(max(peak - self._before[d] for d, peak in peaks.items()))
        _write(logs, peaks)

    def on_epoch_end(self, epoch, logs=None):
        """Notes the epoch's peak; after the first epoch, fills the report and compares."""
        records = _records.get(self.model)
        found = records.report if records else None
        if self._dynamic:
            _write(logs, self._largest)
            measured = int(statistics.median(self._dynamic[1:] or self._dynamic))
            _note(found, measured)
            if self._compare and epoch == (self.params or {}).get("initial_epoch", 0):
                print(_comparison(found, measured, self._devices), flush=True)
        if self._board is not None:
            peaks: dict[str, float] = {}
            _write(peaks, self._largest)
            self._board.scalars(peaks, epoch)
            if records and found is not self._shown:  # once for each trace
                self._shown = found
                _show(self._board, records, epoch)

    def on_train_end(self, logs=None):
        """Closes the event file."""
        if self._board is not None:
            self._board.close()
            self._board = None


def _note(found: Report | None, measured: int) -> None:
    """Fills in what a report lacks; warns where a rewritten step needs more than planned for it."""
    if found is None or not found.applied:
        return
    first = found.measured_peak_bytes is None
    found.measured_peak_bytes = measured
    if first and measured > _ABOVE * found.baseline_peak_bytes:
        warnings.warn(
            f"tfckpt: {found.name} was measured at {format_bytes(measured)}, above the "
            f"plain step's planned {format_bytes(found.baseline_peak_bytes)}; compare with "
            "tfckpt.verify.measure_peak, which leaves the input pipeline out", stacklevel=3)


def _show(board: Board, records: Records, epoch: int) -> None:
    """The step's graph and the picture of its live bytes."""
    graph = records.graph()
    if graph is not None:
        board.graph(graph)
    if records.report is None:
        return
    try:
        board.picture("live_bytes", step_figure({"": records.report}), epoch)
    except TfckptError as error:
        warnings.warn(f"tfckpt: PeakMemory writes no picture. {error}", stacklevel=3)


def _devices_of(model) -> tuple[str, ...]:
    """The local devices that a model trains on, such as "GPU:0"."""
    strategy = getattr(model, "distribute_strategy", None)
    if strategy is None or strategy.num_replicas_in_sync == 1:
        return (default_device(),)
    specs = [tf.DeviceSpec.from_string(name) for name in strategy.extended.worker_devices]
    return tuple(dict.fromkeys(f"{s.device_type}:{s.device_index or 0}" for s in specs))


def _write(logs, peaks: dict[str, int]) -> None:
    """Puts peaks in bytes into a logs dictionary, in MiB."""
    if logs is None or not peaks:
        return
    logs[PEAK] = max(peaks.values()) / _MIB
    if len(peaks) > 1:
        for device, peak in peaks.items():
            logs[f"{PEAK}_{device.lower().replace(':', '_')}"] = peak / _MIB


def _comparison(found: Report | None, measured: int, devices: tuple[str, ...]) -> str:
    """Planned against measured, as text of three or four lines."""
    lines = ["", "tfckpt: peak above what is allocated when a step begins"]
    if found is None:
        lines.append("  planned   nothing: tfckpt.keras.checkpoint(model) rewrote no step")
    else:
        off = 100.0 * (measured / max(found.planned_peak_bytes, 1) - 1.0)
        lines += [f"  plain     {format_bytes(found.baseline_peak_bytes):>10}  planned",
                  f"  rewritten {format_bytes(found.planned_peak_bytes):>10}  planned"
                  + ("" if found.applied else f" (not applied: {found.reason})"),
                  f"  measured  {format_bytes(measured):>10}  {off:+.1f} % of planned, "
                  f"{', '.join(devices)}"]
        return "\n".join(lines)
    lines.append(f"  measured  {format_bytes(measured):>10}  {', '.join(devices)}")
    return "\n".join(lines)
