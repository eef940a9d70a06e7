"""Everything that goes wrong in a story. Each trouble says what it did, or "" where it could do nothing now."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import suppress

import trio

from chronik_repl.errors import ChronikError, DiskFailed
from chronik_repl.wal.segment import FRAMES_AT
from tests.simulation.cluster import CAPACITY_BYTES, Killed, Machine
from tests.simulation.operator import Operator
from tests.simulation.workload import IDEMPOTENT, PRODUCERS


class Troubles(Operator):
    # ── troubles ──

    async def _trouble(self) -> None:
        await self._wait_until(lambda: len(self._in_session()) == self.size.nodes - 1, 20)
        kinds = self.kinds()
        while len(self.troubles) < self.size.troubles and not self.judge.verdicts:
            await self._nap(self.rng.expovariate(1 / 0.15))
            (make,) = self.rng.choices([make for _, make in kinds], [weight for weight, _ in kinds])
            done = await make()
            if done:
                self.troubles.append(str(done))
                self.judge.note("trouble", done)
            if self.rng.random() < 0.5:
                await self._operate()

    def kinds(self) -> list[tuple[int, Callable[[], Awaitable[object]]]]:
        """How often, against the others, and what."""
        return [
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
            (1, self._nothing),
            (2, self._lose_disk),
            (6, self._fail_over),
            (2, self._promote_two),
            (1, self._stop),
            (1, self._jump_clock),
            (1, self._members),
            (2, self._burst),
        ]

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
            await self._nap_or_calm(after_s)
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
            await self._nap_or_calm(for_s)
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
            await self._nap(self.rng.choice((0.0, 0.1, 2.0)))
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
            await self._nap(self.rng.uniform(0, 1))
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
        leading = self.cluster.leader()
        changes = leading.node.log.state.membership if leading is not None and leading.node is not None else []
        k = min(self.size.sync_replicas, changes[-1][1].sync_replicas if changes else 0)  # an accepted loss lowers it
        members = len(changes[-1][1].members) if changes else self.size.nodes  # and some may have been removed
        return machine.name not in self._disks_lost and len(self._disks_lost) < min(k, members - 1 - k)

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
            self._nursery.start_soon(self._append, self.rng.randrange(IDEMPOTENT, PRODUCERS), leading)
        await self._nap(self.rng.choice((0.0, 0.0003, 0.0006, 0.001, 0.002, 0.01)))
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

    async def _nothing(self) -> str:
        """A moment more before the next one."""
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
        """Many appends in one step: groups get large, and where there are more than a ring holds, rings overflow."""
        ready = [m for m in self.cluster.accepting() if not m.frozen]
        if not ready or self._nursery is None:
            return ""
        machine, count = self.rng.choice(ready), self.rng.choice((30, 60))
        for _ in range(count):
            self._nursery.start_soon(self._append, self.rng.randrange(IDEMPOTENT, PRODUCERS), machine)
        return f"{count} appends at once on {machine.name}"
