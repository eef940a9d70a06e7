"""Groups over the real log, through the real door: what is answered when, and what a restart keeps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import trio

from chronik_repl.errors import NotLeader
from chronik_repl.kafka import codec, coordinator
from chronik_repl.kafka.codes import Code
from tests.kafka.client import KafkaClient, connect
from tests.kafka.house import open_door

DEADLINE_S = 30.0
SUBSCRIBED_TO_T = b"\0\0\0\0\0\1\0\1t\xff\xff\xff\xff"


def join(member_id: str = "", *, group: str = "g", instance: str | None = None, session_ms: int = 10_000) -> Any:
    request = codec.JoinGroupRequest
    return request(
        group_id=group,
        session_timeout_ms=session_ms,
        rebalance_timeout_ms=5_000,
        member_id=member_id,
        group_instance_id=instance,
        protocol_type="consumer",
        protocols=[request.JoinGroupRequestProtocol(name="range", metadata=SUBSCRIBED_TO_T)],
        reason=None,
    )


def sync(member_id: str, generation: int, assignments: dict[str, bytes], *, group: str = "g") -> Any:
    request = codec.SyncGroupRequest
    return request(
        group_id=group,
        generation_id=generation,
        member_id=member_id,
        group_instance_id=None,
        protocol_type="consumer",
        protocol_name="range",
        assignments=[
            request.SyncGroupRequestAssignment(member_id=to, assignment=what) for to, what in assignments.items()
        ],
    )


def heartbeat(member_id: str, generation: int, *, group: str = "g") -> Any:
    return codec.HeartbeatRequest(group_id=group, generation_id=generation, member_id=member_id, group_instance_id=None)


def commit(offset: int, *, group: str = "g", member_id: str = "", generation: int = -1, topic: str = "t") -> Any:
    request = codec.OffsetCommitRequest
    topic_of = request.OffsetCommitRequestTopic
    return request(
        group_id=group,
        generation_id_or_member_epoch=generation,
        member_id=member_id,
        group_instance_id=None,
        topics=[
            topic_of(
                name=topic,
                partitions=[
                    topic_of.OffsetCommitRequestPartition(
                        partition_index=0, committed_offset=offset, committed_leader_epoch=3, committed_metadata="note"
                    )
                ],
            )
        ],
    )


async def committed(client: KafkaClient, group: str = "g") -> int:
    request = codec.OffsetFetchRequest
    asked = request(
        groups=[request.OffsetFetchRequestGroup(group_id=group, member_id=None, member_epoch=-1, topics=None)],
        require_stable=False,
    )
    (answer,) = (await client.ask(asked, 9)).groups
    assert answer.error_code == Code.NONE
    return int(answer.topics[0].partitions[0].committed_offset) if answer.topics else -1


async def one_member(client: KafkaClient, **options: Any) -> tuple[str, int]:
    """A stable group of one: its member id and generation."""
    first = await client.ask(join(**options), 8)
    if first.error_code == Code.MEMBER_ID_REQUIRED:
        first = await client.ask(join(first.member_id, **options), 8)
    assert first.error_code == Code.NONE
    group = options.get("group", "g")
    second = await client.ask(sync(first.member_id, first.generation_id, {first.member_id: b"mine"}, group=group), 5)
    assert (second.error_code, bytes(second.assignment)) == (Code.NONE, b"mine")
    return str(first.member_id), int(first.generation_id)


def code_of(answer: Any) -> int:
    """Of an OffsetCommit answer for one partition."""
    return int(answer.topics[0].partitions[0].error_code)


async def waits(client: KafkaClient, patience_s: float = 0.2) -> bool:
    """No answer comes, for long enough that one would have come. It can still be taken afterwards."""
    asked = client._asked[0]
    with trio.move_on_after(patience_s):
        await client.answer()
        return False
    client._asked.insert(0, asked)
    return True


async def test_a_commit_is_one_small_frame_answered_below_the_high_watermark(tmp_path: Path) -> None:
    with trio.fail_after(DEADLINE_S):
        async with open_door(tmp_path) as (house, address), connect(address) as client:
            await client.make_topic("t")
            before = house.log.end
            with house.held():
                await client.send(commit(42), 8)
                await house.log.durable.wait(house.log.end)
                assert await waits(client)
            assert code_of(await client.answer()) == Code.NONE
            assert house.log.end - before < 150
            assert await committed(client) == 42


async def test_fetched_offsets_are_never_taken_back(tmp_path: Path) -> None:
    """An offset that is not yet below the high watermark may still be lost: nobody hears of it."""
    with trio.fail_after(DEADLINE_S):
        async with open_door(tmp_path) as (house, address), connect(address) as one, connect(address) as other:
            await one.make_topic("t")
            await one.ask(commit(1), 8)
            with house.held():
                await one.send(commit(2), 8)
                await house.log.durable.wait(house.log.end)
                async with trio.open_nursery() as nursery:
                    told: list[int] = []

                    async def fetch() -> None:
                        told.append(await committed(other))

                    nursery.start_soon(fetch)
                    await trio.sleep(0.1)
                    assert told == []
                    house.holding = False
                    house.log.commit_to(house.log.durable.value)
            assert told == [2]


async def test_join_and_sync_are_answered_below_the_high_watermark(tmp_path: Path) -> None:
    with trio.fail_after(DEADLINE_S):
        async with open_door(tmp_path) as (house, address), connect(address) as client:
            first = await client.ask(join(), 8)
            for ask, version in ((join(first.member_id), 8), (sync(first.member_id, 1, {first.member_id: b"x"}), 5)):
                with house.held():
                    await client.send(ask, version)
                    assert await waits(client, 0.5)
                assert (await client.answer()).error_code == Code.NONE


async def test_a_high_watermark_that_stands_still_is_told_not_waited_for_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(coordinator, "COMMIT_TIMEOUT_S", 0.1)
    with trio.fail_after(DEADLINE_S):
        async with open_door(tmp_path) as (house, address), connect(address) as client:
            await client.make_topic("t")
            with house.held():
                assert code_of(await client.ask(commit(1), 8)) == Code.COORDINATOR_NOT_AVAILABLE


async def test_nothing_is_written_before_as_many_disks_hold_it_as_were_asked_for(tmp_path: Path) -> None:
    """Who is a member already goes on: nothing is promised anew by a heartbeat or by what was committed before."""
    with trio.fail_after(DEADLINE_S):
        async with open_door(tmp_path) as (house, address), connect(address) as client:
            await client.make_topic("t")
            member_id, generation = await one_member(client)
            assert code_of(await client.ask(commit(1, member_id=member_id, generation=generation), 8)) == Code.NONE
            house.sync_in_force = False
            end = house.log.end
            one = codec.LeaveGroupRequest.MemberIdentity(member_id=member_id)
            leave = codec.LeaveGroupRequest(group_id="g", members=[one])
            for asked, version in (
                (join(member_id), 8),
                (sync(member_id, generation, {member_id: b"x"}), 5),
                (leave, 5),
            ):
                assert (await client.ask(asked, version)).error_code == Code.COORDINATOR_NOT_AVAILABLE
            refused = await client.ask(commit(2, member_id=member_id, generation=generation), 8)
            assert code_of(refused) == Code.COORDINATOR_NOT_AVAILABLE
            given = await client.ask(codec.InitProducerIdRequest(transactional_id=None), 4)
            assert given.error_code == Code.COORDINATOR_LOAD_IN_PROGRESS
            assert house.log.end == end
            assert (await client.ask(heartbeat(member_id, generation), 4)).error_code == Code.NONE
            assert await committed(client) == 1


async def test_a_restart_forgets_nothing_and_causes_no_rebalance(tmp_path: Path) -> None:
    with trio.fail_after(2 * DEADLINE_S):
        async with open_door(tmp_path) as (_, address), connect(address) as client:
            await client.make_topic("t")
            member, generation = await one_member(client)
            assert code_of(await client.ask(commit(7, member_id=member, generation=generation), 8)) == Code.NONE
        async with open_door(tmp_path) as (house, address), connect(address) as client:
            assert (await client.ask(heartbeat(member, generation), 4)).error_code == Code.NONE
            again = await client.ask(sync(member, generation, {}), 5)
            assert bytes(again.assignment) == b"mine"
            assert code_of(await client.ask(commit(8, member_id=member, generation=generation), 8)) == Code.NONE
            assert await committed(client) == 8
            assert house.log.state.groups["g"].generation == generation


async def test_a_restart_between_join_and_sync_goes_on_there(tmp_path: Path) -> None:
    with trio.fail_after(2 * DEADLINE_S):
        async with open_door(tmp_path) as (_, address), connect(address) as client:
            first = await client.ask(join(), 8)
            joined = await client.ask(join(first.member_id), 8)
        async with open_door(tmp_path) as (_, address), connect(address) as client:
            told = await client.ask(sync(joined.member_id, joined.generation_id, {joined.member_id: b"mine"}), 5)
            assert (told.error_code, bytes(told.assignment)) == (Code.NONE, b"mine")


async def test_a_silent_member_is_removed_after_a_restart_too(tmp_path: Path) -> None:
    """Its timer begins anew; nobody needs to ask for that."""
    with trio.fail_after(3 * DEADLINE_S):
        async with open_door(tmp_path) as (_, address), connect(address) as client:
            await one_member(client, session_ms=1_000)
        async with open_door(tmp_path) as (house, _):
            while house.log.state.groups["g"].members:
                await trio.sleep(0.05)
            assert house.log.state.groups["g"].generation == 2


async def test_a_leader_that_is_drained_writes_nothing(tmp_path: Path) -> None:
    """Not even that a member fell silent, or a producer's id: another is about to go on from the end of this log."""
    with trio.fail_after(DEADLINE_S):
        async with open_door(tmp_path) as (house, address), connect(address) as client:
            await one_member(client, session_ms=1_000)
            house.accepting = False
            end = house.log.end
            await trio.sleep(1.5)
            told = await client.ask(codec.InitProducerIdRequest(transactional_id=None), 4)
            assert told.error_code == Code.COORDINATOR_LOAD_IN_PROGRESS
            assert house.log.end == end
            house.accepting = True
            while house.log.state.groups["g"].members:
                await trio.sleep(0.05)


