"""Idempotent producers and acks over the real log: ids once, batches once, and no ack that says too much."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import trio

from chronik_repl.errors import NotLeader
from chronik_repl.kafka import codec
from chronik_repl.kafka.codes import Code
from chronik_repl.positions import Checksum, Epoch, Offset, Position
from chronik_repl.wal.changes import (
    Change,
    CommittedOffset,
    GroupChanged,
    GroupMember,
    OffsetsCommitted,
    ProducerIdGiven,
    TopicMade,
)
from chronik_repl.wal.state import State
from tests.kafka.client import batch, connect
from tests.kafka.house import OneHouse, open_door
from tests.kafka.test_coordinator import waits

DEADLINE_S = 30.0


def init(transactional_id: str | None = None) -> Any:
    return codec.InitProducerIdRequest(transactional_id=transactional_id, transaction_timeout_ms=1_000)


async def test_kf60_a_producer_id_is_never_given_out_twice(tmp_path: Path) -> None:
    """Not to two who ask at once, not after a restart, and not by the next leader: it is told only once committed."""
    given = []
    with trio.fail_after(2 * DEADLINE_S):
        for _ in range(2):
            async with open_door(tmp_path) as (house, address), connect(address) as client:
                given += [(await client.ask(init(), 4)).producer_id for _ in range(3)]
                with house.held():
                    await client.send(init(), 4)
                    await trio.sleep(0.1)
                    house.log.stop_accepting(NotLeader("deposed"))
                    told = await client.answer()
                    assert told.error_code == Code.COORDINATOR_LOAD_IN_PROGRESS
                    assert told.producer_id == -1
    assert len(set(given)) == 6


async def test_kf60_a_follower_gives_out_what_its_leader_gave_it(tmp_path: Path) -> None:
    """And only once that is below the high watermark, and nothing that was given to it in an earlier life."""
    with trio.fail_after(2 * DEADLINE_S):
        given = []
        for _ in range(2):
            async with open_door(tmp_path) as (house, address), connect(address) as client:
                house.role = "follower"
                house.slow_s = 0.05  # its leader's answer comes later
                with house.held():
                    await client.send(init(), 4)
                    assert await waits(client)
                given.append((await client.answer()).producer_id)
                given += [(await client.ask(init(), 4)).producer_id for _ in range(4)]
                house.role = "leader"
                given.append((await client.ask(init(), 4)).producer_id)
        assert len(set(given)) == 12


def test_kf60_the_next_leader_folds_the_ids_of_the_one_before() -> None:
    state = State()
    state.fold(ProducerIdGiven(41), *[0] * 4)  # type: ignore[arg-type]
    assert State.restore(state.snapshot()).next_producer_id == 42


DAY_MS = 24 * 3600 * 1000


def test_idle_groups_and_producers_are_forgotten_by_the_logs_time() -> None:
    """At a snapshot: groups without members and producers that nobody used for seven days of the log."""
    state = State()

    def at(day: int, change: Change) -> None:
        state.timestamp_ms = day * DAY_MS
        state.fold(change, Position(0), Position(1), Epoch(1), Checksum(0))

    offsets = (CommittedOffset("t", 0, 5),)
    at(0, TopicMade("t", 1))
    at(1, GroupChanged("full", 1, members=(GroupMember("m"),)))
    at(1, GroupChanged("idle", 1))
    at(1, OffsetsCommitted("idle", offsets))
    at(1, OffsetsCommitted("used", offsets))
    at(2, OffsetsCommitted("late", offsets))
    (partition,) = state.topics["t"].partitions
    for producer_id, day in ((1, 1), (2, 2)):
        partition.produced(producer_id, 0, 0, (Offset(0), Position(1), 1), day * DAY_MS)
    at(8, OffsetsCommitted("used", offsets))
    state.timestamp_ms += 1
    state.expire(state.timestamp_ms)
    kept = State.restore(state.snapshot())
    assert sorted(kept.groups) == ["full", "late", "used"]
    assert sorted(kept.topics["t"].partitions[0].producers) == [2]


async def test_transactions_are_refused_for_good(tmp_path: Path) -> None:
    with trio.fail_after(DEADLINE_S):
        async with open_door(tmp_path) as (_, address), connect(address) as client:
            told = await client.ask(init("txn"), 4)
            assert told.error_code == Code.TRANSACTIONAL_ID_AUTHORIZATION_FAILED
            asked = codec.FindCoordinatorRequest(key_type=1, coordinator_keys=["txn"])
            (found,) = (await client.ask(asked, 4)).coordinators
            assert found.error_code == Code.TRANSACTIONAL_ID_AUTHORIZATION_FAILED


async def test_kf26_a_producer_retries_after_a_lost_ack(tmp_path: Path) -> None:
    """The same batch again, in the same process and after a restart: its first offset, and no second copy."""
    with trio.fail_after(2 * DEADLINE_S):
        async with open_door(tmp_path) as (house, address), connect(address) as client:
            await client.make_topic("t")
            producer = (await client.ask(init(), 4)).producer_id
            batches = [batch(b"a", b"b", producer=(producer, 0, sequence)) for sequence in range(0, 14, 2)]
            for n, sent in enumerate(batches):
                assert (await client.produce("t", sent)).base_offset == 2 * n
            for n, sent in list(enumerate(batches))[2:]:
                assert (await client.produce("t", sent)).base_offset == 2 * n
            assert house.log.end_offset("t", 0) == 14
        async with open_door(tmp_path) as (house, address), connect(address) as client:
            for n, sent in list(enumerate(batches))[2:]:
                answer = await client.produce("t", sent)
                assert (answer.error_code, answer.base_offset) == (Code.NONE, 2 * n)
            assert (await client.produce("t", batches[0])).error_code == Code.OUT_OF_ORDER_SEQUENCE_NUMBER
            gap = batch(b"x", producer=(producer, 0, 100))
            assert (await client.produce("t", gap)).error_code == Code.OUT_OF_ORDER_SEQUENCE_NUMBER
            assert (await client.produce("t", batch(b"x", producer=(producer, 0, 14)))).base_offset == 14
            assert house.log.end_offset("t", 0) == 15


async def test_kf26_a_duplicate_is_acked_no_earlier_than_its_original(tmp_path: Path) -> None:
    with trio.fail_after(DEADLINE_S):
        async with open_door(tmp_path) as (house, address), connect(address) as client, connect(address) as again:
            await client.make_topic("t")
            sent = batch(b"a", producer=(5, 0, 0))
            with house.held():
                await client.send(client.produce_request("t", sent), 9)
                await house.log.durable.wait(house.log.end)
                await again.send(again.produce_request("t", sent), 9)
                assert await waits(again)
                assert (await connect_and_produce(address, sent, acks=1)).base_offset == 0  # durable is enough for it
            for each in (client, again):
                answer = await each.answer()
                assert answer.responses[0].partition_responses[0].base_offset == 0
            assert house.log.end_offset("t", 0) == 1


async def connect_and_produce(address: str, sent: bytes, *, acks: int) -> Any:
    async with connect(address) as client:
        return await client.produce("t", sent, acks=acks)


async def test_kf33_an_ack_that_comes_before_anyone_waits_is_not_missed(tmp_path: Path) -> None:
    async with open_door(tmp_path) as (house, address), connect(address) as client:
        await client.make_topic("t")
        end = house.log.append_change(ProducerIdGiven(99)).end
        await house.log.durable.wait(end)
        while house.log.committed.value < end:
            await trio.lowlevel.checkpoint()
        with trio.fail_after(1):  # the high watermark was there first
            await house.log.committed.wait(end)
            await house.log.durable.wait(end)
        with trio.fail_after(DEADLINE_S):
            for n in range(200):  # one at a time, each ack racing with the one who waits for it
                assert (await client.produce("t", batch(b"x"))).base_offset == n


@pytest.mark.parametrize("acks", [0, 1, -1])
async def test_kf34_every_acks_level_goes_the_same_way(tmp_path: Path, acks: int) -> None:
    """Into the log and, by its listeners, into every follower's ring: nothing is written locally only."""
    with trio.fail_after(DEADLINE_S):
        async with open_door(tmp_path) as (house, address), connect(address) as client:
            await client.make_topic("t")
            shipped: list[int] = []
            house.log.listeners.append(lambda position, frame, records: shipped.append(records))
            request = client.produce_request("t", batch(b"a", b"b", b"c"), acks=acks)
            if acks == 0:
                await client.send(request, 9)
                client._asked.clear()
                await until(house, 3)
            else:
                await client.ask(request, 9)
            assert shipped == [3]


async def test_kf34_acks_all_waits_for_the_high_watermark_and_acks_1_does_not(tmp_path: Path) -> None:
    with trio.fail_after(DEADLINE_S):
        async with open_door(tmp_path) as (house, address), connect(address) as client:
            await client.make_topic("t")
            with house.held():
                assert (await client.produce("t", batch(b"a"), acks=1)).base_offset == 0
                await client.send(client.produce_request("t", batch(b"b")), 9)
                assert await waits(client)
            assert (await client.answer()).responses[0].partition_responses[0].base_offset == 1


async def until(house: OneHouse, offset: int) -> None:
    while house.log.end_offset("t", 0) < offset:
        await trio.sleep(0.01)
