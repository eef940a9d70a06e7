"""Topics, metadata, offsets: what clients ask before and beside the data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import trio

from chronik_repl.kafka import codec
from chronik_repl.kafka.codes import Code

from .client import KafkaClient, batch, connect, values_of
from .house import open_door


async def delete_topic(client: KafkaClient, name: str) -> int:
    request = codec.DeleteTopicsRequest(topic_names=[name], timeout_ms=5_000)
    return int((await client.ask(request, 5)).responses[0].error_code)


async def grow(client: KafkaClient, name: str, count: int) -> int:
    topic = codec.CreatePartitionsRequest.CreatePartitionsTopic(name=name, count=count, assignments=None)
    request = codec.CreatePartitionsRequest(topics=[topic], timeout_ms=5_000, validate_only=False)
    return int((await client.ask(request, 3)).results[0].error_code)


async def test_a_topic_is_made_on_first_use(tmp_path: Path) -> None:
    async with open_door(tmp_path, default_partitions=3) as (house, address), connect(address) as client:
        (topic,) = (await client.metadata("t", create=False)).topics
        assert topic.error_code == Code.UNKNOWN_TOPIC_OR_PARTITION
        for version in range(1, 10):
            (topic,) = (await client.metadata("t", version=version)).topics
            assert (topic.error_code, len(topic.partitions)) == (0, 3)
            assert {p.leader_id for p in topic.partitions} == {1}
            if version >= 7:
                assert {p.leader_epoch for p in topic.partitions} == {house.epoch}
        assert [t.name for t in (await client.metadata()).topics] == ["t"]
        for name in ("", ".", "..", "a/b", "ä", "x" * 250, "a b", "../../etc/passwd"):
            (topic,) = (await client.metadata(name)).topics
            assert topic.error_code == Code.INVALID_TOPIC_EXCEPTION, name


async def test_topics_are_not_made_where_that_is_off(tmp_path: Path) -> None:
    async with open_door(tmp_path, auto_create_topics=False) as (house, address), connect(address) as client:
        assert (await client.metadata("t")).topics[0].error_code == Code.UNKNOWN_TOPIC_OR_PARTITION
        assert not house.log.state.topics


async def test_a_new_topic_is_named_once_it_is_committed(tmp_path: Path) -> None:
    async with open_door(tmp_path) as (house, address), connect(address) as client, connect(address) as other:
        with house.held():
            await client.send(codec.MetadataRequest(topics=[_named("t")], allow_auto_topic_creation=True), 9)
            while "t" not in house.log.state.topics:
                await trio.testing.wait_all_tasks_blocked(0.001)
            await other.send(codec.MetadataRequest(topics=[_named("t")], allow_auto_topic_creation=True), 9)
            for each in (client, other):
                with trio.move_on_after(0.1) as scope:
                    await each.frame()
                assert scope.cancelled_caught
        for each in (client, other):
            assert (await each.answer()).topics[0].error_code == 0


def _named(name: str) -> Any:
    return codec.MetadataRequest.MetadataRequestTopic(name=name)


async def test_create_topics_says_what_is_wrong(tmp_path: Path) -> None:
    async with open_door(tmp_path) as (house, address), connect(address) as client:
        assert await client.make_topic("t", 4) == 0
        assert await client.make_topic("t") == Code.TOPIC_ALREADY_EXISTS
        assert await client.make_topic("a/b") == Code.INVALID_TOPIC_EXCEPTION
        assert await client.make_topic("n", 0) == Code.INVALID_PARTITIONS
        assert await client.make_topic("n", 10_001) == Code.INVALID_PARTITIONS
        for key, value in (
            ("cleanup.policy", "compact"),
            ("cleanup.policy", "compact,delete"),
            ("retention.ms", "1000"),
            ("retention.bytes", "1000"),
            ("no.such.config", "1"),
        ):
            assert await client.make_topic("n", 1, [(key, value)]) == Code.INVALID_CONFIG, key
        assert await client.make_topic("n", -1, [("cleanup.policy", "delete")]) == 0
        assert sorted(house.log.state.topics) == ["n", "t"]
        house.accepting = False
        assert await client.make_topic("m") == Code.NOT_CONTROLLER


async def test_a_topic_made_again_continues_at_its_old_next_offset(tmp_path: Path) -> None:
    async with open_door(tmp_path) as (_, address), connect(address) as client:
        await client.make_topic("t")
        await client.produce("t", batch(b"0", b"1"))
        assert await delete_topic(client, "t") == 0
        assert await delete_topic(client, "t") == Code.UNKNOWN_TOPIC_OR_PARTITION
        assert (await client.produce("t", batch(b"2"))).error_code == Code.UNKNOWN_TOPIC_OR_PARTITION
        assert await client.make_topic("t") == 0
        done = await client.produce("t", batch(b"2"))
        assert (done.error_code, done.base_offset) == (0, 2)
        assert (await client.list_offset("t", -2)).offset == 2
        assert (await client.fetch("t", 0)).error_code == Code.OFFSET_OUT_OF_RANGE
        assert values_of((await client.fetch("t", 2)).records) == [b"2"]


async def test_partitions_only_grow(tmp_path: Path) -> None:
    async with open_door(tmp_path) as (_, address), connect(address) as client:
        await client.make_topic("t", 2)
        assert await grow(client, "t", 5) == 0
        assert await grow(client, "t", 5) == Code.INVALID_PARTITIONS
        assert await grow(client, "none", 5) == Code.UNKNOWN_TOPIC_OR_PARTITION
        assert len((await client.metadata("t")).topics[0].partitions) == 5
        assert (await client.produce("t", batch(b"0"), partition=4)).error_code == 0


async def test_list_offsets(tmp_path: Path) -> None:
    async with open_door(tmp_path) as (house, address), connect(address) as client:
        await client.make_topic("t")
        for time_ms in (1_000, 2_000, 3_000):
            await client.produce("t", batch(b"0", b"1", timestamp_ms=time_ms))
        for version in range(1, 7):
            assert (await client.list_offset("t", -2, version=version)).offset == 0
            assert (await client.list_offset("t", -1, version=version)).offset == 6
            found = await client.list_offset("t", 1_500, version=version)
            assert (found.offset, found.timestamp) == (2, 2_000)
            assert (await client.list_offset("t", 9_000, version=version)).offset == -1
        assert (await client.list_offset("none", -1)).error_code == Code.UNKNOWN_TOPIC_OR_PARTITION
        house.holding = True
        await house.lead()  # its start frame is not committed yet
        assert (await client.list_offset("t", -1)).error_code == Code.OFFSET_NOT_AVAILABLE
        assert (await client.list_offset("t", -2)).offset == 0
        house.log.commit_to(house.log.durable.value)
        assert (await client.list_offset("t", -1)).offset == 6


async def test_where_an_epoch_ended(tmp_path: Path) -> None:
    async with open_door(tmp_path) as (house, address), connect(address) as client:
        await client.make_topic("t")
        ends = {}
        for _ in range(4):
            for _ in range(3):
                await client.produce("t", batch(b"0", b"1"))
            ends[house.epoch] = (house.epoch, house.log.end_offset("t", 0))
            if house.epoch == 2:  # an epoch without a record in this partition
                await house.lead()
                ends[house.epoch] = ends[house.epoch - 1]
            await house.lead()
        ends[house.epoch] = (house.epoch, house.log.end_offset("t", 0))
        topic_of = codec.OffsetForLeaderEpochRequest.OffsetForLeaderTopic
        for version in (2, 3, 4):
            for epoch, expected in {**ends, 99: (-1, -1), 0: (-1, -1)}.items():
                partition = topic_of.OffsetForLeaderPartition(partition=0, current_leader_epoch=-1, leader_epoch=epoch)
                request = codec.OffsetForLeaderEpochRequest(
                    replica_id=-1, topics=[topic_of(topic="t", partitions=[partition])]
                )
                (found,) = (await client.ask(request, version)).topics[0].partitions
                assert (found.error_code, found.leader_epoch, found.end_offset) == (0, *expected), epoch


async def test_configs_and_cluster(tmp_path: Path) -> None:
    async with open_door(tmp_path) as (house, address), connect(address) as client:
        await client.make_topic("t")
        resource_of = codec.DescribeConfigsRequest.DescribeConfigsResource
        for version in range(1, 5):
            request = codec.DescribeConfigsRequest(
                resources=[
                    resource_of(resource_type=2, resource_name="t", configuration_keys=None),
                    resource_of(resource_type=2, resource_name="t", configuration_keys=["cleanup.policy"]),
                    resource_of(resource_type=2, resource_name="none", configuration_keys=None),
                    resource_of(resource_type=4, resource_name="1", configuration_keys=None),
                    resource_of(resource_type=8, resource_name="x", configuration_keys=None),
                    resource_of(resource_type=4, resource_name="2", configuration_keys=None),
                    resource_of(resource_type=2, resource_name="t", configuration_keys=None),  # again: answered once
                ],
                include_synonyms=False,
                include_documentation=False,
            )
            results = (await client.ask(request, version)).results
            assert [r.error_code for r in results] == [0, 0, 3, 0, 42, 42]
            assert [(c.name, c.value) for c in results[1].configs] == [("cleanup.policy", "delete")]
            assert {c.name for c in results[3].configs} >= {"broker.id", "num.partitions"}
        for version in (0, 1):
            request = codec.DescribeClusterRequest(include_cluster_authorized_operations=False, endpoint_type=1)
            answer = await client.ask(request, version)
            assert (answer.cluster_id, answer.controller_id) == (house.cluster_id, 1)
            assert [(b.broker_id, f"{b.host}:{b.port}") for b in answer.brokers] == [(1, address)]
