"""Topics by name and by id, in every version; and what a follower does for clients that stay with it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import trio

from chronik_repl.kafka import codec, topics
from chronik_repl.kafka.codes import Code
from chronik_repl.positions import Checksum, Epoch, Position
from chronik_repl.standing import Role
from chronik_repl.wal.changes import TopicMade
from chronik_repl.wal.snapshot import split
from chronik_repl.wal.state import State
from tests.kafka.client import connect
from tests.kafka.house import open_door

DEADLINE_S = 30.0


def first_use(topic: str) -> Any:
    named = codec.MetadataRequest.MetadataRequestTopic(name=topic)
    return codec.MetadataRequest(topics=[named], allow_auto_topic_creation=True)


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
                await client.send(first_use("t"), 9)
                with trio.move_on_after(0.2):
                    await client.frame()
                    raise AssertionError("named before it was below the high watermark")
            (topic,) = (await client.answer()).topics
            assert (topic.error_code, topic.name) == (Code.NONE, "t")


@pytest.mark.parametrize("role", ["leader", "follower"])
async def test_whoever_made_a_topic_it_is_named_once_it_is_committed(tmp_path: Path, role: Role) -> None:
    """The leader makes it for a follower's client, behind its own door's back; then a client of its own asks."""
    with trio.fail_after(DEADLINE_S):
        async with open_door(tmp_path) as (house, address), connect(address) as client:
            with house.held():
                house.log.append_change(TopicMade("t", 1))
                house.role = role
                await client.send(first_use("t"), 9)
                with trio.move_on_after(0.2):
                    await client.frame()
                    raise AssertionError("named before it was below the high watermark")
            (topic,) = (await client.answer()).topics
            assert (topic.error_code, topic.name, len(topic.partitions)) == (Code.NONE, "t", 1)


async def test_two_who_use_a_topic_for_the_first_time_make_it_once(tmp_path: Path) -> None:
    with trio.fail_after(DEADLINE_S):
        async with open_door(tmp_path) as (house, address), connect(address) as one, connect(address) as other:
            made: list[int] = []
            house.log.listeners.append(lambda position, frame, records: made.append(position))
            with house.held():
                for client in (one, other):
                    await client.send(first_use("t"), 9)
                while not made:
                    await trio.testing.wait_all_tasks_blocked(0.001)
            for client in (one, other):
                assert (await client.answer()).topics[0].error_code == Code.NONE
            assert len(made) == 1


async def test_first_use_makes_no_more_topics_than_the_cluster_may_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(topics, "ALL_PARTITIONS_MAX", 2)
    with trio.fail_after(DEADLINE_S):
        async with open_door(tmp_path) as (_, address), connect(address) as client:
            told = [(await client.ask(first_use(f"t{n}"), 9)).topics[0].error_code for n in range(4)]
            assert told == [Code.NONE, Code.NONE, Code.INVALID_PARTITIONS, Code.INVALID_PARTITIONS]


def test_a_topic_that_only_a_snapshot_tells_of_was_made_no_later_than_that() -> None:
    whole = State()
    made_at = Position(100)
    whole.fold(TopicMade("t", 1), Position(50), made_at, Epoch(1), Checksum(0))
    assert whole.topics["t"].last_change_end == made_at
    (part,) = split(whole.snapshot())
    anew = State()
    for state in (whole, anew):
        state.fold(part, Position(200), Position(300), Epoch(1), Checksum(0))
    assert whole.topics["t"].last_change_end == made_at
    assert anew.topics["t"].last_change_end == 300
