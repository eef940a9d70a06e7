"""The state as bytes: what stands in a segment's first frames. This file owns that layout.

msgpack of the rows below, each an array, cut into parts of at most 1 MiB, one frame a part. Only ever append fields,
with defaults. What is read here is untrusted: `replace_state` raises BadFrame, and has changed nothing then.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from chronik_repl.errors import ProtocolError
from chronik_repl.positions import Offset, Position
from chronik_repl.wal.changes import (
    GroupMember,
    HistoryEntry,
    MembersChanged,
    SnapshotPart,
    SourcePosition,
    decode_change,
    encode_change,
)
from chronik_repl.wal.entities import (
    GroupOffset,
    GroupState,
    PartitionState,
    ProducedBatch,
    ProducerState,
)
from chronik_repl.wal.frame import OVERHEAD, TOPIC_PATTERN, BadFrame

if TYPE_CHECKING:
    from chronik_repl.wal.state import State

PART_BYTES = 1024 * 1024  # of every part but the last
PARTS_MAX = 1024


class ProducerRow(msgspec.Struct, frozen=True, array_like=True):
    producer_id: int
    epoch: int
    timestamp_ms: int
    batches: tuple[tuple[int, int, int, int], ...]  # base sequence, last sequence, base offset, end position


class PartitionRow(msgspec.Struct, frozen=True, array_like=True):
    start_offset: int
    next_offset: int
    producers: tuple[ProducerRow, ...] = ()


class TopicRow(msgspec.Struct, frozen=True, array_like=True):
    name: str
    removed: bool
    configs: dict[str, str]
    partitions: tuple[PartitionRow, ...]
    retired: tuple[PartitionRow, ...] = ()


class OffsetRow(msgspec.Struct, frozen=True, array_like=True):
    topic: str
    partition: int
    offset: int
    leader_epoch: int
    metadata: str
    timestamp_ms: int


class GroupRow(msgspec.Struct, frozen=True, array_like=True):
    group: str
    generation: int
    protocol_type: str
    protocol: str
    leader: str
    members: tuple[GroupMember, ...]
    offsets: tuple[OffsetRow, ...]
    timestamp_ms: int
    last_change_end: int


class MembershipRow(msgspec.Struct, frozen=True, array_like=True):
    end: int
    change: MembersChanged


class StateRow(msgspec.Struct, frozen=True, array_like=True):
    format: int
    log_start: int
    timestamp_ms: int
    next_producer_id: int
    history: tuple[HistoryEntry, ...]
    membership: tuple[MembershipRow, ...]
    topics: tuple[TopicRow, ...]
    groups: tuple[GroupRow, ...]
    sources: tuple[SourcePosition, ...]


FORMAT = 1
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(StateRow)


def encode_state(state: State) -> bytes:
    topics = [
        (t.name, t.removed, t.configs, _partition_rows(t.partitions), _partition_rows(t.retired))
        for t in state.topics.values()
    ]
    groups = tuple(
        GroupRow(
            g.group,
            g.generation,
            g.protocol_type,
            g.protocol,
            g.leader,
            tuple(g.members.values()),
            tuple(OffsetRow(topic, partition, *offset) for (topic, partition), offset in g.offsets.items()),
            g.timestamp_ms,
            g.last_change_end,
        )
        for g in state.groups.values()
    )
    return _encoder.encode(
        (
            FORMAT,
            state.log_start,
            state.timestamp_ms,
            state.next_producer_id,
            state.history,
            [MembershipRow(end, change) for end, change in state.membership],
            topics,
            groups,
            list(state.sources.values()),
        )
    )


def _partition_rows(partitions: list[PartitionState]) -> list[tuple[object, ...]]:
    """Plain tuples, for there may be very many; they encode as `PartitionRow` does."""
    return [
        (p.start_offset, p.next_offset, _producer_rows(p)) if p.producers else (p.start_offset, p.next_offset)
        for p in partitions
    ]


def _producer_rows(partition: PartitionState) -> list[ProducerRow]:
    return [ProducerRow(k, v.epoch, v.timestamp_ms, tuple(v.batches)) for k, v in partition.producers.items()]


def replace_state(state: State, data: bytes) -> None:
    """Make `state` what the snapshot says, in place. A partition that stays is the same object with its committed
    offset."""
    try:
        row = _decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadFrame(f"unreadable snapshot: {error}") from error
    if row.format > FORMAT:
        raise BadFrame(f"a snapshot of format {row.format}; this version reads up to {FORMAT}. Upgrade chronik-repl")
    for topic_row in row.topics:
        if not TOPIC_PATTERN.match(topic_row.name):
            raise BadFrame(f"topic name {topic_row.name!r} in a snapshot")
    state.log_start = Position(row.log_start)
    state.timestamp_ms = row.timestamp_ms
    state.next_producer_id = row.next_producer_id
    state.history = list(row.history)
    state.membership = [(Position(r.end), r.change) for r in row.membership]
    state.sources = {source.source: source for source in row.sources}
    _replace_topics(state, row.topics)
    state.groups = {g.group: _group(g) for g in row.groups}


def _replace_topics(state: State, rows: tuple[TopicRow, ...]) -> None:
    for name in state.topics.keys() - {r.name for r in rows}:
        state.drop_topic(name)
    for row in rows:
        topic = state.topics.get(row.name) or state.add_topic(row.name)
        known = topic.partitions + topic.retired
        topic.removed, topic.configs = row.removed, row.configs
        both = []
        for index, partition_row in enumerate(row.partitions + row.retired):
            partition = known[index] if index < len(known) else PartitionState(row.name, index)
            partition.start_offset = Offset(max(partition.start_offset, partition_row.start_offset))
            partition.next_offset = Offset(partition_row.next_offset)
            partition.producers = {p.producer_id: _producer(p) for p in partition_row.producers}
            both.append(partition)
        topic.partitions, topic.retired = both[: len(row.partitions)], both[len(row.partitions) :]


def _producer(row: ProducerRow) -> ProducerState:
    return ProducerState(
        row.epoch, row.timestamp_ms, [ProducedBatch(a, b, Offset(c), Position(d)) for a, b, c, d in row.batches]
    )


def _group(row: GroupRow) -> GroupState:
    group = GroupState(row.group)
    group.generation, group.protocol_type, group.protocol = row.generation, row.protocol_type, row.protocol
    group.leader, group.timestamp_ms = row.leader, row.timestamp_ms
    group.last_change_end = Position(row.last_change_end)
    group.members = {m.member_id: m for m in row.members}
    group.offsets = {
        (o.topic, o.partition): GroupOffset(Offset(o.offset), o.leader_epoch, o.metadata, o.timestamp_ms)
        for o in row.offsets
    }
    return group


def split(snapshot: bytes) -> list[SnapshotPart]:
    """As many parts as it takes, in order."""
    pieces = [snapshot[at : at + PART_BYTES] for at in range(0, len(snapshot), PART_BYTES)]
    return [SnapshotPart(part, len(pieces), piece) for part, piece in enumerate(pieces)]


def last_part_at(parts: int) -> int:
    """How far from the segment's start the last part's frame stands: all parts before it are of full size."""
    full = b"\0" * PART_BYTES
    return sum(OVERHEAD + len(encode_change(SnapshotPart(part, parts, full))) for part in range(parts - 1))


def read_part(data: bytes | memoryview) -> SnapshotPart:
    """Raises BadFrame."""
    try:
        part = decode_change(data)
    except ProtocolError as error:
        raise BadFrame(str(error)) from error
    if not isinstance(part, SnapshotPart) or not 0 <= part.part < part.parts:
        raise BadFrame("a segment's first frame is not a snapshot")
    return part