async def test_followers_and_new_leaders_say_so(tmp_path: Path) -> None:
    with trio.fail_after(DEADLINE_S):
        async with open_door(tmp_path) as (house, address), connect(address) as client:
            await client.make_topic("t")
            member, generation = await one_member(client)
            house.role = "follower"
            assert (await client.ask(heartbeat(member, generation), 4)).error_code == Code.NOT_COORDINATOR
            assert code_of(await client.ask(commit(1), 8)) == Code.NOT_COORDINATOR
            listed = await client.ask(codec.ListGroupsRequest(states_filter=[], types_filter=[]), 5)
            assert (listed.error_code, listed.groups) == (Code.NONE, [])
            house.role = "leader"
            with house.held():
                await house.lead()
                told = await client.ask(heartbeat(member, generation), 4)
                assert told.error_code == Code.COORDINATOR_LOAD_IN_PROGRESS
            assert (await client.ask(heartbeat(member, generation), 4)).error_code == Code.NONE


async def test_who_waits_in_a_rebalance_hears_that_the_leadership_is_over(tmp_path: Path) -> None:
    with trio.fail_after(DEADLINE_S):
        async with open_door(tmp_path) as (house, address), connect(address) as one, connect(address) as two:
            await one_member(one)
            told = await two.ask(join(), 8)
            await two.send(join(told.member_id), 8)  # waits for the first one to join again
            await trio.sleep(0.1)
            house.role = "follower"
            assert (await two.answer()).error_code == Code.NOT_COORDINATOR


