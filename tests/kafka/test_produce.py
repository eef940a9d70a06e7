"""Produce: what is acked is durable as asked, and what is not gets the code that makes clients do the right thing."""

from __future__ import annotations

import os
import struct
import threading
from pathlib import Path
from typing import Any

import pytest
import trio
from crc32c import crc32c

from chronik_repl.errors import NotLeader
from chronik_repl.kafka.codes import Code
from chronik_repl.standing import Peer

from .client import batch, connect, values_of
from .house import open_door


async def test_acked_records_come_back_in_order_in_every_version(tmp_path: Path) -> None:
    async with open_door(tmp_path) as (_, address), connect(address) as client:
        assert await client.make_topic("t") == 0
        expected = 0
        for version in range(3, 13):
            for acks in (1, -1):
                done = await client.produce("t", batch(b"%d" % version, b"x"), acks=acks, version=version)
                assert (done.error_code, done.base_offset) == (0, expected)
                expected += 2
                fetched = await client.fetch("t", done.base_offset, version=max(4, version))
                assert (fetched.error_code, fetched.high_watermark) == (0, expected)
                assert values_of(fetched.records) == [b"%d" % version, b"x"]


async def test_several_partitions_of_one_request_are_one_group(tmp_path: Path) -> None:
    async with open_door(tmp_path) as (house, address), connect(address) as client:
        await client.make_topic("t", 8)
        request = client.produce_request("t", batch(b"0"))
        one = request.topic_data[0].partition_data
        topic_of = type(request.topic_data[0])
        request.topic_data[0].partition_data = [
            topic_of.PartitionProduceData(index=index, records=one[0].records) for index in range(8)
        ]
        groups = house.log.stats.groups_committed
        response = await client.ask(request, 9)
        assert [p.error_code for p in response.responses[0].partition_responses] == [0] * 8
        assert (
            house.log.stats.groups_committed <= groups + 2
        )  # all of them went to the disk together, but for a group under way


