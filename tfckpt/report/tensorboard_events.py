"""Event files for TensorBoard: scalars, a picture, a graph. TensorBoard itself is not needed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from tfckpt.report.pictures import drawn

_RGBA = 4


class Board:
    """An event file below a directory.

    Args:
      log_dir: what `tensorboard --logdir` is given; made where it does not exist.
    """

    def __init__(self, log_dir: str) -> None:
        self._writer = tf.summary.create_file_writer(str(log_dir))

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        """Write one point for each tag, under Scalars.

        Args:
          values: by tag, such as bytes or seconds.
          step: of training, that the points belong to.
        """
        summary = tf.compat.v1.Summary()
        for tag in sorted(values):
            summary.value.add(tag=tag, simple_value=values[tag])
        self._write(summary, step)

    def picture(self, tag: str, figure: Any, step: int) -> None:
        """Write a matplotlib figure, under Images.

        Args:
          tag: what the picture is called.
          figure: of matplotlib; drawn as a PNG.
          step: of training, that the picture belongs to.

        Raises:
          TfckptError: matplotlib is not installed.
        """
        png = drawn(figure, "png")
        width, height = (int.from_bytes(png[i:i + 4], "big") for i in (16, 20))  # PNG's header
        summary = tf.compat.v1.Summary()
        summary.value.add(tag=tag, image=tf.compat.v1.Summary.Image(
            height=height, width=width, colorspace=_RGBA, encoded_image_string=png))
        self._write(summary, step)

    def graph(self, graph: tf.Graph) -> None:
        """Write a graph, under Graphs.

        Args:
          graph: a FuncGraph or another graph of TensorFlow; not changed.
        """
        with self._writer.as_default(step=0):
            tf.summary.graph(graph.as_graph_def())
        self._writer.flush()

    def close(self) -> None:
        """Write out what is left."""
        self._writer.close()

    def _write(self, summary: Any, step: int) -> None:
        with self._writer.as_default():
            tf.summary.experimental.write_raw_pb(summary.SerializeToString(), step=step)
        self._writer.flush()
