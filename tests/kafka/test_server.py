"""Hostile, broken and greedy clients: each costs itself its connection, and nobody else anything."""

from __future__ import annotations

import re
import socket
from pathlib import Path

import pytest
import trio

from chronik_repl.addresses import split_address
from chronik_repl.kafka import codec
from chronik_repl.kafka.codes import Code
from chronik_repl.kafka.context import KIB, MIB, Limits

from .client import Closed, batch, connect, values_of
from .house import open_door


async def still_serves(address: str) -> bool:
    async with connect(address) as client:
        return bool((await client.metadata(create=False)).controller_id == 1)


async def test_versions_are_told_even_to_clients_from_the_future(tmp_path: Path) -> None:
    async with open_door(tmp_path) as (_, address), connect(address) as client:
        for version in range(4):
            request = codec.ApiVersionsRequest(client_software_name="a", client_software_version="1")
            answer = await client.ask(request, version)
            told = {key.api_key: (key.min_version, key.max_version) for key in answer.api_keys}
            assert answer.error_code == 0
            assert (told[0], told[1], told[3]) == ((0, 12), (4, 12), (0, 12))
            assert not {24, 25, 26, 28} & set(told), "transactions are not advertised"
        head = b"\x00\x12\x00\x63\x00\x00\x00\x07\xff\xff\x00"
        await client.stream.send_all(len(head).to_bytes(4, "big") + head)
        frame = await client.frame()
        assert frame[:4] == b"\0\0\0\x07"
        answer = codec.ApiVersionsResponse.decode(frame[4:], version=0)
        assert answer.error_code == Code.UNSUPPORTED_VERSION
        assert [(key.api_key, key.max_version) for key in answer.api_keys] == [(18, 3)]
        assert (await client.metadata()).controller_id == 1  # the connection lives


async def test_versions_are_those_of_the_page(tmp_path: Path) -> None:
    page = Path(__file__).parents[2].joinpath("docs", "kafka.md").read_text()
    rows = re.findall(r"(?m)^\| ((?:[A-Z]\w+(?:, )?)+) \| ([\d–, ]+) \|", page)
    written = {}
    for names, ranges in rows:
        for name, versions in zip(names.split(", "), ranges.split(", "), strict=True):
            lowest, _, highest = versions.partition("–")
            written[name] = (int(lowest), int(highest or lowest))
    async with open_door(tmp_path) as (_, address), connect(address) as client:
        told = (await client.ask(codec.ApiVersionsRequest(), 0)).api_keys
    assert written == {codec.ApiKey(key.api_key).name: (key.min_version, key.max_version) for key in told}


HOSTILE = {
    "kf45 the largest length": b"\xff\xff\xff\xff" + bytes(100),
    "a length of 2 GB": b"\x7f\xff\xff\xff" + bytes(100),
    "no length": bytes(100),
    "kf46 TLS": bytes.fromhex("16030102000100 01fc0303".replace(" ", "")) + bytes(100),
    "HTTP": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "an API that is not there": b"\0\0\0\x0a\x03\xe7\0\0\0\0\0\1\xff\xff",
    "transactions": b"\0\0\0\x0a\0\x18\0\0\0\0\0\1\xff\xff",
    "Fetch in version 13": b"\0\0\0\x0a\0\x01\0\x0d\0\0\0\1\xff\xff",
    "Produce in version 13": b"\0\0\0\x0a\0\x00\0\x0d\0\0\0\1\xff\xff",
    "Metadata in version -1": b"\0\0\0\x0a\0\x03\xff\xff\0\0\0\1\xff\xff",
    "a client id that ends elsewhere": b"\0\0\0\x0a\0\x03\0\x01\0\0\0\1\x7f\xff",
    "a body that is cut": b"\0\0\0\x0c\0\x03\0\x01\0\0\0\1\xff\xff\0\0",
    "bytes behind the body": b"\0\0\0\x12\0\x03\0\x01\0\0\0\1\xff\xff\xff\xff\xff\xff\0\0\0\0",
    "two million topics": b"\0\0\0\x0e\0\x03\0\x01\0\0\0\1\xff\xff\0\x1f\xff\xff",
    "a topic name that is null": b"\0\0\0\x10\0\x03\0\x01\0\0\0\1\xff\xff\0\0\0\1\xff\xff",
    "a topic name that is no UTF-8": b"\0\0\0\x11\0\x03\0\x01\0\0\0\1\xff\xff\0\0\0\1\0\1\xff",
}


