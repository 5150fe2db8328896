"""`PeakMemory()`: a Keras callback that measures what training steps really need."""

from __future__ import annotations

import os
import statistics
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfckpt.carriers.records import Records
from tfckpt.errors import TfckptError, VerificationError
from tfckpt.keras.wrapping import records_of
from tfckpt.report.observed import note
from tfckpt.report.pictures import step_figure
from tfckpt.report.report import Report
from tfckpt.report.tensorboard_events import Board
from tfckpt.request.budget import format_bytes
from tfckpt.verify.memory import default_device, memory_info

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
    (`CSVLogger`, `TensorBoard`) must come after this one in `callbacks=[...]`, since Keras
    hands the logs from one to the next.

    The numbers are those of TensorFlow's allocator: on a CPU it also serves the input pipeline,
    counts only requests of 256 KiB and more, and serves all logical CPUs together. Validation is
    not measured. Of a step that XLA compiles nearly all of it is one request, the buffer in which
    XLA has packed its temporary tensors (`compiled by XLA` in the report), so that it says nothing
    of single ones; where that buffer lies in a larger piece of the allocator, all of the piece
    counts. For a model that `checkpoint` wrapped, the report's `measured_peak_bytes` is filled in:
    the median over the batches of the peak above what was allocated when the batch began, without
    the first batch, which traces, and a partial one. Where the allocator keeps no statistics, a
    warning says what to set, and training goes on without the key.

    With `log_dir`, TensorBoard finds each epoch's peak under Scalars and, for a model that
    `checkpoint` wrapped, the live bytes of the planned step under Images (that needs matplotlib)
    and the rewritten graph under Graphs. TensorBoard itself need not be installed.

    Args:
      compare: also print planned against measured peak at the end of the first epoch.
      log_dir: directory for TensorBoard's event files; that of `keras.callbacks.TensorBoard` will
        do. None writes none.
    """

    def __init__(self, compare: bool = False, log_dir: str | os.PathLike | None = None) -> None:
        super().__init__()
        self._compare = compare
        self._log_dir = log_dir
        self._board: Board | None = None
        self._shown: Report | None = None
        self._devices: tuple[str, ...] = ()
        self._before: dict[str, int] = {}
        self._largest: dict[str, int] = {}
        self._dynamic: list[int] = []

    def _implements_train_batch_hooks(self) -> bool:
        """Answer Keras 2, which asks each callback and has no such method in those of Keras 3."""
        return True

    def _implements_test_batch_hooks(self) -> bool:
        return False

    def _implements_predict_batch_hooks(self) -> bool:
        return False

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Find the devices and whether they can be measured.

        Args:
          logs: of Keras; not used.
        """
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

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Forget the batches of the epoch before.

        Args:
          epoch: its number, from 0; not used.
          logs: of Keras; not used.
        """
        self._largest = dict.fromkeys(self._devices, 0)

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Have the peak count from here.

        Args:
          batch: its number in the epoch, from 0; not used.
          logs: of Keras; not used.
        """
        for device in self._devices:
            self._before[device] = memory_info(device, reset=True)["current"]

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Read the peak of the batch.

        Args:
          batch: its number in the epoch, from 0; not used.
          logs: of the batch; gets the peak, in MiB.
        """
        peaks = {device: memory_info(device)["peak"] for device in self._devices}
        if not peaks:
            return
        for device, peak in peaks.items():
            self._largest[device] = max(self._largest.get(device, 0), peak)
        self._dynamic.append(max(peak - self._before[d] for d, peak in peaks.items()))
        _write(logs, peaks)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Note the epoch's peak; after the first epoch, fill the report and compare.

        Args:
          epoch: its number, from 0.
          logs: of the epoch; gets the largest peak of its batches, in MiB.
        """
        records = records_of(self.model)
        found = records.report if records else None
        if self._dynamic:
            _write(logs, self._largest)
            measured = _of_whole_batches(self._dynamic)
            if not _share_memory(self._devices):  # else all replicas' memory is measured as one's
                _note(found, measured)
            if self._compare and epoch == (self.params or {}).get("initial_epoch", 0):
                print(_comparison(found, measured, self._largest,
                                  getattr(self.model, "run_eagerly", False)), flush=True)
        if self._board is not None:
            peaks: dict[str, float] = {}
            _write(peaks, self._largest)
            self._board.scalars(peaks, epoch)
            if records and found is not self._shown:  # once for each trace
                self._shown = found
                _show(self._board, records, epoch)

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Close the event file.

        Args:
          logs: of Keras; not used.
        """
        if self._board is not None:
            self._board.close()
            self._board = None


def _share_memory(devices: Sequence[str]) -> bool:
    """Return whether several of the devices are parts of one CPU, which have one allocator."""
    return sum(name.startswith("CPU:") for name in devices) > 1


def _of_whole_batches(peaks: Sequence[int]) -> int:
    """Return the higher median of the batches' peaks, without the first batch, which traces.

    Of two batches that are left one may be a partial batch; the higher is the whole one's.
    """
    return statistics.median_high(peaks[1:] or peaks)


def _note(found: Report | None, measured: int) -> None:
    """Fill in what a report lacks; warn where a rewritten step needs more than planned for it."""
    if found is None:
        return
    first = found.measured_peak_bytes is None
    note(found, measured)
    plain = max(found.simulated_bytes[0], found.baseline_peak_bytes)
    if first and found.applied and not found.missed and measured > _ABOVE * plain:
        warnings.warn(
            f"tfckpt: {found.name} was measured at {format_bytes(measured)}, above the "
            f"plain step's planned {format_bytes(plain)}; tfckpt.verify.measure_peak "
            "leaves out what the input pipeline takes of the same allocator; where that measures "
            "as much, kernels use memory that is not planned", stacklevel=3)


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


def _devices_of(model: Any) -> tuple[str, ...]:
    """Return the local devices that a model trains on, such as "GPU:0"."""
    strategy = getattr(model, "distribute_strategy", None)
    if strategy is None or strategy.num_replicas_in_sync == 1:
        return (default_device(),)
    specs = [tf.DeviceSpec.from_string(name) for name in strategy.extended.worker_devices]
    return tuple(dict.fromkeys(f"{s.device_type}:{s.device_index or 0}" for s in specs))


def _write(logs: dict[str, Any] | None, peaks: dict[str, int]) -> None:
    """Put peaks in bytes into a logs dictionary, in MiB."""
    if logs is None or not peaks:
        return
    logs[PEAK] = max(peaks.values()) / _MIB
    if len(peaks) > 1:
        for device, peak in peaks.items():
            logs[f"{PEAK}_{device.lower().replace(':', '_')}"] = peak / _MIB


def _comparison(found: Report | None, measured: int, peaks: Mapping[str, int], eager: bool
                ) -> str:
    """Planned against measured, and the peaks of whole devices, as text of some lines."""
    lines = ["", "tfckpt: bytes above what is allocated when a step begins"]
    devices = ", ".join(peaks)
    whole = [f"  peak of {device:<8} {format_bytes(peak):>10}  with all that is allocated there "
             f"({PEAK} {peak / _MIB:.1f})" for device, peak in peaks.items()]
    if found is None:
        lines += ["  planned peak     none: the model runs eagerly: compile it without "
                  "run_eagerly=True"] if eager else [
            "  planned peak     none of this model: tfckpt.keras.checkpoint(model) plans its steps",
            "                   (the native pass does, too, and grappler_ext.reports() says what)"]
    else:
        plain, expected = found.expected_bytes
        off = 100.0 * (measured / max(expected, 1) - 1.0)
        allowed = found.allowed_bytes
        lines += [f"  plain peak       {format_bytes(plain):>10}",
                  f"  planned peak     {format_bytes(expected):>10}"
                  + ("" if found.applied else f"  (not applied: {found.reason})"),
                  *([f"  budget           {format_bytes(allowed):>10}  asked for: {found.budget}"]
                    if allowed is not None else []),
                  f"  measured peak    {format_bytes(measured):>10}  {off:+.1f} % of planned, "
                  f"{devices}"]
        return "\n".join(lines + whole)
    lines.append(f"  measured peak    {format_bytes(measured):>10}  {devices}")
    return "\n".join(lines + whole)
