"""Troubles that belong together: each of these is a story that lost data somewhere, told on purpose.

Chance alone seldom makes the third step follow from the first two: a candidate that lags, at the very moment when the
leader dies and the only other holder has lost its disk. A plot brings its cast into position and leaves the rest to
chance; with the rules as they are, most of them end in a refusal.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import contextmanager

import trio

from chronik_repl.errors import ChronikError
from tests.simulation.cluster import PORT, Killed, Machine
from tests.simulation.troubles import Troubles
from tests.simulation.workload import IDEMPOTENT, PRODUCERS

WHOLE_S = 40.0  # simulated time in which everyone is back after an accepted loss
LONELY = 0.2  # of the stories of sync mode begin with a leader that nobody else can reach


class Plots(Troubles):
    def kinds(self) -> list[tuple[int, Callable[[], Awaitable[object]]]]:
        sync = self.size.sync_replicas > 0
        return [
            *super().kinds(),
            (12, self._split),
            (4, self._stillborn),
            (3, self._returns_at_once),
            (6, self._several_at_once),
            (3, self._change_in_flight),
            (1, self._accept_loss),
            (5 if sync else 0, self._wiped_voter),
            (5 if sync else 0, self._empty_founder),
            (0 if sync else 8, self._deserter),
        ]

    # ── positions ──

    def _cast(self) -> tuple[Machine, list[Machine]] | None:
        """The leader and all others, if everyone is there."""
        leading = self.cluster.leader()
        everyone = list(self.cluster.machines.values())
        if leading is None or any(m.node is None or m.frozen or m.name in self._busy for m in everyone):
            return None
        others = [m for m in everyone if m is not leading]
        return leading, self.rng.sample(others, len(others))

    @contextmanager
    def _apart(self, ones: Iterable[Machine], others: Iterable[Machine], *, both: bool = True) -> Iterator[None]:
        """Nothing that the ones send arrives at the others (nor back)."""
        fabric = self.cluster.fabric
        ways = [(one.name, other.name) for one in ones for other in others]
        ways += [(there, here) for here, there in ways] if both else []
        for way in ways:
            fabric.cut(*way)
        try:
            yield
        finally:
            for way in ways:
                fabric.heal(*way)

    async def _write(self, machine: Machine, count: int, *, everyone: bool | None = None) -> None:
        """Appends there, at once, and a new producer; returns when they are acked, or after a moment."""
        with trio.move_on_after(0.05):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._take_id, machine)
                for _ in range(count):
                    producer = self.rng.randrange(IDEMPOTENT, PRODUCERS)
                    nursery.start_soon(lambda who=producer: self._append(who, machine, everyone=everyone))  # type: ignore[misc]

    async def _write_on(self, machine: Machine) -> None:
        """Appends there now and then, until cancelled: while others promise somebody else an epoch, say."""
        while True:
            await self._nap(self.rng.uniform(0.02, 0.4))
            await self._write(machine, 1, everyone=False)

    def _end(self, machine: Machine, back_after_s: float) -> str:
        """kill -9 or a power cut."""
        self._start(machine, back_after_s)
        if self.rng.random() < 0.5:
            machine.kill()
            return "is killed"
        machine.power_cut()
        return "loses its power"

    # ── plots ──

    async def _open(self) -> None:
        """How the story begins: mostly all are there at once. In some of sync mode nobody reaches the first leader from
        the moment on at which it begins: whoever asks it for acks=all must be refused until they do."""
        chance = self.cluster.rng_for("opening")
        if not self.size.sync_replicas or chance.random() >= LONELY:
            return
        first, *others = self.cluster.machines.values()
        began = self.judge.beginnings[first.name] = trio.Event()
        with trio.move_on_after(5):
            await began.wait()
        if not began.is_set():
            return
        with self._apart([first], others):
            await self._nap(chance.choice((0.3, 1.0, 2.0)))
            await self._write(first, chance.choice((1, 4)), everyone=True)
            await self._write(first, chance.choice((0, 4)), everyone=False)
            fate = self._end(first, chance.choice((0.0, 0.5))) if chance.random() < 0.3 else "lives on"
            await self._nap(chance.choice((0.0, 0.1, 1.0)))
        done = f"{first.name} begins alone and {fate}"
        self.troubles.append(done)
        self.judge.note("trouble", done)

    async def _split(self) -> str:
        """The network falls apart, and both parts work: the old leader writes what nobody gets, another is promoted
        and writes, perhaps a third; then they meet again."""
        if (cast := self._cast()) is None:
            return ""
        leading, others = cast
        chance = self.rng
        candidate = others[0]
        shape = chance.choice(("halves", "halves", "pair", "pair", "leader alone", "candidate alone"))
        here, there = [leading], others
        if shape == "halves":
            size = chance.randrange(1, len(others) + 1)
            here, there = [leading, *others[size:]], others[:size]
        elif shape == "pair":
            there = [candidate]
        elif shape == "candidate alone":
            here, there = [leading, *others[1:]], [candidate]
        with self._apart(here, there, both=chance.random() < 0.8):
            await self._nap(chance.choice((0.0, 0.1, 2.0)))
            await self._write(leading, chance.choice((1, 4, 12)))
            fate = ""
            if chance.random() < 0.4:
                fate = self._end(leading, chance.choice((0.1, 1.0, 4.0)))
            async with trio.open_nursery() as nursery:
                if not fate and chance.random() < 0.5:
                    nursery.start_soon(self._write_on, leading)
                promoted = await self._promote_one(candidate, accept_loss=False)
                nursery.cancel_scope.cancel()
            if promoted:
                await self._write(candidate, chance.choice((0, 1, 6)))
                if chance.random() < 0.4 and len(there) > 1:  # and once more, quickly
                    if chance.random() < 0.5:
                        self._end(candidate, chance.choice((0.5, 3.0)))
                    await self._promote_one(there[1], accept_loss=False)
                    await self._write(there[1], chance.choice((0, 1, 6)))
            if chance.random() < 0.3:
                await self._write(leading, 2)
        return f"{shape}: {_names(here)} and {_names(there)} are apart; {leading.name} {fate or 'lives on'}"

    async def _stillborn(self) -> str:
        """A leader begins and is gone before anyone has heard of its epoch; another leads; it comes back."""
        if (cast := self._cast()) is None or self._nursery is None:
            return ""
        _, (first, *rest) = cast
        began = self.judge.beginnings[first.name] = trio.Event()
        self._nursery.start_soon(lambda: self._promote_one(first, accept_loss=False))
        with trio.move_on_after(5):
            await began.wait()
        if not began.is_set():
            return f"{first.name} could not be promoted"
        everyone = [m for m in self.cluster.machines.values() if m is not first]
        with self._apart([first], everyone):
            await self._nap(self.rng.choice((0.0, 0.0005, 0.002)))
            fate = ""
            if self.rng.random() < 0.5:
                fate = self._end(first, self.rng.choice((0.1, 2.0)))
            else:
                await self._write(first, self.rng.choice((0, 3)), everyone=False)
            for other in rest:
                if await self._promote_one(other, accept_loss=False):
                    await self._write(other, self.rng.choice((1, 8)))
                    break
        return f"{first.name} begins to lead and {fate or 'is cut off'}"

    async def _returns_at_once(self) -> str:
        """The old leader is back when another has just begun and nobody else has its start frame: it could win."""
        if (cast := self._cast()) is None or self._nursery is None:
            return ""
        leading, (candidate, *others) = cast
        fate = self._end(leading, self.rng.choice((0.5, 2.0)))
        began = self.judge.beginnings[candidate.name] = trio.Event()
        self._nursery.start_soon(lambda: self._promote_one(candidate, accept_loss=False))
        with trio.move_on_after(4):
            await began.wait()
        with self._apart([candidate], others):
            await self._wait_until(lambda: leading.node is not None, 2)
            await self._nap(self.rng.choice((0.1, 1.0)))
        return f"{leading.name} {fate} and is back when {candidate.name} begins"

    async def _several_at_once(self) -> str:
        """Several operators promote at the same time. Where there are others to be asked, the leader is dead."""
        if (cast := self._cast()) is None:
            return ""
        leading, others = cast
        dies = self.rng.random() < (0.7 if len(others) > 2 else 0.2)
        fate = self._end(leading, self.rng.choice((1.0, 3.0))) if dies else "lives on"
        async with trio.open_nursery() as nursery:
            for machine in others[: self.rng.randrange(2, len(others) + 1)]:
                nursery.start_soon(lambda machine=machine: self._promote_one(machine, accept_loss=False))  # type: ignore[misc]
        return f"{leading.name} {fate} and {_names(others)} are promoted at once"

    async def _change_in_flight(self) -> str:
        """Members change while the leader dies, or is cut off from some."""
        if (cast := self._cast()) is None or self._nursery is None or len(cast[1]) < 3:
            return ""
        leading, (candidate, other, *_) = cast
        node = leading.node
        assert node is not None

        async def change() -> None:
            try:
                with trio.move_on_after(4):
                    await node.command({"command": "members-remove", "node_id": other.node_id}, lambda text: None)
                    self.judge.note("removed", other.name)
                    await node.command({"command": "members-add", "address": f"{other.name}:{PORT}"}, lambda text: None)
                    self.judge.note("added", other.name)
            except (ChronikError, Killed) as error:
                self.judge.note("members refused", str(error))

        apart = [candidate] if self.rng.random() < 0.5 else [m for m in cast[1] if m is not other]
        with self._apart([leading], apart):
            self._nursery.start_soon(change)
            await self._nap(self.rng.choice((0.0, 0.0005, 0.001, 0.01, 0.1)))
            await self._write(leading, 3)
            fate = self._end(leading, self.rng.choice((0.5, 3.0))) if self.rng.random() < 0.6 else "lives on"
            await self._promote_one(candidate, accept_loss=False)
            await self._write(candidate, 2)
        return f"{other.name} is removed and added while {leading.name} {fate}"

    async def _wiped_voter(self) -> str:
        """Of those that hold the newest frames one loses its disk and the leader dies: the rest must not lead by the
        wiped one's word."""
        if (cast := self._cast()) is None:
            return ""
        leading, others = cast
        k = self._k(leading)
        holders, laggards = others[:k], others[k:]
        if not k or not laggards or not self._may_lose(holders[0]):
            return ""
        wiped, before = holders[0], holders[0].boots
        # They stay apart: what a cut has held back arrives when it heals, and then the laggards would lag no more.
        with self._apart([leading], laggards):
            await self._write(leading, self.rng.choice((2, 8)), everyone=True)
            self._end(leading, self.rng.choice((3.0, 6.0)))
            self._disks_lost.add(wiped.name)
            self._to_wipe.add(wiped.name)
            self._start(wiped, 0.05)
            wiped.power_cut()
            for other in holders[1:]:
                self._end(other, 5.0)
            await self._wait_until(lambda: wiped.boots > before and wiped.node is not None, 1)
            await self._promote_one(laggards[0], accept_loss=False)
        return f"{leading.name} dies and {wiped.name} loses its disk; {laggards[0].name} lags"

    async def _empty_founder(self) -> str:
        """The program that founded the cluster starts as a leader again, with an empty disk, beside those that hold the
        log."""
        founder = self.cluster.machines["n1"]
        if self._cast() is None or not self._may_lose(founder):
            return ""
        if founder is self.cluster.leader():
            other = self.rng.choice([m for m in self.cluster.machines.values() if m is not founder])
            if not await self._promote_one(other, accept_loss=False) or founder.node is None:
                return ""
        self._disks_lost.add(founder.name)
        self._to_wipe.add(founder.name)
        founder.program = "leader"
        self._start(founder, self.rng.choice((0.05, 1.0)))
        founder.power_cut()
        return f"{founder.name} starts as a leader, with an empty disk"

    async def _deserter(self) -> str:
        """An async leader promises another its loyalty, dies before it hears more, and starts again, alone."""
        if (cast := self._cast()) is None or self._nursery is None:
            return ""
        leading, (candidate, *_) = cast
        began = self.judge.beginnings[candidate.name] = trio.Event()
        self._nursery.start_soon(lambda: self._promote_one(candidate, accept_loss=False))
        with trio.move_on_after(5):
            await began.wait()
        if not began.is_set() or leading.node is None:
            return ""
        with self._apart([leading], [m for m in self.cluster.machines.values() if m is not leading]):
            fate = self._end(leading, 0.1)
            await self._nap(0.5)
            await self._write(candidate, 4)
            await self._wait_until(lambda: leading.leads, 3)
            await self._write(leading, 2)
        return f"{leading.name} promises {candidate.name} its loyalty, {fate} and starts alone"

    async def _accept_loss(self) -> str:
        """More are gone than the mode allows for, and the operator goes on without what they alone hold. Nothing else
        happens until all are back: before they have heard of it, they could go on with the old history on their own."""
        if (cast := self._cast()) is None or self._disks_lost or self.judge.lossy:
            return ""
        leading, others = cast
        if self._k(leading) >= len(others):
            return ""
        gone = [leading, *others[: self.rng.randrange(self._k(leading), len(others))]]
        candidate = self.rng.choice([m for m in others if m not in gone])
        self.cluster.fabric.heal_all()
        with self._apart([leading], [candidate]):
            await self._write(leading, self.rng.choice((2, 8)))
        for machine in gone:
            self._end(machine, 4.0)
        candidate.accepts_loss = True
        if not await self._promote_one(candidate, accept_loss=True):
            return ""
        await self._write(candidate, 3)
        deadline = trio.current_time() + WHOLE_S
        while len(self._in_session()) < self.size.nodes - 1 and not self.judge.verdicts:
            await self._operate()
            await self._invite()
            await self._nap(0.1)
            if trio.current_time() > deadline:
                self.judge.broken(f"not whole {WHOLE_S:.0f} s after an accepted loss: {self._standing()}")
        for machine in self.cluster.machines.values():
            machine.accepts_loss, machine.excused_to = False, None
        return f"{_names(gone)} are gone, and {candidate.name} leads with the loss accepted"

    def _k(self, leading: Machine) -> int:
        changes = leading.node.log.state.membership if leading.node is not None else []
        return changes[-1][1].sync_replicas if changes else 0


def _names(machines: Iterable[Machine]) -> str:
    return ", ".join(machine.name for machine in machines)
