"""Mutated requests of every API, through the production server, without a socket in between.

A request is made from the API's own schema, with values that lead somewhere (topics that are there, sound batches,
numbers at the edges), then most are broken: bits, bytes, lengths, cuts, repetitions. Each goes through a connection of
its own, as bytes; whatever comes of it other than an answer or a closed connection ends the run, with the seed that
found it. One in WHOLE goes through all of a conversation, as over TLS; the others through its reading half as the
poller drives it, which is where requests are taken apart and handled: answers fit into the wire at once, so the writing
half would only be started and ended.

    python -m tests.kafka.fuzz --requests 1000000 --seed 7     # that many of every API, on all cores
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import os
import random
import resource
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import structlog
import trio

from chronik_repl.config import Settings
from chronik_repl.kafka import codec, topics
from chronik_repl.kafka.connection import Connection
from chronik_repl.kafka.context import Client, Door, Limits
from chronik_repl.kafka.server import Server
from chronik_repl.kafka.wire import Buffer
from chronik_repl.wal.disk import RealDisk
from chronik_repl.wal.log import Log, LogSettings

from .client import batch
from .house import OneHouse

MIB = 1024 * 1024
CONCURRENT = 100
SOUND_A_VERSION = 50  # requests to mutate
WHOLE = 20
PATIENCE_S = 0.02  # of a client: then it is gone, also from the middle of a wait
NAMES = ["t", "u", "group", "consumer", "range", "", "x" * 300, "ä/..", "SCRAM-SHA-256", "cleanup.policy", "member-1"]
EDGES: dict[str, list[Any]] = {
    "int8": [0, 1, 2, 4, -1, 127, -128],
    "int16": [0, 1, -1, 3, 32767, -32768],
    "uint16": [0, 1, 65535],
    "int32": [0, 1, 2, -1, 5, 1000, 2**31 - 1, -(2**31)],
    "int64": [0, 1, -1, -2, -3, 1000, 2**63 - 1, -(2**63)],
    "float64": [0.0, 1.5, -1e300],
}


class MemoryWire:
    """A client that sends these bytes, takes every answer, and hangs up."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0
        self._first = trio.Event()
        self.answered = 0
        self.polled: Connection | None = None  # whom to tell that the client hung up

    def receive_now(self, into: memoryview) -> int | None:
        piece = self._data[self._at : self._at + len(into)]
        into[: len(piece)] = piece
        self._at += len(piece)
        return len(piece) if piece else None

    async def receive(self, into: memoryview) -> int:
        count = self.receive_now(into)
        if count is not None:
            await trio.lowlevel.checkpoint()
            return count
        if not self.answered:
            await self._first.wait()
        return 0

    def send_now(self, pieces: Sequence[Buffer]) -> int:
        size = sum(map(len, pieces))
        self.answered += size
        self._first.set()
        if self.polled is not None:
            self.polled._received(0)
            self.polled._wake()
        return size

    async def send(self, pieces: Sequence[Buffer]) -> None:
        raise AssertionError("everything fits")

    async def close(self) -> None:
        await trio.lowlevel.checkpoint()


