"""From acks to the high watermark.

Acks come in, each from one session of one follower; out comes the position below which everything is committed: held
durably by the leader and by k other members, for every set of members in force. It never goes back, and it does not
move at all before it covers this epoch's start frame: frames of older epochs are committed through that frame, never
by counting them alone.

Only acks of this epoch's sessions count: what a follower said to an earlier leader speaks of other bytes. A
`Progress` is therefore made anew for each leadership. A follower whose chain differs is set aside and counts no more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set

from chronik_repl.positions import ORIGIN, Epoch, Position
from chronik_repl.replication.epochs import Electorate, Identity


def high_watermark(
    me: Identity,
    durable_end: int,
    acked: Mapping[Identity, int],
    sets: Sequence[Electorate],
    start_end: int,
    known: int,
) -> Position:
    """`acked`: durable ends told in this epoch; `start_end`: the end of this epoch's start frame; `known`: the high
    watermark until now."""
    best = durable_end
    for members in sets:
        best = min(best, held_by(members, me, acked, durable_end))
    return Position(max(known, best)) if may_count(best, start_end) else Position(known)


def held_by(members: Electorate, me: Identity, acked: Mapping[Identity, int], durable_end: int) -> int:
    """The highest position that k members other than me have acked."""
    k = members.sync_replicas
    if k == 0:
        return durable_end
    others = sorted((acked.get(who, ORIGIN) for who in members.who if who != me), reverse=True)
    return others[k - 1] if len(others) >= k else ORIGIN


def may_count(position: int, start_end: int) -> bool:
    """Not before it covers the start frame of this epoch."""
    return position >= start_end


def ack_counts(session_epoch: int, epoch: int) -> bool:
    return session_epoch == epoch


def enough_live(me: Identity, sets: Sequence[Electorate], live: Set[Identity]) -> bool:
    """Are as many members in session as a commit needs?"""
    return all(len((live - {me}) & members.who) >= members.sync_replicas for members in sets)


def in_force(asked: int, sets: Sequence[Electorate]) -> bool:
    """Does every set that counts hold to the k that is asked for? Until then a commit can be the leader's alone."""
    return bool(sets) and all(members.sync_replicas >= asked for members in sets)


class Progress:
    """One leadership's count of who holds what."""

    def __init__(self, me: Identity, epoch: Epoch, start_end: Position, known: Position) -> None:
        self.me = me
        self.epoch = epoch
        self.start_end = start_end
        self.committed = known  # never back
        self.acked: dict[Identity, Position] = {}
        self.set_aside: set[Identity] = set()  # their chain differs from ours

    def ack(self, who: Identity, session_epoch: int, position: Position) -> bool:
        """Takes note of a durable end. False when it does not count: another epoch's session, or one set aside."""
        if not ack_counts(session_epoch, self.epoch) or who in self.set_aside:
            return False
        if position > self.acked.get(who, -1):
            self.acked[who] = position
        return True

    def set_apart(self, who: Identity) -> None:
        """Parity failed: what it holds is not what we shipped, so nothing that it said counts."""
        self.set_aside.add(who)
        self.acked.pop(who, None)

    def readmit(self, who: Identity) -> None:
        """A new session has compared the chain again, and it is ours."""
        self.set_aside.discard(who)

    def advance(self, durable_end: int, sets: Sequence[Electorate]) -> Position:
        """The high watermark as it is now."""
        self.committed = high_watermark(self.me, durable_end, self.acked, sets, self.start_end, self.committed)
        return self.committed
