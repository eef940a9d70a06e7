"""A whole cluster in one process: machines with simulated disks, one simulated network, the production's `run_node`.

A machine has a medium that outlives everything, and now and then a process: one run of `run_node` over one `SimDisk`.
To kill it, its disk and sockets die first, so that nothing that unwinding does can reach them; then its tasks go.
"""

from __future__ import annotations

import math
import random
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import trio

from chronik_repl.config import Program, Settings
from chronik_repl.errors import CannotLead, ChronikError, CorruptLog, DiskFailed, ForeignLog
from chronik_repl.kafka.producer_ids import Ids
from chronik_repl.leader import Leadership
from chronik_repl.node import Node, run_node
from chronik_repl.positions import ORIGIN
from chronik_repl.wal.disk import File, Write
from chronik_repl.wal.watermark import Watermark
from tests.simulation import disk as simulated
from tests.simulation.clock import SimClock, Timer, ring_all
from tests.simulation.disk import SimDisk, SimFile
from tests.simulation.judge import Judge
from tests.simulation.medium import Medium
from tests.simulation.network import Fabric

T = TypeVar("T")
CAPACITY_BYTES = 1 << 40
PORT = 9291
FATAL = (DiskFailed, CorruptLog, CannotLead, ForeignLog)  # what may end a process; anything else is a bug


class Killed(BaseException):
    """The process is gone: unwinds every task that was in a call to its disk, shielded or not."""


class MortalDisk(SimDisk):
    """On a dead disk, a call ends its task; `SimDisk` itself would leave it waiting for ever.

    A call cannot be cancelled, as a thread's cannot. Its time is a timer of the simulation's clock, and nothing else.
    """

    def __init__(self, rng: random.Random, medium: Medium | None = None) -> None:
        super().__init__(rng, medium)
        clock = trio.lowlevel.current_clock()
        assert isinstance(clock, SimClock)
        self._clock = clock
        self._stalled = False
        self._calls: dict[Timer, None] = {}
        self._committing = False
        self._turns: dict[Timer, None] = {}  # commits that wait for theirs, in order

    def crash(self) -> None:
        super().crash()
        ring_all(self._calls)
        ring_all(self._turns)

    def stall(self) -> None:
        self._stalled = True

    def resume(self) -> None:
        self._stalled = False
        ring_all(self._calls)

    async def commit(self, file: File, writes: Sequence[Write]) -> None:
        assert isinstance(file, SimFile)
        assert not file.closed
        self._check()
        joined = [Write(at, [b"".join(buffers)]) for at, buffers in writes]
        try:
            await self._commit(file, joined)
        except simulated._Dead:
            raise Killed from None
        await trio.lowlevel.checkpoint_if_cancelled()

    def _is_committing(self) -> bool:
        return self._committing

    async def _commit(self, file: SimFile, writes: Sequence[Write]) -> None:
        if self._committing:
            await self._clock.wait(math.inf, self._turns, cancellable=False)
            if self.dead:
                raise simulated._Dead
        self._committing = True
        try:
            self._check()
            try:
                await self._elapse(sum(len(data) for _, (data,) in writes))
            except simulated._Dead:  # between two of them
                for at, (data,) in writes[: self.rng.randrange(len(writes))]:
                    self.medium.write(file.inode, at, bytes(data))
                raise
            for at, (data,) in writes:
                self._put(file.inode, file.name, at, data)
            await self._sync(file.inode, file.name)
        finally:
            for timer in self._turns:
                timer.ring()  # and it is its turn
                break
            else:
                self._committing = False

    async def _elapse(self, size: int = 0, seconds: float = simulated.CALL_S) -> None:
        clock = self._clock
        until = clock.now + (seconds + size / simulated.BYTES_PER_S) * self.slowness * self.rng.uniform(0.5, 1.5)
        while not self._death.is_set() and (clock.now < until or self._stalled):
            await clock.wait(until if clock.now < until else math.inf, self._calls, cancellable=False)
        if self._death.is_set():
            raise simulated._Dead

    async def _call(self, size: int = 0) -> None:
        await trio.lowlevel.checkpoint_if_cancelled()
        try:
            await self._elapse(size)
        except simulated._Dead:
            raise Killed from None

    async def _finish(self, action: Callable[[], Awaitable[T]]) -> T:
        self._check()
        try:
            result = await action()
        except simulated._Dead:
            raise Killed from None
        await trio.lowlevel.checkpoint_if_cancelled()
        return result