class Maker:
    """Requests from a seed."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def value(self, field: Any, version: int, depth: int = 0) -> Any:
        pick = self.random
        if field.nullable_for_version_q(version) and pick.random() < 0.15:
            return None
        kind = field._type_str
        if field.is_struct_array():
            count = pick.choice([0, 1, 1, 1, 2, 3]) if depth < 3 else 1
            return [self.struct(field.array_of, version, depth + 1) for _ in range(count)]
        if field.is_array():
            return [self.value(field.array_of, version, depth + 1) for _ in range(pick.choice([0, 1, 2]))]
        if field.is_struct():
            return self.struct(field, version, depth + 1)
        if kind in EDGES:
            return pick.choice(EDGES[kind]) if pick.random() < 0.7 else pick.choice([0, 1])
        if kind == "bool":
            return pick.random() < 0.5
        if kind == "uuid":
            return None
        if kind == "string":
            return pick.choice(NAMES[:3]) if pick.random() < 0.6 else pick.choice(NAMES)
        return self.records()

    def records(self) -> bytes:
        pick = self.random
        made = bytearray(
            batch(
                *[pick.randbytes(pick.choice([0, 1, 50])) for _ in range(pick.choice([0, 1, 2]))],
                attributes=pick.choice([0, 0, 0, 1, 4, 7, 16, 32]),
                producer=pick.choice([(-1, -1, -1), (1, 0, 0), (2**62, 3, 2**31 - 1)]),
            )
        )
        if pick.random() < 0.3:
            made[pick.randrange(len(made))] ^= 1 << pick.randrange(8)
        return bytes(made)

    def struct(self, schema: Any, version: int, depth: int) -> Any:
        values = {field.name: self.value(field, version, depth) for field in schema.untagged_fields(version)}
        return schema.data_class(version=version, **values)

    def request(self, message: Any, version: int) -> bytes:
        schema = message._struct
        values = {field.name: self.value(field, version) for field in schema.untagged_fields(version)}
        request = message(version=version, **values)
        request.with_header(correlation_id=self.random.getrandbits(31), client_id=self.random.choice(NAMES[:8]))
        return bytes(request.encode(version=version, header=True))

    def broken(self, request: bytes) -> bytes:
        """The request with its length before it, mutated more often than not."""
        pick = self.random
        data = bytearray(request)
        if pick.random() < 0.85:
            for _ in range(pick.choice([1, 1, 1, 2, 3, 8])):
                self._mutate(data)
        size = len(data)
        if pick.random() < 0.03:
            size = pick.choice([0, 1, size - 1, size + 1, 2**31 - 1, 2**32 - 1, MIB])
        return max(size, 0).to_bytes(4, "big") + bytes(data)

    def _mutate(self, data: bytearray) -> None:
        pick = self.random
        if not data:
            data.append(pick.randrange(256))
            return
        at = pick.randrange(min(len(data), 8), len(data)) if len(data) > 8 and pick.random() < 0.9 else 0
        match pick.randrange(8):
            case 0:
                data[at] ^= 1 << pick.randrange(8)
            case 1:
                data[at] = pick.choice([0, 1, 0x7F, 0x80, 0xFF])
            case 2:
                del data[at:]
            case 3:
                del data[at : at + pick.randrange(1, 9)]
            case 4:
                data[at:at] = pick.randbytes(pick.randrange(1, 9))
            case 5:
                data[at : at + 4] = pick.choice(
                    [b"\xff" * 4, b"\x7f\xff\xff\xff", b"\0\0\0\0", b"\0\0\xff\xff", b"\x80" * 4]
                )
            case 6:
                data[at:at] = data[at : at + pick.randrange(1, 64)]
            case _:
                data[at:at] = b"\x80" * pick.randrange(1, 200)


async def fuzz(requests: int, seed: int, folder: Path, keys: Sequence[int] = ()) -> dict[str, int]:
    """That many requests of each API. Returns how many were answered; raises what the server should not have raised."""
    disk = RealDisk(folder)
    log = await Log.open(disk, LogSettings(segment_bytes=16 * MIB, min_free_bytes=0), None)
    house = OneHouse(log)
    answered: dict[str, int] = {}
    async with trio.open_nursery() as nursery:
        await nursery.start(_run, log)
        nursery.start_soon(house.commit)
        await house.lead()
        settings = Settings(node_id=1, data_dir=folder)
        door = Door(house, settings, limits=Limits(sending_bytes_max=16 * MIB))
        door.advertised = "127.0.0.1:9092"
        for name in NAMES[:2]:
            topics.make_topic(door, name, 2, {})
        server = Server(door)
        nursery.start_soon(server.apis.producing.run)
        nursery.start_soon(server.apis.fetching.run)
        nursery.start_soon(door.coordinator.run)
        for key in keys or sorted(server.apis.versions):
            name = codec.ApiKey(key).name
            answered[name] = await _one_api(server, key, requests, seed)
        held = server.shared.receiving.held, server.shared.sending.held
        assert held == (0, 0), f"bytes that nobody gave back: {held}"
        assert not server.apis.fetching._waits
        nursery.cancel_scope.cancel()
    with trio.CancelScope(shield=True):
        await log.close()
    disk.close()
    return answered


async def _run(log: Log, *, task_status: trio.TaskStatus[None]) -> None:
    await log.run(task_status=task_status)


async def _one_api(server: Server, key: int, requests: int, seed: int) -> int:
    lowest, highest = server.apis.versions[key]
    message = codec.REQUESTS[key]
    lowest = max(lowest, message._valid_versions[0])
    maker = Maker(seed * 1000 + key)
    versions = range(lowest, highest + 1)
    sound = [maker.request(message, version) for _ in range(SOUND_A_VERSION) for version in versions]
    answered = 0
    numbers = iter(range(requests))

    async def work() -> None:
        nonlocal answered
        for number in numbers:
            data = maker.broken(maker.random.choice(sound))
            wire = MemoryWire(data)
            try:
                if number % WHOLE == 0:
                    with trio.move_on_after(PATIENCE_S):
                        await server._converse(wire, Client("fuzz"))
                else:
                    await _read(server, wire)
            except Exception as error:
                raise AssertionError(f"seed {seed}: {message.name}: {data.hex()}") from error
            answered += wire.answered > 0

    async with trio.open_nursery() as nursery:
        for _ in range(min(CONCURRENT, requests)):
            nursery.start_soon(work)
    return answered


async def _read(server: Server, wire: MemoryWire) -> None:
    client = Client("fuzz")
    client.authenticated = True
    connection = wire.polled = Connection(wire, client, server.shared, polled=True)
    connection.scope.deadline = connection.now + PATIENCE_S
    try:
        with connection.scope:
            await server._read(connection)
    finally:
        connection.closed()


class Round(NamedTuple):
    """One fresh server's life."""

    seed: int
    requests: int  # of every API
    answered: dict[str, int]
    grown_bytes: int
    memory_bytes: int


