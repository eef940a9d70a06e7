"""Committed offsets as Kafka's messages: commit, fetch, delete.

A commit is one small frame, answered once it is below the high watermark. A fetch tells what the log's state holds, and
waits until the last commit in it is below the high watermark: what was told is never taken back.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import Any

from chronik_repl.kafka.codec import OffsetCommitResponse, OffsetDeleteResponse, OffsetFetchResponse
from chronik_repl.kafka.codes import Code
from chronik_repl.kafka.context import Api, Context
from chronik_repl.kafka.groups import Group
from chronik_repl.wal.changes import CommittedOffset
from chronik_repl.wal.state import GroupState

METADATA_BYTES_MAX = 4096
GROUPS_SINCE = 8  # OffsetFetch: many groups in one request
NO_OFFSET = -1


async def offset_commit(context: Context, version: int, request: Any) -> Any:
    state = context.house.log.state
    good: list[CommittedOffset] = []
    codes: dict[tuple[str, int], Code] = {}
    for topic in request.topics:
        for entry in topic.partitions:
            metadata = entry.committed_metadata or ""
            key = (topic.name, entry.partition_index)
            if state.find(*key) is None:
                codes[key] = Code.UNKNOWN_TOPIC_OR_PARTITION
            elif len(metadata.encode()) > METADATA_BYTES_MAX:
                codes[key] = Code.OFFSET_METADATA_TOO_LARGE
            else:
                offset = max(entry.committed_offset, NO_OFFSET)
                good.append(CommittedOffset(*key, offset, entry.committed_leader_epoch, metadata))
    code = await context.door.coordinator.commit(
        request.group_id,
        request.member_id,
        request.group_instance_id or "",
        request.generation_id_or_member_epoch,
        tuple(good),
    )
    return OffsetCommitResponse(
        topics=[
            OffsetCommitResponse.OffsetCommitResponseTopic(
                name=topic.name,
                partitions=[
                    OffsetCommitResponse.OffsetCommitResponseTopic.OffsetCommitResponsePartition(
                        partition_index=entry.partition_index,
                        error_code=code or codes.get((topic.name, entry.partition_index), Code.NONE),
                    )
                    for entry in topic.partitions
                ],
            )
            for topic in request.topics
        ]
    )


async def offset_fetch(context: Context, version: int, request: Any) -> Any:
    if version >= GROUPS_SINCE:
        groups = []
        every = {asked.group_id: asked.topics for asked in request.groups}
        offsets = [(name, *await _offsets(context, name, topics)) for name, topics in every.items()]
        await context.room()
        for name, code, found in offsets:
            group = OffsetFetchResponse.OffsetFetchResponseGroup
            topic = group.OffsetFetchResponseTopics
            groups.append(
                group(
                    group_id=name,
                    error_code=code,
                    topics=_topics(found, topic, topic.OffsetFetchResponsePartitions, Code.NONE),
                )
            )
        return OffsetFetchResponse(groups=groups)
    code, found = await _offsets(context, request.group_id, request.topics)
    await context.room()
    topic = OffsetFetchResponse.OffsetFetchResponseTopic
    in_partitions = code if version < 2 else Code.NONE  # before version 2 there is no other place for it
    if code is not Code.NONE:
        found = [(asked.name, [(index, None) for index in asked.partition_indexes]) for asked in request.topics or ()]
    return OffsetFetchResponse(
        error_code=code, topics=_topics(found, topic, topic.OffsetFetchResponsePartition, in_partitions)
    )


_Found = list[tuple[str, list[tuple[int, Any]]]]  # topic, (partition, GroupOffset or None)


async def _offsets(context: Context, name: str, asked: Iterable[Any] | None) -> tuple[Code, _Found]:
    coordinator = context.door.coordinator
    code = await coordinator.ready() if name else Code.INVALID_GROUP_ID
    if code is Code.NONE:
        code = await coordinator.committed(coordinator.last_change_end(name))
    if code is not Code.NONE:
        return code, []
    known: GroupState | None = context.house.log.state.groups.get(name)
    offsets = {} if known is None else known.offsets
    if asked is not None:
        return Code.NONE, [
            (name, [(index, offsets.get((name, index))) for index in indexes])
            for name, indexes in {topic.name: dict.fromkeys(topic.partition_indexes) for topic in asked}.items()
        ]
    by_topic: dict[str, list[tuple[int, Any]]] = {}
    for (topic_name, index), offset in sorted(offsets.items()):
        by_topic.setdefault(topic_name, []).append((index, offset))
    return Code.NONE, list(by_topic.items())


def _topics(found: _Found, topic: Any, partition: Any, code: Code) -> list[Any]:
    return [
        topic(
            name=name,
            partitions=[
                partition(
                    partition_index=index,
                    committed_offset=NO_OFFSET if offset is None else offset.offset,
                    committed_leader_epoch=-1 if offset is None else offset.leader_epoch,
                    metadata="" if offset is None else offset.metadata,
                    error_code=code,
                )
                for index, offset in partitions
            ],
        )
        for name, partitions in found
    ]


async def offset_delete(context: Context, version: int, request: Any) -> Any:
    """Offsets of topics that a living member subscribes to stay."""
    coordinator = context.door.coordinator
    name = request.group_id
    code = await coordinator.ready() if name else Code.INVALID_GROUP_ID
    group = coordinator.find(name) if code is Code.NONE else None
    if code is Code.NONE and (group is None or name not in context.house.log.state.groups):
        code = Code.GROUP_ID_NOT_FOUND
    if code is not Code.NONE or group is None:
        return OffsetDeleteResponse(error_code=code, topics=[])
    subscribed = _subscribed(group)
    if subscribed is None:
        return OffsetDeleteResponse(error_code=Code.NON_EMPTY_GROUP, topics=[])
    gone = tuple(
        CommittedOffset(topic.name, entry.partition_index, NO_OFFSET)
        for topic in request.topics
        if topic.name not in subscribed
        for entry in topic.partitions
    )
    code = await coordinator.forget_offsets(name, gone)
    topic_response = OffsetDeleteResponse.OffsetDeleteResponseTopic
    return OffsetDeleteResponse(
        error_code=code,
        topics=[
            topic_response(
                name=topic.name,
                partitions=[
                    topic_response.OffsetDeleteResponsePartition(
                        partition_index=entry.partition_index,
                        error_code=Code.GROUP_SUBSCRIBED_TO_TOPIC if topic.name in subscribed else Code.NONE,
                    )
                    for entry in topic.partitions
                ],
            )
            for topic in request.topics
        ],
    )


def _subscribed(group: Group) -> set[str] | None:
    """The topics that members subscribe to. None if there are members whose metadata only they understand."""
    topics: set[str] = set()
    for member in group.members.values():
        if group.protocol_type != "consumer":
            return None
        for _, metadata in member.protocols:
            names = subscription_topics(metadata)
            if names is None:
                return None
            topics |= names
    return topics


def subscription_topics(metadata: bytes) -> set[str] | None:
    """Of a consumer's metadata: i16 version, i32 count, each an i16 length and a name. None if it is not that."""
    topics = set()
    try:
        (count,) = struct.unpack_from(">i", metadata, 2)
        at = 6
        for _ in range(count):
            (size,) = struct.unpack_from(">h", metadata, at)
            at += 2 + size
            if size < 0 or at > len(metadata):
                return None
            topics.add(metadata[at - size : at].decode())
    except (struct.error, UnicodeDecodeError):
        return None
    return topics


APIS = (
    Api(8, 0, 9, offset_commit),
    Api(9, 0, 9, offset_fetch),
    Api(47, 0, 0, offset_delete),
)
