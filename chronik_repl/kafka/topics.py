"""Topics: made, grown, removed, described. A change is a frame in the log, answered once below the high watermark.

One log holds all topics, so retention and cleaning are the log's, not a topic's: a config that asks for something else
gets INVALID_CONFIG rather than silence. What a topic may say is what is true of it anyway.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from chronik_repl.errors import ChronikError, DiskFailed
from chronik_repl.kafka.codec import (
    ApiKey,
    CreatePartitionsResponse,
    CreateTopicsResponse,
    DeleteTopicsResponse,
    DescribeConfigsResponse,
)
from chronik_repl.kafka.codes import Code, error_code
from chronik_repl.kafka.context import Api, Context, Door
from chronik_repl.positions import Position
from chronik_repl.wal.changes import TopicMade, TopicRemoved
from chronik_repl.wal.frame import TOPIC_PATTERN
from chronik_repl.wal.state import ALL_PARTITIONS_MAX, TopicState
from chronik_repl.words import count_of

PARTITIONS_A_TOPIC_MAX = 10_000
TIMEOUT_MS_MAX = 120_000
TOPIC, BROKER = 2, 4  # kinds of config resources
DEFAULT_CONFIG, STATIC_BROKER_CONFIG = 5, 4  # where a value comes from
BOOLEAN, STRING, INT, LONG, LIST = 1, 2, 3, 5, 7  # what it is
Asked = TypeVar("Asked")


class Wrong(Exception):
    """What a request asks cannot be: the code and the words for it."""

    def __init__(self, code: Code, message: str) -> None:
        super().__init__(message)
        self.code = code


def make_topic(door: Door, name: str, partitions: int, configs: Mapping[str, str]) -> Position:
    """A new topic, or more partitions for one that is there. Raises what `append_change` does."""
    return door.house.log.append_change(TopicMade(name, partitions, dict(configs))).end


async def topic_committed(door: Door, topic: TopicState, timeout_s: float) -> bool:
    """Whether the topic's last change, whoever made it, is below the high watermark, within the time."""
    return await door.committed(topic.last_change_end, timeout_s)


def true_configs(door: Door) -> dict[str, tuple[str, int]]:
    """What holds for every topic here: value and type."""
    settings = door.settings
    hours = settings.wal_retention_hours
    frame_max = door.house.log.settings.frame_bytes_max
    return {
        "cleanup.policy": ("delete", LIST),
        "compression.type": ("producer", STRING),
        "max.message.bytes": (str(frame_max), INT),
        "message.timestamp.type": ("CreateTime", STRING),
        "min.insync.replicas": (str(1 + door.house.status().sync_replicas), INT),
        "retention.bytes": (str(settings.wal_retention_bytes or -1), LONG),
        "retention.ms": (str(int(hours * 3_600_000) if hours else -1), LONG),
        "segment.bytes": (str(settings.wal_segment_bytes), INT),
        "unclean.leader.election.enable": ("false", BOOLEAN),
    }


def check_topic(door: Door, topic: Any) -> tuple[int, dict[str, str]]:
    """Partitions and configs of a topic that may be made. Raises Wrong."""
    name = topic.name
    check_name(name)
    known = door.house.log.state.topics.get(name)
    if known is not None and known.partitions:
        raise Wrong(Code.TOPIC_ALREADY_EXISTS, f"topic {name} is there already")
    if topic.assignments:
        raise Wrong(Code.INVALID_REPLICA_ASSIGNMENT, "every node holds every partition; nothing can be assigned")
    members = max(1, len(door.house.peers))
    if topic.replication_factor != -1 and not 1 <= topic.replication_factor <= members:
        raise Wrong(
            Code.INVALID_REPLICATION_FACTOR,
            f"replication factor {topic.replication_factor}; the cluster has {count_of(members, 'node')}, each with "
            "all partitions",
        )
    partitions = door.settings.default_partitions if topic.num_partitions == -1 else topic.num_partitions
    check_partitions(door, partitions, partitions)
    allowed = true_configs(door)
    configs = {}
    for config in topic.configs:
        if config.value is None:
            continue
        if config.name not in allowed:
            raise Wrong(Code.INVALID_CONFIG, f"{config.name}: no such config for a topic here")
        if config.value != allowed[config.name][0]:
            raise Wrong(
                Code.INVALID_CONFIG,
                f"{config.name}={config.value}: one log holds all topics, and there it is {allowed[config.name][0]}",
            )
        configs[config.name] = config.value
    return partitions, configs