class Machine:
    def __init__(self, cluster: Cluster, name: str, node_id: int, program: Program, settings: Settings) -> None:
        self.cluster, self.name, self.node_id = cluster, name, node_id
        self.program: Program = program
        self.settings = settings
        self.disk = MortalDisk(cluster.rng_for(f"disk {name}"))
        self.disk.capacity_bytes = CAPACITY_BYTES
        self.node: Node | None = None
        self.ids: Ids | None = None
        self.boots = 0
        self.booted_at = 0.0
        self.ended = trio.Event()  # of the present process
        self.ended.set()
        self.why_ended = ""
        self.watermark = Watermark(ORIGIN)
        self.committed = 0  # its high watermark, as the judge last saw it
        self.checked = 0  # its bytes were compared with the canon up to here
        self.rotten = False  # a bit was flipped by the story
        self.clock_skew_s = 0.0
        self.promoted = False  # the operator has just asked for it
        self.accepts_loss = False  # and accepts what that loses
        self.excused_to: int | None = None  # down to here its high watermark may go back: a loss was accepted
        self.kept = 0  # the high watermark that its last process left on the disk
        self.leadership: Leadership | None = None  # as the judge last saw it
        self._scope = trio.CancelScope()

    @property
    def running(self) -> bool:
        return not self.ended.is_set()

    @property
    def directory(self) -> str:
        return self.node._local.passport.directory_id if self.node is not None else self._last_directory

    _last_directory = ""

    @property
    def log_start(self) -> int:
        return self.node.log.start if self.node is not None else 0

    @property
    def leads(self) -> bool:
        node = self.node
        return node is not None and node._leadership is not None and node._leadership.begun

    @property
    def sync_replicas_asked(self) -> int:
        """By its operator, in its environment; 0 where that says nothing."""
        settings = self.settings
        return settings.replication_sync_replicas if settings.replication_mode == "sync" else 0

    @property
    def frozen(self) -> bool:
        return self.cluster.fabric.is_frozen(self.name)

    def clock(self) -> float:
        return 1_700_000_000.0 + trio.current_time() + self.clock_skew_s

    async def run(self) -> None:
        """One process, from its start to its end."""
        judge, fabric = self.cluster.judge, self.cluster.fabric
        self.ended = trio.Event()
        self.boots += 1
        self.booted_at = trio.current_time()
        self.why_ended = "stopped"
        fabric.boot(self.name)
        judge.note("starts", self.name, self.boots)
        rng = self.cluster.rng_for(f"process {self.name} {self.boots}")
        try:
            with trio.CancelScope() as self._scope:
                async with trio.open_nursery() as nursery:
                    await nursery.start(self._serve, rng)
        except BaseException as error:
            self._explain(error)
        finally:
            if self.disk.dead:
                self.why_ended = "killed"
            self.node = self.ids = None
            self.kept = judge.kept_watermark(self.disk.medium)
            fabric.kill(self.name)
            judge.note("ended", self.name, self.why_ended)
            self.ended.set()

    async def _serve(self, rng: random.Random, task_status: trio.TaskStatus[None]) -> None:
        network = self.cluster.fabric.of(self.name)
        async with trio.open_nursery() as nursery:
            run = run_node
            node: Node = await nursery.start(
                lambda task_status: run(
                    self.settings,
                    self.disk,
                    network,
                    program=self.program,
                    clock=self.clock,
                    rng=rng,
                    task_status=task_status,
                )
            )
            self.watermark = node.log.committed
            self.committed = self.watermark.value
            self.ids = Ids(node)
            self.checked = 0
            self.node = node
            self._last_directory = self.directory
            self.cluster.judge.note("runs", self.name, node.log.start, node.log.end, node.log.committed.value)
            self.cluster.judge.restarts(self)
            task_status.started()

    def _explain(self, error: BaseException) -> None:
        leaves = list(_leaves(error))
        if any(isinstance(leaf, Killed) for leaf in leaves) and all(
            isinstance(leaf, Killed | trio.Cancelled) or self.disk.dead for leaf in leaves
        ):
            self.why_ended = "killed"
            return
        if all(isinstance(leaf, FATAL) for leaf in leaves):
            self.why_ended = f"{type(leaves[0]).__name__}: {leaves[0]}"
            return
        raise error

    # What the story does to it

    def kill(self) -> None:
        """kill -9."""
        self.cluster.judge.note("kill", self.name)
        self.disk.crash()
        self.cluster.fabric.kill(self.name)
        self._scope.cancel()

    def power_cut(self) -> None:
        self.cluster.judge.note("power cut", self.name)
        self.disk.power_cut()
        self.cluster.fabric.unplug(self.name)
        self._scope.cancel()

    def next_disk(self) -> None:
        """Before the next start."""
        old = self.disk
        if not old.dead:
            old.crash()
        self.disk = MortalDisk(old.rng, old.medium)
        self.disk.capacity_bytes = old.capacity_bytes

    def wipe(self) -> None:
        """An empty disk in the same machine: another directory."""
        self.cluster.judge.note("wipe", self.name)
        self.disk.crash()
        self.disk = MortalDisk(self.disk.rng, Medium())
        self.disk.capacity_bytes = CAPACITY_BYTES
        self.committed = self.checked = self.kept = 0
        self._last_directory = ""
        self.rotten = False

    def freeze(self) -> None:
        self.cluster.judge.note("pause", self.name)
        self.cluster.fabric.freeze(self.name)
        self.disk.stall()

    def thaw(self) -> None:
        self.cluster.judge.note("resume", self.name)
        self.disk.resume()
        self.cluster.fabric.thaw(self.name)


