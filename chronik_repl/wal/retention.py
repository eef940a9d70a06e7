"""Which segments may go: a pure decision of the leader's, which stands in the log once it is made.

By size and by age, whole segments from the front, and never what a member still needs: at most what every member has
durable, or `keep_bytes` behind the end for a member that is slower than that. A log can begin only at a whole snapshot.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from chronik_repl.positions import Position
from chronik_repl.wal.values import LogSettings

HOUR_MS = 3_600_000


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
