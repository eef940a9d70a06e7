"""One seed, one story: producers and readers at work, troubles in between, and at the end everything is looked at.

A seed decides the cluster's size and mode, how hard producers press, and which troubles come when. Troubles stay within
what is promised: at most k disks are lost for good in sync mode, and none of an async leader; where the story plays
the operator and accepts a loss, the judge is told what was given up.
"""

from __future__ import annotations

import struct
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import NamedTuple

import trio

from chronik_repl.errors import ChronikError, CorruptLog, DiskFailed, DiskFull, NotLeader, OutOfRange
from chronik_repl.positions import Offset
from chronik_repl.wal import frame
from chronik_repl.wal.changes import TopicMade
from chronik_repl.wal.segment import FRAMES_AT
from chronik_repl.wal.state import BATCH
from tests.simulation.cluster import CAPACITY_BYTES, PORT, Cluster, Killed, Machine
from tests.simulation.judge import Acked, Judge

TOPIC, PARTITIONS = "t", 2
IDENT = struct.Struct(">QI")  # which append, and whose
APPENDS_MIN = 200
PRODUCERS = 4
CALM_S = 60.0  # simulated time in which a healed cluster must be whole again
SIMULATED_S_MAX = 200.0
PROMPT_S = 0.5  # an append on a healthy disk is durable within this


class Size(NamedTuple):
    nodes: int
    sync_replicas: int
    troubles: int
    retention: bool
    receiver_on_first: bool


