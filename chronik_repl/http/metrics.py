"""A node's standing in Prometheus's words. Nothing is stored here: each scrape reads the log, the role and the meters.

Names: `chronik_…`, base units, `_total` for what only grows. `follower` is a node id, or an address while nobody knows
who is there. Positions are byte addresses, so a lag in positions is a lag in bytes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import accumulate
from typing import Any, get_args

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from chronik_repl.http.history import name_of
from chronik_repl.meters import METERS
from chronik_repl.standing import FollowerState, FollowerStatus, House, Role, Status
from chronik_repl.wal.values import Histogram

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

OfStatus = Callable[[Status], float]
OfFollower = Callable[[FollowerStatus], float]

NODE_GAUGES: dict[str, tuple[str, OfStatus]] = {
    "ready": ("1 while /readyz says yes.", lambda s: s.ready),
    "epoch": ("The epoch that this node leads or follows.", lambda s: s.epoch),
    "uptime_seconds": ("Since the process began.", lambda s: s.uptime_s),
    "diverged": ("1 on a follower that differs from its leader and serves no reads.", lambda s: bool(s.diverged)),
    "enough_replicas": (
        "0 on a leader with fewer live followers than acks=all needs.",
        lambda s: s.enough_replicas,
    ),
    "sync_replicas": ("Followers that acks=all waits for, or lacks; 0 in async mode.", lambda s: s.sync_replicas),
    "log_start_position": ("The first position held.", lambda s: s.log.start),
    "log_end_position": ("Where the next frame will stand.", lambda s: s.log.end),
    "log_durable_end_position": ("Everything below survives a power cut here.", lambda s: s.log.durable_end),
    "log_high_watermark_position": ("Everything below is committed and readable.", lambda s: s.log.high_watermark),
    "log_segments": ("Segment files.", lambda s: s.log.segments),
    "log_size_bytes": ("The log on disk.", lambda s: s.log.bytes_on_disk),
    "log_topics": ("Topics.", lambda s: s.log.topics),
    "log_partitions": ("Partitions of all topics.", lambda s: s.log.partitions),
    "log_damaged_ranges": ("Ranges that the scrubber found damaged.", lambda s: len(s.log.damage)),
    "clock_ahead_seconds": (
        "A leap of this clock, by which nothing expires.",
        lambda s: s.log.clock_ahead_s,
    ),
    "disk_free_bytes": ("Free space where the log is.", lambda s: s.log.free_bytes),
}
NODE_COUNTERS: dict[str, tuple[str, OfStatus]] = {
    "log_appended_frames": ("Frames appended.", lambda s: s.log.appended_frames),
    "log_appended_bytes": ("Bytes appended.", lambda s: s.log.appended_bytes),
    "log_appended_records": ("Records appended.", lambda s: s.log.appended_records),
    "log_groups_committed": ("Groups, each one fdatasync.", lambda s: s.log.groups_committed),
}
FOLLOWER_GAUGES: dict[str, tuple[str, OfFollower]] = {
    "lag_positions": ("How far its durable end is behind our end, in bytes of log.", lambda f: f.lag_positions),
    "lag_records": ("The same in records.", lambda f: f.lag_records),
    "lag_seconds": ("The age of the oldest thing that it has not got.", lambda f: f.lag_seconds),
    "durable_end_position": ("Its durable end as last acked.", lambda f: f.durable_end),
    "parity_position": ("Its log was last seen equal to ours up to here.", lambda f: f.parity_position),
    "ring_frames": ("Frames in its ring.", lambda f: f.ring_frames),
    "ring_bytes": ("Bytes in its ring.", lambda f: f.ring_bytes),
    "member": ("1 if it is a member and so counts.", lambda f: f.member),
}
FOLLOWER_COUNTERS: dict[str, tuple[str, OfFollower]] = {
    "ring_drops": ("Times that its ring overflowed and it went on from disk.", lambda f: f.ring_drops),
    "sent_bytes": ("Bytes sent to it.", lambda f: f.sent_bytes),
    "acks": ("Acks received from it.", lambda f: f.acks),
    "reconnects": ("Sessions begun again.", lambda f: f.reconnects),
    "truncations": ("Times that its log was cut back to where the histories part.", lambda f: f.truncations),
    "parity_mismatches": ("Acks whose checksum was not ours.", lambda f: f.parity_mismatches),
}
LOG_STATS: dict[str, tuple[str, str]] = {  # a field of log.stats → name, meaning
    "commit_s": ("log_commit_seconds", "Spent in commits; divide by groups for the mean commit latency."),
    "segments_rolled": ("log_segments_rolled", "Segments begun."),
    "segments_removed": ("log_segments_removed", "Segments removed by retention."),
    "fetched_bytes": ("log_fetched_bytes", "Bytes of batches read for consumers."),
    "read_bytes": ("log_read_bytes", "Bytes read from files, for fetches and catch-up."),
    "indexes_rebuilt": ("log_indexes_rebuilt", "Indexes that were missing or wrong, and made again."),
    "scrubbed_bytes": ("log_scrubbed_bytes", "Bytes that the scrubber has checked."),
}
LOG_STATS_GAUGES: dict[str, tuple[str, str]] = {
    "commit_last_s": ("log_commit_last_seconds", "How long the last commit took."),
    "commit_longest_s": ("log_commit_longest_seconds", "The longest commit since the start."),
    "group_bytes": ("log_group_bytes", "Bytes in the last group."),
    "group_frames": ("log_group_frames", "Frames in the last group."),
}
LOG_HISTOGRAMS: dict[str, tuple[str, str]] = {
    "commit_seconds": ("wal_commit_seconds", "From handing a group to the disk to its fdatasync's end."),
    "committed_bytes": ("wal_group_bytes", "Bytes that one fdatasync made durable."),
}


def render(house: House) -> bytes:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Standing(house))
    return generate_latest(registry)


class _Standing(Collector):
    def __init__(self, house: House) -> None:
        self._house = house

    def collect(self) -> Iterator[Metric]:
        status = self._house.status()
        yield from _node(status)
        yield from _log(self._house.log.stats)
        yield from _followers(status)
        for name, meter in METERS.items():
            made: Any = CounterMetricFamily if meter.kind == "counter" else GaugeMetricFamily
            family = made(f"chronik_{name}", meter.meaning, labels=meter.labels)
            for labels, value in sorted(self._house.meters.values[name].items()):
                family.add_metric(labels, value)
            yield family


def _node(status: Status) -> Iterator[Metric]:
    names = ("version", "cluster_id", "node_id", "mode")
    about = GaugeMetricFamily("chronik_info", "What this is.", labels=names)
    about.add_metric([status.version, status.cluster_id, str(status.node_id), status.mode], 1)
    yield about
    role = GaugeMetricFamily("chronik_role", "1 for the role that it plays now.", labels=("role",))
    for name in get_args(Role):
        role.add_metric([name], name == status.role)
    yield role
    for name, (meaning, of) in NODE_GAUGES.items():
        yield GaugeMetricFamily(f"chronik_{name}", meaning, value=of(status))
    for name, (meaning, of) in NODE_COUNTERS.items():
        yield CounterMetricFamily(f"chronik_{name}", meaning, value=of(status))


def _log(stats: object) -> Iterator[Metric]:
    for field, (name, meaning) in LOG_STATS.items():
        yield CounterMetricFamily(f"chronik_{name}", meaning, value=getattr(stats, field))
    for field, (name, meaning) in LOG_STATS_GAUGES.items():
        yield GaugeMetricFamily(f"chronik_{name}", meaning, value=getattr(stats, field))
    for field, (name, meaning) in LOG_HISTOGRAMS.items():
        histogram: Histogram = getattr(stats, field)
        bounds = map(floatToGoString, (*histogram.bounds, math.inf))
        buckets = list(zip(bounds, accumulate(histogram.counts), strict=True))
        yield HistogramMetricFamily(f"chronik_{name}", meaning, buckets=buckets, sum_value=histogram.sum)


def _followers(status: Status) -> Iterator[Metric]:
    state = GaugeMetricFamily(
        "chronik_replication_state", "1 for the state that the follower is in.", labels=("follower", "state")
    )
    for follower in status.followers:
        for name in get_args(FollowerState):
            state.add_metric([name_of(follower), name], name == follower.state)
    yield state
    for table, made in ((FOLLOWER_GAUGES, GaugeMetricFamily), (FOLLOWER_COUNTERS, CounterMetricFamily)):
        for name, (meaning, of) in table.items():
            family: Any = made(f"chronik_replication_{name}", meaning, labels=("follower",))
            for follower in status.followers:
                family.add_metric([name_of(follower)], of(follower))
            yield family
