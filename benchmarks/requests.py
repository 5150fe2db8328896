"""The allocations that one call requests of TensorFlow, from its profiler."""

from __future__ import annotations

import dataclasses
import pathlib
import tempfile
from collections.abc import Callable, Iterable, Sequence
from typing import Any


@dataclasses.dataclass(frozen=True)
class Request:
    """One allocation of a step.

    Attributes:
      op: which asked for it.
      bytes: asked for.
      chunk: what the allocator gave.
      made, freed: event numbers; `freed` is None where the step leaves it allocated.
    """

    op: str
    bytes: int
    chunk: int
    made: int
    freed: int | None


def requests_of(step: Callable, args: Sequence[Any]) -> tuple[list[Request], int]:
    """Return the allocator's requests during one call, and the bytes freed that others had made."""
    import tensorflow as tf

    with tempfile.TemporaryDirectory() as folder:
        tf.profiler.experimental.start(
            folder, options=tf.profiler.experimental.ProfilerOptions(host_tracer_level=3))
        tf.nest.map_structure(lambda t: t.numpy(), step(*args))
        tf.profiler.experimental.stop()
        (path,) = pathlib.Path(folder).rglob("*.xplane.pb")
        return _matched(_events(path.read_bytes()))


def _events(data: bytes) -> list[dict[str, Any]]:
    """Return the allocator's events in their order."""
    from tensorflow.tsl.profiler.protobuf import xplane_pb2

    space = xplane_pb2.XSpace()
    space.ParseFromString(data)
    found = []
    for plane in space.planes:
        names = {key: entry.name for key, entry in plane.stat_metadata.items()}
        for row in plane.lines:
            for event in row.events:
                kind = plane.event_metadata[event.metadata_id].name
                if kind in ("MemoryAllocation", "MemoryDeallocation"):
                    stats = {names[s.metadata_id]: _value(s, names) for s in event.stats}
                    found.append(stats | {"kind": kind, "when": (
                        row.timestamp_ns * 1000 + event.offset_ps)})
    return sorted(found, key=lambda event: event["when"])


def _value(stat: Any, names: dict[int, str]) -> Any:
    kind = stat.WhichOneof("value")
    return names[stat.ref_value] if kind == "ref_value" else getattr(stat, kind)


def _matched(events: Iterable[dict[str, Any]]) -> tuple[list[Request], int]:
    open_: dict[int, tuple[str, int, int, int]] = {}
    found: list[Request] = []
    before = 0
    for number, event in enumerate(events):
        address = event["addr"]
        if event["kind"] == "MemoryAllocation":
            open_[address] = (str(event.get("tf_op", "?")).partition(":")[0],
                              event["requested_bytes"], event["allocation_bytes"], number)
        elif address in open_:
            found.append(Request(*open_.pop(address), number))
        else:
            before += event["allocation_bytes"]
    found += [Request(*entry, None) for entry in open_.values()]
    return sorted(found, key=lambda request: request.made), before


def peak_of(requests: Sequence[Request], size: Callable[[Request], int]) -> tuple[int, int]:
    """Return the most bytes that are live together, and the event at which they are."""
    changes = sorted([(r.made, size(r)) for r in requests]
                     + [(r.freed, -size(r)) for r in requests if r.freed is not None])
    live = most = when = 0
    for number, change in changes:
        live += change
        if live > most:
            most, when = live, number
    return most, when