class Story:
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
        self.appended = 0
        self.refused = 0
        self.reads = 0
        self.troubles: list[str] = []
        self._next_ident = 1
        self._troubled = True
        self._disks_lost: set[str] = set()  # nodes that lost what they had acked
        self._busy: set[str] = set()  # nodes that a trouble has in hand
        self._down_for: dict[str, float] = {}
        self._to_wipe: set[str] = set()
        self._slow_disk: dict[str, float] = {}  # until when an append there may take long
        self._nursery: trio.Nursery | None = None

    async def tell(self) -> None:
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            for machine in self.cluster.machines.values():
                nursery.start_soon(self._keep_running, machine)
            nursery.start_soon(self._make_topic)
            for number in range(PRODUCERS):
                nursery.start_soon(self._produce, number)
            nursery.start_soon(self._consume)
            await self._trouble()
            while self.appended < APPENDS_MIN and not self.judge.verdicts:
                await self._operate()
                await trio.sleep(0.05)
                if trio.current_time() > SIMULATED_S_MAX:
                    self.judge.broken(f"{self.appended} appends in {SIMULATED_S_MAX:.0f} s: {self._standing()}")
            self._troubled = False
            if not self.judge.verdicts:
                await self._calm()
            nursery.cancel_scope.cancel()

    # ── machines ──

    def _start(self, machine: Machine, after_s: float) -> None:
        """The process that was ended comes back."""
        self._down_for[machine.name] = after_s

    async def _keep_running(self, machine: Machine) -> None:
        """Processes one after another; where one ends by itself, the operator looks at why."""
        await trio.sleep(self.rng.uniform(0, 0.2))
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
            await trio.sleep(self._down_for.pop(machine.name, self.rng.uniform(0.01, 0.5)))
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
            await trio.sleep(0.05)

    # ── producers and readers ──

    async def _produce(self, producer: int) -> None:
        pace_s = self.rng.choice((0.0, 0.0005, 0.005, 0.02))
        while True:
            ready = [m for m in self.cluster.accepting() if not m.frozen]
            if not self._troubled:
                return
            if not ready or self.appended >= self._allowance():
                await trio.sleep(0.04)
                continue
            machine = self.rng.choice(ready)
            for _ in range(self.rng.choice((1, 1, 1, 3))):
                await self._append(producer, machine)
            await trio.sleep(pace_s * self.rng.uniform(0.2, 2))

    def _allowance(self) -> int:
        """Appends are spread over the troubles, so that each meets some."""
        return (APPENDS_MIN + 10) * (len(self.troubles) + 1) // (self.size.troubles + 1) + 5

    async def _append(self, producer: int, machine: Machine) -> None:
        node = machine.node
        everyone = self.rng.random() < 0.7
        if node is None or not node.accepting or (everyone and not node.enough_replicas):
            return
        ident, self._next_ident = self._next_ident, self._next_ident + 1
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
            await trio.sleep(0.01)
            return
        if machine.boots == boots and machine.running and not machine.disk.dead:
            self.judge.ack(
                machine, Acked(ident, producer, machine.name, epoch, appended.position, appended.end, everyone)
            )

    def _prompt(self, machine: Machine, began: float) -> None:
        """Promise 3: whatever the followers do, the leader's own disk is all that an append waits for."""
        excused = self._slow_disk.get(machine.name, 0.0) >= began or machine.frozen
        if trio.current_time() - began > PROMPT_S and not excused:
            self.judge.broken(f"promise 3: an append on {machine.name} took {trio.current_time() - began:.1f} s")

    async def _consume(self) -> None:
        """Reads anywhere: only what is committed, and exactly that."""
        while True:
            await trio.sleep(self.rng.uniform(0.02, 0.2) if self._troubled else 1.0)
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
            if bytes(batch) not in self.judge.canon:
                self.judge.broken(
                    f"promise 2: {machine.name} shows a batch at {partition}/{base} that is not committed"
                )
            offset = base + 1

    # ── troubles ──

    async def _trouble(self) -> None:
        await self._wait_until(lambda: len(self._in_session()) == self.size.nodes - 1, 20)
        kinds: list[tuple[int, Callable[[], Awaitable[object]]]] = [
            (6, self._crash),
            (5, self._cut_power),
            (3, self._pause),
            (4, self._partition),
            (3, self._isolate_leader),
            (3, self._sever),
            (2, self._slow_link),
            (2, self._slow_device),
            (2, self._fail_sync),
            (2, self._fill_disk),
            (2, self._rot),
            (5, self._promote),
            (1, self._accept_loss),
            (2, self._lose_disk),
            (6, self._fail_over),
            (2, self._promote_two),
            (1, self._stop),
            (1, self._jump_clock),
            (1, self._members),
            (2, self._burst),
        ]
        while len(self.troubles) < self.size.troubles and not self.judge.verdicts:
            await trio.sleep(self.rng.expovariate(1 / 0.15))
            (make,) = self.rng.choices([make for _, make in kinds], [weight for weight, _ in kinds])
            done = await make()
            if done:
                self.troubles.append(str(done))
                self.judge.note("trouble", done)
            if self.rng.random() < 0.5:
                await self._operate()

    def _pick(self, *, leader: bool | None = None) -> Machine | None:
        """A running machine that no other trouble has in hand."""
        leading = self.cluster.leader()
        free = [
            m
            for m in self.cluster.machines.values()
            if m.node is not None and not m.frozen and m.name not in self._busy
            and (leader is None or (m is leading) == leader)
        ]  # fmt: skip
        return self.rng.choice(free) if free else None

    async def _crash(self) -> str:
        if (machine := self._pick()) is None:
            return ""
        self._start(machine, self.rng.choice((0.0, 0.05, 0.5, 3.0)))
        machine.kill()
        return f"kill -9 of {machine.name}"

    async def _cut_power(self) -> str:
        machines = [m for m in self.cluster.machines.values() if m.node is not None and m.name not in self._busy]
        if not machines:
            return ""
        if self.rng.random() < 0.7:
            machines = [self.rng.choice(machines)]
        for machine in machines:
            self._start(machine, self.rng.choice((0.01, 0.1, 1.0, 4.0)))
            machine.power_cut()
        return f"power cut of {', '.join(m.name for m in machines)}"

    async def _stop(self) -> str:
        if (machine := self._pick()) is None or machine.node is None:
            return ""
        self._start(machine, self.rng.uniform(0, 1))
        with trio.move_on_after(20):
            ended = machine.ended
            with suppress(DiskFailed, Killed):  # its own end
                await machine.node.stop()
            await ended.wait()
        if not ended.is_set() and not self._slow_disk.get(machine.name):
            self.judge.broken(f"{machine.name} did not stop within 20 s")
        return f"clean stop of {machine.name}"

    async def _pause(self) -> str:
        if (machine := self._pick()) is None:
            return ""
        for_s = self.rng.choice((0.05, 0.3, 2.0, 5.0))
        machine.freeze()
        self._later(for_s, machine, self._resume)
        return f"pause of {machine.name} for {for_s} s"

    def _resume(self, machine: Machine) -> None:
        self._slow_disk[machine.name] = trio.current_time() + 0.2
        machine.thaw()

    def _later(
        self, after_s: float, machine: Machine, action: Callable[[Machine], object], *, always: bool = False
    ) -> None:
        """Unless that process is gone by then (`always`: then too)."""
        assert self._nursery is not None
        boots = machine.boots

        async def wait() -> None:
            with trio.move_on_after(after_s):
                while self._troubled:
                    await trio.sleep(0.1)
            if always or (machine.boots == boots and machine.running):
                action(machine)

        self._nursery.start_soon(wait)

    async def _partition(self) -> str:
        one, other = self.rng.sample(sorted(self.cluster.machines), 2)
        for_s = self.rng.choice((0.2, 1.0, 4.0))
        both = self.rng.random() < 0.5
        self._cut_for(for_s, [(one, other), (other, one)] if both else [(one, other)])
        return f"{one} and {other} are cut off {'both ways' if both else 'one way'} for {for_s} s"

    def _cut_for(self, for_s: float, ways: list[tuple[str, str]]) -> None:
        assert self._nursery is not None
        fabric = self.cluster.fabric
        for way in ways:
            fabric.cut(*way)

        async def heal() -> None:
            with trio.move_on_after(for_s):
                while self._troubled:
                    await trio.sleep(0.1)
            for way in ways:
                fabric.heal(*way)

        self._nursery.start_soon(heal)

    async def _isolate_leader(self) -> str:
        """The old leader lives on, alone or with a part of the others, while another is promoted."""
        leading = self.cluster.leader()
        if leading is None or leading.name in self._busy:
            return ""
        others = [m for m in self.cluster.machines.values() if m is not leading]
        cut_off = self.rng.sample(others, self.rng.randrange(1, len(others) + 1))
        one_way = self.rng.random() < 0.3
        ways = [(leading.name, m.name) for m in cut_off]
        if not one_way:
            ways += [(m.name, leading.name) for m in cut_off]
        for_s = self.rng.choice((1.0, 3.0, 6.0))
        self._cut_for(for_s, ways)
        if self.rng.random() < 0.8:
            await trio.sleep(self.rng.choice((0.0, 0.1, 2.0)))
            await self._promote_one(self.rng.choice(cut_off), accept_loss=False)
        return f"{leading.name} is cut off from {', '.join(m.name for m in cut_off)} for {for_s} s"

    async def _sever(self) -> str:
        count = self.rng.randrange(1, 5)
        between = [self.cluster.fabric.sever() for _ in range(count)]
        return f"severed {' '.join(filter(None, between))}" if any(between) else ""

    async def _slow_link(self) -> str:
        one, other = self.rng.sample(sorted(self.cluster.machines), 2)
        delay_s = self.rng.choice((0.01, 0.1, 0.7))
        self.cluster.fabric.slow[one, other] = delay_s
        if self.rng.random() < 0.5:
            await trio.sleep(self.rng.uniform(0, 1))
            self.cluster.fabric.slow.pop((one, other), None)
        return f"the link from {one} to {other} is {delay_s} s slow"

    async def _slow_device(self) -> str:
        if (machine := self._pick()) is None:
            return ""
        slowness = self.rng.choice((10.0, 100.0, 1000.0))
        machine.disk.slowness = slowness
        self._slow_disk[machine.name] = 1e9

        def heal(machine: Machine) -> None:
            machine.disk.slowness = 1.0
            self._slow_disk[machine.name] = trio.current_time() + 2

        self._later(self.rng.uniform(0.2, 2), machine, heal)
        return f"the disk of {machine.name} is {slowness:.0f} times slower"

    async def _fail_sync(self) -> str:
        if (machine := self._pick()) is None:
            return ""
        machine.disk.fail_sync_in(self.rng.randrange(1, 6))
        return f"a sync of {machine.name} fails"

    async def _fill_disk(self) -> str:
        if (machine := self._pick()) is None:
            return ""
        floor = machine.settings.min_free_bytes
        room = self.rng.choice((0, floor // 2, floor + 2000, floor + 20_000))
        machine.disk.capacity_bytes = machine.disk.medium.used_bytes() + room

        def heal(machine: Machine) -> None:
            machine.disk.capacity_bytes = CAPACITY_BYTES

        self._later(self.rng.uniform(0.5, 3), machine, heal, always=True)
        return f"the disk of {machine.name} has {room} bytes left"

    async def _rot(self) -> str:
        """A bit in a sealed segment of a follower. Its copy is lost, as if the disk were, until it is mended."""
        machine = self._pick(leader=False)
        if machine is None or not self._may_lose(machine):
            return ""
        medium = machine.disk.medium
        sealed = sorted(n for n in medium.folders["wal"].seen if n.endswith(".wal"))[:-1]
        if not sealed:
            return ""
        name = f"wal/{self.rng.choice(sealed)}"
        size = len(medium.bytes_of(name))
        if size <= FRAMES_AT:
            return ""
        self._disks_lost.add(machine.name)
        machine.rotten = True
        at = machine.disk.rot(name, self.rng.randrange(FRAMES_AT, size))
        return f"a bit rots on {machine.name}: {name} at {at}"

    def _may_lose(self, machine: Machine) -> bool:
        k = self.size.sync_replicas
        return machine.name not in self._disks_lost and len(self._disks_lost) < min(k, self.size.nodes - 1 - k)

    async def _lose_disk(self) -> str:
        """The machine comes back with an empty disk: another directory under the same node id."""
        machine = self._pick(leader=False)
        if machine is None or not self._may_lose(machine):
            return ""
        self._disks_lost.add(machine.name)
        self._to_wipe.add(machine.name)
        self._start(machine, 0.1)
        machine.power_cut()
        return f"the disk of {machine.name} is lost"

    async def _promote(self) -> str:
        machine = self._pick(leader=False)
        if machine is None:
            return ""
        ok = await self._promote_one(machine, accept_loss=False)
        return f"promotion of {machine.name}" if ok else ""

    async def _fail_over(self) -> str:
        """The leader dies in the middle of its work and another is promoted at once; the old one comes back later."""
        leading = self.cluster.leader()
        others = [m for m in self.cluster.machines.values() if m is not leading and m.node is not None and not m.frozen]
        if leading is None or leading.frozen or leading.name in self._busy or not others or self._nursery is None:
            return ""
        for _ in range(self.rng.choice((0, 2, 8))):
            self._nursery.start_soon(self._append, self.rng.randrange(PRODUCERS), leading)
        await trio.sleep(self.rng.choice((0.0, 0.0003, 0.0006, 0.001, 0.002, 0.01)))
        self._start(leading, self.rng.choice((0.0, 0.3, 1.0, 4.0)))
        if self.rng.random() < 0.5:
            leading.power_cut()
        else:
            leading.kill()
        for machine in self.rng.sample(others, len(others)):
            if await self._promote_one(machine, accept_loss=False):
                return f"{leading.name} dies and {machine.name} takes over"
        return f"{leading.name} dies and nobody can take over"

    async def _promote_two(self) -> str:
        """Two operators at once."""
        others = [m for m in self.cluster.machines.values() if m is not self.cluster.leader() and m.node is not None]
        if len(others) < 2:
            return ""
        chosen = self.rng.sample(others, 2)
        async with trio.open_nursery() as nursery:
            for machine in chosen:
                nursery.start_soon(lambda machine=machine: self._promote_one(machine, accept_loss=False))  # type: ignore[misc]
        return f"{chosen[0].name} and {chosen[1].name} are promoted at once"

    async def _promote_one(self, machine: Machine, *, accept_loss: bool) -> bool:
        node = machine.node
        if node is None or machine.frozen:
            return False
        self.judge.note("promote", machine.name, accept_loss)
        machine.promoted = True
        try:
            with trio.move_on_after(45):
                await node.promote(accept_loss=accept_loss)
                self.judge.note("promoted", machine.name, node.epoch)
                return True
        except (ChronikError, Killed) as refusal:
            self.judge.note("refused", machine.name, str(refusal))
        finally:
            machine.promoted = False
        return False

    async def _accept_loss(self) -> str:
        return ""

    async def _jump_clock(self) -> str:
        machine = self.rng.choice(list(self.cluster.machines.values()))
        machine.clock_skew_s += self.rng.choice((-86400.0, -5.0, 5.0, 86400.0))
        return f"the clock of {machine.name} jumps"

    async def _members(self) -> str:
        """Remove one, and add it again: while everything runs."""
        leading = self.cluster.leader()
        if leading is None or leading.node is None or self.size.nodes < 4 or leading.frozen:
            return ""
        other = self.rng.choice([m for m in self.cluster.machines.values() if m is not leading])
        node = leading.node
        try:
            with trio.move_on_after(5):
                await node.command({"command": "members-remove", "node_id": other.node_id}, lambda text: None)
                self.judge.note("removed", other.name)
            with trio.move_on_after(5):
                await node.command({"command": "members-add", "address": f"{other.name}:9291"}, lambda text: None)
                self.judge.note("added", other.name)
        except (ChronikError, Killed) as error:
            self.judge.note("members refused", str(error))
        return f"{other.name} is removed and added"

    async def _burst(self) -> str:
        """Many appends in one step: groups get large, rings overflow."""
        ready = [m for m in self.cluster.accepting() if not m.frozen]
        if not ready or self._nursery is None:
            return ""
        machine = self.rng.choice(ready)
        for _ in range(30):
            self._nursery.start_soon(self._append, self.rng.randrange(PRODUCERS), machine)
        return f"30 appends at once on {machine.name}"

    # ── the operator ──

    async def _operate(self) -> None:
        """Where nobody leads for a while, someone is promoted, as an operator would do."""
        if await self._wait_until(lambda: bool(self.cluster.accepting()), 4):
            return
        free = [m for m in self.cluster.machines.values() if m.node is not None and not m.frozen]
        for machine in self.rng.sample(free, len(free)):
            if await self._promote_one(machine, accept_loss=False):
                return
        if all(m.settings.wal_receiver_enabled and m.settings.replication_followers for m in free):
            return
        for machine in free:  # one that does not listen, or whose address nobody knows, cannot be asked for its vote
            everyone = tuple(f"{name}:{PORT}" for name in self.cluster.machines if name != machine.name)
            self.cluster.variables(machine, wal_receiver_enabled=True, replication_followers=everyone)
            machine.kill()

    async def _invite(self) -> None:
        """Who is no member, or whose address the leader does not know, is added by the operator."""
        leading = self.cluster.leader()
        if leading is None or leading.node is None or leading.node._leadership is None:
            return
        known = {address for address, link in leading.node._leadership.links.items() if link.state != "refused"}
        for machine in self.cluster.machines.values():
            address = f"{machine.name}:{PORT}"
            if machine is leading or machine.node is None or address in known:
                continue
            if not machine.settings.wal_receiver_enabled:
                continue
            self.judge.note("invite", machine.name)
            with trio.move_on_after(3):
                try:
                    await leading.node.command({"command": "members-add", "address": address}, lambda text: None)
                except (ChronikError, Killed) as error:
                    self.judge.note("refused", str(error))

    def _unmended(self) -> bool:
        """Rot is found by the scrubber and mended, or named."""
        return any(m.rotten and m.node is not None and not self._whole(m) for m in self.cluster.machines.values())

    def _whole(self, machine: Machine) -> bool:
        assert machine.node is not None
        start, end = machine.node.log.start, len(self.judge.canon)
        return self.judge.read(machine.disk.medium, start, end) == bytes(self.judge.canon[start:end])

    async def _wait_until(self, condition: Callable[[], bool], timeout_s: float) -> bool:
        with trio.move_on_after(timeout_s):
            while not condition():
                await trio.sleep(0.05)
            return True
        return False

    def _in_session(self) -> set[str]:
        """Who follows the leader, and holds what it holds."""
        leading = self.cluster.leader()
        if leading is None or leading.node is None:
            return set()
        node = leading.node
        return {
            m.name
            for m in self.cluster.machines.values()
            if m is not leading and m.node is not None
            and m.node.log.durable.value == m.node.log.end == node.log.end
            and m.node.log.committed.value == node.log.end == node.log.committed.value
        }  # fmt: skip

    # ── the end ──

    async def _calm(self) -> None:
        """All troubles are over: the cluster must become whole by itself, but for what an operator does."""
        judge, cluster = self.judge, self.cluster
        judge.note("calm")
        cluster.fabric.heal_all()
        for machine in cluster.machines.values():
            machine.disk.slowness = 1.0
            machine.disk.capacity_bytes = CAPACITY_BYTES
            machine.disk.fail_sync_in(0)
            if machine.frozen:
                self._resume(machine)
        deadline = trio.current_time() + CALM_S
        while len(self._in_session()) < self.size.nodes - 1 or self._unmended():
            if judge.verdicts:
                return
            await self._operate()
            await self._invite()
            leading = cluster.leader()
            if leading is not None and leading.rotten and not self._whole(leading):  # only a follower can be mended
                sound = [m for m in cluster.machines.values() if not m.rotten and m.node is not None]
                await self._promote_one(self.rng.choice(sound), accept_loss=False)
            await trio.sleep(0.1)
            if trio.current_time() > deadline:
                judge.broken(f"the cluster is not whole {CALM_S:.0f} s after the last trouble: {self._standing()}")
                return
        self._check_whole()

    def _standing(self) -> str:
        said = []
        for m in self.cluster.machines.values():
            log = m.node.log if m.node is not None else None
            where = f"end {log.end} committed {log.committed.value}" if log else m.why_ended or "down"
            events = m.node._local.events if m.node is not None else ()
            said.append(f"{m.name} {m.node.role if m.node else ''} {where} ({events[-1].text if events else ''})")
        return "; ".join(said)

    def _check_whole(self) -> None:
        """Every copy is the canon, and every acked record is in it, once, in order."""
        judge = self.judge
        for machine in self.cluster.machines.values():
            if machine.node is not None and not self._whole(machine):
                judge.broken(f"promise 2: at the end the log of {machine.name} is not what was committed")
        found: dict[int, int] = {}
        for each in judge.frames():
            if each.kind != frame.Kind.DATA:
                continue
            ident, producer = IDENT.unpack_from(each.data, BATCH.size)
            if ident in found:
                judge.broken(f"promise 2: append {ident} stands at {found[ident]} and again at {each.position}")
            found[ident] = each.position
            if each.partition != producer % PARTITIONS:
                judge.broken(f"promise 2: append {ident} stands in partition {each.partition}")
        for acked in judge.acked:
            if found.get(acked.ident) == acked.position:
                continue
            others = any(e > acked.epoch and who != acked.node for e, who in judge.began.items())
            if acked.everyone or self.size.sync_replicas == 0 or not others:
                judge.broken(f"promise 2: append {acked.ident}, acked at {acked.position} by {acked.node}, is lost")


def make_batch(ident: int, producer: int, padding: int) -> bytes:
    body = IDENT.pack(ident, producer) + bytes(padding)
    length = BATCH.size - 12 + len(body)
    return BATCH.pack(0, length, 0, 2, 0, 0, 0, 0, 0, -1, -1, -1, 1) + body
