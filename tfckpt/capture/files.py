"""Reads graphs from files: SavedModel directories, GraphDef and MetaGraphDef, binary or text."""

from __future__ import annotations

import dataclasses
import pathlib
import re
from typing import Any

import tensorflow as tf
from google.protobuf import message, text_format
from tensorflow.core.protobuf import saved_model_pb2

from tfckpt.capture import tf_adapter
from tfckpt.errors import CaptureError, unreadable

SAVED_MODEL, META_GRAPH, GRAPH_DEF = "SavedModel", "MetaGraphDef", "GraphDef"
_FILES = ("saved_model.pb", "saved_model.pbtxt")
LARGEST = 2**31 - 1
"""Bytes that a protobuf message can have."""
_CONTROL = re.compile(rb"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")
_OP_TYPE = re.compile(r"^[A-Za-z_>][A-Za-z0-9_>.-]*$")


@dataclasses.dataclass(frozen=True)
class Document:
    """A graph as it stands in a file.

    Attributes:
      source: where it came from, for messages.
      kind: `SAVED_MODEL`, `META_GRAPH` or `GRAPH_DEF`.
      text: whether it was written as text.
      proto: SavedModel, MetaGraphDef or GraphDef message.
    """

    source: str
    kind: str
    text: bool
    proto: Any

    def graph_defs(self) -> list[Any]:
        """Return the GraphDefs inside, in order: one, or one for each meta graph."""
        if self.kind == SAVED_MODEL:
            return [meta.graph_def for meta in self.proto.meta_graphs]
        return [self.proto.graph_def if self.kind == META_GRAPH else self.proto]

    def meta_graphs(self) -> list[Any]:
        """Return the MetaGraphDefs inside, in that order; None for a bare GraphDef."""
        if self.kind == SAVED_MODEL:
            return list(self.proto.meta_graphs)
        return [self.proto if self.kind == META_GRAPH else None]

    def layers(self, number: int) -> tuple[str, ...]:
        """Return names of layers with variables, ascending: Keras names variables by their layers.

        Args:
          number: of a meta graph; other kinds of documents, and of models, tell none.
        """
        meta = self.meta_graphs()[number]
        return () if meta is None else tuple(sorted({
            scope for node in meta.object_graph_def.nodes if node.WhichOneof("kind") == "variable"
            for scope in node.variable.name.split("/")[:-1] if scope}))

    def copy(self) -> Document:
        """Return a document whose message can be changed."""
        proto = type(self.proto)()
        proto.CopyFrom(self.proto)
        return dataclasses.replace(self, proto=proto)

    def serialized(self) -> bytes:
        """Return the message as it is written to a file of this kind.

        Raises:
          CaptureError: it is too large for one.
        """
        data = (text_format.MessageToString(self.proto).encode() if self.text
                else self.proto.SerializeToString(deterministic=True))
        if len(data) > LARGEST:
            raise too_large(f"{self.source!r}, rewritten,", len(data))
        return data


_KERAS = (b"PK\x03\x04", b"\x89HDF\r\n\x1a\n")
"""How zip archives (.keras) and HDF5 files (.h5) begin, and no graph does."""


def too_large(what: str, size: int) -> CaptureError:
    """Return the refusal of a graph that is too large for a protobuf message.

    Args:
      what: the graph, as the message names it.
      size: bytes of its message.
    """
    return CaptureError(
        f"capture: {what} has {size / 2**30:.2f} GiB of graph, and a protobuf message ends at "
        "2 GiB; keep large constants in variables, which are saved beside the graph")


def saved_model_file(directory: pathlib.Path) -> pathlib.Path | None:
    """Return the file of a SavedModel directory with its graphs; None where there is none.

    Args:
      directory: a directory, whatever is in it.
    """
    return next((directory / name for name in _FILES if (directory / name).is_file()), None)


def read_path(path: str) -> Document:
    """Read a file or a SavedModel directory.

    Args:
      path: of a SavedModel directory, or of a file with a GraphDef or MetaGraphDef, binary or text.

    Returns:
      The document; it has ops.

    Raises:
      CaptureError: it does not exist, cannot be read, or contains no graph.
    """
    where = pathlib.Path(path)
    try:
        if where.is_dir():
            inside = saved_model_file(where)
            if inside is None:
                raise CaptureError(f"capture: {path!r} is a directory without "
                                   f"{' or '.join(_FILES)}; name a SavedModel or a file")
            return read_bytes(_contents(inside), path, saved_model=True)
        return read_bytes(_contents(where), path)
    except OSError as error:
        raise unreadable(path, error) from error


def _contents(file: pathlib.Path) -> bytes:
    """Return the content of a file; one that cannot be a graph is not read."""
    size = file.stat().st_size
    if size > LARGEST:
        raise too_large(repr(str(file)), size)
    return file.read_bytes()


def read_bytes(data: bytes, source: str, *, saved_model: bool = False) -> Document:
    """Parse the content of a file.

    Args:
      data: the file's bytes.
      source: its name, for messages.
      saved_model: it is the main file of a SavedModel directory.

    Returns:
      The document; it has ops.

    Raises:
      CaptureError: the bytes are none of the kinds, or contain no graph.
    """
    if not data:
        raise CaptureError(f"capture: {source!r} is empty; was it written to the end?")
    if len(data) > LARGEST:
        raise too_large(repr(source), len(data))
    if data.startswith(_KERAS):
        raise CaptureError(
            f"capture: {source!r} looks like a model or weights that Keras saved, which contain "
            "no training step; load the model in Python and use tfckpt.keras.checkpoint(model), or "
            "save the function that trains it with tf.saved_model.save")
    text = _as_text(data)
    kinds = ([(SAVED_MODEL, saved_model_pb2.SavedModel)] if saved_model else
             [(GRAPH_DEF, tf.compat.v1.GraphDef), (META_GRAPH, tf.compat.v1.MetaGraphDef)])
    complaint = ""
    for kind, message_type in kinds:
        proto = message_type()
        try:
            if text is None:
                proto.ParseFromString(data)
            else:
                text_format.Parse(text, proto)
        except (message.DecodeError, text_format.ParseError, RecursionError, ValueError) as error:
            complaint = complaint or str(error)
            continue
        document = Document(source, kind, text is not None, proto)
        if _plausible(document):
            return document
        complaint = "it has no ops"
    names = "saved_model.pb" if saved_model else f"{GRAPH_DEF} or {META_GRAPH}"
    if text is not None:
        raise CaptureError(f"capture: {source!r} is text, but no {names} in text format "
                           f"({complaint})")
    raise CaptureError(f"capture: {source!r} is no {names}, or is truncated or corrupt"
                       f"{f' ({complaint})' if complaint else ''}; write it again")


def _as_text(data: bytes) -> str | None:
    """Return the bytes as text, where they are printable text."""
    if _CONTROL.search(data):  # found at once in all but text, and without a copy of the data
        return None
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError:
        return None
    return text if all(c.isprintable() or c in "\t\r\n" for c in text) else None


def _plausible(document: Document) -> bool:
    """Return whether a message has ops: other messages may parse as one by accident."""
    nodes = [node for definition in document.graph_defs()
             for node in tf_adapter.nodes_with_bodies(definition)]
    return bool(nodes) and all(node.name and _OP_TYPE.match(node.op) for node in nodes)
