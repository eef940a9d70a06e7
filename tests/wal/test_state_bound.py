"""What clients can make the state grow by has an end: topics, groups and their offsets, producers."""

from __future__ import annotations

import pytest

from chronik_repl.errors import StateFull
from chronik_repl.positions import Offset, Position
from chronik_repl.wal import state as states
from chronik_repl.wal import writer
from chronik_repl.wal.changes import (
    CommittedOffset,
    GroupChanged,
    GroupMember,
    GroupRemoved,
    OffsetsCommitted,
    TopicMade,
    TopicRemoved,
)
from chronik_repl.wal.log import Log, LogSettings
from chronik_repl.wal.state import PartitionState, State
from tests.wal.workbench import SimPlace, lead, opened, settle

ROOMY = LogSettings(segment_bytes=1 << 26, min_free_bytes=0, scrub_mb_per_s=0)
STATE_BYTES_MAX = 100_000


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "STATE_BYTES_MAX", STATE_BYTES_MAX)


def offset(group: str, offset: int = 1, metadata: str = "m" * 1000) -> OffsetsCommitted:
    return OffsetsCommitted(group, (CommittedOffset("t", 0, offset, -1, metadata),))


def members(group: str, size: int, generation: int = 1) -> GroupChanged:
    member = GroupMember("one", protocols=(("range", bytes(size)),))
    return GroupChanged(group, generation, "consumer", "range", "one", (member,))


def fill(log: Log) -> int:
    """With groups, each committed by one who is no member, until no more are taken."""
    for number in range(1000):
        try:
            log.append_change(offset(f"group-{number}"))
        except StateFull:
            return number
    raise AssertionError("a thousand groups of a kilobyte, and no end")


async def test_groups_without_members_have_an_end_and_those_that_are_there_go_on() -> None:
    async with opened(SimPlace(), ROOMY) as log:
        lead(log)
        count = fill(log)
        assert STATE_BYTES_MAX * 0.7 < len(log.state.snapshot()) < STATE_BYTES_MAX * 1.3
        for number in range(count):
            log.append_change(offset(f"group-{number}", offset=2))
        assert len(log.state.snapshot()) < STATE_BYTES_MAX * 1.3
        with pytest.raises(StateFull):
            log.append_change(offset("group-0", metadata="m" * 4000))
        with pytest.raises(StateFull):
            log.append_change(TopicMade("another", 1))
        with pytest.raises(StateFull):
            log.append_change(members("another", 10))
        log.append_change(members("group-0", 10))
        with pytest.raises(StateFull):
            log.append_change(members("group-0", 50_000))
        await settle(log)


async def test_commits_over_and_over_are_no_growth() -> None:
    async with opened(SimPlace(), ROOMY) as log:
        lead(log)
        for number in range(2000):
            log.append_change(offset("group", number))
        log.append_change(TopicMade("another", 1))
        await settle(log)


async def test_there_is_room_again_after_groups_were_removed() -> None:
    async with opened(SimPlace(), ROOMY) as log:
        lead(log)
        count = fill(log)
        for number in range(count - 1):
            log.append_change(GroupRemoved(f"group-{number}"))
        for number in range(50):  # what happens meanwhile makes it look again
            log.append_change(offset(f"group-{count - 1}", number))
        log.append_change(TopicMade("another", 1))
        await settle(log)


async def test_a_new_leader_knows_how_much_there_is() -> None:
    place = SimPlace()
    async with opened(place, ROOMY) as log:
        lead(log)
        fill(log)
        await settle(log)
    async with opened(place, ROOMY) as log:
        lead(log, 2)
        assert fill_more(log) < 40


def fill_more(log: Log) -> int:
    for number in range(1000):
        try:
            log.append_change(offset(f"more-{number}"))
        except StateFull:
            return number
    raise AssertionError("no end")


async def test_a_removed_topic_keeps_no_producers() -> None:
    async with opened(SimPlace(), ROOMY) as log:
        lead(log)
        log.state.topics["t"].partitions[0].produced(5, 0, 0, (Offset(0), Position(0), 1), 0)
        log.append_change(TopicRemoved("t"))
        log.state.expire(log.state.timestamp_ms)
        assert not log.state.topics["t"].retired[0].producers


def test_of_very_many_producers_those_that_wrote_last_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(states, "PRODUCERS_KEPT", 10)
    state = State()
    topic = state.add_topic("t")
    topic.partitions = [PartitionState("t", 0), PartitionState("t", 1)]
    for number in range(30):
        topic.partitions[number % 2].produced(number, 0, 0, (Offset(0), Position(0), 1), 1000 + number)
    state.expire(state.timestamp_ms)
    assert {k for partition in state.partitions() for k in partition.producers} == set(range(20, 30))
