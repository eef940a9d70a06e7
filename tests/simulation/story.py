"""One seed, one story: producers and readers at work, troubles in between, and at the end everything is looked at.

A seed decides the cluster's size and mode, how hard producers press, and which troubles come when. Troubles stay within
what is promised: at most k disks are lost for good in sync mode, and none of an async leader; where the story plays
the operator and accepts a loss, the judge is told what was given up.
"""

from __future__ import annotations

import trio

from chronik_repl.wal import frame
from chronik_repl.wal.state import BATCH
from tests.simulation.cluster import CAPACITY_BYTES
from tests.simulation.plots import Plots
from tests.simulation.workload import APPENDS_MIN, CALM_S, IDEMPOTENT, IDENT, PARTITIONS, PRODUCERS, SIMULATED_S_MAX


class Story(Plots):
    async def tell(self) -> None:
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            for machine in self.cluster.machines.values():
                nursery.start_soon(self._keep_running, machine)
            nursery.start_soon(self._make_topic)
            for number in range(PRODUCERS):
                nursery.start_soon(self._produce_once if number < IDEMPOTENT else self._produce, number)
            nursery.start_soon(self._consume)
            await self._open()
            await self._trouble()
            while self.appended < APPENDS_MIN and not self.judge.verdicts:
                await self._operate()
                await self._nap(0.05)
                if trio.current_time() > SIMULATED_S_MAX:
                    self.judge.broken(f"{self.appended} appends in {SIMULATED_S_MAX:.0f} s: {self._standing()}")
            self._calm_down()
            if not self.judge.verdicts:
                await self._calm()
            nursery.cancel_scope.cancel()

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
            await self._nap(0.1)
            if trio.current_time() > deadline:
                judge.broken(f"the cluster is not whole {CALM_S:.0f} s after the last trouble: {self._standing()}")
                return
        self._check_whole()
        marked = {m.name: judge.kept_watermark(m.disk.medium) for m in cluster.machines.values()}
        if not await self._wait_until(self._marked, 1):
            judge.broken(f"promise 2: at rest, {marked} are the high watermarks on disks: {self._standing()}")

    def _marked(self) -> bool:
        """Does every disk know the high watermark that its node shows?"""
        machines = [m for m in self.cluster.machines.values() if m.node is not None]
        return all(self.judge.kept_watermark(m.disk.medium) == m.committed for m in machines)

    def _check_whole(self) -> None:
        """Every copy is the canon, and every acked record is in it, once, in order."""
        judge = self.judge
        for machine in self.cluster.machines.values():
            if machine.node is not None and not self._whole(machine):
                judge.broken(f"promise 2: at the end the log of {machine.name} is not what was committed")
        found: dict[int, int] = {}
        last: dict[int, int] = {}
        for each in judge.frames():
            if each.kind != frame.Kind.DATA:
                continue
            ident, producer = IDENT.unpack_from(each.data, BATCH.size)
            if ident in found:
                judge.broken(f"promise 2: append {ident} stands up to {found[ident]} and again at {each.position}")
            found[ident] = each.position + each.size
            if producer < IDEMPOTENT and ident < last.get(producer, 0):
                judge.broken(f"promise 2: append {ident} of producer {producer} stands after {last[producer]}")
            last[producer] = ident
            if each.partition != producer % PARTITIONS:
                judge.broken(f"promise 2: append {ident} stands in partition {each.partition}")
        for acked in judge.acked:
            if found.get(acked.ident) == acked.end:
                continue
            others = any(e > acked.epoch and who != acked.node for e, who in judge.began.items())
            if acked.everyone or self.size.sync_replicas == 0 or not others:
                judge.broken(f"promise 2: append {acked.ident}, acked at {acked.position} by {acked.node}, is lost")
