"""A house of one room: the real log on the real disk, led by this node alone, with the real Kafka door in front.

What replication decides is set by hand here (role, epoch, who is alive, what is committed), so that the door can be
tried in every standing. `python -m tests.kafka.house DIR [PORT]` runs it by itself.
"""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import trio

from chronik_repl.config import Settings
from chronik_repl.errors import NotLeader
from chronik_repl.kafka.context import Limits
from chronik_repl.kafka.server import serve
from chronik_repl.meters import Meters
from chronik_repl.node import log_status
from chronik_repl.positions import Epoch, Position
from chronik_repl.standing import Peer, Role, Status
from chronik_repl.wal.changes import EpochStart, ProducerIdGiven, TopicMade
from chronik_repl.wal.disk import RealDisk
from chronik_repl.wal.log import Log, LogSettings


class OneHouse:
    def __init__(self, log: Log, node_id: int = 1) -> None:
        self.log = log
        self.node_id = node_id
        self.role: Role = "leader"
        self.epoch = 0
        self.accepting = True
        self.serving = True
        self.enough_replicas = self.sync_in_force = True
        self.ready = True
        self.meters = Meters()
        self.peers: tuple[Peer, ...] = (Peer(node_id, live=True),)
        self.leader: Peer | None = None
        self.holding = False  # the high watermark stands still
        self.slow_s = 0.0

    @property
    def cluster_id(self) -> str:
        return self.log.cluster_id or ""

    async def lead(self) -> None:
        """A new epoch of ours, committed."""
        if self.log.cluster_id is None:
            self.log.found("a-cluster")
        history = self.log.state.history
        self.epoch = history[-1].epoch + 1 if history else 1
        end = self.log.begin_epoch(Epoch(self.epoch), EpochStart(self.node_id, "a-directory")).end
        await self.log.durable.wait(end)
        if not self.holding:
            self.log.commit_to(end)

    async def commit(self) -> None:
        """What is durable is committed, as in a cluster of one."""
        while True:
            try:
                value = await self.log.durable.wait_beyond(self.log.durable.value)
            except NotLeader:  # deposed by the test
                continue
            if not self.holding:
                self.log.commit_to(value)

    def ask_for_producer_ids(self, word: str) -> None:
        """As the leader would: the ids come in the log, after a while."""
        trio.lowlevel.spawn_system_task(self._give_ids, word)

    async def _give_ids(self, word: str) -> None:
        await trio.sleep(self.slow_s)
        self.log.append_change(ProducerIdGiven(self.log.state.next_producer_id + 1, 2, word))

    def ask_for_topic(self, name: str) -> None:
        self.log.append_change(TopicMade(name, 1))

    @contextmanager
    def held(self) -> Iterator[None]:
        """As if no follower answered meanwhile."""
        self.holding = True
        try:
            yield
        finally:
            self.holding = False
            self.log.commit_to(self.log.durable.value)

    def status(self) -> Status:
        return Status(
            node_id=self.node_id,
            cluster_id=self.cluster_id,
            directory_id="a-directory",
            version="0",
            role=self.role,
            epoch=self.epoch,
            leader=self.leader,
            mode="async",
            sync_replicas=0,
            sync_in_force=True,
            acks_all_means="durable here",
            ready=True,
            uptime_s=0.0,
            log=log_status(self.log, free_bytes=0),
        )


@asynccontextmanager
async def open_door(
    folder: Path, *, limits: Limits | None = None, bind: str = "127.0.0.1:0", holding: bool = False, **settings: Any
) -> AsyncIterator[tuple[OneHouse, str]]:
    """The house and its Kafka address. `holding`: no follower has answered it yet."""
    disk = RealDisk(folder)
    log = await Log.open(disk, LogSettings(segment_bytes=16 * 1024 * 1024, min_free_bytes=0), None)
    house = OneHouse(log)
    house.holding = holding
    configured = Settings(node_id=1, data_dir=folder, kafka_bind_addr=bind, **settings)
    try:
        async with trio.open_nursery() as nursery:
            await nursery.start(_run_log, log)
            nursery.start_soon(house.commit)
            await house.lead()

            async def door(*, task_status: trio.TaskStatus[str]) -> None:
                await serve(house, configured, limits=limits, task_status=task_status)

            address: str = await nursery.start(door)
            yield house, address
            nursery.cancel_scope.cancel()
    finally:
        with trio.CancelScope(shield=True):
            await log.close()
        disk.close()


async def _run_log(log: Log, *, task_status: trio.TaskStatus[None]) -> None:
    await log.run(task_status=task_status)


def at(value: int) -> Position:
    return Position(value)


async def main() -> None:
    folder, port = Path(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else "0"
    async with open_door(folder, bind=f"127.0.0.1:{port}") as (_, address):
        print(f"ready {address}", flush=True)
        await trio.sleep_forever()


if __name__ == "__main__":
    trio.run(main)
