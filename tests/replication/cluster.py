"""A cluster in one process: real disks, real sockets, the node as it runs in production, without the front doors."""

from __future__ import annotations

import struct
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import trio
from crc32c import crc32c

from chronik_repl.config import Program, Settings, load
from chronik_repl.node import Node, run_node
from chronik_repl.replication.network import Network
from chronik_repl.replication.tcp import TcpNetwork
from chronik_repl.wal.changes import TopicMade
from chronik_repl.wal.disk import RealDisk
from chronik_repl.wal.frame import TOPIC_PATTERN
from chronik_repl.wal.segment import FRAMES_AT, Mark, best_mark
from chronik_repl.wal.values import Appended

DEADLINE_S = 20.0
TEST_DEADLINE_S = 60.0
TOPIC = "orders"

assert TOPIC_PATTERN.match(TOPIC)


def batch(value: bytes, count: int = 1) -> bytes:
    """A v2 record batch with a good head and CRC; what stands in it is `value`, as often as it takes."""
    record = bytes([0]) + value
    records = record * count
    body = struct.pack(">hiqqqhii", 0, count - 1, 0, 0, -1, -1, -1, count) + records
    head = struct.pack(">qiibI", 0, 9 + len(body), -1, 2, crc32c(body))
    return head + body


def settings_for(path: Path, node_id: int, program: Program, **variables: str) -> Settings:
    """Quick heartbeats, small segments, any free port."""
    environ = {
        "CHRONIK_NODE_ID": str(node_id),
        "CHRONIK_DATA_DIR": str(path),
        "CHRONIK_WAL_RECEIVER_BIND_ADDR": "127.0.0.1:0",
        "CHRONIK_KAFKA_BIND_ADDR": "127.0.0.1:0",
        "CHRONIK_HTTP_BIND_ADDR": "127.0.0.1:0",
        "CHRONIK_WAL_SEGMENT_BYTES": "1MiB",
        "CHRONIK_MIN_FREE_BYTES": "16MiB",
        "CHRONIK_REPLICATION_HEARTBEAT_INTERVAL_SECS": "0.3",
        "CHRONIK_REPLICATION_HEARTBEAT_TIMEOUT_SECS": "1.5",
        "CHRONIK_REPLICATION_RECONNECT_DELAY_SECS": "0.5",
    }
    environ.update({f"CHRONIK_{name.upper()}": value for name, value in variables.items()})
    return load(environ, program)


class Running:
    """One node that runs, and can be crashed, stopped and started again in its directory."""

    def __init__(self, cluster: Cluster, node_id: int, path: Path, program: Program, variables: dict[str, str]) -> None:
        self.cluster, self.node_id, self.path, self.program, self.variables = cluster, node_id, path, program, variables
        self.node: Node | None = None
        self.scope = trio.CancelScope()
        self.ended = trio.Event()
        self.error: BaseException | None = None

    @property
    def up(self) -> Node:
        assert self.node is not None
        return self.node

    @property
    def address(self) -> str:
        return self.up.addresses["replication"]

    async def start(self, network: Network | None = None) -> None:
        settings = settings_for(self.path, self.node_id, self.program, **self.variables)
        self.scope, self.ended, self.error = trio.CancelScope(), trio.Event(), None
        disk = RealDisk(self.path)
        self.node = await self.cluster.nursery.start(self._run, settings, disk, network or TcpNetwork())
        if self.up.addresses["replication"]:
            self.variables["wal_receiver_bind_addr"] = self.address  # the same port when it starts again

    async def _run(
        self, settings: Settings, disk: RealDisk, network: Network, *, task_status: trio.TaskStatus[Node]
    ) -> None:
        try:
            with self.scope:
                await run_node(settings, disk, network, program=self.program, task_status=task_status)
        except* Exception as group:
            self.error = group
            if self.node is None or not self.cluster.forgiving:
                raise
        finally:
            self.ended.set()

    async def crash(self) -> None:
        """As kill -9 does, but for the page cache, which stays in both cases."""
        self.scope.cancel()
        await self.ended.wait()

    async def stop(self) -> None:
        await self.up.stop()
        await self.ended.wait()


