"""Who may lead, and where two logs part: the decisions, as plain functions over plain values.

The story (docs/architecture.md tells it at length). A member is a directory, not a machine. Each node keeps a
*promise*: the highest epoch that it granted, and to whom. To lead, a node asks around, takes an epoch above every
promise that it knows of, and leads if enough members granted it with logs that are not ahead of its own. *Enough* is
n + 1 - k of n + 1 members: then every set of k + 1 members that could have committed something has a granter among
them. It begins with an epoch-start frame, which stands in the log's history with the chain value under it; so two
logs part at a known position, and what stands after it was never committed in both.

Some of these rules look odd. Each has a test in tests/model/ that leaves it out and shows what is lost without it.

Nothing here waits, reads or remembers. Whoever calls makes the decision durable before acting on it: a promise before
it is told, the start frame before anything is shipped.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import msgspec

from chronik_repl.positions import NO_EPOCH, NOBODY, ORIGIN, Checksum, Epoch, NodeId, Position
from chronik_repl.wal.changes import HistoryEntry, Member, MembersChanged


class Identity(NamedTuple):
    """Who counts: a node's directory. A wiped node has another directory id, and so another identity."""

    node_id: int
    directory_id: str


class Promise(NamedTuple):
    """The highest epoch that a node granted, and to whom."""

    epoch: int
    node_id: int
    directory_id: str = ""


NO_PROMISE = Promise(NO_EPOCH, NOBODY)
LOSS_EPOCHS = 1 << 20  # a leader a minute for two years
EPOCH_MAX = (1 << 32) - 1  # what a frame has room for


class Summary(msgspec.Struct, frozen=True):
    """What a node tells of its log. `end` includes what is appended and not yet synced."""

    history: tuple[HistoryEntry, ...]
    end: int
    start: int = 0
    end_checksum: int = 0

    @property
    def last_epoch(self) -> int:
        return self.history[-1].epoch if self.history else NO_EPOCH

    @property
    def empty(self) -> bool:
        return self.end == ORIGIN


class Electorate(msgspec.Struct, frozen=True):
    """One set of members, and how many others must hold a frame before it is committed."""

    who: frozenset[Identity]
    sync_replicas: int  # k


# ── promises ─────────────────────────────────────────────────────────────────────────────────────────────────────


def may_grant(promised: Promise, asked: Promise) -> bool:
    """A later epoch, or the very same promise again. An equal epoch of another node never: two leaders of one epoch
    would each have their own frames in it."""
    return asked.epoch > promised.epoch or asked == promised


def next_epoch(promises: Iterable[int]) -> Epoch:
    """Above everything that is known to have been promised."""
    return Epoch(1 + max(promises, default=NO_EPOCH))


def epoch_after_loss(epoch: int) -> Epoch:
    """Far above. Those who are gone may have promised epochs that nobody here knows of; when they come back they must
    follow the history that the operator chose, not depose it. (Any epoch above every known promise may be taken.)"""
    return Epoch(epoch + LOSS_EPOCHS)


def promised_to_others(kept: int, asked: Promise, me: NodeId) -> Epoch:
    """The highest epoch promised to another node, after granting `asked`; kept durably beside the promise, because the
    last promise may be my own again."""
    return Epoch(max(kept, asked.epoch) if asked.node_id != me else kept)


# ── members ──────────────────────────────────────────────────────────────────────────────────────────────────────


def identity(member: Member) -> Identity:
    return Identity(member.node_id, member.directory_id)


def electorate(change: MembersChanged) -> Electorate:
    return Electorate(frozenset(identity(m) for m in change.members), change.sync_replicas)


def membership_in_force(
    changes: Sequence[tuple[int, MembersChanged]], high_watermark: int, history: Sequence[HistoryEntry] = ()
) -> tuple[Electorate, ...]:
    """The sets for which every rule must hold. `changes`: (end of its frame, change), oldest first.

    Until the last change is committed the one before it counts too: nobody knows yet which of them an election
    elsewhere goes by. The first change after an epoch start with accept_loss counts alone: that is what was accepted.
    """
    if not changes:
        return ()
    end, last = changes[-1]
    if len(changes) > 1 and end > high_watermark:
        before_end, before = changes[-2]
        if not any(entry.accept_loss and before_end <= entry.start < end for entry in history):
            return electorate(before), electorate(last)
    return (electorate(last),)


def may_change_members(changes: Sequence[tuple[int, MembersChanged]], high_watermark: int, start_end: int) -> bool:
    """One change at a time, and none before this epoch's start is committed (`start_end`: the end of that frame)."""
    return high_watermark >= start_end and (not changes or changes[-1][0] <= high_watermark)


