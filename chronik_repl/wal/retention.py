"""Which segments may go: a pure decision of the leader's, which stands in the log once it is made.

By size and by age, whole segments from the front, and never what a member still needs: at most what every member has
durable, or `keep_bytes` behind the end for a member that is slower than that. A log can begin only at a whole snapshot.

The segment that is written never goes, so one that fills slowly has to end by its age: an eighth of the retention time
after its first batch, at most a day. So a batch goes at most that much later than the settings say.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from chronik_repl.positions import Position
from chronik_repl.wal.values import LogSettings

HOUR_MS = 3_600_000
ROLL_PARTS = 8  # of the retention time
ROLL_HOURS_MAX = 24.0


class Held(NamedTuple):
    """A segment, as far as this decision goes."""

    start: Position
    first_timestamp_ms: int  # all that stands before `start` is at most this new
    may_begin: bool  # its snapshot is whole


def retention_due(
    segments: Sequence[Held],
    end: Position,
    committed: Position,
    members_durable: Sequence[Position],
    now_ms: int,
    settings: LogSettings,
) -> Position | None:
    """Where the log should start from now on; None if that is where it starts."""
    if not segments:
        return None
    needed = min((max(durable, end - settings.keep_bytes) for durable in members_durable), default=end)
    limit = min(committed, needed)
    due: Position | None = None
    for segment in segments[1:]:
        if segment.start > limit:
            break
        too_much = settings.retention_bytes > 0 and end - segment.start >= settings.retention_bytes
        too_old = (
            settings.retention_hours > 0 and segment.first_timestamp_ms < now_ms - settings.retention_hours * HOUR_MS
        )
        if (too_much or too_old) and segment.may_begin:
            due = segment.start
    return due


def roll_due(first_batch_ms: int | None, now_ms: int, settings: LogSettings) -> bool:
    """Whether the active segment, whose first batch is of that time, should end. One without batches need not: nothing
    in it is to go."""
    if first_batch_ms is None or settings.retention_hours <= 0:
        return False
    return now_ms - first_batch_ms > min(settings.retention_hours / ROLL_PARTS, ROLL_HOURS_MAX) * HOUR_MS
