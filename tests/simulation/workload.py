"""A cluster at work: its machines kept running, producers that append and readers that look, in simulated time."""

from __future__ import annotations

import struct
from typing import NamedTuple

import trio

from chronik_repl.errors import ChronikError, CorruptLog, DiskFailed, DiskFull, NotLeader, OutOfRange
from chronik_repl.kafka import producers
from chronik_repl.positions import Offset, Position
from chronik_repl.wal.changes import TopicMade
from chronik_repl.wal.scrub import REST_S
from chronik_repl.wal.state import BATCH
from tests.simulation.clock import Timer, ring_all
from tests.simulation.cluster import CAPACITY_BYTES, Cluster, Killed, Machine
from tests.simulation.judge import Acked, Judge

TOPIC, PARTITIONS = "t", 2
IDENT = struct.Struct(">QI")  # which append, and whose
APPENDS_MIN = 200
PRODUCERS = 4
IDEMPOTENT = 2  # of them
CALM_S = REST_S + 30  # simulated time in which a healed cluster must be whole again: scrubbers rest between two rounds
SIMULATED_S_MAX = 200.0
PROMPT_S = 0.5  # an append on a healthy disk is durable within this


class Size(NamedTuple):
    nodes: int
    sync_replicas: int
    troubles: int
    retention: bool
    receiver_on_first: bool