def check_name(name: str) -> None:
    if not TOPIC_PATTERN.match(name) or name in (".", ".."):
        raise Wrong(Code.INVALID_TOPIC_EXCEPTION, "a topic's name is 1 to 249 of A-Z a-z 0-9 . _ -")


def check_partitions(door: Door, wanted: int, more: int) -> None:
    if not 1 <= wanted <= PARTITIONS_A_TOPIC_MAX:
        raise Wrong(Code.INVALID_PARTITIONS, f"{wanted} partitions; 1 to {PARTITIONS_A_TOPIC_MAX} are allowed")
    if sum(len(topic.partitions) for topic in door.house.log.state.topics.values()) + more > ALL_PARTITIONS_MAX:
        raise Wrong(Code.INVALID_PARTITIONS, f"the cluster would have more than {ALL_PARTITIONS_MAX} partitions")


def _standing(door: Door) -> None:
    if not door.house.accepting:
        raise Wrong(Code.NOT_CONTROLLER, "this node does not lead")
    if not door.house.enough_replicas:
        raise Wrong(Code.NOT_ENOUGH_REPLICAS, "too few followers are alive to commit this")


async def _change(
    door: Door, asked: Sequence[tuple[str, Asked]], change: Callable[[Asked], Position | None], timeout_ms: int
) -> dict[str, Wrong]:
    """Do what is asked for each name, and wait until all of it is committed; whose is not, and why."""
    wrongs: dict[str, Wrong] = {}
    ends: dict[str, Position] = {}
    times = Counter(name for name, _ in asked)
    for name, what in asked:
        try:
            _standing(door)
            if times[name] > 1:
                raise Wrong(Code.INVALID_REQUEST, "named twice in one request")
            end = change(what)
            if end is not None:
                ends[name] = end
        except Wrong as wrong:
            wrongs[name] = wrong
        except DiskFailed:
            raise
        except ChronikError as error:
            wrongs[name] = Wrong(error_code(error), str(error))
    return wrongs | await _settle(door, ends, timeout_ms)


async def _settle(door: Door, ends: dict[str, Position], timeout_ms: int) -> dict[str, Wrong]:
    timeout_s = min(max(timeout_ms, 0), TIMEOUT_MS_MAX) / 1000
    if not ends:
        return {}
    try:
        if await door.committed(max(ends.values()), timeout_s):
            return {}
        wrong = Wrong(Code.REQUEST_TIMED_OUT, "not yet below the high watermark; it may still come")
    except DiskFailed:
        raise
    except ChronikError as error:
        wrong = Wrong(error_code(error), str(error))
    return dict.fromkeys(ends, wrong)


def _told(wrong: Wrong | None) -> dict[str, Any]:
    """The two fields that every answer has."""
    return {"error_code": wrong.code if wrong else 0, "error_message": str(wrong) if wrong else None}


def _known(door: Door, name: str) -> TopicState:
    topic = door.house.log.state.topics.get(name)
    if topic is None or not topic.partitions:
        raise Wrong(Code.UNKNOWN_TOPIC_OR_PARTITION, "no such topic")
    return topic


async def create_topics(context: Context, version: int, request: Any) -> Any:
    door = context.door
    made: dict[str, int] = {}

    def make(topic: Any) -> Position | None:
        partitions, configs = check_topic(door, topic)
        made[topic.name] = partitions
        return None if request.validate_only else make_topic(door, topic.name, partitions, configs)

    wrongs = await _change(door, [(topic.name, topic) for topic in request.topics], make, request.timeout_ms)
    await context.room()
    factor = max(1, len(door.house.peers))
    answers = []
    for name in dict.fromkeys(topic.name for topic in request.topics):
        found = wrongs.get(name)
        answers.append(
            CreateTopicsResponse.CreatableTopicResult(
                name=name,
                **_told(found),
                topic_config_error_code=0,
                num_partitions=-1 if found else made[name],
                replication_factor=-1 if found else factor,
                configs=[
                    CreateTopicsResponse.CreatableTopicResult.CreatableTopicConfigs(
                        name=key, value=value, read_only=True, config_source=DEFAULT_CONFIG, is_sensitive=False
                    )
                    for key, (value, _) in true_configs(door).items()
                ]
                if not found
                else [],
            )
        )
    return CreateTopicsResponse(throttle_time_ms=0, topics=answers)


