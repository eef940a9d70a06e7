"""How far the log was when: so that a follower's lag can be told in seconds and records, not only in positions.

The leader marks its durable end as it moves, at most every 20 ms. When the trail is full, every second mark of it
goes: it becomes coarser with age and never grows.
"""

from __future__ import annotations

from bisect import bisect_right

MARKS_MAX = 8192
SPACING_S = 0.02


class Trail:
    def __init__(self) -> None:
        self._positions: list[int] = []
        self._records: list[int] = []
        self._times: list[float] = []

    def mark(self, position: int, records: int, now: float) -> None:
        """The log ends at `position` now, with so many records appended so far."""
        if self._times and now - self._times[-1] < SPACING_S:
            return
        self._positions.append(position)
        self._records.append(records)
        self._times.append(now)
        if len(self._times) > MARKS_MAX:
            del self._positions[1::2], self._records[1::2], self._times[1::2]

    def lag(self, position: int, end: int, records: int, now: float) -> tuple[int, float]:
        """(records, seconds) that one who holds up to `position` is behind a log that ends at `end`."""
        if position >= end:
            return 0, 0.0
        at = bisect_right(self._positions, position)  # the first mark that it has not reached
        if at == len(self._positions):
            return _share(position, self._last(end)[0], end, records - self._last(end)[1]), 0.0
        before_position, before_records = (self._positions[at - 1], self._records[at - 1]) if at else (position, 0)
        inside = self._records[at] - before_records
        behind = records - self._records[at] + _share(position, before_position, self._positions[at], inside)
        return max(0, behind), max(0.0, now - self._times[at])

    def _last(self, end: int) -> tuple[int, int]:
        return (self._positions[-1], self._records[-1]) if self._positions else (end, 0)


def _share(position: int, start: int, end: int, records: int) -> int:
    """Of the records between start and end, those after `position`, as if they were spread evenly."""
    if end <= start or position <= start:
        return records
    return records * (end - position) // (end - start)
