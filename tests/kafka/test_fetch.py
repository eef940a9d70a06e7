"""Fetch: only what is below the high watermark, as soon as it is there, and bounded."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio

from chronik_repl.kafka.codes import Code
from chronik_repl.standing import Peer

from .client import batch, connect, values_of
from .house import open_door


async def test_a_long_poll_wakes_on_the_high_watermark(tmp_path: Path) -> None:
    async with open_door(tmp_path) as (house, address), connect(address) as reader, connect(address) as writer:
        await writer.make_topic("t")
        await writer.make_topic("other")
        began = trio.current_time()
        await reader.send(reader.fetch_request("t", 0, wait_ms=15_000), 11)
        await writer.produce("other", batch(b"not yours"))
        with house.held():
            await writer.send(writer.produce_request("t", batch(b"1")), 9)
            with trio.move_on_after(0.2) as scope:
                await reader.frame()
            assert scope.cancelled_caught, "woken by what is not committed"
        partition = (await reader.answer()).responses[0].partitions[0]
        assert values_of(partition.records) == [b"1"]
        assert trio.current_time() - began < 5


async def test_min_bytes_and_max_wait(tmp_path: Path) -> None:
    async with open_door(tmp_path) as (_, address), connect(address) as reader, connect(address) as writer:
        await writer.make_topic("t")
        await writer.produce("t", batch(b"first"))
        await reader.send(reader.fetch_request("t", 0, wait_ms=15_000, min_bytes=300), 11)
        for _ in range(5):
            await writer.produce("t", batch(b"more"))
        partition = (await reader.answer()).responses[0].partitions[0]
        assert len(partition.records) >= 300
        began = trio.current_time()
        some = await reader.fetch("t", 5, wait_ms=300, min_bytes=10_000)
        assert values_of(some.records) == [b"more"]
        assert 0.25 < trio.current_time() - began < 5


async def test_max_bytes_hold_but_for_one_batch(tmp_path: Path) -> None:
    async with open_door(tmp_path) as (_, address), connect(address) as client:
        await client.make_topic("t")
        size = len(batch(bytes(1000)))
        for _ in range(20):
            await client.produce("t", batch(bytes(1000)))
        assert len((await client.fetch("t", 0, max_bytes=10)).records) == size
        assert len((await client.fetch("t", 0, max_bytes=size * 3 + 5)).records) <= size * 4
        assert len((await client.fetch("t", 0)).records) == size * 20
        assert len(values_of((await client.fetch("t", 17)).records)) == 3


async def test_a_fetch_in_the_middle_of_a_batch_gets_the_whole_batch(tmp_path: Path) -> None:
    async with open_door(tmp_path) as (_, address), connect(address) as client:
        await client.make_topic("t")
        await client.produce("t", batch(b"0", b"1", b"2"))
        assert values_of((await client.fetch("t", 1)).records) == [b"0", b"1", b"2"]


async def test_offsets_that_are_not_there(tmp_path: Path) -> None:
    async with open_door(tmp_path) as (house, address), connect(address) as client, connect(address) as writer:
        await client.make_topic("t")
        await client.produce("t", batch(b"0"))
        assert (await client.fetch("t", 2)).error_code == Code.OFFSET_OUT_OF_RANGE
        assert (await client.fetch("t", -1)).error_code == Code.OFFSET_OUT_OF_RANGE
        assert (await client.fetch("nowhere", 0)).error_code == Code.UNKNOWN_TOPIC_OR_PARTITION
        assert (await client.fetch("t", 0, partition=9)).error_code == Code.UNKNOWN_TOPIC_OR_PARTITION
        with house.held():
            assert (await writer.produce("t", batch(b"1"), acks=1)).error_code == 0
            empty = await client.fetch("t", 2)  # above the high watermark, at the log's end
            assert (empty.error_code, empty.high_watermark, empty.records or b"") == (0, 1, b"")
            house.role = "follower"
            assert (await client.fetch("t", 2)).error_code == 0
            assert (await client.fetch("t", 3)).error_code == Code.OFFSET_NOT_AVAILABLE
            assert (await client.fetch("t", -1)).error_code == Code.NOT_LEADER_OR_FOLLOWER
        house.serving = False  # its log differs from its leader's
        assert (await client.fetch("t", 0)).error_code == Code.NOT_LEADER_OR_FOLLOWER


@pytest.mark.parametrize("role", ["leader", "follower"])
async def test_epochs_are_fenced(tmp_path: Path, role: str) -> None:
    async with open_door(tmp_path) as (house, address), connect(address) as client:
        await client.make_topic("t")
        await house.lead()
        await client.produce("t", batch(b"0"))
        house.role = role  # type: ignore[assignment]
        assert (await client.fetch("t", 0, epoch=house.epoch)).error_code == 0
        assert (await client.fetch("t", 0, epoch=house.epoch - 1)).error_code == Code.FENCED_LEADER_EPOCH
        assert (await client.fetch("t", 0, epoch=house.epoch + 1)).error_code == Code.UNKNOWN_LEADER_EPOCH
        for timestamp in (-1, -2):
            assert (await client.list_offset("t", timestamp, epoch=house.epoch - 1)).error_code == (
                Code.FENCED_LEADER_EPOCH
            )


async def test_a_consumer_is_sent_to_the_follower_of_its_rack(tmp_path: Path) -> None:
    async with open_door(tmp_path, rack="a") as (house, address), connect(address) as client:
        await client.make_topic("t")
        await client.produce("t", batch(b"0"))
        house.peers = (
            Peer(1, kafka_address=address, rack="a", live=True),
            Peer(2, kafka_address="h:1", rack="b", live=False),
            Peer(3, kafka_address="h:2", rack="b", live=True),
        )
        sent = await client.fetch("t", 0, rack="b")
        assert (sent.error_code, sent.preferred_read_replica, sent.records or b"") == (0, 3, b"")
        for rack in ("a", "c", ""):
            stayed = await client.fetch("t", 0, rack=rack)
            assert (stayed.preferred_read_replica, values_of(stayed.records)) == (-1, [b"0"]), rack
        assert values_of((await client.fetch("t", 0, rack="b", version=10)).records) == [b"0"]
        assert (await client.fetch("t", 5, rack="b")).error_code == Code.OFFSET_OUT_OF_RANGE, (
            "sent away with a bad offset"
        )
        house.role = "follower"
        assert values_of((await client.fetch("t", 0, rack="b")).records) == [b"0"]


async def test_a_fetch_of_thousands_of_partitions_is_woken_by_one_of_them(tmp_path: Path) -> None:
    async with open_door(tmp_path) as (_, address), connect(address) as reader, connect(address) as writer:
        await writer.make_topic("wide", 5_000)
        await writer.make_topic("t")
        request = reader.fetch_request("wide", 0, wait_ms=15_000)
        one = request.topics[0].partitions[0]
        request.topics[0].partitions = [
            type(one)(
                partition=index,
                current_leader_epoch=-1,
                fetch_offset=0,
                last_fetched_epoch=-1,
                log_start_offset=-1,
                partition_max_bytes=1_000,
            )
            for index in range(5_000)
        ]
        await reader.send(request, 11)
        for _ in range(50):
            await writer.produce("t", batch(b"not yours"))
        await writer.produce("wide", batch(b"yours"), partition=4_321)
        partitions = (await reader.answer()).responses[0].partitions
        assert [p.partition_index for p in partitions if p.records] == [4_321]


async def test_there_are_no_fetch_sessions(tmp_path: Path) -> None:
    async with open_door(tmp_path) as (_, address), connect(address) as client:
        await client.make_topic("t")
        await client.produce("t", batch(b"0"))
        response = await client.ask(client.fetch_request("t", 0, session=(0, 0)), 11)
        assert (response.error_code, response.session_id) == (0, 0)
        response = await client.ask(client.fetch_request("t", 0, session=(12, 3)), 11)
        assert (response.error_code, response.responses) == (70, [])


async def test_compressed_batches_pass_untouched(tmp_path: Path) -> None:
    async with open_door(tmp_path) as (_, address), connect(address) as client:
        await client.make_topic("t")
        for codec in range(5):
            sent = batch(b"not really compressed, and nobody here looks", attributes=codec)
            done = await client.produce("t", sent)
            (base, got) = (done.base_offset, (await client.fetch("t", done.base_offset)).records)
            assert got[16:] == sent[16:]
            assert int.from_bytes(got[:8], "big") == base == codec
            assert int.from_bytes(got[12:16], "big") == 1, "the leader's epoch stands in the batch"
