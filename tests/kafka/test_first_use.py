"""Topics by name and by id, in every version; and what a follower does for clients that stay with it."""

from __future__ import annotations

from pathlib import Path

import trio

from chronik_repl.kafka import codec
from chronik_repl.kafka.codes import Code
from tests.kafka.client import connect
from tests.kafka.house import open_door

DEADLINE_S = 30.0


async def test_a_topic_has_the_same_id_everywhere_and_is_found_by_it(tmp_path: Path) -> None:
    with trio.fail_after(DEADLINE_S):
        async with open_door(tmp_path) as (_, address), connect(address) as client:
            await client.make_topic("t", 3)
            found = {}
            for version in range(13):
                (topic,) = (await client.metadata("t", version=version)).topics
                assert (topic.error_code, topic.name, len(topic.partitions)) == (Code.NONE, "t", 3)
                found[version] = topic.topic_id
            assert found[10] == found[11] == found[12]
            assert found[12].int
            request = codec.MetadataRequest
            asked = request(
                topics=[request.MetadataRequestTopic(topic_id=found[12], name=None)], allow_auto_topic_creation=False
            )
            (topic,) = (await client.ask(asked, 12)).topics
            assert (topic.name, len(topic.partitions)) == ("t", 3)


async def test_a_follower_asks_its_leader_for_a_topic_that_is_used_for_the_first_time(tmp_path: Path) -> None:
    with trio.fail_after(DEADLINE_S):
        async with open_door(tmp_path) as (house, address), connect(address) as client:
            house.role = "follower"
            with house.held():
                (topic,) = (await client.metadata("t", create=False)).topics
                assert topic.error_code == Code.UNKNOWN_TOPIC_OR_PARTITION
                await client.send(codec.MetadataRequest(
                    topics=[codec.MetadataRequest.MetadataRequestTopic(name="t")], allow_auto_topic_creation=True
                ), 9)  # fmt: skip
                with trio.move_on_after(0.2):
                    await client.frame()
                    raise AssertionError("named before it was below the high watermark")
            (topic,) = (await client.answer()).topics
            assert (topic.error_code, topic.name) == (Code.NONE, "t")