@pytest.mark.parametrize("name", HOSTILE)
async def test_nonsense_closes_its_connection_and_no_other(tmp_path: Path, name: str) -> None:
    async with open_door(tmp_path) as (_, address), connect(address) as other:
        await other.make_topic("t")
        async with connect(address) as client:
            await client.stream.send_all(HOSTILE[name])
            assert await client.closed()
        assert (await other.produce("t", batch(b"1"))).error_code == 0
        assert await still_serves(address)


async def test_kf48_silence_and_kf49_a_byte_now_and_then_are_ended(tmp_path: Path) -> None:
    limits = Limits(request_timeout_s=0.5, idle_timeout_s=0.5)
    async with open_door(tmp_path, limits=limits) as (_, address):
        async with connect(address) as client:
            assert await client.closed()  # silence
        async with connect(address) as client:
            request = client.encode(codec.MetadataRequest(topics=None), 9)
            began = trio.current_time()
            with pytest.raises(trio.BrokenResourceError):  # noqa: PT012
                for byte in request * 100:
                    await client.stream.send_all(bytes([byte]))
                    await trio.sleep(0.05)
            assert trio.current_time() - began < 5
        async with connect(address) as client:  # but requests one after another are fine for ever
            for _ in range(10):
                assert (await client.metadata()).controller_id == 1
                await trio.sleep(0.1)


async def test_a_request_is_measured_before_it_is_read(tmp_path: Path) -> None:
    limits = Limits(request_bytes_max=100 * KIB, small_request_bytes_max=10 * KIB)
    async with open_door(tmp_path, limits=limits) as (_, address), connect(address) as other:
        await other.make_topic("t")
        assert (await other.produce("t", batch(bytes(90 * KIB)))).error_code == 0
        async with connect(address) as client:
            await client.stream.send_all(client.encode(client.produce_request("t", batch(bytes(200 * KIB))), 9)[:100])
            assert await client.closed()
        async with connect(address) as client:
            await client.stream.send_all((11 * KIB).to_bytes(4, "big") + b"\0\x03\0\x09")
            assert await client.closed()


async def test_too_many_connections_are_turned_away(tmp_path: Path) -> None:
    async with open_door(tmp_path, limits=Limits(connections_max=3)) as (house, address):
        async with connect(address) as a, connect(address) as b, connect(address) as c:
            for client in (a, b, c):
                assert (await client.metadata()).controller_id == 1
            async with connect(address) as fourth:
                assert await fourth.closed()
        with trio.fail_after(5):
            while house.meters.values["kafka_connections"][()] > 0:
                await trio.testing.wait_all_tasks_blocked(0.001)
        assert await still_serves(address)


async def test_a_client_that_sends_and_hangs_up_at_once_is_heard_and_forgotten(tmp_path: Path) -> None:
    async with open_door(tmp_path) as (house, address):
        async with connect(address) as client:
            await client.make_topic("t")
            request = client.encode(client.produce_request("t", batch(b"last words"), acks=0), 9)
        host, port = split_address(address)
        with socket.create_connection((host, port)) as plain:
            while house.meters.values["kafka_connections_opened"][()] < 2:
                await trio.testing.wait_all_tasks_blocked(0.001)
            await trio.testing.wait_all_tasks_blocked(0.01)
            plain.sendall(request)  # both in one step of the event loop: the server hears of them at once
            plain.shutdown(socket.SHUT_WR)
            with trio.fail_after(5):
                while house.meters.values["kafka_connections"][()] > 0:
                    await trio.testing.wait_all_tasks_blocked(0.001)
        assert house.log.end_offset("t", 0) == 1


