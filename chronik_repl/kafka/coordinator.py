"""The groups of one node while it leads: the shell around groups.py.

It keeps a machine for every group that has members, made from the log's state when this node begins to lead, carries
out what the machines decide (append, then answer), holds those who wait, and is the clock. Groups without members are
only in the log. When the leadership ends, all who wait hear that this is no longer their coordinator, and everything
here is dropped: nothing is known here that the log does not hold, but who is waiting and since when.

An answer is given when everything that it speaks of is below the high watermark, in the epoch in which it was asked.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from itertools import count
from typing import NamedTuple

import trio

from chronik_repl.errors import ChronikError, DiskFailed, NotLeader
from chronik_repl.kafka.codes import Code
from chronik_repl.kafka.group_messages import Answer, Effect, Join, Joined, Synced, Ticket, Write
from chronik_repl.kafka.groups import Group
from chronik_repl.positions import ORIGIN, Position
from chronik_repl.standing import House
from chronik_repl.wal.changes import Change, CommittedOffset, GroupRemoved, OffsetsCommitted
from chronik_repl.wal.state import GroupState

GROUPS_MAX = 20_000  # with members, at once
NAME_MAX = 1_024
COMMIT_TIMEOUT_S = 5.0  # for the high watermark; then the client looks for its coordinator and asks again
LOAD_TIMEOUT_S = 2.0  # for this epoch's own start
GLANCE_S = 1.0  # how late the end of a leadership may be noticed here; requests notice it at once


class _Slot:
    """One request that waits for its machine."""

    __slots__ = ("code", "end", "reply", "settled")

    def __init__(self) -> None:
        self.settled = trio.Event()
        self.reply: Joined | Synced | None = None
        self.end = ORIGIN
        self.code = Code.NONE

    def settle(self, reply: Joined | Synced, end: Position) -> None:
        self.reply, self.end = reply, end
        self.settled.set()

    def fail(self, code: Code) -> None:
        self.code = code
        self.settled.set()


class _Failed(NamedTuple):
    code: Code


class Coordinator:
    def __init__(self, house: House) -> None:
        self._house = house
        self._epoch = -1  # of what is below; -1: not leading
        self._groups: dict[str, Group] = {}
        self._slots: dict[Ticket, _Slot] = {}
        self._tickets = count()
        self._timers: list[tuple[float, str]] = []
        self._scheduled: dict[str, float] = {}
        self._sooner = trio.Event()

    async def run(self) -> None:
        """The clock. Until cancelled."""
        while True:
            now = trio.current_time()
            wake_at = now + GLANCE_S
            if self.standing() is Code.NONE:  # a leader that is drained writes nothing any more
                while self._timers and self._timers[0][0] <= now:
                    self._expire(*heapq.heappop(self._timers), now)
                if self._timers:
                    wake_at = min(wake_at, self._timers[0][0])
            with trio.move_on_at(wake_at):
                await self._sooner.wait()
            self._sooner = trio.Event()

    def standing(self) -> Code:
        """NONE if this node coordinates now. Takes the groups up, or drops them, when that has changed."""
        house = self._house
        if house.role != "leader":
            self._drop_all()
            return Code.NOT_COORDINATOR
        history = house.log.state.history
        if not house.accepting or not history or house.log.committed.value <= history[-1].start:
            return Code.COORDINATOR_LOAD_IN_PROGRESS
        if self._epoch != house.epoch:
            self._drop_all()
            self._epoch = house.epoch
            now = trio.current_time()
            for name, state in house.log.state.groups.items():
                if state.members:
                    self._keep(_load(name, state, now))
        return Code.NONE

    async def ready(self) -> Code:
        """As `standing`; but a leader that has just begun is given a moment. Not every client asks again."""
        code = self.standing()
        history = self._house.log.state.history
        if code is Code.COORDINATOR_LOAD_IN_PROGRESS and history:
            await self.committed(Position(history[-1].start + 1), self._house.epoch, LOAD_TIMEOUT_S)
            code = self.standing()
        return code

    async def join(self, name: str, ask: Join) -> Joined:
        code = await self._standing_for(name)
        if code is not Code.NONE:
            return Joined(code, ask.member_id)
        group = self._find(name)
        if group is None:
            if ask.member_id:
                return Joined(Code.UNKNOWN_MEMBER_ID, ask.member_id)
            if len(self._groups) >= GROUPS_MAX:
                return Joined(Code.COORDINATOR_NOT_AVAILABLE)
            group = Group(name)
        self._groups[name] = group
        ticket, slot = self._wait_slot()
        self._carry_out(group, group.join(ask, ticket, trio.current_time()))
        reply = await self._settled(ticket, slot)
        return reply if isinstance(reply, Joined) else Joined(reply.code, ask.member_id)

    async def sync(
        self,
        name: str,
        member_id: str,
        instance_id: str,
        generation: int,
        protocol_type: str | None,
        protocol: str | None,
        assignments: Mapping[str, bytes],
    ) -> Synced:
        code = await self._standing_for(name)
        if code is not Code.NONE:
            return Synced(code)
        group = self._find(name)
        if group is None:
            return Synced(Code.UNKNOWN_MEMBER_ID)
        ticket, slot = self._wait_slot()
        effects = group.sync(
            member_id, instance_id, generation, protocol_type, protocol, assignments, ticket, trio.current_time()
        )
        self._carry_out(group, effects)
        reply = await self._settled(ticket, slot)
        return reply if isinstance(reply, Synced) else Synced(reply.code)

    def heartbeat(self, name: str, member_id: str, instance_id: str, generation: int) -> Code:
        code = self.standing() if name else Code.INVALID_GROUP_ID
        if code is not Code.NONE:
            return code
        group = self._find(name)
        if group is None:
            return Code.UNKNOWN_MEMBER_ID
        return group.heartbeat(member_id, instance_id, generation, trio.current_time())

    async def leave(self, name: str, members: list[tuple[str, str]]) -> tuple[Code, list[Code]]:
        """For each (member id, instance id) a code; the first one is for the request as a whole."""
        code = await self._standing_for(name)
        if code is not Code.NONE:
            return code, []
        codes = []
        epoch = self._epoch
        for member_id, instance_id in members:
            group = self._find(name)
            if group is None:
                codes.append(Code.UNKNOWN_MEMBER_ID)
                continue
            code, effects = group.leave(member_id, instance_id, trio.current_time())
            self._carry_out(group, effects)
            codes.append(code)
        return await self.committed(self.last_change_end(name), epoch), codes

    async def commit(
        self, name: str, member_id: str, instance_id: str, generation: int, offsets: tuple[CommittedOffset, ...]
    ) -> Code:
        """One small frame in the log; answered once that is below the high watermark."""
        code = await self._standing_for(name)
        if code is not Code.NONE:
            return code
        group = self._find(name)
        if group is not None:
            code = group.may_commit(member_id, instance_id, generation, trio.current_time())
        elif generation >= 0:
            code = Code.ILLEGAL_GENERATION
        if code is not Code.NONE or not offsets:
            return code
        return await self._append(OffsetsCommitted(name, offsets))

    async def remove(self, name: str) -> Code:
        """Forget a group that has no members."""
        code = await self._standing_for(name)
        if code is not Code.NONE:
            return code
        group = self._find(name)
        if group is None or name not in self._house.log.state.groups:
            return Code.GROUP_ID_NOT_FOUND
        if not group.idle():
            return Code.NON_EMPTY_GROUP
        return await self._append(GroupRemoved(name))

    async def forget_offsets(self, name: str, offsets: tuple[CommittedOffset, ...]) -> Code:
        code = await self._standing_for(name)
        return await self._append(OffsetsCommitted(name, offsets)) if offsets and code is Code.NONE else code

    def find(self, name: str) -> Group | None:
        """To look at. Ask only while `standing` is NONE."""
        return self._find(name)

    def names(self) -> list[str]:
        return sorted({*self._house.log.state.groups, *self._groups})

    def last_change_end(self, name: str) -> Position:
        """The end of the last frame that speaks of this group; what is said of it waits until that is committed."""
        state = self._house.log.state.groups.get(name)
        return ORIGIN if state is None else state.last_change_end

    async def committed(self, end: Position, epoch: int | None = None, timeout_s: float | None = None) -> Code:
        """Wait until `end` is below the high watermark of this very leadership."""
        epoch = self._epoch if epoch is None else epoch
        with trio.move_on_after(COMMIT_TIMEOUT_S if timeout_s is None else timeout_s):
            try:
                await self._house.log.committed.wait(end)
            except DiskFailed:
                raise
            except ChronikError:
                return Code.NOT_COORDINATOR
            # A deposed leader's positions may be written again by another: what was waited for is not what came.
            return Code.NONE if self._house.epoch == epoch and self._house.role == "leader" else Code.NOT_COORDINATOR
        return Code.COORDINATOR_NOT_AVAILABLE

    # ── inside ───────────────────────────────────────────────────────────────────────────────────────────────────

    async def _standing_for(self, name: str) -> Code:
        """For what is to be written."""
        code = await self.ready() if 0 < len(name) <= NAME_MAX else Code.INVALID_GROUP_ID
        return Code.COORDINATOR_NOT_AVAILABLE if code is Code.NONE and not self._house.sync_in_force else code

    def _find(self, name: str) -> Group | None:
        group = self._groups.get(name)
        if group is None:
            state = self._house.log.state.groups.get(name)
            if state is not None:
                group = _load(name, state, trio.current_time())
        return group

    def _wait_slot(self) -> tuple[Ticket, _Slot]:
        ticket, slot = Ticket(next(self._tickets)), _Slot()
        self._slots[ticket] = slot
        return ticket, slot

    async def _settled(self, ticket: Ticket, slot: _Slot) -> Joined | Synced | _Failed:
        epoch = self._epoch
        try:
            await slot.settled.wait()
        finally:
            self._slots.pop(ticket, None)
        if slot.reply is None:
            return _Failed(slot.code)
        if slot.reply.code is not Code.NONE:
            return slot.reply
        code = await self.committed(slot.end, epoch)
        return slot.reply if code is Code.NONE else _Failed(code)

    def _carry_out(self, group: Group, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case Write(change):
                    known = self._house.log.state.groups.get(group.name)
                    before = 0 if known is None else known.generation
                    try:
                        self._house.log.append_change(change)
                    except DiskFailed:
                        raise
                    except ChronikError as error:
                        self._drop(group, effects, _code(error))
                        return
                    self._house.meters.add("kafka_group_rebalances", change.generation - before)
                case Answer(ticket, reply):
                    slot = self._slots.pop(ticket, None)
                    if slot is not None:  # else its connection is gone
                        slot.settle(reply, self.last_change_end(group.name))
        self._keep(group)

    def _keep(self, group: Group) -> None:
        """Hold it while it has anything that the log does not tell, and wake when it is due."""
        if group.idle():
            self._groups.pop(group.name, None)
            return
        self._groups[group.name] = group
        due = group.next_deadline()
        if due is not None and due < self._scheduled.get(group.name, float("inf")):
            self._scheduled[group.name] = due
            heapq.heappush(self._timers, (due, group.name))
            if self._timers[0] == (due, group.name):
                self._sooner.set()

    def _expire(self, due: float, name: str, now: float) -> None:
        if self._scheduled.get(name) != due:
            return  # an earlier one was set since
        del self._scheduled[name]
        group = self._groups.get(name)
        if group is not None:
            self._carry_out(group, group.expire(now))

    def _drop(self, group: Group, effects: list[Effect], code: Code) -> None:
        """The log did not take it: forget what was decided, and go on later from what the log holds."""
        self._groups.pop(group.name, None)
        tickets = [effect.ticket for effect in effects if isinstance(effect, Answer)]
        for member in group.members.values():
            tickets.extend(ticket for ticket in (member.joining, member.syncing) if ticket is not None)
        for ticket in tickets:
            slot = self._slots.pop(ticket, None)
            if slot is not None:
                slot.fail(code)
        state = self._house.log.state.groups.get(group.name)
        if state is not None and state.members:
            self._keep(_load(group.name, state, trio.current_time()))

    def _drop_all(self) -> None:
        if self._epoch == -1:
            return
        self._epoch = -1
        self._groups.clear()
        self._timers.clear()
        self._scheduled.clear()
        slots, self._slots = self._slots, {}
        for slot in slots.values():
            slot.fail(Code.NOT_COORDINATOR)

    async def _append(self, change: Change) -> Code:
        try:
            end = self._house.log.append_change(change).end
        except DiskFailed:
            raise
        except ChronikError as error:
            return _code(error)
        return await self.committed(end)


def _code(error: ChronikError) -> Code:
    return Code.NOT_COORDINATOR if isinstance(error, NotLeader) else Code.COORDINATOR_NOT_AVAILABLE


def _load(name: str, state: GroupState, now: float) -> Group:
    return Group.load(
        name, state.generation, state.protocol_type, state.protocol, state.leader, state.members.values(), now
    )