async def test_a_commit_that_is_cut_off_by_a_change_of_leader_is_not_acked(tmp_path: Path) -> None:
    with trio.fail_after(DEADLINE_S):
        async with open_door(tmp_path) as (house, address), connect(address) as client:
            await client.make_topic("t")
            with house.held():
                await client.send(commit(9), 8)
                await trio.sleep(0.1)
                house.log.stop_accepting(NotLeader("deposed"))
                assert code_of(await client.answer()) == Code.NOT_COORDINATOR


async def test_a_member_killed_and_one_added(tmp_path: Path) -> None:
    with trio.fail_after(3 * DEADLINE_S):
        async with open_door(tmp_path) as (_, address), connect(address) as one, connect(address) as two:
            killed, _ = await one_member(one, session_ms=1_000)
            told = await two.ask(join(), 8)
            joined = await two.ask(join(told.member_id), 8)  # answered when the silent one is given up
            assert joined.error_code == Code.NONE
            assert joined.leader == joined.member_id
            assert killed not in [member.member_id for member in joined.members]


async def test_describe_list_and_delete(tmp_path: Path) -> None:
    with trio.fail_after(DEADLINE_S):
        async with open_door(tmp_path) as (_, address), connect(address) as client:
            await client.make_topic("t")
            member, _ = await one_member(client)
            await client.ask(commit(5, group="stored"), 8)
            listed = await client.ask(codec.ListGroupsRequest(states_filter=[], types_filter=[]), 5)
            assert [(group.group_id, group.group_state) for group in listed.groups] == [
                ("g", "Stable"),
                ("stored", "Empty"),
            ]
            listed = await client.ask(codec.ListGroupsRequest(states_filter=["Empty"], types_filter=["classic"]), 5)
            assert [group.group_id for group in listed.groups] == ["stored"]
            asked = codec.DescribeGroupsRequest(groups=["g", "none"], include_authorized_operations=False)
            described, missing = (await client.ask(asked, 5)).groups
            assert (described.group_state, described.protocol_data) == ("Stable", "range")
            (only,) = described.members
            assert (only.member_id, bytes(only.member_assignment)) == (member, b"mine")
            assert (missing.error_code, missing.group_state) == (Code.NONE, "Dead")
            (_, missing) = (await client.ask(asked, 6)).groups
            assert missing.error_code == Code.GROUP_ID_NOT_FOUND
            asked = codec.DeleteGroupsRequest(groups_names=["g", "stored", "none"])
            codes = [result.error_code for result in (await client.ask(asked, 2)).results]
            assert codes == [Code.NON_EMPTY_GROUP, Code.NONE, Code.GROUP_ID_NOT_FOUND]
            assert await committed(client, "stored") == -1