def one_round(task: tuple[int, int]) -> Round:
    seed, requests = task
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(50))
    vars(topics)["ALL_PARTITIONS_MAX"] = 2_000
    gc.collect()
    gc.freeze()  # as a node does; a full collection of all that is loaded takes as long as hundreds of requests
    folder = Path(tempfile.mkdtemp(prefix="fuzz-kafka-"))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    try:
        answered = trio.run(fuzz, requests, seed, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return Round(seed, requests, answered, after - before, after)


def rounds(requests: int, seed: int, each: int, processes: int) -> Iterator[Round]:
    """That many requests of every API, in rounds, as they end. Raises what the server should not have raised."""
    tasks = [(seed + number, min(each, requests - at)) for number, at in enumerate(range(0, requests, each))]
    with multiprocessing.get_context("spawn").Pool(min(processes, len(tasks))) as pool:
        yield from pool.imap_unordered(one_round, tasks)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--requests", type=int, default=1_000_000, help="of every API (default 1,000,000)")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().getrandbits(32))
    parser.add_argument("--round", type=int, default=10_000, help="requests of an API between fresh servers")
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)))
    options = parser.parse_args()
    done = 0
    total: Counter[str] = Counter()
    for found in rounds(options.requests, options.seed, options.round, options.processes):
        done += found.requests
        total.update(found.answered)
        print(
            f"{done} requests of each of {len(total)} APIs, seed {found.seed}: {sum(total.values())} answered, "
            f"{found.memory_bytes // MIB} MiB",
            flush=True,
        )


if __name__ == "__main__":
    main()