async def test_requests_in_one_piece_are_answered_in_order(tmp_path: Path) -> None:
    async with open_door(tmp_path) as (_, address), connect(address) as client:
        await client.make_topic("t")
        pieces = []
        for number in range(300):
            pieces.append(
                client.encode(client.produce_request("t", batch(b"%d" % number), acks=1 - 2 * (number % 2)), 9)
            )
            if number % 10 == 0:
                pieces.append(client.encode(codec.MetadataRequest(topics=None), 9))
        await client.stream.send_all(b"".join(pieces))
        offsets = []
        for _ in range(len(pieces)):
            answer = await client.answer()
            if hasattr(answer, "responses"):
                offsets.append(answer.responses[0].partition_responses[0].base_offset)
        assert offsets == list(range(300))
        assert values_of((await client.fetch("t", 0)).records) == [b"%d" % number for number in range(300)]


async def test_requests_in_pieces_of_any_size(tmp_path: Path) -> None:
    async with open_door(tmp_path) as (_, address), connect(address) as client:
        await client.make_topic("t")
        sizes = [1, 5, 100, 16 * KIB - 80, 16 * KIB, 20 * KIB, 70 * KIB, MIB, MIB + 70 * KIB, 3 * MIB]
        data = b"".join(client.encode(client.produce_request("t", batch(bytes(size))), 9) for size in sizes)
        step = 7_919

        async def send() -> None:
            for at in range(0, len(data), step):
                await client.stream.send_all(data[at : at + step])

        async with trio.open_nursery() as nursery:
            nursery.start_soon(send)
            for number in range(len(sizes)):
                done = (await client.answer()).responses[0].partition_responses[0]
                assert (done.error_code, done.base_offset) == (0, number)


async def test_kf27_a_consumer_that_reads_nothing_holds_a_bounded_amount(tmp_path: Path) -> None:
    """Many greedy fetches of one connection: the server reads no further while the first answer is not taken."""
    limits = Limits(fetch_bytes_max=MIB)
    async with open_door(tmp_path, limits=limits) as (house, address), connect(address) as writer:
        await writer.make_topic("t")
        for _ in range(24):
            await writer.produce("t", batch(bytes(900 * KIB)))
        async with connect(address) as client:
            for _ in range(60):
                await client.send(client.fetch_request("t", 0), 11)
            # It takes nothing. Another consumer is served meanwhile.
            async with connect(address) as other:
                for _ in range(5):
                    assert values_of((await other.fetch("t", 23)).records) == [bytes(900 * KIB)]
            fetched = house.meters.values["kafka_fetched_bytes"][()]
            assert fetched < 24 * MIB, "more was read than the sockets' buffers and one answer hold"
            for _ in range(60):  # and when it reads, it gets all of them
                partition = (await client.answer()).responses[0].partitions[0]
                assert len(values_of(partition.records)) == 1


async def test_a_consumer_that_reads_nothing_for_too_long_is_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("chronik_repl.kafka.connection.SENT_BYTES_A_SECOND_MIN", 100 * MIB)
    async with open_door(tmp_path, limits=Limits(send_timeout_s=0.3)) as (house, address), connect(address) as writer:
        await writer.make_topic("t")
        for _ in range(16):
            await writer.produce("t", batch(bytes(512 * KIB)))
        async with connect(address) as client:
            for _ in range(4):
                await client.send(client.fetch_request("t", 0), 11)
            while house.meters.values["kafka_connections"][()] > 1:
                await trio.testing.wait_all_tasks_blocked(0.001)
            with pytest.raises((Closed, trio.BrokenResourceError)):  # noqa: PT012
                for _ in range(4):
                    await client.answer()
        assert await still_serves(address)


async def test_produced_bytes_in_flight_are_bounded(tmp_path: Path) -> None:
    limits = Limits(receiving_bytes_max=MIB, pipelined_requests_max=8)
    async with open_door(tmp_path, limits=limits) as (house, address), connect(address) as writer:
        await writer.make_topic("t")
        with house.held():
            async with trio.open_nursery() as nursery:

                async def send() -> None:
                    for _ in range(40):
                        await writer.send(writer.produce_request("t", batch(bytes(100 * KIB)), timeout_ms=60_000), 9)

                nursery.start_soon(send)
                await house.log.durable.wait_beyond(house.log.durable.value)
                await trio.sleep(0.3)
                assert 1 <= house.log.end_offset("t", 0) <= 8  # the rest is still with the client
                house.holding = False
                house.log.commit_to(house.log.durable.value)
                for number in range(40):
                    done = (await writer.answer()).responses[0].partition_responses[0]
                    assert (done.error_code, done.base_offset) == (0, number)
