"""What an operator does in a story: promotes where nobody leads, adds who is missing, looks whether all is whole."""

from __future__ import annotations

from collections.abc import Callable

import trio

from chronik_repl.errors import ChronikError
from tests.simulation.cluster import PORT, Killed, Machine
from tests.simulation.workload import Workload


class Operator(Workload):
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

    def _standing(self) -> str:
        said = []
        for m in self.cluster.machines.values():
            log = m.node.log if m.node is not None else None
            where = f"end {log.end} committed {log.committed.value}" if log else m.why_ended or "down"
            events = m.node._local.events if m.node is not None else ()
            said.append(f"{m.name} {m.node.role if m.node else ''} {where} ({events[-1].text if events else ''})")
        return "; ".join(said)

    async def _wait_until(self, condition: Callable[[], bool], timeout_s: float) -> bool:
        deadline = self._clock.now + timeout_s
        while not condition():
            if self._clock.now >= deadline:
                return False
            await self._nap(0.05)
        return True

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