async def test_a_flood_of_groups_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coordinator, "GROUPS_MAX", 5)
    with trio.fail_after(DEADLINE_S):
        async with open_door(tmp_path) as (_, address), connect(address) as client:
            codes = [(await client.ask(join(group=f"g{n}"), 8)).error_code for n in range(7)]
            assert codes == [Code.MEMBER_ID_REQUIRED] * 5 + [Code.COORDINATOR_NOT_AVAILABLE] * 2
            assert (await client.ask(join(group="x" * 1025), 8)).error_code == Code.INVALID_GROUP_ID


async def test_leave_many_at_once(tmp_path: Path) -> None:
    with trio.fail_after(DEADLINE_S):
        async with open_door(tmp_path) as (house, address), connect(address) as client:
            member, _ = await one_member(client)
            request = codec.LeaveGroupRequest
            asked = request(
                group_id="g",
                members=[
                    request.MemberIdentity(member_id=name, group_instance_id=None, reason=None)
                    for name in (member, "nobody")
                ],
            )
            answer = await client.ask(asked, 5)
            assert answer.error_code == Code.NONE
            assert [left.error_code for left in answer.members] == [Code.NONE, Code.UNKNOWN_MEMBER_ID]
            assert not house.log.state.groups["g"].members
            old = codec.LeaveGroupRequest(group_id="g", member_id=member)
            assert (await client.ask(old, 1)).error_code == Code.UNKNOWN_MEMBER_ID


async def test_offsets_that_cannot_be_committed(tmp_path: Path) -> None:
    with trio.fail_after(DEADLINE_S):
        async with open_door(tmp_path) as (_, address), connect(address) as client:
            await client.make_topic("t")
            assert code_of(await client.ask(commit(1, topic="none"), 8)) == Code.UNKNOWN_TOPIC_OR_PARTITION
            assert code_of(await client.ask(commit(1, group=""), 8)) == Code.INVALID_GROUP_ID
            assert code_of(await client.ask(commit(1, generation=4, member_id="x"), 8)) == Code.ILLEGAL_GENERATION
            large = commit(1)
            large.topics[0].partitions[0].committed_metadata = "x" * 4097
            assert code_of(await client.ask(large, 8)) == Code.OFFSET_METADATA_TOO_LARGE
            assert await committed(client) == -1


async def test_offsets_of_subscribed_topics_are_not_deleted(tmp_path: Path) -> None:
    with trio.fail_after(DEADLINE_S):
        async with open_door(tmp_path) as (_, address), connect(address) as client:
            await client.make_topic("t")
            await client.make_topic("other")
            member, generation = await one_member(client)
            for topic in ("t", "other"):
                asked = commit(3, member_id=member, generation=generation, topic=topic)
                assert code_of(await client.ask(asked, 8)) == Code.NONE
            request = codec.OffsetDeleteRequest
            topic_of = request.OffsetDeleteRequestTopic
            asked = request(
                group_id="g",
                topics=[
                    topic_of(name=name, partitions=[topic_of.OffsetDeleteRequestPartition(partition_index=0)])
                    for name in ("t", "other")
                ],
            )
            answer = await client.ask(asked, 0)
            assert [topic.partitions[0].error_code for topic in answer.topics] == [
                Code.GROUP_SUBSCRIBED_TO_TOPIC,
                Code.NONE,
            ]
            assert await committed(client) == 3


async def test_every_version_of_every_group_message_is_answered(tmp_path: Path) -> None:
    asks: list[Any] = [
        codec.FindCoordinatorRequest, codec.HeartbeatRequest, codec.LeaveGroupRequest, codec.SyncGroupRequest,
        codec.OffsetCommitRequest, codec.OffsetFetchRequest, codec.DescribeGroupsRequest, codec.ListGroupsRequest,
        codec.DeleteGroupsRequest, codec.OffsetDeleteRequest, codec.InitProducerIdRequest,
    ]  # fmt: skip
    with trio.fail_after(2 * DEADLINE_S):
        async with open_door(tmp_path) as (_, address), connect(address) as client:
            versions = (await client.ask(codec.ApiVersionsRequest(), 0)).api_keys
            spoken = {entry.api_key: range(entry.min_version, entry.max_version + 1) for entry in versions}
            for message in asks:
                for version in spoken[message.API_KEY]:
                    assert await client.ask(message(version=version), version) is not None
            for version in spoken[codec.JoinGroupRequest.API_KEY]:
                told = await client.ask(join(group=f"g{version}"), version)
                assert told.error_code == (Code.MEMBER_ID_REQUIRED if version >= 4 else Code.NONE)