async def test_ack_waits_for_fdatasync(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with open_door(tmp_path) as (_, address), connect(address) as client:
        await client.make_topic("t")
        may_end, reached, fdatasync = threading.Event(), threading.Event(), os.fdatasync

        def slow(fd: int) -> None:
            reached.set()
            may_end.wait()
            fdatasync(fd)

        monkeypatch.setattr("os.fdatasync", slow)
        try:
            await client.send(client.produce_request("t", batch(b"1"), acks=1), 9)
            await trio.to_thread.run_sync(reached.wait)
            with trio.move_on_after(0.2) as scope:
                await client.frame()
            assert scope.cancelled_caught
        finally:
            may_end.set()
        assert (await client.answer()).responses[0].partition_responses[0].error_code == 0


async def test_acks_all_waits_for_the_high_watermark_and_holds_up_no_later_request(tmp_path: Path) -> None:
    async with open_door(tmp_path) as (house, address), connect(address) as client:
        await client.make_topic("t")
        with house.held():
            for number in range(5):
                await client.send(client.produce_request("t", batch(b"%d" % number)), 9)
            await client.send(client.produce_request("t", batch(b"5"), acks=1), 9)
            while house.log.end_offset("t", 0) < 6:  # all are appended though none is answered
                await trio.testing.wait_all_tasks_blocked(0.001)
            await house.log.durable.wait(house.log.end)
            with trio.move_on_after(0.2) as scope:
                await client.frame()
            assert scope.cancelled_caught, "an answer before its turn"
            async with connect(address) as other:
                assert (await other.fetch("t", 0)).records in (None, b""), "a reader saw what is not committed"
        offsets = [(await client.answer()).responses[0].partition_responses[0].base_offset for _ in range(6)]
        assert offsets == [0, 1, 2, 3, 4, 5]


async def test_acks_all_in_vain_is_timed_out_and_never_acked(tmp_path: Path) -> None:
    async with open_door(tmp_path) as (house, address), connect(address) as client:
        await client.make_topic("t")
        with house.held():
            first = client.produce_request("t", batch(b"1"), timeout_ms=10_000)
            await client.send(first, 9)
            done = await _second(client, client.produce_request("t", batch(b"2"), timeout_ms=100), house)
        assert [d.error_code for d in done] == [0, Code.REQUEST_TIMED_OUT]


async def _second(client: Any, request: Any, house: Any) -> list[Any]:
    await client.send(request, 9)
    while ("Produce", "REQUEST_TIMED_OUT") not in house.meters.values["kafka_errors"]:
        await trio.testing.wait_all_tasks_blocked(0.001)
    house.holding = False
    house.log.commit_to(house.log.durable.value)
    return [(await client.answer()).responses[0].partition_responses[0] for _ in range(2)]


async def test_too_few_followers_refuse_acks_all_at_once(tmp_path: Path) -> None:
    async with open_door(tmp_path) as (house, address), connect(address) as client:
        await client.make_topic("t")
        house.enough_replicas = False
        assert (await client.produce("t", batch(b"1"))).error_code == Code.NOT_ENOUGH_REPLICAS
        assert house.log.end_offset("t", 0) == 0
        assert (await client.produce("t", batch(b"1"), acks=1)).error_code == 0


async def test_a_follower_refuses_and_names_the_leader(tmp_path: Path) -> None:
    async with open_door(tmp_path) as (house, address), connect(address) as client:
        await client.make_topic("t")
        house.role, house.accepting = "follower", False
        house.leader = Peer(7, kafka_address="a-host:1234", live=True)
        done = await client.produce("t", batch(b"1"), version=12)
        assert done.error_code == Code.NOT_LEADER_OR_FOLLOWER
        assert (done.current_leader.leader_id, done.current_leader.leader_epoch) == (7, house.epoch)
        answer = await client.metadata("t")
        assert (answer.controller_id, answer.topics[0].partitions[0].leader_id) == (7, 7)
        assert {(b.node_id, b.host, b.port) for b in answer.brokers} >= {(7, "a-host", 1234)}


async def test_the_end_of_a_leadership_fails_those_who_wait(tmp_path: Path) -> None:
    async with open_door(tmp_path) as (house, address), connect(address) as client:
        await client.make_topic("t")
        house.holding = True
        await client.send(client.produce_request("t", batch(b"1")), 9)
        while house.log.end_offset("t", 0) == 0:
            await trio.testing.wait_all_tasks_blocked(0.001)
        house.accepting = False
        house.log.stop_accepting(NotLeader("deposed"))
        answer = (await client.answer()).responses[0].partition_responses[0]
        assert answer.error_code == Code.NOT_LEADER_OR_FOLLOWER


def claiming(count: int) -> bytes:
    """One record, and a head that speaks of many: whoever believed it would give away their offsets."""
    good = bytearray(batch(b"1"))
    struct.pack_into(">i", good, 23, count - 1)
    struct.pack_into(">i", good, 57, count)
    struct.pack_into(">I", good, 17, crc32c(good[21:]))
    return bytes(good)


BAD = {
    "crc": (bytes(batch(b"1")[:-1]) + b"\xff", Code.CORRUPT_MESSAGE),
    "cut": (batch(b"1")[:-1], Code.CORRUPT_MESSAGE),
    "empty": (b"", Code.CORRUPT_MESSAGE),
    "null": (None, Code.CORRUPT_MESSAGE),
    "magic": (batch(b"1", magic=1), Code.INVALID_RECORD),
    "two batches": (batch(b"1") + batch(b"2"), Code.INVALID_RECORD),
    "compression": (batch(b"1", attributes=5), Code.UNSUPPORTED_COMPRESSION_TYPE),
    "control": (batch(b"1", attributes=0x20), Code.INVALID_RECORD),
    "transaction": (batch(b"1", attributes=0x10), Code.TRANSACTIONAL_ID_AUTHORIZATION_FAILED),
    "count": (batch(b"1", count=2), Code.INVALID_RECORD),
    "no records": (batch(), Code.INVALID_RECORD),
    "more than fit": (claiming(2**31 - 1), Code.INVALID_RECORD),
    "too large": (batch(bytes(17 * 1024 * 1024)), Code.MESSAGE_TOO_LARGE),
}


async def test_bad_batches_get_kafkas_codes_and_nothing_is_written(tmp_path: Path) -> None:
    async with open_door(tmp_path) as (house, address), connect(address) as client:
        await client.make_topic("t")
        for name, (records, code) in BAD.items():
            assert (await client.produce("t", records)).error_code == code, name
        assert (await client.produce("unknown", batch(b"1"))).error_code == Code.UNKNOWN_TOPIC_OR_PARTITION
        assert (await client.produce("t", batch(b"1"), partition=1)).error_code == Code.UNKNOWN_TOPIC_OR_PARTITION
        assert (await client.produce("t", batch(b"1"), partition=-1)).error_code == Code.UNKNOWN_TOPIC_OR_PARTITION
        assert (await client.produce("t", batch(b"1"), acks=3)).error_code == Code.INVALID_REQUIRED_ACKS
        request = client.produce_request("t", batch(b"1"))
        request.transactional_id = "t-1"
        answer = (await client.ask(request, 9)).responses[0].partition_responses[0]
        assert answer.error_code == Code.TRANSACTIONAL_ID_AUTHORIZATION_FAILED
        assert house.log.end_offset("t", 0) == 0
        assert (await client.produce("t", batch(b"1"))).error_code == 0


async def test_acks_0_is_not_answered_and_an_error_closes(tmp_path: Path) -> None:
    async with open_door(tmp_path) as (_, address), connect(address) as client:
        await client.make_topic("t")
        await client.stream.send_all(client.encode(client.produce_request("t", batch(b"0"), acks=0), 9))
        client._asked.pop()
        done = await client.produce("t", batch(b"1"), acks=1)  # its answer is the next one
        assert (done.error_code, done.base_offset) == (0, 1)
        await client.send(client.produce_request("nowhere", batch(b"0"), acks=0), 9)
        assert await client.closed()


async def test_kf26_a_duplicate_is_answered_when_its_original_is_committed(tmp_path: Path) -> None:
    async with open_door(tmp_path) as (house, address), connect(address) as client, connect(address) as again:
        await client.make_topic("t")
        records = batch(b"1", producer=(5, 0, 0))
        with house.held():
            await client.send(client.produce_request("t", records), 9)
            while house.log.end_offset("t", 0) == 0:
                await trio.testing.wait_all_tasks_blocked(0.001)
            await again.send(again.produce_request("t", records), 9)
            with trio.move_on_after(0.2) as scope:
                await again.frame()
            assert scope.cancelled_caught, "acked before its original was committed"
        for each in (client, again):
            done = (await each.answer()).responses[0].partition_responses[0]
            assert (done.error_code, done.base_offset) == (0, 0)
        assert house.log.end_offset("t", 0) == 1
        gap = batch(b"1", producer=(5, 0, 7))
        assert (await client.produce("t", gap)).error_code == Code.OUT_OF_ORDER_SEQUENCE_NUMBER


async def test_old_versions_are_told_so(tmp_path: Path) -> None:
    async with open_door(tmp_path) as (_, address), connect(address) as client:
        await client.make_topic("t")
        for version in (0, 1, 2):
            topic = b"\0\0\0\x01\0\x01t\0\0\0\x01\0\0\0\0\0\0\0\x00"
            body = b"\0\x01\0\0\0\x64" + topic
            head = bytes([0, 0, 0, version, 0, 0, 0, 9, 0xFF, 0xFF])
            await client.stream.send_all((len(head) + len(body)).to_bytes(4, "big") + head + body)
            frame = await client.frame()
            assert frame[:8] == b"\0\0\0\x09\0\0\0\x01"
            assert int.from_bytes(frame[19:21], "big") == Code.UNSUPPORTED_FOR_MESSAGE_FORMAT