class Cluster:
    """Several of them."""

    def __init__(self, path: Path, nursery: trio.Nursery) -> None:
        self.path, self.nursery = path, nursery
        self.nodes: dict[int, Running] = {}
        self.forgiving = False  # a node may end with an error

    async def add(self, node_id: int, program: Program = "follower", **variables: str) -> Running:
        path = self.path / f"node-{node_id}"
        running = self.nodes[node_id] = Running(self, node_id, path, program, variables)
        await running.start()
        return running

    async def leader_and(self, followers: int, **variables: str) -> Running:
        """Node 1 leads; the others follow and are members by the time this returns."""
        addresses = [(await self.add(node_id)).address for node_id in range(2, followers + 2)]
        leader = await self.add(1, "leader", replication_followers=",".join(addresses), **variables)
        await until(lambda: leader.up.ready, "the leader is ready")
        await until(lambda: len(leader.up.peers) == followers + 1, "all are members")
        await until(lambda: leader.up.enough_replicas, "enough are live")
        await self.same_logs()
        return leader

    async def settled(self) -> None:
        """The same logs, and every node's own mark says so: a crash forgets nothing of that."""
        await self.same_logs()

        def known() -> bool:
            marks = [(mark_of(running.path), running.up.log.end) for running in self.nodes.values()]
            return all(mark is not None and mark[1:] == (end, end) for mark, end in marks)

        await until(known, "the marks are written")

    async def same_logs(self, *nodes: Running) -> None:
        """All nodes hold the same log, durable and committed to its end."""
        chosen = nodes or tuple(self.nodes.values())

        def same() -> bool:
            logs = [running.up.log for running in chosen]
            ends = {(log.end, log.end_checksum, log.durable.value, log.committed.value) for log in logs}
            return len(ends) == 1 and logs[0].durable.value == logs[0].end == logs[0].committed.value

        await until(same, "the logs are the same")


def mark_of(path: Path) -> Mark | None:
    """What a node would know of its log after a crash."""
    with sorted(path.glob("wal/*.wal"))[-1].open("rb") as file:
        return best_mark(file.read(FRAMES_AT))


async def until(condition: Callable[[], bool], what: str, deadline_s: float = DEADLINE_S) -> None:
    """Poll in the test's own time; the nodes under test do not."""
    with trio.move_on_after(deadline_s):
        while not condition():
            await trio.sleep(0.005)
        return
    raise AssertionError(f"not within {deadline_s} s: {what}")


@asynccontextmanager
async def running_cluster(path: Path) -> AsyncIterator[Cluster]:
    with trio.fail_after(TEST_DEADLINE_S):
        async with _running(path) as cluster:
            yield cluster


@asynccontextmanager
async def _running(path: Path) -> AsyncIterator[Cluster]:
    async with trio.open_nursery() as nursery:
        cluster = Cluster(path, nursery)
        yield cluster
        cluster.forgiving = True
        for running in cluster.nodes.values():
            running.scope.cancel()
        nursery.cancel_scope.cancel()


def produce(running: Running, value: bytes, count: int = 1) -> Appended:
    """Append one batch, as the Kafka door does."""
    log = running.up.log
    if TOPIC not in log.state.topics:
        log.append_change(TopicMade(TOPIC, 1))
    return log.append_batch(TOPIC, 0, batch(value, count), record_count=count)


async def produced(running: Running) -> list[bytes]:
    """The values below the high watermark, as a consumer reads them."""
    log = running.up.log
    values: list[bytes] = []
    offset = log.log_start_offset(TOPIC, 0)
    while True:
        fetched = await log.fetch(TOPIC, 0, offset, 1 << 20)
        if not fetched.batches:
            return values
        values += [bytes(b)[62:] for b in fetched.batches]
        offset = fetched.next_offset
