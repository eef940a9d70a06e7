"""Metadata, DescribeCluster, ApiVersions: who is here, who leads, what is spoken.

Every node holds every partition, so the answer is one cluster with one leader for all of them: replicas are the
members, those in sync the ones alive. Leader epochs are the log's epochs.

A topic that is asked for and not there is made on first use, and named once it stands below the high watermark. A
follower asks its leader to make it; where that takes too long it says that the leader is not available, which every
client asks again about.
"""

from __future__ import annotations

from typing import Any
from uuid import NAMESPACE_OID, UUID, uuid5

import trio

from chronik_repl.addresses import split_address
from chronik_repl.errors import ChronikError, DiskFailed
from chronik_repl.kafka.codec import (
    ApiKey,
    DescribeClusterResponse,
    MetadataResponse,
)
from chronik_repl.kafka.codes import Code, error_code
from chronik_repl.kafka.context import Api, Context, Door
from chronik_repl.kafka.hot import Leader
from chronik_repl.kafka.topics import Wrong, check_partitions, make_topic, topic_committed
from chronik_repl.standing import Peer
from chronik_repl.wal.frame import TOPIC_PATTERN

AUTO_CREATE_TIMEOUT_S = 10.0
ASKED_TIMEOUT_S = 3.0  # of a follower, for its leader
Broker = tuple[int, str, int, str | None]


def brokers(door: Door) -> list[Broker]:
    """The members that are alive and serve Kafka clients, this node always among them. A follower hears of its leader
    alone, and names all of them: a client that it sends to another node must know where that is."""
    house = door.house
    hears_all = house.role == "leader"
    found: dict[int, Broker] = {}
    leader = house.leader
    for peer in (*house.peers, *(() if leader is None else (leader,))):
        if peer.node_id != house.node_id and (peer.live or peer is leader or not hears_all) and peer.kafka_address:
            host, port = split_address(peer.kafka_address)
            found[peer.node_id] = (peer.node_id, host, port, peer.rack or None)
    host, port = split_address(door.advertised)
    found[house.node_id] = (house.node_id, host, port, door.settings.rack or None)
    return [found[node_id] for node_id in sorted(found)]


def leader_id(door: Door) -> int:
    """-1 while nobody is known to lead."""
    house = door.house
    if house.role == "leader":
        return house.node_id
    leader = house.leader
    return -1 if leader is None or not leader.kafka_address else leader.node_id


def leader_of(door: Door) -> Leader | None:
    """Whom a client that came to the wrong node should ask."""
    peer: Peer | None = door.house.leader
    if peer is None or not peer.kafka_address:
        return None
    host, port = split_address(peer.kafka_address)
    return Leader(peer.node_id, door.house.epoch, host, port, peer.rack or None)


def topic_id(door: Door, name: str) -> UUID:
    """Topics have no ids of their own. A name means the same topic for ever (its offsets go on when it is made again),
    so what is made of the name will do, for clients that want to see one."""
    return uuid5(NAMESPACE_OID, f"{door.house.cluster_id}/{name}")


