"""What the state is made of: topics, partitions, producers, groups, epochs. Changed only by the fold (state.py)."""

from __future__ import annotations

from typing import NamedTuple

from chronik_repl.positions import ORIGIN, Offset, Position
from chronik_repl.wal.changes import GroupMember
from chronik_repl.wal.frame import topic_prefix

PRODUCER_BATCHES = 5  # as many as a producer may have in flight
SEQUENCE_MODULUS = 1 << 31


class ProducedBatch(NamedTuple):
    base_sequence: int
    last_sequence: int
    base_offset: Offset
    end_position: Position  # of its frame: a duplicate is as durable as this


class ProducerState:
    """What one producer wrote last into one partition."""

    __slots__ = ("batches", "epoch", "timestamp_ms")

    def __init__(self, epoch: int, timestamp_ms: int, batches: list[ProducedBatch]) -> None:
        self.epoch = epoch
        self.timestamp_ms = timestamp_ms
        self.batches = batches  # oldest first, at most PRODUCER_BATCHES


class PartitionState:
    __slots__ = ("committed_offset", "next_offset", "partition", "producers", "start_offset", "topic")

    def __init__(self, topic: str, partition: int) -> None:
        self.topic = topic
        self.partition = partition
        self.start_offset = Offset(0)
        self.next_offset = Offset(0)
        self.committed_offset = Offset(0)
        self.producers: dict[int, ProducerState] = {}

    def produced(
        self, producer_id: int, epoch: int, base_sequence: int, batch: tuple[Offset, Position, int], timestamp_ms: int
    ) -> None:
        """Remember an idempotent producer's batch: (base offset, end position, record count)."""
        base_offset, end_position, record_count = batch
        entry = ProducedBatch(
            base_sequence, (base_sequence + record_count - 1) % SEQUENCE_MODULUS, base_offset, end_position
        )
        producer = self.producers.get(producer_id)
        if producer is None or producer.epoch != epoch:
            self.producers[producer_id] = ProducerState(epoch, timestamp_ms, [entry])
            return
        producer.timestamp_ms = timestamp_ms
        producer.batches.append(entry)
        if len(producer.batches) > PRODUCER_BATCHES:
            del producer.batches[0]


# A batch above the high watermark: once that passes the first, the partition's committed offset is the last. A plain
# tuple, for there is one a batch on the hot path.
Pending = tuple[Position, PartitionState, Offset]


class TopicState:
    __slots__ = ("configs", "last_change_end", "name", "partitions", "prefix", "removed", "retired")

    def __init__(self, name: str) -> None:
        self.name = name
        self.prefix = topic_prefix(name)
        self.last_change_end = ORIGIN  # answers about this topic wait until this is committed
        self.partitions: list[PartitionState] = []
        self.retired: list[PartitionState] = []  # of a removed topic: their next offsets are never used again
        self.configs: dict[str, str] = {}
        self.removed = False

    def grow(self, partitions: int) -> None:
        """At least so many partitions; retired ones come back, empty, at their old next offset."""
        while len(self.partitions) < partitions:
            if self.retired:
                partition = self.retired.pop(0)
                partition.start_offset = partition.committed_offset = partition.next_offset
                partition.producers = {}
            else:
                partition = PartitionState(self.name, len(self.partitions))
            self.partitions.append(partition)

    def retire(self) -> None:
        self.removed = True
        self.retired = self.partitions + self.retired
        self.partitions = []


class GroupOffset(NamedTuple):
    offset: Offset
    leader_epoch: int
    metadata: str
    timestamp_ms: int


class GroupState:
    __slots__ = (
        "generation", "group", "last_change_end", "leader", "members", "offsets", "protocol", "protocol_type",
        "timestamp_ms",
    )  # fmt: skip

    def __init__(self, group: str) -> None:
        self.group = group
        self.generation = 0
        self.protocol_type = ""
        self.protocol = ""
        self.leader = ""
        self.members: dict[str, GroupMember] = {}
        self.offsets: dict[tuple[str, int], GroupOffset] = {}
        self.timestamp_ms = 0  # of its last change
        self.last_change_end = ORIGIN  # answers about this group wait until this is committed
