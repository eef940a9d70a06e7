"""Room that all clients share: whoever holds some and does nothing with it loses it when others wait."""

from __future__ import annotations

from contextlib import AsyncExitStack
from pathlib import Path

import trio

from chronik_repl.kafka.connection import COUNTED, LARGE, Buffers
from chronik_repl.kafka.context import KIB, MIB, Limits

from .client import KafkaClient, batch, connect, values_of
from .house import OneHouse, open_door

NEVER = 3600.0  # as far as a test is concerned


async def announce(clients: AsyncExitStack, address: str, house: OneHouse) -> KafkaClient:
    """A client that begins a Produce of a megabyte and sends no more of it; its room is taken when this returns."""
    held = house.meters.values["kafka_inflight_bytes"][()]
    client = await clients.enter_async_context(connect(address))
    await client.stream.send_all((MIB).to_bytes(4, "big") + b"\0\0\0\x09\0\0\0\1")
    while house.meters.values["kafka_inflight_bytes"][()] == held:
        await trio.testing.wait_all_tasks_blocked(0.001)
    return client


async def test_requests_that_were_announced_and_do_not_come_make_way(tmp_path: Path) -> None:
    limits = Limits(receiving_bytes_max=2 * MIB + KIB, crowded_patience_s=0.1)
    async with open_door(tmp_path, limits=limits) as (house, address), AsyncExitStack() as clients:
        writer = await clients.enter_async_context(connect(address))
        await writer.make_topic("t")
        idle = [await announce(clients, address, house) for _ in range(2)]
        with trio.fail_after(10):  # and not after `request_timeout_s`
            assert (await writer.produce("t", batch(bytes(100 * KIB)))).error_code == 0
            assert await idle[0].closed()
            assert await idle[1].closed()


async def test_a_request_that_comes_keeps_its_room(tmp_path: Path) -> None:
    limits = Limits(receiving_bytes_max=2 * MIB + KIB, crowded_patience_s=0.1, crowded_bytes_a_second_min=64 * KIB)
    async with open_door(tmp_path, limits=limits) as (house, address), AsyncExitStack() as clients:
        writer = await clients.enter_async_context(connect(address))
        other = await clients.enter_async_context(connect(address))
        await writer.make_topic("t")
        await announce(clients, address, house)
        request = writer.encode(writer.produce_request("t", batch(bytes(MIB - KIB))), 9)
        async with trio.open_nursery() as nursery:

            async def crowd() -> None:
                assert (await other.produce("t", batch(bytes(100 * KIB)))).error_code == 0

            await writer.stream.send_all(request[: 200 * KIB])
            nursery.start_soon(crowd)
            for at in range(200 * KIB, len(request), 100 * KIB):  # slow, but faster than is asked for
                await trio.sleep(0.05)
                await writer.stream.send_all(request[at : at + 100 * KIB])
        assert (await writer.answer()).responses[0].partition_responses[0].error_code == 0


async def fill_with_unread_answers(clients: AsyncExitStack, address: str, house: OneHouse, room: int) -> None:
    """Clients that fetch and do not read, until what they hold leaves no room for one more answer."""
    while house.meters.values["kafka_inflight_bytes"][()] + MIB <= room:
        client = await clients.enter_async_context(connect(address))
        for _ in range(40):
            await client.send(client.fetch_request("t", 0), 11)
        sent = -1.0
        while sent != (sent := house.meters.values["kafka_sent_bytes"][()]):  # until the sockets take no more
            await trio.testing.wait_all_tasks_blocked(0.05)


async def test_answers_that_nobody_reads_make_way(tmp_path: Path) -> None:
    limits = Limits(fetch_bytes_max=MIB, sending_bytes_max=2 * MIB, crowded_patience_s=0.1)
    async with open_door(tmp_path, limits=limits) as (house, address), AsyncExitStack() as clients:
        writer = await clients.enter_async_context(connect(address))
        await writer.make_topic("t")
        await writer.produce("t", batch(bytes(900 * KIB)))
        await fill_with_unread_answers(clients, address, house, limits.sending_bytes_max)
        with trio.fail_after(10):  # and not after `send_timeout_s`
            assert values_of((await writer.fetch("t", 0)).records) == [bytes(900 * KIB)]


async def test_an_empty_fetch_needs_no_room(tmp_path: Path) -> None:
    limits = Limits(fetch_bytes_max=MIB, sending_bytes_max=2 * MIB, crowded_patience_s=NEVER)
    async with open_door(tmp_path, limits=limits) as (house, address), AsyncExitStack() as clients:
        writer = await clients.enter_async_context(connect(address))
        await writer.make_topic("t")
        await writer.produce("t", batch(bytes(900 * KIB)))
        await fill_with_unread_answers(clients, address, house, limits.sending_bytes_max)
        with trio.fail_after(5):
            done = await writer.fetch("t", 1)
        assert (done.error_code, done.high_watermark, done.records or b"") == (0, 1, b"")


async def test_a_fetch_of_no_bytes_gets_its_one_batch(tmp_path: Path) -> None:
    async with open_door(tmp_path) as (_, address), connect(address) as client:
        await client.make_topic("t")
        await client.produce("t", batch(b"1"))
        assert values_of((await client.fetch("t", 0, max_bytes=0)).records) == [b"1"]


def test_buffers_that_nobody_counts_are_no_larger_than_that() -> None:
    buffers = Buffers()
    for size in (17 * KIB, COUNTED):
        assert len(buffers.take(size)) == COUNTED
    assert len(buffers.take(COUNTED + 1)) == LARGE
