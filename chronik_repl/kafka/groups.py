"""One consumer group, as a machine that decides and does nothing.

What comes in: what members ask (join, sync, heartbeat, leave, commit), and the time. What goes out: a list of effects,
in the order in which the shell (coordinator.py) must carry them out: `Write` puts the group's new generation into the
log, `Answer` gives a member who waits its reply. A reply speaks of everything written before it, so the shell sends it
only when that is below the high watermark.

    EMPTY ──join──▶ PREPARING ──all joined, or time is up──▶ COMPLETING ──the leader's assignment──▶ STABLE
      ▲                 ▲ └──nobody left──▶ EMPTY                 │                                     │
      └── nobody left ──┴───────────── a member joins, leaves or falls silent ◀──────────────────────────┘

The log holds a generation twice: when all have joined (who is in it), and when its leader has assigned (who has what).
So a new leader of the cluster, or the same one after a restart, takes a group up where it was: in STABLE, or in
COMPLETING when no assignment stands in it yet, and the members notice nothing. Only PREPARING is not in the log: those
who wait in it ask again. Timers are not in it either: they begin anew.

The rules are those of Kafka's classic coordinator, static members (KIP-345) and required member ids (KIP-394) included.
No trio, no clock, no random: `now` (seconds) and new member ids are given.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from chronik_repl.kafka.codes import Code
from chronik_repl.kafka.group_messages import Answer, Effect, Join, Joined, Member, Phase, Synced, Ticket, Write
from chronik_repl.wal.changes import GroupChanged, GroupMember

SESSION_TIMEOUT_MS_MIN, SESSION_TIMEOUT_MS_MAX = 1_000, 1_800_000
REBALANCE_TIMEOUT_MS_MAX = 24 * 3_600_000
INITIAL_DELAY_S = 0.2  # the first members of a group rarely come alone: wait for the others a moment, once
INITIAL_DELAY_S_MAX = 3.0
NEW_MEMBER_TIMEOUT_S = 300.0  # of a member that waits in its first join, and may be gone
MEMBERS_MAX = 5_000
GROUP_BYTES_MAX = 8 * 1024 * 1024  # of all members' metadata, and of all assignments: a generation is one frame


@dataclass(slots=True)
class Group:
    name: str
    generation: int = 0
    phase: Phase = Phase.EMPTY
    protocol_type: str = ""
    protocol: str = ""
    leader: str = ""
    members: dict[str, Member] = field(default_factory=dict)
    pending: dict[str, float] = field(default_factory=dict)  # ids given out and not yet used, until when
    unsynced: set[str] = field(default_factory=set)  # who has not asked for this generation's assignment
    join_deadline: float = 0.0
    sync_deadline: float = 0.0
    first_join: float | None = None  # of an empty group: since when it waits for company
    effects: list[Effect] = field(default_factory=list)

    @classmethod
    def load(
        cls,
        name: str,
        generation: int,
        protocol_type: str,
        protocol: str,
        leader: str,
        members: Iterable[GroupMember],
        now: float,
    ) -> Group:
        """A group as the log tells it. Everyone's timers begin anew."""
        group = cls(name, generation, protocol_type=protocol_type, protocol=protocol, leader=leader)
        for told in members:
            member = Member(
                told.member_id,
                told.instance_id,
                told.client_id,
                told.client_host,
                told.session_timeout_ms,
                told.rebalance_timeout_ms,
                told.protocols,
                told.assignment,
            )
            group.members[member.member_id] = member
            group._touch(member, now)
        if any(member.assignment for member in group.members.values()):
            group.phase = Phase.STABLE
        elif group.members:
            group.phase = Phase.COMPLETING
            group.unsynced = set(group.members)
            group.sync_deadline = now + group._rebalance_timeout_s()
        return group

    # ── what members ask ─────────────────────────────────────────────────────────────────────────────────────────

    def join(self, ask: Join, ticket: Ticket, now: float) -> list[Effect]:
        if not SESSION_TIMEOUT_MS_MIN <= ask.session_timeout_ms <= SESSION_TIMEOUT_MS_MAX:
            return [Answer(ticket, Joined(Code.INVALID_SESSION_TIMEOUT, ask.member_id))]
        if not self._supports(ask):
            return [Answer(ticket, Joined(Code.INCONSISTENT_GROUP_PROTOCOL, ask.member_id))]
        known = self.members.get(ask.member_id)
        if known is None and len(self.members) + len(self.pending) >= MEMBERS_MAX:
            return [Answer(ticket, Joined(Code.GROUP_MAX_SIZE_REACHED, ask.member_id))]
        others = sum(member.size() for member in self.members.values() if member is not known)
        if others + sum(len(name) + len(metadata) for name, metadata in ask.protocols) > GROUP_BYTES_MAX:
            return [Answer(ticket, Joined(Code.GROUP_MAX_SIZE_REACHED, ask.member_id))]
        if not ask.member_id:
            self._join_new(ask, ticket, now)
        else:
            self._join_again(ask, ticket, now)
        return self._take()

    def sync(
        self,
        member_id: str,
        instance_id: str,
        generation: int,
        protocol_type: str | None,
        protocol: str | None,
        assignments: Mapping[str, bytes],
        ticket: Ticket,
        now: float,
    ) -> list[Effect]:
        code = self._check(member_id, instance_id, generation)
        if code is Code.NONE and (
            (protocol_type is not None and protocol_type != self.protocol_type)
            or (protocol is not None and protocol != self.protocol)
        ):
            code = Code.INCONSISTENT_GROUP_PROTOCOL
        if code is Code.NONE and self.phase is Phase.PREPARING:
            code = Code.REBALANCE_IN_PROGRESS
        if code is not Code.NONE:
            return [Answer(ticket, Synced(code))]
        member = self.members[member_id]
        self._touch(member, now)
        self.unsynced.discard(member_id)
        if self.phase is Phase.STABLE:
            return [Answer(ticket, self._synced(member))]
        if member_id != self.leader:
            self._put_off(member.syncing, Synced(Code.REBALANCE_IN_PROGRESS))
            member.syncing = ticket
            return self._take()
        if sum(map(len, assignments.values())) > GROUP_BYTES_MAX:
            return [Answer(ticket, Synced(Code.UNKNOWN_SERVER_ERROR))]
        self._put_off(member.syncing, Synced(Code.REBALANCE_IN_PROGRESS))
        member.syncing = ticket
        for other in self.members.values():
            other.assignment = assignments.get(other.member_id, b"")
        self.phase = Phase.STABLE
        self._write()
        for other in self.members.values():
            if other.syncing is not None:
                self.effects.append(Answer(other.syncing, self._synced(other)))
                other.syncing = None
                self._touch(other, now)
        return self._take()

    def heartbeat(self, member_id: str, instance_id: str, generation: int, now: float) -> Code:
        code = self._check(member_id, instance_id, generation)
        if code is Code.NONE:
            self._touch(self.members[member_id], now)
            if self.phase is Phase.PREPARING:
                return Code.REBALANCE_IN_PROGRESS
        return code

    def leave(self, member_id: str, instance_id: str, now: float) -> tuple[Code, list[Effect]]:
        """A static member may be named by its instance id alone."""
        if not instance_id and self.pending.pop(member_id, None) is not None:
            self._complete_if_all_joined(now)
            return Code.NONE, self._take()
        if instance_id:
            member = self._static(instance_id)
            if member is not None and member_id and member.member_id != member_id:
                return Code.FENCED_INSTANCE_ID, []
        else:
            member = self.members.get(member_id)
        if member is None:
            return Code.UNKNOWN_MEMBER_ID, []
        self._remove([member], now)
        return Code.NONE, self._take()

    def may_commit(self, member_id: str, instance_id: str, generation: int, now: float) -> Code:
        """May this member commit offsets? A group without members takes those of anyone who claims no generation."""
        if generation < 0 and self.phase is Phase.EMPTY:
            return Code.NONE
        code = self._check(member_id, instance_id, generation)
        if code is Code.NONE:
            self._touch(self.members[member_id], now)
            if self.phase is Phase.COMPLETING:
                return Code.REBALANCE_IN_PROGRESS
        return code

    # ── what time does ───────────────────────────────────────────────────────────────────────────────────────────

    def next_deadline(self) -> float | None:
        """When `expire` may next have something to do. Heartbeats only move it further away."""
        deadlines = [member.deadline for member in self.members.values() if not member.waits]
        deadlines.extend(self.pending.values())
        if self.phase is Phase.PREPARING:
            deadlines.append(self.join_deadline)
        elif self.unsynced:
            deadlines.append(self.sync_deadline)
        return min(deadlines, default=None)

    def expire(self, now: float) -> list[Effect]:
        for member_id in [member_id for member_id, until in self.pending.items() if now >= until]:
            del self.pending[member_id]
        silent = [member for member in self.members.values() if member.expired(now)]
        if self.unsynced and self.phase is not Phase.PREPARING and now >= self.sync_deadline:
            silent += [self.members[member_id] for member_id in self.unsynced if self.members[member_id] not in silent]
        if silent:
            self._remove(silent, now)
        if self.phase is Phase.PREPARING and now >= self.join_deadline:
            self._complete_join(now)
        else:
            self._complete_if_all_joined(now)
        return self._take()

    def idle(self) -> bool:
        """Nothing here that the log does not hold."""
        return self.phase is Phase.EMPTY and not self.pending

    # ── inside ───────────────────────────────────────────────────────────────────────────────────────────────────

    def _join_new(self, ask: Join, ticket: Ticket, now: float) -> None:
        if ask.instance_id:
            old = self._static(ask.instance_id)
            if old is not None:
                self._replace_static(old, ask, ticket, now)
                return
        elif ask.id_first:
            self.pending[ask.new_member_id] = now + ask.session_timeout_ms / 1000
            self.effects.append(Answer(ticket, Joined(Code.MEMBER_ID_REQUIRED, ask.new_member_id)))
            return
        self._add(ask.new_member_id, ask, ticket, now)

    def _join_again(self, ask: Join, ticket: Ticket, now: float) -> None:
        if not ask.instance_id and self.pending.pop(ask.member_id, None) is not None:
            self._add(ask.member_id, ask, ticket, now)
            return
        code = self._check_member(ask.member_id, ask.instance_id)
        if code is not Code.NONE:
            self.effects.append(Answer(ticket, Joined(code, ask.member_id)))
            return
        member = self.members[ask.member_id]
        same = member.protocols == ask.protocols
        if same and (
            self.phase is Phase.COMPLETING or (self.phase is Phase.STABLE and member.member_id != self.leader)
        ):
            # It did not hear our answer, or lost the connection: the generation stands.
            self._touch(member, now)
            self.effects.append(Answer(ticket, self._joined(member)))
            return
        self._update(member, ask, ticket, now)
        self._prepare(now)

    def _add(self, member_id: str, ask: Join, ticket: Ticket, now: float) -> None:
        member = Member(member_id, ask.instance_id, ask.client_id, ask.client_host, 0, 0, (), is_new=True)
        if not self.members:
            self.protocol_type = ask.protocol_type
        self.members[member_id] = member
        self._update(member, ask, ticket, now)
        member.deadline = now + NEW_MEMBER_TIMEOUT_S
        self._prepare(now)

    def _update(self, member: Member, ask: Join, ticket: Ticket | None, now: float) -> None:
        self._put_off(member.joining, Joined(Code.REBALANCE_IN_PROGRESS, member.member_id))
        member.protocols = ask.protocols
        member.client_id, member.client_host = ask.client_id, ask.client_host
        member.session_timeout_ms = ask.session_timeout_ms
        member.rebalance_timeout_ms = min(max(ask.rebalance_timeout_ms, 0), REBALANCE_TIMEOUT_MS_MAX)
        member.can_skip = ask.can_skip
        member.joining = ticket
        if not member.is_new:
            self._touch(member, now)

    def _replace_static(self, old: Member, ask: Join, ticket: Ticket, now: float) -> None:
        """A static member came back without its id: the old incarnation is fenced, its place is kept."""
        self._put_off(old.joining, Joined(Code.FENCED_INSTANCE_ID, old.member_id))
        self._put_off(old.syncing, Synced(Code.FENCED_INSTANCE_ID))
        old.joining = old.syncing = None
        leader_before = self.leader
        self.members = {
            (ask.new_member_id if member is old else member_id): member for member_id, member in self.members.items()
        }
        if old.member_id in self.unsynced:
            self.unsynced.remove(old.member_id)
            self.unsynced.add(ask.new_member_id)
        if self.leader == old.member_id:
            self.leader = ask.new_member_id
        old.member_id = ask.new_member_id
        self._update(old, ask, None, now)
        if self.phase is not Phase.STABLE or self._select_protocol() != self.protocol:
            old.joining = ticket
            self._prepare(now)
            return
        self._write()
        is_leader = self.leader == old.member_id
        reply = self._joined(old)
        if not ask.can_skip:
            # An old client that hears that it leads would assign anew, which a stable group ignores: it is told of
            # the id that it had before, and so only asks for its assignment.
            reply = reply._replace(members=(), leader=leader_before)
        else:
            reply = reply._replace(skip_assignment=is_leader)
        self.effects.append(Answer(ticket, reply))

    def _prepare(self, now: float) -> None:
        """A new generation is needed: everyone has to join again."""
        if self.phase is Phase.PREPARING:
            if self.first_join is not None:
                self.join_deadline = min(now + INITIAL_DELAY_S, self.first_join + INITIAL_DELAY_S_MAX)
        elif self.phase is Phase.EMPTY:
            self.first_join = now
            self.join_deadline = now + INITIAL_DELAY_S
        else:
            for member in self.members.values():
                self._put_off(member.syncing, Synced(Code.REBALANCE_IN_PROGRESS))
                member.syncing = None
            self.join_deadline = now + self._rebalance_timeout_s()
        self.phase = Phase.PREPARING
        self.unsynced.clear()
        self._complete_if_all_joined(now)

    def _complete_if_all_joined(self, now: float) -> None:
        if self.phase is not Phase.PREPARING or self.pending or (self.first_join is not None and self.members):
            return
        if all(member.joining is not None for member in self.members.values()):
            self._complete_join(now)

    def _complete_join(self, now: float) -> None:
        self.first_join = None
        for member in [m for m in self.members.values() if m.joining is None and not m.instance_id]:
            del self.members[member.member_id]
        joined = [member for member in self.members.values() if member.joining is not None]
        if self.members and not joined:  # static members only, all of them away: their session decides
            self.join_deadline = now + self._rebalance_timeout_s()
            return
        self.generation += 1
        if not self.members:
            self.phase, self.protocol, self.leader = Phase.EMPTY, "", ""
            self._write()
            return
        if not any(member.member_id == self.leader for member in joined):
            self.leader = joined[0].member_id
        self.protocol = self._select_protocol()
        self.phase = Phase.COMPLETING
        self.unsynced = set(self.members)
        self.sync_deadline = now + self._rebalance_timeout_s()
        for member in self.members.values():
            member.assignment = b""
        self._write()
        for member in joined:
            assert member.joining is not None
            self.effects.append(Answer(member.joining, self._joined(member)))
            member.joining = None
            member.is_new = False
            self._touch(member, now)

    def _remove(self, gone: list[Member], now: float) -> None:
        for member in gone:
            self._put_off(member.joining, Joined(Code.UNKNOWN_MEMBER_ID, member.member_id))
            self._put_off(member.syncing, Synced(Code.UNKNOWN_MEMBER_ID))
            del self.members[member.member_id]
            self.unsynced.discard(member.member_id)
        if self.phase is Phase.PREPARING:
            self._complete_if_all_joined(now)
        else:
            self._prepare(now)

    def _check_member(self, member_id: str, instance_id: str) -> Code:
        if instance_id:
            static = self._static(instance_id)
            if static is None:
                return Code.UNKNOWN_MEMBER_ID
            if static.member_id != member_id:
                return Code.FENCED_INSTANCE_ID
        return Code.NONE if member_id in self.members else Code.UNKNOWN_MEMBER_ID

    def _check(self, member_id: str, instance_id: str, generation: int) -> Code:
        code = self._check_member(member_id, instance_id)
        if code is Code.NONE and generation != self.generation:
            return Code.ILLEGAL_GENERATION
        return code

    def _static(self, instance_id: str) -> Member | None:
        return next((member for member in self.members.values() if member.instance_id == instance_id), None)

    def _supports(self, ask: Join) -> bool:
        if not ask.protocol_type or not ask.protocols:
            return False
        if not self.members:
            return True
        names = {name for name, _ in ask.protocols}
        return ask.protocol_type == self.protocol_type and bool(
            names & self._common(without=ask.member_id, names=names)
        )

    def _common(self, *, without: str = "", names: set[str] | None = None) -> set[str]:
        """The protocols that every member (but one) understands."""
        common = names
        for member in self.members.values():
            if member.member_id != without:
                theirs = {name for name, _ in member.protocols}
                common = theirs if common is None else common & theirs
        return common or set()

    def _select_protocol(self) -> str:
        """Of those that all understand, the one that most like best."""
        common = self._common()
        votes = Counter(
            next(name for name, _ in member.protocols if name in common) for member in self.members.values() if common
        )
        return max(votes, key=lambda name: votes[name]) if votes else ""

    def _rebalance_timeout_s(self) -> float:
        return max((member.rebalance_timeout_ms for member in self.members.values()), default=0) / 1000

    def _joined(self, member: Member) -> Joined:
        members: tuple[tuple[str, str, bytes], ...] = ()
        if member.member_id == self.leader:
            members = tuple((m.member_id, m.instance_id, m.metadata(self.protocol)) for m in self.members.values())
        return Joined(
            Code.NONE, member.member_id, self.generation, self.protocol_type, self.protocol, self.leader, members
        )

    def _synced(self, member: Member) -> Synced:
        return Synced(Code.NONE, self.protocol_type, self.protocol, member.assignment)

    def _touch(self, member: Member, now: float) -> None:
        member.deadline = now + member.session_timeout_ms / 1000

    def _put_off(self, ticket: Ticket | None, reply: Joined | Synced) -> None:
        if ticket is not None:
            self.effects.append(Answer(ticket, reply))

    def _write(self) -> None:
        members = tuple(
            GroupMember(
                m.member_id,
                m.client_id,
                m.client_host,
                m.instance_id,
                m.session_timeout_ms,
                m.rebalance_timeout_ms,
                m.protocols,
                m.assignment,
            )
            for m in self.members.values()
        )
        self.effects.append(
            Write(GroupChanged(self.name, self.generation, self.protocol_type, self.protocol, self.leader, members))
        )

    def _take(self) -> list[Effect]:
        effects, self.effects = self.effects, []
        return effects
