"""Spark's filters, as far as a reader of frames can use them. Pure.

Topic and partition are a frame's own: those filters are kept exactly, and Spark need not look again. Offsets and
times are a record's: a batch that cannot hold one that is wanted is left out, and Spark looks again at the rest.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any

INT64_MAX = (1 << 63) - 1


class Wanted:
    """What a reader is asked for: everything, until it is told otherwise."""

    def __init__(self) -> None:
        self.topics: set[str] | None = None
        self.topic_prefix = ""
        self.partitions: set[int] | None = None
        self.partition_min, self.partition_max = -(1 << 31), (1 << 31) - 1
        self.offset_min, self.offset_max = 0, INT64_MAX
        self.time_ms_min = -INT64_MAX
        self.position_min, self.position_max = 0, INT64_MAX

    def __bool__(self) -> bool:
        """Is anything left out?"""
        return self.__dict__ != Wanted().__dict__

    def partition(self, topic: str, number: int) -> bool:
        return (
            (self.topics is None or topic in self.topics)
            and topic.startswith(self.topic_prefix)
            and (self.partitions is None or number in self.partitions)
            and self.partition_min <= number <= self.partition_max
        )

    def batch(self, base: int, count: int, newest_ms: int) -> bool:
        """May a batch with these offsets, and no record younger than this, hold a record that is wanted?"""
        return base <= self.offset_max and base + count > self.offset_min and newest_ms >= self.time_ms_min

    def take(self, filters: Iterable[Any]) -> list[Any]:
        """Note what is wanted. Returns the filters that Spark has to apply itself."""
        return [f for f in filters if not self._take(f)]

    def _take(self, f: Any) -> bool:
        kind, column, value = type(f).__name__, ".".join(getattr(f, "attribute", ())), getattr(f, "value", None)
        if kind == "IsNotNull":
            return column in ("topic", "partition", "offset", "timestamp", "position")
        if column == "topic":
            return self._topic(kind, value)
        if column == "partition" and _whole(kind, value):
            return self._partition(kind, value)
        if column == "offset" and _whole(kind, value):
            low, high = _bounds(kind, value)
            self.offset_min, self.offset_max = max(self.offset_min, low), min(self.offset_max, high)
        if column == "position" and _whole(kind, value):
            low, high = _bounds(kind, value)
            self.position_min, self.position_max = max(self.position_min, low), min(self.position_max, high)
        if (
            column == "timestamp"
            and isinstance(value, datetime)
            and kind in ("EqualTo", "GreaterThan", "GreaterThanOrEqual")
        ):
            moment = value if value.tzinfo else value.replace(tzinfo=UTC)
            self.time_ms_min = max(self.time_ms_min, int(moment.timestamp() * 1000))
        return False

    def _topic(self, kind: str, value: Any) -> bool:
        if kind in ("EqualTo", "EqualNullSafe") and isinstance(value, str):
            self.topics = {value} if self.topics is None else self.topics & {value}
            return True
        if kind == "In" and value is not None:
            named = {v for v in value if v is not None}
            self.topics = named if self.topics is None else self.topics & named
            return True
        if (
            kind == "StringStartsWith"
            and isinstance(value, str)
            and (not self.topic_prefix or value.startswith(self.topic_prefix))
        ):
            self.topic_prefix = value
            return True
        return False

    def _partition(self, kind: str, value: Any) -> bool:
        if kind == "In":
            named = {v for v in value if v is not None}
            self.partitions = named if self.partitions is None else self.partitions & named
            return True
        low, high = _bounds(kind, value)
        self.partition_min, self.partition_max = max(self.partition_min, low), min(self.partition_max, high)
        return True


def _whole(kind: str, value: Any) -> bool:
    """A comparison that numbers can be bounded by."""
    if kind == "In":
        return value is not None and all(v is None or (isinstance(v, int) and not isinstance(v, bool)) for v in value)
    return kind in _BOUNDS and isinstance(value, int) and not isinstance(value, bool)


_BOUNDS = {
    "EqualTo": (0, 0),
    "EqualNullSafe": (0, 0),
    "GreaterThan": (1, None),
    "GreaterThanOrEqual": (0, None),
    "LessThan": (None, -1),
    "LessThanOrEqual": (None, 0),
}


def _bounds(kind: str, value: Any) -> tuple[int, int]:
    if kind == "In":
        numbers = [v for v in value if v is not None]
        return (min(numbers), max(numbers)) if numbers else (INT64_MAX, -INT64_MAX)
    low, high = _BOUNDS[kind]
    return (-INT64_MAX if low is None else value + low), (INT64_MAX if high is None else value + high)