async def metadata(context: Context, version: int, request: Any) -> Any:
    door = context.door
    everyone = brokers(door)
    alive = [broker[0] for broker in everyone]
    members = sorted({peer.node_id for peer in door.house.peers} | set(alive))
    leader = leader_id(door)
    known = door.house.log.state.topics
    if request.topics is None or (version == 0 and not request.topics):
        names = [name for name, topic in known.items() if topic.partitions]
        codes = dict.fromkeys(names, Code.NONE)
    else:
        by_id = {} if all(asked.name is not None for asked in request.topics) else {topic_id(door, n): n for n in known}
        asked_for = (by_id.get(asked.topic_id, "") if asked.name is None else asked.name for asked in request.topics)
        names = list(dict.fromkeys(asked_for))
        create = version < 4 or request.allow_auto_topic_creation
        codes = {name: await _find(door, name, create=create) for name in names}
    await context.room()
    topics = []
    for name in names:
        code = codes[name]
        partitions = []
        if code is Code.NONE and name in known:
            partitions = [
                MetadataResponse.MetadataResponseTopic.MetadataResponsePartition(
                    error_code=Code.NONE if leader >= 0 else Code.LEADER_NOT_AVAILABLE,
                    partition_index=partition.partition,
                    leader_id=leader,
                    leader_epoch=door.house.epoch,
                    replica_nodes=members,
                    isr_nodes=alive,
                    offline_replicas=[node for node in members if node not in alive],
                )
                for partition in known[name].partitions
            ]
        topics.append(
            MetadataResponse.MetadataResponseTopic(
                error_code=code,
                name=name,
                topic_id=topic_id(door, name) if name in known else None,
                is_internal=False,
                partitions=partitions,
                authorized_operations=None,
            )
        )
    return MetadataResponse(
        throttle_time_ms=0,
        brokers=[
            MetadataResponse.MetadataResponseBroker(node_id=node_id, host=host, port=port, rack=rack)
            for node_id, host, port, rack in everyone
        ],
        cluster_id=door.house.cluster_id,
        controller_id=leader,
        topics=topics,
        authorized_operations=None,
    )


async def _find(door: Door, name: str, *, create: bool) -> Code:
    topic = door.house.log.state.topics.get(name)
    if topic is not None and topic.partitions:
        return Code.NONE if await _committed(door, name) else Code.LEADER_NOT_AVAILABLE
    if not TOPIC_PATTERN.match(name) or name in (".", ".."):
        return Code.INVALID_TOPIC_EXCEPTION
    if not create or not door.settings.auto_create_topics:
        return Code.UNKNOWN_TOPIC_OR_PARTITION
    if door.house.role == "follower":
        return Code.NONE if await _made_by_the_leader(door, name) else Code.LEADER_NOT_AVAILABLE
    if not door.house.accepting or not door.house.enough_replicas:
        return Code.LEADER_NOT_AVAILABLE
    partitions = door.settings.default_partitions
    try:
        check_partitions(door, partitions, partitions)
        make_topic(door, name, partitions, {})
    except Wrong as wrong:
        return wrong.code
    except DiskFailed:
        raise
    except ChronikError as error:
        code = error_code(error)
        return Code.LEADER_NOT_AVAILABLE if code is Code.NOT_LEADER_OR_FOLLOWER else code
    return Code.NONE if await _committed(door, name) else Code.LEADER_NOT_AVAILABLE


async def _made_by_the_leader(door: Door, name: str) -> bool:
    """Some clients ask one and the same node for ever: so it asks the leader, and sees the topic come in the log."""
    log = door.house.log
    door.house.ask_for_topic(name)
    with trio.move_on_after(ASKED_TIMEOUT_S):
        try:
            while name not in log.state.topics or not log.state.topics[name].partitions:
                await log.committed.wait_beyond(log.committed.value)
            await log.committed.wait(log.state.topics[name].last_change_end)
        except DiskFailed:
            raise
        except ChronikError:
            return False
        return True
    return False


async def _committed(door: Door, name: str) -> bool:
    """Whoever made it: this node for a client, the leader for a follower's client, or the leader before this one."""
    try:
        return await topic_committed(door, door.house.log.state.topics[name], AUTO_CREATE_TIMEOUT_S)
    except DiskFailed:
        raise
    except ChronikError:
        return False


async def describe_cluster(context: Context, version: int, request: Any) -> Any:
    door = context.door
    return DescribeClusterResponse(
        throttle_time_ms=0,
        error_code=0,
        error_message=None,
        endpoint_type=1,
        cluster_id=door.house.cluster_id,
        controller_id=leader_id(door),
        brokers=[
            DescribeClusterResponse.DescribeClusterBroker(broker_id=node_id, host=host, port=port, rack=rack)
            for node_id, host, port, rack in brokers(door)
        ],
        authorized_operations=None,
    )


APIS = (
    Api(ApiKey.Metadata, 0, 12, metadata),
    Api(ApiKey.DescribeCluster, 0, 1, describe_cluster),
)
