"""The records by op type, and those of families: all op types that begin alike.

An op type of its own record belongs to no family; one without is what the longest prefix says
that it has, and else what the defaults of `OpRecord` say.
"""

from __future__ import annotations

import dataclasses

from tfckpt.ops.op_record import OpRecord

_records: dict[str, OpRecord] = {}
_families: dict[str, OpRecord] = {}
_found: dict[str, OpRecord] = {}  # what was asked for; it is, for each op of a graph


def register(*records: OpRecord) -> None:
    """Add records.

    Args:
      *records: each of one op type; they are looked up from now on.

    Raises:
      ValueError: an op type has a record already.
    """
    _add(_records, records)


def register_families(*records: OpRecord) -> None:
    """Add records whose `type` is what the op types of a family begin with; raise as `register`.

    Args:
      *records: each of a family; they are looked up from now on.

    Raises:
      ValueError: a family has a record already.
    """
    _add(_families, records)


def _add(table: dict[str, OpRecord], records: tuple[OpRecord, ...]) -> None:
    for new in records:
        if new.type in table:
            raise ValueError(f"ops: {new.type!r} has a record already")
        table[new.type] = new
    _found.clear()


def record(op_type: str) -> OpRecord:
    """Return what is known of an op type.

    Args:
      op_type: as TensorFlow spells it; one without record and family has the defaults of
        `OpRecord`.
    """
    try:
        return _found[op_type]
    except KeyError:
        return _found.setdefault(op_type, _records.get(op_type) or _of_family(op_type))


def _of_family(op_type: str) -> OpRecord:
    prefix = max((p for p in _families if op_type.startswith(p)), key=len, default=None)
    return (OpRecord(op_type) if prefix is None
            else dataclasses.replace(_families[prefix], type=op_type))


def registered() -> tuple[OpRecord, ...]:
    """Return all records of single op types, in the order in which they were added."""
    return tuple(_records.values())


def families() -> tuple[OpRecord, ...]:
    """Return the records of families."""
    return tuple(_families.values())