class Cluster:
    def __init__(self, seed: int, judge: Judge, *, nodes: int, sync_replicas: int, **variables: Any) -> None:
        self._seed = seed
        self.judge = judge
        self.rng = self.rng_for("story")
        self.sync_replicas = sync_replicas
        self.fabric = Fabric(self.rng_for("network"), judge.said)
        self.machines: dict[str, Machine] = {}
        names = [f"n{i}" for i in range(1, nodes + 1)]
        for number, name in enumerate(names, 1):
            leads = number == 1
            chosen: dict[str, Any] = {
                "node_id": number,
                "data_dir": Path("/nowhere"),
                "wal_receiver_enabled": True,
                "wal_receiver_bind_addr": f"{name}:{PORT}",
                "wal_segment_bytes": 12 * 1024,
                "min_free_bytes": 40_000,
                "replication_heartbeat_interval_secs": 0.5,
                "replication_heartbeat_timeout_secs": 1.6,
                "replication_reconnect_delay_secs": 1.0,
                "replication_max_queue_size": 40,
                "replication_max_queue_bytes": 16 * 1024,
                "wal_retention_hours": 0.0,
                "scrub_mb_per_sec": 8.0,
                **variables,
            }
            if leads:
                chosen["replication_followers"] = tuple(f"{other}:{PORT}" for other in names[1:])
                chosen["replication_mode"] = "sync" if sync_replicas else "async"
                if sync_replicas:
                    chosen["replication_sync_replicas"] = sync_replicas
            given = frozenset(chosen)
            settings = Settings(**chosen, given=given)
            self.machines[name] = Machine(self, name, number, "leader" if leads else "follower", settings)
        judge.machines, judge.watched = self.machines, tuple(self.machines.values())

    @staticmethod
    def chance(seed: int, what: str) -> random.Random:
        """Chance of its own for everyone, so that one more draw here does not change everything there."""
        return random.Random(f"{seed} {what}")

    def rng_for(self, what: str) -> random.Random:
        return self.chance(self._seed, what)

    def accepting(self) -> list[Machine]:
        return [m for m in self.machines.values() if m.node is not None and m.node.accepting]

    def leader(self) -> Machine | None:
        """The one of the latest epoch, if there is one."""
        leading = [m for m in self.machines.values() if m.leads and m.node is not None]
        return max(leading, key=lambda m: m.node.epoch if m.node else 0, default=None)

    def variables(self, machine: Machine, **changes: Any) -> None:
        """Edit a machine's environment, for its next start."""
        given = machine.settings.given | set(changes)
        machine.settings = msgspec.structs.replace(machine.settings, given=given, **changes)


def _leaves(error: BaseException) -> list[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        return [leaf for inner in error.exceptions for leaf in _leaves(inner)]
    return [error]


__all__ = ["ChronikError", "Cluster", "Killed", "Machine"]
