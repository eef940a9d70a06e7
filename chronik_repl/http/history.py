"""The last minutes, a sample a second, so that a page that is opened now shows what led here.

Bounded: ten minutes, whatever happens. Times are the wall clock's, for people; nothing is decided by them.
"""

from __future__ import annotations

from collections import deque

import msgspec

from chronik_repl.standing import FollowerStatus, Status

SAMPLES_MAX = 600
INTERVAL_S = 1.0


class FollowerSample(msgspec.Struct, frozen=True):
    follower: str
    state: str
    lag_positions: int
    lag_records: int
    lag_seconds: float


class Sample(msgspec.Struct, frozen=True):
    time_ms: int
    role: str
    end: int
    high_watermark: int
    records: int  # appended since the log was opened
    bytes: int
    followers: tuple[FollowerSample, ...]


def name_of(follower: FollowerStatus) -> str:
    """Its node id, or its address while nobody knows who it is."""
    return str(follower.node_id) if follower.node_id else follower.address


class History:
    def __init__(self) -> None:
        self._samples: deque[Sample] = deque(maxlen=SAMPLES_MAX)

    def take(self, status: Status, time_ms: int) -> None:
        followers = tuple(
            FollowerSample(name_of(one), one.state, one.lag_positions, one.lag_records, round(one.lag_seconds, 3))
            for one in status.followers
        )
        log = status.log
        self._samples.append(
            Sample(
                time_ms, status.role, log.end, log.high_watermark, log.appended_records, log.appended_bytes, followers
            )
        )

    def since(self, time_ms: int) -> list[Sample]:
        return [sample for sample in self._samples if sample.time_ms > time_ms]