def may_ship(changes: Sequence[tuple[int, MembersChanged]], to: Identity, asked_for: bool = False) -> bool:
    """From its removal on a node is shipped nothing: else it might hold the longest log and not be allowed to stand.
    `asked_for`: the operator wants it as a member (again), so it must catch up first.

    Ask after the bytes are taken and before they are sent: then they do not hold a removal that this does not know of.
    """
    if asked_for or not changes or to in electorate(changes[-1][1]).who:
        return True
    return not any(to in electorate(change).who for _, change in changes[:-1])


def members_after_loss(now: MembersChanged, me: Member, granted: Iterable[Identity]) -> MembersChanged:
    """With --accept-loss the members that did not grant are removed; they come back as additions."""
    stay = set(granted)
    others = tuple(m for m in now.members if m.node_id != me.node_id and identity(m) in stay)
    return MembersChanged(tuple(sorted((me, *others))), min(now.sync_replicas, len(others)))


# ── leading ──────────────────────────────────────────────────────────────────────────────────────────────────────


def same_entry(one: HistoryEntry, other: HistoryEntry) -> bool:
    """Epoch, leader, start and the chain value under it: then everything below is the same too."""
    return (
        one.epoch == other.epoch
        and one.leader == other.leader
        and one.start == other.start
        and one.chain == other.chain
    )


def log_ahead(theirs: Summary, mine: Summary, me: int) -> bool:
    """Might that log hold something committed that mine does not?

    A later last epoch, or the same and a longer end. One exception: where the last entry of both is the same and names
    me, a longer end is not ahead: nothing was committed in that epoch without being durable here. So a leader killed
    in mid-group leads again, though its followers hold frames that it lost.
    """
    if theirs.last_epoch != mine.last_epoch:
        return theirs.last_epoch > mine.last_epoch
    if own_last_epoch(theirs, mine, me):
        return False
    return theirs.end > mine.end


def own_last_epoch(theirs: Summary, mine: Summary, me: int) -> bool:
    return (
        bool(mine.history)
        and bool(theirs.history)
        and mine.history[-1].leader == me
        and same_entry(mine.history[-1], theirs.history[-1])
    )


def grants_needed(members: Electorate) -> int:
    """Of n + 1 members, n + 1 - k, the candidate among them."""
    return len(members.who) - members.sync_replicas


def may_start_alone(me: int, mine: Summary, to_others: int) -> bool:
    """Where k is 0: I led the last epoch of my log and have promised no later one to another node. (`to_others`: the
    highest epoch ever promised to another node.) Then nobody else can have committed anything since."""
    return bool(mine.history) and mine.history[-1].leader == me and to_others < mine.history[-1].epoch


def missing_to_lead(
    me: Identity,
    mine: Summary,
    grants: Mapping[Identity, Summary],
    sets: Sequence[Electorate],
    to_others: int,
) -> str:
    """What this candidate lacks, in words for the operator; "" when it may lead.

    `grants`: those that granted this epoch, without the candidate; `sets`: the membership in force by its own log.
    """
    if not sets:
        return "this node's log is empty: promote one that holds the log"
    good = {who for who, log in grants.items() if not log_ahead(log, mine, me.node_id)}
    ahead = sorted({who.node_id for who in grants if who not in good})
    for members in sets:
        if me not in members.who:
            return (
                f"node {me.node_id} with directory {me.directory_id} is not a member: promote one, or add this node on "
                "the leader first (`chronik members add`)"
            )
        if members.sync_replicas == 0 and may_start_alone(me.node_id, mine, to_others) and not ahead:
            continue
        have, need = 1 + len((good - {me}) & members.who), grants_needed(members)
        if have < need:
            silent = sorted(who.node_id for who in members.who if who != me and who not in grants)
            parts = [f"{have} of {len(members.who)} members agree and {need} are needed"]
            if silent:
                parts.append(f"no answer from node {_and(silent)}")
            if ahead:
                parts.append(f"the log of node {_and(ahead)} is ahead of this one: promote that one")
            return "; ".join(parts)
    return ""


def may_lead(
    me: Identity,
    mine: Summary,
    grants: Mapping[Identity, Summary],
    sets: Sequence[Electorate],
    to_others: int,
) -> bool:
    return not missing_to_lead(me, mine, grants, sets, to_others)


def _and(nodes: Sequence[int]) -> str:
    return " and ".join(map(str, nodes)) if len(nodes) < 3 else f"{', '.join(map(str, nodes[:-1]))} and {nodes[-1]}"


# ── founding ─────────────────────────────────────────────────────────────────────────────────────────────────────


class Asked(NamedTuple):
    """One answer to asking."""

    node_id: int
    directory_id: str
    promise: Promise
    log: Summary
    live_leader: int = NOBODY  # heard by it, or itself
    live_epoch: int = NO_EPOCH


class Found(NamedTuple):
    """An empty node founds a cluster."""


