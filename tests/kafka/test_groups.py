"""The group machine alone: what it answers, what it writes, and that a reload from what it wrote changes nothing."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import count

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from chronik_repl.kafka.codes import Code
from chronik_repl.kafka.group_messages import Answer, Effect, Join, Joined, Phase, Synced, Ticket, Write
from chronik_repl.kafka.groups import (
    GROUP_BYTES_MAX,
    INITIAL_DELAY_S,
    MEMBERS_MAX,
    NEW_MEMBER_TIMEOUT_S,
    Group,
)
from chronik_repl.wal.changes import GroupChanged

RANGE = (("range", b"range-metadata"),)


@dataclass
class Desk:
    """Feeds a group and keeps what came out."""

    group: Group = field(default_factory=lambda: Group("g"))
    now: float = 1000.0
    replies: dict[int, Joined | Synced] = field(default_factory=dict)
    written: list[GroupChanged] = field(default_factory=list)
    tickets: count[int] = field(default_factory=count)
    ids: count[int] = field(default_factory=count)

    def take(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case Write(change):
                    self.written.append(change)
                case Answer(ticket, reply):
                    assert ticket not in self.replies, "answered twice"
                    self.replies[ticket] = reply

    def join(self, member_id: str = "", **given: object) -> int:
        ticket = next(self.tickets)
        asked: dict[str, object] = {
            "member_id": member_id, "instance_id": "", "client_id": "c", "client_host": "/127.0.0.1",
            "session_timeout_ms": 10_000, "rebalance_timeout_ms": 60_000, "protocol_type": "consumer",
            "protocols": RANGE, "new_member_id": f"m{next(self.ids)}",
        }  # fmt: skip
        asked.update(given)
        self.take(self.group.join(Join(**asked), Ticket(ticket), self.now))  # type: ignore[arg-type]
        return ticket

    def sync(self, member_id: str, generation: int, assignments: dict[str, bytes] | None = None, **given: str) -> int:
        ticket = next(self.tickets)
        self.take(
            self.group.sync(
                member_id, given.get("instance_id", ""), generation, given.get("protocol_type"),
                given.get("protocol"), assignments or {}, Ticket(ticket), self.now,
            )
        )  # fmt: skip
        return ticket

    def leave(self, member_id: str, instance_id: str = "") -> Code:
        code, effects = self.group.leave(member_id, instance_id, self.now)
        self.take(effects)
        return code

    def beat(self, member_id: str, instance_id: str = "") -> Code:
        return self.group.heartbeat(member_id, instance_id, self.group.generation, self.now)

    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.take(self.group.expire(self.now))

    def joined(self, ticket: int) -> Joined:
        reply = self.replies[ticket]
        assert isinstance(reply, Joined)
        return reply

    def synced(self, ticket: int) -> Synced:
        reply = self.replies[ticket]
        assert isinstance(reply, Synced)
        return reply

    def reload(self) -> None:
        """A restart: all that the log has is the last thing written. Those who waited ask again, if they do."""
        told = self.written[-1]
        self.group = Group.load(
            told.group, told.generation, told.protocol_type, told.protocol, told.leader, told.members, self.now
        )

    def stable(self, members: int, **given: object) -> list[str]:
        """A group of so many members, each with an assignment of its own name."""
        tickets = [self.join("", **given) for _ in range(members)]
        self.wait(INITIAL_DELAY_S)
        ids = [self.joined(ticket).member_id for ticket in tickets]
        self.settle()
        return ids

    def settle(self) -> None:
        generation = self.group.generation
        for member_id in [m for m in self.group.members if m != self.group.leader]:
            self.sync(member_id, generation)
        self.sync(self.group.leader, generation, {m: m.encode() for m in self.group.members})
        assert self.group.phase is Phase.STABLE


def test_members_that_come_together_are_one_generation() -> None:
    desk = Desk()
    first, second = desk.join(), desk.join()
    assert not desk.replies
    desk.wait(INITIAL_DELAY_S)
    leader, other = desk.joined(first), desk.joined(second)
    assert leader.generation == other.generation == 1
    assert leader.leader == leader.member_id == other.leader
    assert [member for member, _, _ in leader.members] == [leader.member_id, other.member_id]
    assert other.members == ()  # only the leader needs them
    assert leader.members[0][2] == b"range-metadata"
    assert len(desk.written) == 1


def test_the_leaders_assignment_reaches_everyone() -> None:
    desk = Desk()
    first, second = desk.join(), desk.join()
    desk.wait(INITIAL_DELAY_S)
    a, b = desk.joined(first).member_id, desk.joined(second).member_id
    waits = desk.sync(b, 1)
    assert waits not in desk.replies
    leads = desk.sync(a, 1, {a: b"for a", b: b"for b"})
    assert desk.synced(leads) == Synced(Code.NONE, "consumer", "range", b"for a")
    assert desk.synced(waits).assignment == b"for b"
    assert {m.member_id: m.assignment for m in desk.written[-1].members} == {a: b"for a", b: b"for b"}
    late = desk.sync(b, 1)
    assert desk.synced(late).assignment == b"for b"


def test_a_newcomer_is_told_its_id_first() -> None:
    desk = Desk()
    told = desk.joined(desk.join(id_first=True))
    assert told.code is Code.MEMBER_ID_REQUIRED
    again = desk.join(told.member_id, id_first=True)
    desk.wait(INITIAL_DELAY_S)
    assert desk.joined(again).member_id == told.member_id
    assert desk.joined(again).code is Code.NONE


def test_an_id_that_is_never_used_is_forgotten_and_then_holds_up_nobody() -> None:
    desk = Desk()
    (member,) = desk.stable(1)
    desk.join(id_first=True)
    newcomer = desk.join()  # starts a rebalance that waits for the one with the id
    rejoined = desk.join(member)
    desk.wait(5)
    assert rejoined not in desk.replies
    desk.wait(5)
    assert desk.joined(rejoined).generation == desk.joined(newcomer).generation == 2


def test_a_third_member_makes_the_others_join_again() -> None:
    desk = Desk()
    a, b = desk.stable(2)
    third = desk.join()
    assert desk.beat(a) is Code.REBALANCE_IN_PROGRESS
    again_a, again_b = desk.join(a), desk.join(b)
    assert desk.joined(third).generation == desk.joined(again_a).generation == desk.joined(again_b).generation == 2
    assert desk.joined(again_a).leader == a  # the leader stays if it came back


def test_who_does_not_join_again_in_time_is_out() -> None:
    desk = Desk()
    a, b = desk.stable(2)
    newcomer = desk.join(rebalance_timeout_ms=5_000)
    again = desk.join(a, rebalance_timeout_ms=5_000)
    for _ in range(12):  # b goes on with its heartbeats, and never joins
        desk.wait(5)
        desk.beat(b)
    assert desk.joined(again).generation == desk.joined(newcomer).generation == 2
    assert b not in desk.group.members
    assert desk.beat(b) is Code.UNKNOWN_MEMBER_ID


def test_silence_ends_a_membership() -> None:
    desk = Desk()
    a, b = desk.stable(2)
    for _ in range(3):
        desk.wait(4)
        assert desk.beat(a) in (Code.NONE, Code.REBALANCE_IN_PROGRESS)
    assert list(desk.group.members) == [a]
    assert desk.beat(b) is Code.UNKNOWN_MEMBER_ID
    again = desk.join(a)
    assert desk.joined(again).generation == 2


def test_a_member_that_waits_for_us_is_not_silent() -> None:
    desk = Desk()
    a, b = desk.stable(2)
    desk.join()
    again = desk.join(a)
    for _ in range(5):
        desk.wait(9)
        desk.beat(b)
    assert a in desk.group.members
    assert again not in desk.replies
    desk.join(b)
    assert desk.joined(again).generation == 2


def test_a_newcomer_that_hangs_in_its_first_join_is_forgotten_in_the_end() -> None:
    desk = Desk()
    (a,) = desk.stable(1, rebalance_timeout_ms=2 * 300_000, session_timeout_ms=1_800_000)
    newcomer = desk.join()
    desk.wait(NEW_MEMBER_TIMEOUT_S)
    assert desk.joined(newcomer).code is Code.UNKNOWN_MEMBER_ID
    assert list(desk.group.members) == [a]


def test_the_last_one_to_leave_empties_the_group() -> None:
    desk = Desk()
    (a,) = desk.stable(1)
    assert desk.leave(a) is Code.NONE
    assert desk.group.phase is Phase.EMPTY
    assert desk.group.idle()
    assert desk.written[-1].generation == 2
    assert desk.written[-1].members == ()
    assert desk.leave(a) is Code.UNKNOWN_MEMBER_ID


def test_a_leader_that_does_not_assign_is_replaced() -> None:
    desk = Desk()
    tickets = [desk.join(session_timeout_ms=1_800_000), desk.join(session_timeout_ms=1_800_000)]
    desk.wait(INITIAL_DELAY_S)
    a, b = (desk.joined(ticket).member_id for ticket in tickets)
    waits = desk.sync(b, 1)
    desk.wait(60)
    assert desk.synced(waits).code is Code.REBALANCE_IN_PROGRESS
    again = desk.join(b)
    assert desk.joined(again).leader == b
    assert a not in desk.group.members


def test_wrong_generation_wrong_member_wrong_protocol() -> None:
    desk = Desk()
    (a,) = desk.stable(1)
    assert desk.synced(desk.sync(a, 7)).code is Code.ILLEGAL_GENERATION
    assert desk.synced(desk.sync("nobody", 1)).code is Code.UNKNOWN_MEMBER_ID
    assert desk.synced(desk.sync(a, 1, protocol="sticky")).code is Code.INCONSISTENT_GROUP_PROTOCOL
    assert desk.synced(desk.sync(a, 1, protocol_type="connect")).code is Code.INCONSISTENT_GROUP_PROTOCOL
    assert desk.joined(desk.join("nobody")).code is Code.UNKNOWN_MEMBER_ID
    assert desk.joined(desk.join(protocol_type="connect")).code is Code.INCONSISTENT_GROUP_PROTOCOL
    assert desk.joined(desk.join(protocols=(("sticky", b""),))).code is Code.INCONSISTENT_GROUP_PROTOCOL
    assert desk.joined(desk.join(protocols=())).code is Code.INCONSISTENT_GROUP_PROTOCOL
    assert desk.joined(desk.join(session_timeout_ms=1)).code is Code.INVALID_SESSION_TIMEOUT
    assert desk.group.phase is Phase.STABLE


def test_the_protocol_that_most_like_best_wins() -> None:
    desk = Desk()
    tickets = [
        desk.join(protocols=(("range", b"r"), ("sticky", b"s"))),
        desk.join(protocols=(("sticky", b"s"), ("range", b"r"))),
        desk.join(protocols=(("mine", b""), ("sticky", b"s"), ("range", b"r"))),
    ]
    desk.wait(INITIAL_DELAY_S)
    assert {desk.joined(ticket).protocol for ticket in tickets} == {"sticky"}


def test_limits_hold() -> None:
    desk = Desk()
    assert desk.joined(desk.join(protocols=(("range", bytes(GROUP_BYTES_MAX)),))).code is Code.GROUP_MAX_SIZE_REACHED
    desk.group.pending = {str(n): 1e9 for n in range(MEMBERS_MAX)}
    assert desk.joined(desk.join()).code is Code.GROUP_MAX_SIZE_REACHED


def test_a_join_that_is_sent_again_is_answered_without_a_rebalance() -> None:
    desk = Desk()
    a, b = desk.stable(2)
    again = desk.join(b)
    assert desk.joined(again).generation == 1
    assert desk.group.phase is Phase.STABLE
    assert desk.beat(a) is Code.NONE


def test_commits() -> None:
    desk = Desk()
    assert desk.group.may_commit("", "", -1, desk.now) is Code.NONE  # nobody's group: a store of offsets
    (a,) = desk.stable(1)
    assert desk.group.may_commit(a, "", 1, desk.now) is Code.NONE
    assert desk.group.may_commit(a, "", 0, desk.now) is Code.ILLEGAL_GENERATION
    assert desk.group.may_commit("", "", -1, desk.now) is Code.UNKNOWN_MEMBER_ID
    desk.join()
    assert desk.group.may_commit(a, "", 1, desk.now) is Code.NONE  # before it joins again it says what it has done
    desk.join(a)
    assert desk.group.phase is Phase.COMPLETING
    assert desk.group.may_commit(a, "", 2, desk.now) is Code.REBALANCE_IN_PROGRESS


@pytest.mark.parametrize("can_skip", [False, True])
def test_a_static_member_comes_back_without_a_rebalance(can_skip: bool) -> None:
    desk = Desk()
    (a,) = desk.stable(1, instance_id="i")
    back = desk.joined(desk.join(instance_id="i", can_skip=can_skip))
    assert back.code is Code.NONE
    assert back.generation == 1
    assert back.member_id != a
    assert back.skip_assignment is can_skip
    # An old client must not think that it leads, or it would assign anew.
    assert (back.leader == back.member_id) is can_skip
    assert desk.group.phase is Phase.STABLE
    assert desk.synced(desk.sync(back.member_id, 1, instance_id="i")).assignment == a.encode()
    assert desk.beat(a, "i") is Code.FENCED_INSTANCE_ID
    assert [m.member_id for m in desk.written[-1].members] == [back.member_id]


def test_a_static_member_that_left_by_its_instance_id_alone() -> None:
    desk = Desk()
    desk.stable(1, instance_id="i")
    assert desk.leave("other", "i") is Code.FENCED_INSTANCE_ID
    assert desk.leave("", "nobody") is Code.UNKNOWN_MEMBER_ID
    assert desk.leave("", "i") is Code.NONE
    assert desk.group.phase is Phase.EMPTY


def test_static_members_that_are_away_keep_their_place_through_a_rebalance() -> None:
    desk = Desk()
    (a,) = desk.stable(1, instance_id="i", session_timeout_ms=1_800_000)
    newcomer = desk.join()
    desk.wait(60)
    assert desk.joined(newcomer).generation == 2
    assert a in desk.group.members
    assert desk.joined(newcomer).leader == desk.joined(newcomer).member_id


def test_a_restart_in_a_stable_group_is_not_noticed() -> None:
    desk = Desk()
    a, b = desk.stable(2)
    generation = desk.group.generation
    desk.now += 3600  # the node was away for an hour: timers begin anew
    desk.reload()
    desk.wait(9)
    assert desk.beat(a) is Code.NONE
    assert desk.beat(b) is Code.NONE
    assert desk.group.generation == generation
    assert desk.synced(desk.sync(b, generation)).assignment == b.encode()
    assert desk.group.may_commit(a, "", generation, desk.now) is Code.NONE


def test_a_restart_between_join_and_assignment_goes_on_there() -> None:
    desk = Desk()
    first, second = desk.join(), desk.join()
    desk.wait(INITIAL_DELAY_S)
    a, b = desk.joined(first).member_id, desk.joined(second).member_id
    desk.reload()
    assert desk.group.phase is Phase.COMPLETING
    waits = desk.sync(b, 1)
    desk.sync(a, 1, {a: b"for a", b: b"for b"})
    assert desk.synced(waits).assignment == b"for b"
    assert desk.beat(a) is Code.NONE


def test_an_assignment_is_of_one_generation() -> None:
    """A restart after the next join and before its assignment: nobody goes on with what they had before."""
    desk = Desk()
    a, b = desk.stable(2)
    newcomer = desk.join()
    desk.join(a)
    desk.join(b)
    assert desk.joined(newcomer).generation == 2
    desk.reload()
    waits = desk.sync(b, 2)
    assert waits not in desk.replies
    desk.sync(a, 2, dict.fromkeys(desk.group.members, b"new"))
    assert desk.synced(waits).assignment == b"new"


def test_next_deadline_is_never_late_and_never_stuck_in_the_past() -> None:
    desk = Desk()
    a, b = desk.stable(2)
    desk.join()
    desk.join(a)  # waits: its session does not run
    due = desk.group.next_deadline()
    assert due is not None
    desk.wait(due - desk.now)
    later = desk.group.next_deadline()
    assert later is None or later > desk.now
    assert b not in desk.group.members


class Members(RuleBasedStateMachine):
    """Any order of requests, time and restarts: the machine stays consistent and nobody is answered twice."""

    def __init__(self) -> None:
        super().__init__()
        self.desk = Desk()
        self.generations: list[int] = [0]

    def ids(self) -> list[str]:
        return [*self.desk.group.members, *self.desk.group.pending, "nobody"]

    @rule(static=st.sampled_from(["", "", "i", "j"]), id_first=st.booleans(), skip=st.booleans())
    def newcomer(self, static: str, id_first: bool, skip: bool) -> None:
        self.desk.join(instance_id=static, id_first=id_first, can_skip=skip)

    @rule(pick=st.integers(0, 9), change=st.booleans())
    def again(self, pick: int, change: bool) -> None:
        ids = self.ids()
        member = self.desk.group.members.get(ids[pick % len(ids)])
        protocols = (("range", b"changed"),) if change else RANGE
        self.desk.join(ids[pick % len(ids)], instance_id=member.instance_id if member else "", protocols=protocols)

    @rule(pick=st.integers(0, 9))
    def sync(self, pick: int) -> None:
        ids = self.ids()
        group = self.desk.group
        self.desk.sync(ids[pick % len(ids)], group.generation, {m: m.encode() for m in group.members})

    @rule()
    def leader_syncs(self) -> None:
        group = self.desk.group
        self.desk.sync(group.leader, group.generation, {m: m.encode() for m in group.members})

    @rule(pick=st.integers(0, 9))
    def leave(self, pick: int) -> None:
        ids = self.ids()
        self.desk.leave(ids[pick % len(ids)])

    @rule(pick=st.integers(0, 9))
    def beat(self, pick: int) -> None:
        ids = self.ids()
        self.desk.beat(ids[pick % len(ids)])

    @rule(seconds=st.sampled_from([0.1, 0.2, 5.0, 10.0, 61.0, 400.0]))
    def wait(self, seconds: float) -> None:
        self.desk.wait(seconds)

    @rule()
    def restart(self) -> None:
        if self.desk.written:
            self.desk.reload()

    @invariant()
    def holds(self) -> None:
        desk, group = self.desk, self.desk.group
        generations = [change.generation for change in desk.written]
        assert generations == sorted(generations), "a generation went back"
        for member_id, member in group.members.items():
            assert member.member_id == member_id
            assert member.joining is None or group.phase is Phase.PREPARING
            assert member.syncing is None or group.phase is Phase.COMPLETING
        assert group.unsynced <= set(group.members)
        if group.phase is Phase.EMPTY:
            assert not group.members
        if group.phase is Phase.COMPLETING:
            assert not any(member.assignment for member in group.members.values())
        if group.phase in (Phase.COMPLETING, Phase.STABLE):
            assert group.leader in group.members
            assert group.protocol == "range"
            # What the log holds is what is here.
            told = desk.written[-1]
            assert (told.generation, told.leader) == (group.generation, group.leader)
            assert {m.member_id: m.assignment for m in told.members} == {
                m.member_id: m.assignment for m in group.members.values()
            }
        due = group.next_deadline()
        if group.phase is not Phase.EMPTY:
            assert due is not None, "nothing would ever wake this group"


Members.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestMembers = Members.TestCase