async def delete_topics(context: Context, version: int, request: Any) -> Any:
    door = context.door
    names = list(dict.fromkeys(request.topic_names))

    def remove(name: str) -> Position:
        _known(door, name)
        return door.house.log.append_change(TopicRemoved(name)).end

    wrongs = await _change(door, [(name, name) for name in names], remove, request.timeout_ms)
    return DeleteTopicsResponse(
        throttle_time_ms=0,
        responses=[DeleteTopicsResponse.DeletableTopicResult(name=name, **_told(wrongs.get(name))) for name in names],
    )


async def create_partitions(context: Context, version: int, request: Any) -> Any:
    door = context.door

    def grow(topic: Any) -> Position | None:
        known = _known(door, topic.name)
        there = len(known.partitions)
        if topic.count <= there:
            raise Wrong(Code.INVALID_PARTITIONS, f"it has {count_of(there, 'partition')}; there can only be more")
        if topic.assignments:
            raise Wrong(Code.INVALID_REPLICA_ASSIGNMENT, "every node holds every partition")
        check_partitions(door, topic.count, topic.count - there)
        return None if request.validate_only else make_topic(door, topic.name, topic.count, known.configs)

    wrongs = await _change(door, [(topic.name, topic) for topic in request.topics], grow, request.timeout_ms)
    return CreatePartitionsResponse(
        throttle_time_ms=0,
        results=[
            CreatePartitionsResponse.CreatePartitionsTopicResult(name=name, **_told(wrongs.get(name)))
            for name in dict.fromkeys(topic.name for topic in request.topics)
        ],
    )


def _once(keys: Sequence[str] | None) -> tuple[str, ...] | None:
    return None if keys is None else tuple(dict.fromkeys(keys))


async def describe_configs(context: Context, version: int, request: Any) -> Any:
    door = context.door
    await context.room()
    results = []
    result_of = DescribeConfigsResponse.DescribeConfigsResult
    topic_configs = true_configs(door)
    asked = ((r.resource_type, r.resource_name, _once(r.configuration_keys)) for r in request.resources)
    for kind, name, wanted in dict.fromkeys(asked):
        code, message, configs = Code.NONE, None, topic_configs
        topic = door.house.log.state.topics.get(name)
        if kind == TOPIC and (topic is None or not topic.partitions):
            code, message, configs = Code.UNKNOWN_TOPIC_OR_PARTITION, "no such topic", {}
        elif kind == BROKER and name in ("", str(door.house.node_id)):
            configs = _broker_configs(door)
        elif kind == BROKER:
            code, message, configs = Code.INVALID_REQUEST, f"this is node {door.house.node_id}: ask that one", {}
        elif kind != TOPIC:
            code, message, configs = Code.INVALID_REQUEST, f"configs of resource type {kind} are not kept here", {}
        results.append(
            result_of(
                error_code=code,
                error_message=message,
                resource_type=kind,
                resource_name=name,
                configs=[
                    result_of.DescribeConfigsResourceResult(
                        name=key,
                        value=value,
                        read_only=True,
                        is_default=True,
                        config_source=STATIC_BROKER_CONFIG if kind == BROKER else DEFAULT_CONFIG,
                        is_sensitive=False,
                        synonyms=[],
                        config_type=config_type,
                        documentation=None,
                    )
                    for key, (value, config_type) in configs.items()
                    if wanted is None or key in wanted
                ],
            )
        )
    return DescribeConfigsResponse(throttle_time_ms=0, results=results)


def _broker_configs(door: Door) -> dict[str, tuple[str, int]]:
    settings, topic = door.settings, true_configs(door)
    return {
        "auto.create.topics.enable": (str(settings.auto_create_topics).lower(), BOOLEAN),
        "broker.id": (str(door.house.node_id), INT),
        "broker.rack": (settings.rack, STRING),
        "default.replication.factor": (str(max(1, len(door.house.peers))), INT),
        "log.retention.bytes": topic["retention.bytes"],
        "log.retention.ms": topic["retention.ms"],
        "log.segment.bytes": topic["segment.bytes"],
        "message.max.bytes": topic["max.message.bytes"],
        "min.insync.replicas": topic["min.insync.replicas"],
        "num.partitions": (str(settings.default_partitions), INT),
    }


APIS = (
    Api(ApiKey.CreateTopics, 2, 6, create_topics),
    Api(ApiKey.DeleteTopics, 1, 5, delete_topics),
    Api(ApiKey.CreatePartitions, 0, 3, create_partitions),
    Api(ApiKey.DescribeConfigs, 1, 4, describe_configs),
)