class Wait(NamedTuple):
    """Not yet: says for whom."""

    missing: str


class Yield(NamedTuple):
    """Someone else leads, or should: says who and what to do."""

    leader: int
    epoch: int
    reason: str


def founding(listed: Sequence[str], answers: Mapping[str, Asked], bootstrap: bool) -> Found | Wait | Yield:
    """What a node with an empty log and a list of followers does. `answers`: by the address listed.

    It founds only when everyone listed has answered and is empty too, or with CHRONIK_BOOTSTRAP=true: an empty leader
    must not found a second history over followers that hold the first.
    """
    with_log = sorted((a for a in answers.values() if not a.log.empty), key=lambda a: (a.log.last_epoch, a.log.end))
    if with_log:
        best = with_log[-1]
        return Yield(
            best.node_id,
            best.log.last_epoch,
            f"this node's log is empty, but node {best.node_id} holds one (epoch {best.log.last_epoch}, "
            f"position {best.log.end}). Run `chronik promote` there, and start this node as a follower",
        )
    silent = [address for address in listed if address not in answers]
    if silent and not bootstrap:
        return Wait(f"founding a cluster waits for {', '.join(silent)} to answer (or set CHRONIK_BOOTSTRAP=true)")
    return Found()


def live_leader(me: int, answers: Iterable[Asked]) -> Yield | None:
    """Whom a starting node must not depose: the leader of the highest epoch that somebody hears. `promote` goes on."""
    heard = max(((a.live_epoch, a.live_leader) for a in answers if a.live_leader not in (NOBODY, me)), default=None)
    if heard is None:
        return None
    epoch, leader = heard
    return Yield(leader, epoch, f"node {leader} leads since epoch {epoch}; this node does not depose it")


# ── where two logs part ──────────────────────────────────────────────────────────────────────────────────────────


class Meeting(NamedTuple):
    """What a leader tells a follower to do before it ships."""

    position: Position  # up to here the logs are the same; the follower cuts what it has beyond
    anew: bool  # it must forget everything and begin at `position`, the leader's log start
    loss_accepted: bool  # the first epoch that it does not share began with --accept-loss


def common_entries(leader: Summary, follower: Summary) -> tuple[int, int] | None:
    """The places of the last entry that both histories hold. An epoch that one side does not know is no match and
    is passed over; that its number is lower or higher says nothing."""
    places = {entry.epoch: at for at, entry in enumerate(follower.history)}
    for at in range(len(leader.history) - 1, -1, -1):
        other = places.get(leader.history[at].epoch)
        if other is not None and same_entry(leader.history[at], follower.history[other]):
            return at, other
    return None


def diverging_point(leader: Summary, follower: Summary) -> Position:
    """Up to where the follower's log is the leader's. Beyond it the follower truncates."""
    common = common_entries(leader, follower)
    if common is None:
        return ORIGIN
    ends = [
        log.history[at + 1].start if len(log.history) > at + 1 else log.end
        for log, at in zip((leader, follower), common, strict=True)
    ]
    return Position(min(ends))


def meet(leader: Summary, follower: Summary) -> Meeting:
    """Where a session begins. The chain value there is compared by both sides before anything is cut."""
    point = diverging_point(leader, follower)
    common = common_entries(leader, follower)
    first_other = 0 if common is None else common[0] + 1
    loss = len(leader.history) > first_other and leader.history[first_other].accept_loss
    if point < leader.start or (point < follower.start and point != follower.end):
        return Meeting(Position(leader.start), True, loss)
    return Meeting(point, False, loss)


def may_truncate(to: Position, anew: bool, high_watermark: Position, loss_accepted: bool) -> bool:
    """The follower's side: nothing below its high watermark is cut, unless the operator accepted that. Beginning anew
    forgets only what the leader's log start has passed, so the same comparison holds for it."""
    return loss_accepted or high_watermark <= to


def accepted_loss(leader_history: Sequence[HistoryEntry], mine: Summary) -> bool:
    """The follower's own view of it, from the history in the handshake: it does not take the leader's word."""
    common = common_entries(Summary(tuple(leader_history), 0), mine)
    first_other = 0 if common is None else common[0] + 1
    return len(leader_history) > first_other and leader_history[first_other].accept_loss


def parity(position: int, theirs: int, ours: int | None) -> str:
    """Two logs with the same (position, chain value) are the same all the way back. In words what differs, or ""."""
    if ours is None:
        return f"position {position} is inside a frame of the leader's log"
    if theirs != ours:
        return f"the chain value at position {position} is {theirs:#010x}, the leader's is {ours:#010x}"
    return ""


def summarise(history: Sequence[HistoryEntry], start: Position, end: Position, checksum: Checksum) -> Summary:
    """Of one's own log, as it is now."""
    return Summary(tuple(history), end, start, checksum)