class Workload:
    def __init__(self, seed: int, judge: Judge) -> None:
        self.judge = judge
        chance = Cluster.chance(seed, "size")
        nodes = chance.choice((3, 3, 3, 4, 5))
        self.size = Size(
            nodes,
            chance.choice((0, 1, 1, 1, 2)) if nodes > 2 else 1,
            chance.randrange(5, 10),
            chance.random() < 0.25,
            chance.random() < 0.85,
        )
        variables = {"wal_retention_bytes": 30_000, "wal_keep_bytes": 60_000} if self.size.retention else {}
        self.cluster = Cluster(seed, judge, nodes=nodes, sync_replicas=self.size.sync_replicas, **variables)
        if not self.size.receiver_on_first:
            self.cluster.variables(self.cluster.machines["n1"], wal_receiver_enabled=False)
        self.rng = self.cluster.rng
        self._clock = self.cluster.fabric.clock
        self._resting: dict[Timer, None] = {}  # those whose sleep ends when the troubles do
        self.appended = 0
        self.refused = 0
        self.reads = 0
        self.troubles: list[str] = []
        self._next_ident = 0
        self._troubled = True
        self._disks_lost: set[str] = set()  # nodes that lost what they had acked
        self._busy: set[str] = set()  # nodes that a trouble has in hand
        self._down_for: dict[str, float] = {}
        self._to_wipe: set[str] = set()
        self._slow_disk: dict[str, float] = {}  # until when an append there may take long
        self._nursery: trio.Nursery | None = None

    async def _nap(self, seconds: float) -> None:
        """As trio.sleep, for less."""
        await self._clock.wait(self._clock.now + seconds)

    async def _nap_or_calm(self, seconds: float) -> None:
        """Or until all troubles are over."""
        if self._troubled:
            await self._clock.wait(self._clock.now + seconds, self._resting)

    def _calm_down(self) -> None:
        self._troubled = False
        ring_all(self._resting)

    # ── machines ──

    def _start(self, machine: Machine, after_s: float) -> None:
        """The process that was ended comes back."""
        self._down_for[machine.name] = after_s

    async def _keep_running(self, machine: Machine) -> None:
        """Processes one after another; where one ends by itself, the operator looks at why."""
        await self._nap(self.rng.uniform(0, 0.2))
        while True:
            await machine.run()
            why = machine.why_ended
            if why.startswith("CannotLead"):
                self.cluster.variables(machine, wal_receiver_enabled=True)
                machine.program = "follower"
            elif why.startswith("CorruptLog"):
                if not machine.rotten:
                    self.judge.broken(f"promise 6: {machine.name} finds damage that nobody made: {why}")
                    return
                machine.wipe()
            elif why.startswith("DiskFailed"):
                machine.disk.capacity_bytes = CAPACITY_BYTES
            self._busy.add(machine.name)
            await self._nap(self._down_for.pop(machine.name, self.rng.uniform(0.01, 0.5)))
            self._busy.discard(machine.name)
            if machine.name in self._to_wipe:
                self._to_wipe.discard(machine.name)
                machine.wipe()
            machine.next_disk()

    async def _make_topic(self) -> None:
        while True:
            for machine in self.cluster.accepting():
                node = machine.node
                if node is not None and TOPIC not in node.log.state.topics and not machine.frozen:
                    try:
                        node.log.append_change(TopicMade(TOPIC, PARTITIONS))
                    except ChronikError:
                        continue
            await self._nap(0.2)

    # ── producers and readers ──

    async def _produce(self, producer: int) -> None:
        """One that sends and forgets: acks=1 or all, no retries."""
        pace_s = self.rng.choice((0.0, 0.0005, 0.005, 0.02))
        while True:
            ready = [m for m in self.cluster.accepting() if not m.frozen]
            if not self._troubled:
                return
            if not ready or self.appended >= self._allowance():
                await self._nap(0.08)
                continue
            machine = self.rng.choice(ready)
            for _ in range(self.rng.choice((1, 1, 1, 3))):
                await self._append(producer, machine)
            await self._nap(pace_s * self.rng.uniform(0.2, 2))

    def _allowance(self) -> int:
        """Appends are spread over the troubles, so that each meets some."""
        return (APPENDS_MIN + 10) * (len(self.troubles) + 1) // (self.size.troubles + 1) + 5

    async def _append(self, producer: int, machine: Machine, *, everyone: bool | None = None) -> None:
        node = machine.node
        everyone = self.rng.random() < 0.7 if everyone is None else everyone
        if node is None or not node.accepting or (everyone and not node.enough_replicas):
            return
        ident = self._ident()
        batch = make_batch(ident, producer, self.rng.randrange(10, 400))
        boots, epoch, log = machine.boots, node.epoch, node.log
        began = trio.current_time()
        try:
            appended = log.append_batch(TOPIC, producer % PARTITIONS, batch, record_count=1)
            self.appended += 1
            self.judge.note("append", ident, machine.name, appended.position)
            with trio.fail_after(3):
                await log.durable.wait(appended.end)
                self._prompt(machine, began)
                if everyone:
                    await log.committed.wait(appended.end)
                await self.cluster.fabric.standing(machine.name)
        except trio.TooSlowError:
            k = log.state.membership[-1][1].sync_replicas if log.state.membership else 0
            alive = machine.boots == boots and machine.running and node.accepting and node.epoch == epoch
            if alive and (log.durable.value < appended.end or k == 0 or log.committed.value >= appended.end):
                self._prompt(machine, began)
            self.refused += 1
            return
        except (NotLeader, DiskFull, OutOfRange, DiskFailed, Killed):
            self.refused += 1
            await self._nap(0.01)
            return
        if self._still(machine, boots, epoch):
            self.judge.ack(
                machine, Acked(ident, producer, machine.name, epoch, appended.position, appended.end, everyone)
            )

    def _ident(self) -> int:
        self._next_ident += 1
        return self._next_ident

    def _still(self, machine: Machine, boots: int, epoch: int) -> bool:
        """Is that process there to answer, and the leadership the one that it answers for?"""
        lives = machine.boots == boots and machine.running and not machine.disk.dead and machine.node is not None
        return lives and machine.leads and machine.node is not None and machine.node.epoch == epoch

    async def _produce_once(self, producer: int) -> None:
        """An idempotent one, as clients are by default: acks=all, up to three batches in flight, each tried again, in
        order, until it is acked. Whatever happens to leaders meanwhile, each must stand in the log once."""
        pace_s = self.rng.choice((0.0, 0.002, 0.02))
        producer_id: int | None = None
        pending: list[tuple[int, int, bytes]] = []  # ident, sequence, batch
        sequence = 0
        heard: Acked | None = None  # the last one
        while self._troubled or pending:
            if producer_id is None or (pending and self.rng.random() < 0.03):  # or it gives up: another id
                pending, sequence, heard = [], 0, None
                producer_id = await self._take_id()
                await self._nap(0.02)
                continue
            ready = [m for m in self.cluster.accepting() if not m.frozen]
            if not ready or (not pending and self.appended >= self._allowance()):
                await self._nap(0.08)
                continue
            for _ in range(0 if pending else self.rng.choice((1, 1, 2, 3))):
                ident = self._ident()
                pending.append((ident, sequence, make_batch(ident, producer, 50, producer_id, sequence)))
                sequence += 1
            machine = self.rng.choice(ready)
            done = await self._send(producer, producer_id, machine, pending, heard)
            heard = done[-1] if done else heard
            del pending[: len(done)]
            await self._nap(pace_s * self.rng.uniform(0.2, 2) if done else self.rng.choice((0.005, 0.05, 0.2)))

    async def _send(
        self,
        producer: int,
        producer_id: int,
        machine: Machine,
        pending: list[tuple[int, int, bytes]],
        heard: Acked | None,
    ) -> list[Acked]:
        """What the Kafka door does with them. Returns those that were acked."""
        node, partition = machine.node, producer % PARTITIONS
        if node is None or not node.accepting or not node.enough_replicas or TOPIC not in node.log.state.topics:
            return []
        boots, epoch, log = machine.boots, node.epoch, node.log
        places: list[tuple[int, int, int]] = []
        try:
            for ident, sequence, batch in pending:
                written = log.state.topics[TOPIC].partitions[partition]
                decision = producers.check(written, producer_id, 0, sequence, 0)
                if decision is None:
                    appended = log.append_batch(TOPIC, partition, batch, record_count=1)
                    self.appended += 1
                    self.judge.note("append", ident, machine.name, appended.position, sequence)
                    places.append((ident, appended.position, appended.end))
                elif isinstance(decision, producers.Duplicate):
                    self.judge.note("again", ident, machine.name, decision.end, sequence)
                    places.append((ident, decision.end - 1, decision.end))
                else:
                    if heard is None or (heard in self.judge.acked and log.committed.value >= heard.end):
                        self.judge.broken(
                            f"{machine.name} holds what producer {producer_id} was acked, up to "
                            f"{heard.end if heard else 0}, and answers its sequence {sequence} with {decision.name}"
                        )
                    break
            with trio.move_on_after(3) as scope:
                for _, _, end in places:
                    await log.committed.wait(Position(end))
                await self.cluster.fabric.standing(machine.name)
        except (NotLeader, DiskFull, OutOfRange, DiskFailed, Killed):
            self.refused += 1
            return []
        if scope.cancelled_caught or not places or not self._still(machine, boots, epoch):
            return []
        if self.rng.random() < 0.05:  # the answer is lost on its way, and all of them come again
            self.judge.note("unheard", machine.name, [ident for ident, _, _ in places])
            return []
        done = [Acked(ident, producer, machine.name, epoch, position, end, True) for ident, position, end in places]
        for acked in done:
            self.judge.ack(machine, acked)
        return done

    async def _take_id(self, machine: Machine | None = None) -> int | None:
        """From any node."""
        machine = machine or self.rng.choice(list(self.cluster.machines.values()))
        ids, boots = machine.ids, machine.boots
        if ids is None or machine.frozen:
            return None
        try:
            producer_id = await ids.take()
            await self.cluster.fabric.standing(machine.name)
        except (ChronikError, Killed):
            return None
        if producer_id is not None and machine.boots == boots and machine.running and not machine.disk.dead:
            self.judge.told_id(producer_id, machine.name)
            return producer_id
        return None

    def _prompt(self, machine: Machine, began: float) -> None:
        """Promise 3: whatever the followers do, the leader's own disk is all that an append waits for."""
        excused = self._slow_disk.get(machine.name, 0.0) >= began or machine.frozen
        if trio.current_time() - began > PROMPT_S and not excused:
            self.judge.broken(f"promise 3: an append on {machine.name} took {trio.current_time() - began:.1f} s")

    async def _consume(self) -> None:
        """Reads anywhere: only what is committed, and exactly that."""
        while True:
            await self._nap(self.rng.uniform(0.05, 0.3) if self._troubled else 1.0)
            machine = self.rng.choice(list(self.cluster.machines.values()))
            node = machine.node
            if node is None or machine.frozen or not node.serving or TOPIC not in node.log.state.topics:
                continue
            partition = self.rng.randrange(PARTITIONS)
            boots = machine.boots
            try:
                high = node.log.committed_offset(TOPIC, partition)
                low = node.log.log_start_offset(TOPIC, partition)
                if high <= low:
                    continue
                offset = Offset(self.rng.randrange(low, high))
                with trio.move_on_after(1):
                    fetched = await node.log.fetch(TOPIC, partition, offset, 2000)
                    if machine.boots == boots and machine.running and not machine.disk.dead:
                        self._check_read(machine, partition, offset, list(fetched.batches))
            except (OutOfRange, CorruptLog, DiskFailed, NotLeader, Killed):
                continue

    def _check_read(self, machine: Machine, partition: int, offset: int, batches: list[memoryview]) -> None:
        self.reads += 1
        for batch in batches:
            base = int.from_bytes(bytes(batch[:8]), "big")
            if base != offset:
                self.judge.broken(f"promise 2: {machine.name} reads offset {base} of {partition}, not {offset}")
            if machine.excused_to is None and bytes(batch) not in self.judge.canon:
                self.judge.broken(
                    f"promise 2: {machine.name} shows a batch at {partition}/{base} that is not committed"
                )
            offset = base + 1


def make_batch(ident: int, producer: int, padding: int, producer_id: int = -1, sequence: int = -1) -> bytes:
    body = IDENT.pack(ident, producer) + bytes(padding)
    length = BATCH.size - 12 + len(body)
    epoch = 0 if producer_id >= 0 else -1
    return BATCH.pack(0, length, 0, 2, 0, 0, 0, 0, 0, producer_id, epoch, sequence, 1) + body
