"""What the log says, folded: topics and offsets, producers, groups, epochs, members, sources, the log's start.

Frames come in, in order; the state after them is the same on every node, because it is a pure fold: no clock, no
disk, nothing from outside. The leader folds what it appends, a follower what it receives, recovery what it reads.

A snapshot (snapshot.py) replaces the state wholly, in place: objects that others hold stay the same objects. Only the
leader leaves things out of one (`expire`): producers and groups that were idle for too long, by the log's own time.

Two fields are not part of the fold and are kept by the log: a partition's `committed_offset`, and a `start_offset` that
retention has raised.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator

from chronik_repl.errors import ProtocolError
from chronik_repl.positions import ORIGIN, Checksum, Epoch, NodeId, Offset, Position
from chronik_repl.wal.changes import (
    Change,
    EpochStart,
    GroupChanged,
    GroupMember,
    GroupRemoved,
    HistoryEntry,
    LogStartMoved,
    MembersChanged,
    OffsetsCommitted,
    ProducerIdGiven,
    SnapshotPart,
    SourcePosition,
    TopicMade,
    TopicRemoved,
    decode_change,
)
from chronik_repl.wal.entities import (
    GroupOffset,
    GroupState,
    PartitionState,
    ProducedBatch,
    ProducerState,
    TopicState,
)
from chronik_repl.wal.frame import TOPIC_PATTERN, BadFrame, Frame, Kind
from chronik_repl.wal.snapshot import PART_BYTES, PARTS_MAX, encode_state, replace_state

# A record batch (v2): base offset, length, leader epoch, magic, crc, attributes, last offset delta, base and max
# timestamp, producer id, producer epoch, base sequence, record count.
BATCH = struct.Struct(">qiibIhiqqqhii")
PRODUCER_IDLE_MS = 7 * 24 * 3600 * 1000
GROUP_IDLE_MS = 7 * 24 * 3600 * 1000
PRODUCERS_KEPT = 100_000  # in a snapshot, of all partitions together: those that wrote last
SMALL_GROUP_BYTES = 8 * 1024  # its members: one that is known and no larger may always change
IDS_GIVEN_KEPT = 64
MEMBERSHIPS_KEPT = 8  # two count at once at most; the rest is for those who look back
PARTITIONS_MAX = 100_000  # of one topic
ALL_PARTITIONS_MAX = 200_000  # of all topics: whoever leads makes no more
OFFSET_MAX = (1 << 63) - 1
LOSS_IDS = 1 << 20  # producer ids that a loss which the operator accepted may have taken along


class State:
    def __init__(self) -> None:
        self.topics: dict[str, TopicState] = {}
        self.groups: dict[str, GroupState] = {}
        self.history: list[HistoryEntry] = []
        self.membership: list[tuple[Position, MembersChanged]] = []  # end of the frame, what it says
        self.sources: dict[str, SourcePosition] = {}
        self.next_producer_id = 1
        self.ids_given: dict[str, tuple[ProducerIdGiven, Position]] = {}  # lately, and where; in no snapshot
        self.log_start = ORIGIN
        self.timestamp_ms = 0
        self.topics_raw: dict[bytes, TopicState] = {}  # the same by the bytes that stand in frames
        self._pieces: list[bytes] = []  # of a snapshot that is not whole yet

    def partitions(self) -> Iterator[PartitionState]:
        for topic in self.topics.values():
            yield from topic.partitions

    def find(self, topic: str, partition: int) -> PartitionState | None:
        """None for a topic or partition that is not there (or is removed)."""
        known = self.topics.get(topic)
        if known is None or not 0 <= partition < len(known.partitions):
            return None
        return known.partitions[partition]

    def apply(self, frame: Frame) -> PartitionState | Change:
        """Fold one frame; returns what it touched. Raises BadFrame, with nothing changed, if it cannot stand here."""
        if frame.kind == Kind.DATA:
            return self._apply_batch(frame)
        try:
            change = decode_change(frame.data)
        except ProtocolError as error:
            raise BadFrame(f"at {frame.position}: {error}") from error
        self.check(change, frame.kind)
        if frame.kind == Kind.EPOCH_START and self.history and frame.epoch <= self.history[-1].epoch:
            raise BadFrame(f"epoch {frame.epoch} begins at {frame.position}, after {self.history[-1].epoch}")
        if frame.timestamp_ms > self.timestamp_ms:
            self.timestamp_ms = frame.timestamp_ms
        self.fold(change, frame.position, Position(frame.position + frame.size), frame.epoch, frame.previous)
        return change

    def _apply_batch(self, frame: Frame) -> PartitionState:
        topic = self.topics_raw.get(frame.topic)
        index = frame.partition
        if topic is None or not 0 <= index < len(topic.partitions):
            raise BadFrame(f"data for {frame.topic!r}/{index} at {frame.position}: no such partition")
        partition = topic.partitions[index]
        data = frame.data
        if len(data) < BATCH.size:
            raise BadFrame(f"a batch of {len(data)} bytes at {frame.position}")
        base, length, _, _, _, _, last_delta, _, _, producer_id, producer_epoch, sequence, _ = BATCH.unpack_from(data)
        count = frame.record_count
        if base != frame.base_offset or last_delta + 1 != count or length + 12 != len(data) or count < 1:
            raise BadFrame(f"the frame at {frame.position} and the batch in it disagree")
        if base != partition.next_offset or base > OFFSET_MAX - count:
            raise BadFrame(
                f"offset {base} of {partition.topic}/{index} at {frame.position}; {partition.next_offset} is next"
            )
        timestamp_ms = frame.timestamp_ms
        self._pieces = []
        partition.next_offset = Offset(base + count)
        if producer_id >= 0:
            batch = (base, Position(frame.position + frame.size), count)
            partition.produced(producer_id, producer_epoch, sequence, batch, timestamp_ms)
        if timestamp_ms > self.timestamp_ms:
            self.timestamp_ms = timestamp_ms
        return partition

    def check(self, change: Change, kind: int) -> None:
        """Raises BadFrame where the change does not belong into a frame of this kind, or cannot be folded."""
        if kind_of(change) != kind:
            raise BadFrame(f"{type(change).__name__} in a frame of kind {kind}")
        match change:
            case TopicMade():
                if not TOPIC_PATTERN.match(change.topic):
                    raise BadFrame(f"topic name {change.topic!r}")
                if not 1 <= change.partitions <= PARTITIONS_MAX:
                    raise BadFrame(f"{change.partitions} partitions for {change.topic}")
            case SnapshotPart():
                full = len(change.piece) == PART_BYTES or change.part == change.parts - 1
                if not 0 <= change.part < change.parts <= PARTS_MAX or not full or len(change.piece) > PART_BYTES:
                    raise BadFrame(
                        f"snapshot part {change.part} of {change.parts}, {len(change.piece)} bytes; all but the last "
                        f"have {PART_BYTES}"
                    )

    def fold(self, change: Change, position: Position, end: Position, epoch: Epoch, previous: Checksum) -> None:
        """Apply a checked change whose frame stands from `position` to `end` after a frame with checksum `previous`."""
        if isinstance(change, SnapshotPart):
            self._fold_snapshot(change, end)
            return
        self._pieces = []  # a snapshot that was cut off in the middle never counts
        match change:
            case OffsetsCommitted():
                self._fold_offsets(change, end)
            case GroupChanged():
                group = self._group(change.group, end)
                group.generation, group.leader = change.generation, change.leader
                group.protocol_type, group.protocol = change.protocol_type, change.protocol
                group.members = {member.member_id: member for member in change.members}
            case GroupRemoved():
                self.groups.pop(change.group, None)
            case TopicMade():
                topic = self.topics.get(change.topic)
                if topic is None:
                    topic = self.add_topic(change.topic)
                if topic.removed:
                    topic.removed, topic.configs = False, {}
                if change.configs:
                    topic.configs = dict(change.configs)
                topic.grow(change.partitions)
                topic.last_change_end = end
            case TopicRemoved():
                if change.topic in self.topics:
                    self.topics[change.topic].retire()
                    self.topics[change.topic].last_change_end = end
            case ProducerIdGiven():
                self.next_producer_id = max(self.next_producer_id, change.producer_id + 1)
                if change.asked:
                    self.ids_given[change.asked] = (change, end)
                    if len(self.ids_given) > IDS_GIVEN_KEPT:
                        del self.ids_given[next(iter(self.ids_given))]
            case SourcePosition():
                self.sources[change.source] = change
            case LogStartMoved():
                self.log_start = max(self.log_start, Position(change.start))
            case MembersChanged():
                self.membership = [*self.membership[1 - MEMBERSHIPS_KEPT :], (end, change)]
            case EpochStart():
                self.history.append(HistoryEntry(epoch, NodeId(change.leader), position, previous, change.accept_loss))
                if change.accept_loss:  # ids may have been told that stood in what was lost: none of them again
                    self.next_producer_id += LOSS_IDS

    def _group(self, name: str, end: Position) -> GroupState:
        group = self.groups.get(name)
        if group is None:
            group = self.groups[name] = GroupState(name)
        group.timestamp_ms = self.timestamp_ms
        group.last_change_end = end
        return group

    def _fold_offsets(self, change: OffsetsCommitted, end: Position) -> None:
        group = self._group(change.group, end)
        for committed in change.offsets:
            key = (committed.topic, committed.partition)
            if committed.offset < 0:
                group.offsets.pop(key, None)
            else:
                group.offsets[key] = GroupOffset(
                    Offset(committed.offset), committed.leader_epoch, committed.metadata, self.timestamp_ms
                )

    def _fold_snapshot(self, part: SnapshotPart, end: Position) -> None:
        if part.part == 0:
            self._pieces = []
        elif part.part != len(self._pieces):
            raise BadFrame(f"snapshot part {part.part} after {len(self._pieces)} parts")
        self._pieces.append(part.piece)
        if len(self._pieces) == part.parts:
            pieces, self._pieces = self._pieces, []
            replace_state(self, b"".join(pieces))
            for topic in self.topics.values():
                if topic.last_change_end == ORIGIN:  # when it was made is not known any more; not after this
                    topic.last_change_end = end

    @property
    def blank(self) -> bool:
        """Nothing was ever said but, perhaps, that a log is founded."""
        return not (self.history or self.topics or self.groups or self.membership or self.sources)

    @property
    def snapshot_pending(self) -> bool:
        """The last frames are parts of a snapshot whose end is not there."""
        return bool(self._pieces)

    def add_topic(self, name: str) -> TopicState:
        topic = self.topics[name] = self.topics_raw[name.encode()] = TopicState(name)
        return topic

    def drop_topic(self, name: str) -> None:
        del self.topics[name], self.topics_raw[name.encode()]

    def expire(self, now_ms: int) -> None:
        """The leader, before a snapshot: forget producers and groups that were idle for too long by the log's time, and
        by the time that it is."""
        now_ms = min(now_ms, self.timestamp_ms)
        for partition in self.partitions():
            idle = [k for k, p in partition.producers.items() if now_ms - p.timestamp_ms > PRODUCER_IDLE_MS]
            for producer_id in idle:
                del partition.producers[producer_id]
        if sum(len(partition.producers) for partition in self.partitions()) > PRODUCERS_KEPT:
            times = sorted(p.timestamp_ms for partition in self.partitions() for p in partition.producers.values())
            until_ms = times[-PRODUCERS_KEPT - 1]
            for partition in self.partitions():
                partition.producers = {k: p for k, p in partition.producers.items() if p.timestamp_ms > until_ms}
        for topic in self.topics.values():
            for partition in topic.retired:
                partition.producers = {}  # when it comes back nobody has written to it
        for name, group in list(self.groups.items()):
            if not group.members and now_ms - group.timestamp_ms > GROUP_IDLE_MS:
                del self.groups[name]

    def grows_by(self, change: Change) -> bool:
        """Would a snapshot be larger after it, by what a client chose?"""
        match change:
            case TopicMade():
                return True
            case OffsetsCommitted():
                group = self.groups.get(change.group)
                known = {} if group is None else group.offsets
                return any(
                    committed.offset >= 0
                    and (
                        (old := known.get((committed.topic, committed.partition))) is None
                        or len(committed.metadata) > len(old.metadata)
                    )
                    for committed in change.offsets
                )
            case GroupChanged():
                group, size = self.groups.get(change.group), members_bytes(change.members)
                return group is None or (size > SMALL_GROUP_BYTES and size > members_bytes(group.members.values()))
        return False

    def snapshot(self) -> bytes:
        return encode_state(self)

    @classmethod
    def restore(cls, data: bytes) -> State:
        """Raises BadFrame for anything that is not a snapshot."""
        state = cls()
        replace_state(state, data)
        return state


_KINDS: dict[type, Kind] = {
    EpochStart: Kind.EPOCH_START,
    SnapshotPart: Kind.SEGMENT_START,
    SourcePosition: Kind.SOURCE_POSITION,
}


def members_bytes(members: Iterable[GroupMember]) -> int:
    """About what a snapshot holds of them."""
    return sum(
        200
        + len(member.client_id)
        + len(member.instance_id)
        + len(member.assignment)
        + sum(len(name) + len(metadata) for name, metadata in member.protocols)
        for member in members
    )


def kind_of(change: Change) -> Kind:
    """The frame kind that carries this change."""
    return _KINDS.get(type(change), Kind.STATE_CHANGE)


__all__ = [
    "BATCH",
    "GroupOffset",
    "GroupState",
    "HistoryEntry",
    "PartitionState",
    "ProducedBatch",
    "ProducerState",
    "State",
    "TopicState",
    "kind_of",
]
