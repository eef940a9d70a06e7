"""Fetch: whole batches below the high watermark, as they stand in the log, from any node.

A fetch that finds too little waits: for the high watermark to pass one of its offsets, or for its time to be up. One
task watches the watermark for all who wait. Batches go from the log's files to the socket as they are; what one answer
holds is bounded, and so is what all answers that are not yet sent hold together: a slow consumer waits alone.

Who answers what, by offset:

    below the log start        leader: OFFSET_OUT_OF_RANGE (a reset works)   follower: "ask the leader"
    to the high watermark      the batches
    to the log's end           nothing, without error: it will become visible here
    beyond                     leader: OFFSET_OUT_OF_RANGE                   follower: OFFSET_NOT_AVAILABLE, behind

There are no fetch sessions: session id 0 makes clients send whole requests.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import trio

from chronik_repl.errors import ChronikError, CorruptLog, DiskFailed, OutOfRange
from chronik_repl.kafka.budget import Budget
from chronik_repl.kafka.codec import Head
from chronik_repl.kafka.codes import Code
from chronik_repl.kafka.connection import Connection
from chronik_repl.kafka.context import Door
from chronik_repl.kafka.hot import Fetch, FetchedPartition, FetchPartition, decode_fetch, encode_fetched
from chronik_repl.kafka.metadata import leader_of
from chronik_repl.wal.state import PartitionState

LOWEST, HIGHEST = 4, 12
MAX_WAIT_MS_MAX = 60_000
LOOK_S = 0.000_5  # looking through those who wait may take so long at every step of the high watermark
LOOK_REST = 10  # if it takes longer: rest for so many times that
FETCH_SESSION_ID_NOT_FOUND = 70
Topics = list[tuple[str, list[FetchedPartition]]]


class _Wait:
    """A fetch that waits until one of its partitions is visible beyond the offset it knows."""

    __slots__ = ("event", "watched")

    def __init__(self, watched: Sequence[tuple[PartitionState, int]]) -> None:
        self.watched = watched
        self.event = trio.Event()


class Fetching:
    """The Fetch API of one server."""

    def __init__(self, door: Door, sending: Budget) -> None:
        self._door = door
        self._house = door.house
        self._log = door.house.log
        self._limits = door.limits
        self._meters = door.meters
        self._sending = sending
        self._waits: dict[_Wait, None] = {}
        self._asleep: trio.Event | None = None

    async def run(self) -> None:
        """Wake those who wait, until cancelled. Raises DiskFailed."""
        committed = self._log.committed
        while True:
            value = committed.value
            began_s = time.perf_counter()
            for wait in list(self._waits):
                for partition, offset in wait.watched:
                    if partition.committed_offset > offset:
                        wait.event.set()
                        del self._waits[wait]
                        break
            took_s = time.perf_counter() - began_s
            if not self._waits:  # nobody to wake: do not be woken by every group
                self._asleep = trio.Event()
                await self._asleep.wait()
                self._asleep = None
                continue
            try:
                if took_s > LOOK_S:  # thousands of partitions are watched: look less often, not all the time
                    await trio.sleep(took_s * LOOK_REST)
                await committed.wait_beyond(value)
            except DiskFailed:
                raise
            except ChronikError:
                continue  # the leadership is over; readers go on

    async def handle(self, connection: Connection, head: Head, view: memoryview) -> None:
        request = decode_fetch(view, head.body_at, head.version)
        if request.session_id != 0:
            connection.ready(encode_fetched(head.version, head.correlation_id, (), code=FETCH_SESSION_ID_NOT_FOUND))
            return
        bytes_max = min(max(request.max_bytes, 0), self._limits.fetch_bytes_max)
        deadline = trio.current_time() + min(max(request.max_wait_ms, 0), MAX_WAIT_MS_MAX) / 1000
        while True:
            held = 0
            reads = self._has_batches(request)  # what will be empty takes no room
            if reads:
                await self._sending.take(bytes_max)
                held = bytes_max
            try:
                topics, size, final, failed = await self._collect(request, bytes_max if reads else None)
                if size > held:  # one batch that is larger than all that was asked for
                    self._sending.take_anyway(size - held)
                else:
                    self._sending.give_back(held - size)
                held = size
                done = final or size >= request.min_bytes or trio.current_time() >= deadline
                if done:
                    leader = leader_of(self._door) if failed else None
                    pieces = encode_fetched(head.version, head.correlation_id, topics, leader)
                    taken, held = held, 0
                    connection.ready(pieces, taken)
                    return
            finally:
                self._sending.give_back(held)
            await self._wait(request, topics, deadline)

    def _has_batches(self, request: Fetch) -> bool:
        look, rack = self._look, request.rack
        return any(look(name, asked, rack) is None for name, partitions in request.topics for asked in partitions)

    async def _collect(self, request: Fetch, bytes_max: int | None) -> tuple[Topics, int, bool, bool]:
        """What is there now, its size, whether it must be told at once, and whether there are errors in it.
        `bytes_max` None: nothing is to be read, and nothing is waited for."""
        topics: Topics = []
        total = 0
        final = failed = False
        for name, partitions in request.topics:
            results = []
            for asked in partitions:
                done = self._look(name, asked, request.rack)
                if done is None:
                    assert bytes_max is not None
                    done = await self._read(name, asked, bytes_max - total, first=total == 0)
                    size = sum(map(len, done.records))
                    total += size
                if done.code:
                    failed = final = True
                    self._meters.add("kafka_errors", 1, "Fetch", Code(done.code).name)
                elif done.preferred_replica >= 0:
                    final = True
                results.append(done)
            topics.append((name, results))
        return topics, total, final, failed

    def _look(self, topic: str, asked: FetchPartition, rack: str) -> FetchedPartition | None:
        """The answer where no batch is to be read; None where there is one."""
        house = self._house
        index, epoch, offset, _ = asked
        partition = self._log.state.find(topic, index)
        if partition is None:
            return FetchedPartition(index, Code.UNKNOWN_TOPIC_OR_PARTITION)
        if epoch >= 0 and epoch != house.epoch:
            return FetchedPartition(
                index, Code.FENCED_LEADER_EPOCH if epoch < house.epoch else Code.UNKNOWN_LEADER_EPOCH
            )
        if not house.serving:
            return FetchedPartition(index, Code.NOT_LEADER_OR_FOLLOWER)
        leads = house.role == "leader"
        high = partition.committed_offset
        if offset < partition.start_offset:
            return FetchedPartition(index, Code.OFFSET_OUT_OF_RANGE if leads else Code.NOT_LEADER_OR_FOLLOWER)
        if offset > partition.next_offset:
            return FetchedPartition(index, Code.OFFSET_OUT_OF_RANGE if leads else Code.OFFSET_NOT_AVAILABLE)
        if rack and leads:
            preferred = self._preferred(rack)
            if preferred >= 0:
                return FetchedPartition(index, 0, high, partition.start_offset, (), preferred)
        if offset >= high:
            return FetchedPartition(index, 0, high, partition.start_offset)
        return None

    def _preferred(self, rack: str) -> int:
        """A live follower in the consumer's rack (KIP-392); -1 if this node is as near, or there is none."""
        if self._door.settings.rack == rack:
            return -1
        for peer in self._house.peers:
            if peer.rack == rack and peer.live and peer.kafka_address and peer.node_id != self._house.node_id:
                return peer.node_id
        return -1

    async def _read(self, topic: str, asked: FetchPartition, room: int, *, first: bool) -> FetchedPartition:
        index, _, offset, bytes_max = asked
        leads = self._house.role == "leader"
        if room <= 0 and not first:
            return FetchedPartition(
                index, 0, self._log.committed_offset(topic, index), self._log.log_start_offset(topic, index)
            )
        try:
            fetched = await self._log.fetch(topic, index, offset, max(0, min(bytes_max, room)))
        except OutOfRange:  # removed while we were on the way
            return FetchedPartition(index, Code.OFFSET_OUT_OF_RANGE if leads else Code.NOT_LEADER_OR_FOLLOWER)
        except CorruptLog:
            return FetchedPartition(index, Code.KAFKA_STORAGE_ERROR)
        batches: Sequence[bytes | memoryview] = fetched.batches
        if not first and sum(map(len, batches)) > room:
            batches = ()  # only the first may be larger than the answer
        if batches:
            self._meters.add("kafka_fetched_batches", len(batches))
            self._meters.add("kafka_fetched_bytes", sum(map(len, batches)))
        return FetchedPartition(index, 0, fetched.high_watermark_offset, fetched.log_start_offset, batches)

    async def _wait(self, request: Fetch, topics: Topics, deadline: float) -> None:
        """Until more is visible than `topics` tells of, or the time is up."""
        watched = []
        for name, results in topics:
            for done in results:
                partition = self._log.state.find(name, done.partition)
                if partition is not None:
                    if partition.committed_offset > done.high_watermark:
                        return
                    watched.append((partition, done.high_watermark))
        if len(self._waits) >= self._limits.waiting_fetches_max:
            with trio.move_on_at(deadline):
                await trio.sleep_forever()
            return
        wait = _Wait(watched)
        self._waits[wait] = None
        if self._asleep is not None:
            self._asleep.set()
        try:
            with trio.move_on_at(deadline):
                await wait.event.wait()
        finally:
            self._waits.pop(wait, None)
