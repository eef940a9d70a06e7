"""ListOffsets and OffsetForLeaderEpoch: where a partition begins, ends, was at a time; where an epoch ended in it."""

from __future__ import annotations

from typing import Any

from chronik_repl.errors import ChronikError, CorruptLog, DiskFailed, OutOfRange
from chronik_repl.kafka.batch import HEAD
from chronik_repl.kafka.codec import ApiKey, ListOffsetsResponse, OffsetForLeaderEpochResponse
from chronik_repl.kafka.codes import Code
from chronik_repl.kafka.context import Api, Context
from chronik_repl.positions import Offset
from chronik_repl.standing import House
from chronik_repl.wal.log import Log
from chronik_repl.wal.state import PartitionState

LATEST, EARLIEST = -1, -2
NOWHERE = -1
LEADER_EPOCH_AT = 12  # in a batch's head


def epoch_committed(house: House) -> bool:
    """Whether this leadership's start frame is below the high watermark: before that, its end may still move back."""
    history = house.log.state.history
    return house.role != "leader" or (bool(history) and house.log.committed.value > history[-1].start)


def _refusal(house: House, partition: PartitionState | None, epoch: int) -> Code:
    if partition is None:
        return Code.UNKNOWN_TOPIC_OR_PARTITION
    if not house.serving:
        return Code.NOT_LEADER_OR_FOLLOWER
    if epoch >= 0 and epoch != house.epoch:
        return Code.FENCED_LEADER_EPOCH if epoch < house.epoch else Code.UNKNOWN_LEADER_EPOCH
    return Code.NONE


async def list_offsets(context: Context, version: int, request: Any) -> Any:
    house = context.house
    topic_of = ListOffsetsResponse.ListOffsetsTopicResponse
    topics = []
    for topic in request.topics:
        partitions = []
        for asked in topic.partitions:
            index = asked.partition_index
            partition = house.log.state.find(topic.name, index)
            code = _refusal(house, partition, asked.current_leader_epoch if version >= 4 else -1)
            offset, timestamp = NOWHERE, -1
            if code is Code.NONE and partition is not None:
                code, offset, timestamp = await _offset(house, partition, asked.timestamp)
            partitions.append(
                topic_of.ListOffsetsPartitionResponse(
                    partition_index=index,
                    error_code=code,
                    timestamp=timestamp,
                    offset=offset,
                    leader_epoch=house.epoch if offset >= 0 else -1,
                )
            )
        topics.append(topic_of(name=topic.name, partitions=partitions))
    return ListOffsetsResponse(throttle_time_ms=0, topics=topics)


async def _offset(house: House, partition: PartitionState, timestamp_ms: int) -> tuple[Code, int, int]:
    if timestamp_ms == EARLIEST:
        return Code.NONE, partition.start_offset, -1
    if timestamp_ms == LATEST:
        if not epoch_committed(house):
            return Code.OFFSET_NOT_AVAILABLE, NOWHERE, -1
        return Code.NONE, partition.committed_offset, -1
    if timestamp_ms < 0:
        return Code.INVALID_REQUEST, NOWHERE, -1
    try:
        found = await house.log.offset_for_time(partition.topic, partition.partition, timestamp_ms)
    except OutOfRange:
        return Code.UNKNOWN_TOPIC_OR_PARTITION, NOWHERE, -1
    except CorruptLog:
        return Code.KAFKA_STORAGE_ERROR, NOWHERE, -1
    return (Code.NONE, NOWHERE, -1) if found is None else (Code.NONE, found[0], found[1])


async def offset_for_leader_epoch(context: Context, version: int, request: Any) -> Any:
    house = context.house
    topics = []
    for topic in request.topics:
        partitions = []
        for asked in topic.partitions:
            partition = house.log.state.find(topic.topic, asked.partition)
            code = _refusal(house, partition, asked.current_leader_epoch)
            epoch, end = -1, NOWHERE
            if code is Code.NONE and house.role != "leader":
                code = Code.NOT_LEADER_OR_FOLLOWER
            elif code is Code.NONE and not epoch_committed(house):
                # A high watermark that is still behind would look like a log that was cut there: a consumer that has
                # read further would go back to it and read twice.
                code = Code.OFFSET_NOT_AVAILABLE
            if code is Code.NONE and partition is not None:
                try:
                    epoch, end = await epoch_end(house.log, partition, asked.leader_epoch, house.epoch)
                except DiskFailed:
                    raise
                except ChronikError:
                    code = Code.KAFKA_STORAGE_ERROR
            partitions.append(
                OffsetForLeaderEpochResponse.OffsetForLeaderTopicResult.EpochEndOffset(
                    error_code=code, partition=asked.partition, leader_epoch=epoch, end_offset=end
                )
            )
        topics.append(OffsetForLeaderEpochResponse.OffsetForLeaderTopicResult(topic=topic.topic, partitions=partitions))
    return OffsetForLeaderEpochResponse(throttle_time_ms=0, topics=topics)


async def epoch_end(log: Log, partition: PartitionState, epoch: int, current: int) -> tuple[int, int]:
    """The last epoch that is not after `epoch` and wrote here, and the offset where it ended. (-1, -1): none is known.

    Batches carry the epoch that wrote them, and epochs only grow: a binary search over the offsets finds the border."""
    if epoch > current or epoch < 0:
        return -1, NOWHERE
    high = partition.committed_offset
    if epoch == current:
        return epoch, high
    low, beyond, last = partition.start_offset, high, -1
    while low < beyond:
        middle = (low + beyond) // 2
        fetched = await log.fetch(partition.topic, partition.partition, Offset(middle), 1)
        if not fetched.batches:
            beyond = Offset(middle)
            continue
        head = HEAD.unpack_from(fetched.batches[0], 0)
        base, wrote, count = head[0], head[2], head[6] + 1
        if wrote <= epoch:
            low, last = Offset(base + count), wrote
        else:
            beyond = Offset(base)
    return (last, low) if last >= 0 else (-1, NOWHERE)


APIS = (
    Api(ApiKey.ListOffsets, 1, 6, list_offsets),
    Api(ApiKey.OffsetForLeaderEpoch, 2, 4, offset_for_leader_epoch),
)
