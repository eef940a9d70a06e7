"""The decisions, case by case. What leaving one out loses is in tests/model/; here is what each says."""

from __future__ import annotations

import pytest

from chronik_repl.positions import Checksum, NodeId, Position
from chronik_repl.replication import epochs
from chronik_repl.replication.epochs import (
    NO_PROMISE,
    Asked,
    Found,
    Identity,
    Meeting,
    Promise,
    Summary,
    Wait,
    Yield,
)
from chronik_repl.wal.changes import HistoryEntry, Member, MembersChanged

A, B, C, D = (Identity(n, f"d{n}") for n in (1, 2, 3, 4))


def log(*entries: tuple[int, int, int], end: int, start: int = 0, chain: int = 7) -> Summary:
    """Entries are (epoch, leader, start). The chain value is the same wherever the start is."""
    return Summary(tuple(HistoryEntry(e, who, at, chain + at) for e, who, at in entries), end, start)


def members(*who: Identity, k: int) -> MembersChanged:
    return MembersChanged(tuple(Member(*i) for i in who), k)


def in_force(*who: Identity, k: int) -> tuple[epochs.Electorate, ...]:
    return (epochs.electorate(members(*who, k=k)),)


# ── promises ──


@pytest.mark.parametrize(
    ("promised", "asked", "granted"),
    [
        (NO_PROMISE, Promise(1, 1, "d1"), True),
        (Promise(3, 1, "d1"), Promise(3, 1, "d1"), True),  # the same again
        (Promise(3, 1, "d1"), Promise(3, 2, "d2"), False),  # kf53
        (Promise(3, 1, "d1"), Promise(3, 1, "d9"), False),  # the same node after a wipe is another
        (Promise(3, 1, "d1"), Promise(2, 1, "d1"), False),
        (Promise(3, 1, "d1"), Promise(4, 2, "d2"), True),
    ],
)
def test_a_promise_is_kept(promised: Promise, asked: Promise, granted: bool) -> None:
    assert epochs.may_grant(promised, asked) is granted


def test_the_next_epoch_is_above_every_known_promise() -> None:
    assert epochs.next_epoch([3, 9, 4]) == 10
    assert epochs.next_epoch([]) == 1


def test_kf57_what_was_promised_to_another_is_remembered_through_own_promises() -> None:
    kept = epochs.promised_to_others(0, Promise(5, 2, "d2"), NodeId(1))
    assert epochs.promised_to_others(kept, Promise(6, 1, "d1"), NodeId(1)) == 5


# ── who may lead ──


def test_log_ahead_is_a_later_epoch_or_a_longer_end() -> None:
    mine = log((1, 1, 0), (2, 2, 50), end=100)
    assert epochs.log_ahead(log((1, 1, 0), (3, 3, 40), end=45), mine, 1)
    assert epochs.log_ahead(log((1, 1, 0), (2, 2, 50), end=101), mine, 1)
    assert not epochs.log_ahead(log((1, 1, 0), (2, 2, 50), end=100), mine, 1)
    assert not epochs.log_ahead(log((1, 1, 0), end=500), mine, 1)


def test_a_longer_end_in_ones_own_last_epoch_is_not_ahead() -> None:
    mine = log((1, 1, 0), (2, 1, 50), end=100)
    assert not epochs.log_ahead(log((1, 1, 0), (2, 1, 50), end=900), mine, 1)
    assert epochs.log_ahead(log((1, 1, 0), (2, 1, 50), end=900, chain=8), mine, 1)  # another entry, same numbers
    assert epochs.log_ahead(log((1, 1, 0), (2, 1, 50), (3, 1, 80), end=90), mine, 1)  # a later epoch, even my own


def test_sync_one_needs_two_of_three() -> None:
    mine = log((1, 1, 0), end=100)
    sets = in_force(A, B, C, k=1)
    assert not epochs.may_lead(B, mine, {}, sets, 1)
    assert epochs.may_lead(B, mine, {A: mine}, sets, 1)
    assert not epochs.may_lead(B, mine, {A: log((1, 1, 0), end=101)}, sets, 1)
    assert epochs.may_lead(B, mine, {A: log((1, 1, 0), end=101), C: mine}, sets, 1)
    assert not epochs.may_lead(B, mine, {D: mine}, sets, 1)  # no member
    assert not epochs.may_lead(D, mine, {A: mine, B: mine, C: mine}, sets, 1)


def test_kf54_a_wiped_node_does_not_vote_with_its_old_authority() -> None:
    empty = Summary((), 0)
    assert not epochs.may_lead(C, log((1, 1, 0), end=90), {Identity(1, "new"): empty}, in_force(A, B, C, k=1), 1)


def test_async_needs_everyone_or_the_one_that_led_last() -> None:
    mine = log((1, 1, 0), end=100)
    sets = in_force(A, B, C, k=0)
    assert epochs.may_lead(A, mine, {}, sets, 0)
    assert not epochs.may_lead(A, mine, {}, sets, 2)  # kf57: promised epoch 2 to another
    assert not epochs.may_lead(B, mine, {A: mine}, sets, 1)
    assert epochs.may_lead(B, mine, {A: mine, C: mine}, sets, 1)


def test_async_nobody_starts_alone_over_a_log_that_is_ahead() -> None:
    mine = log((1, 1, 0), end=100)
    later = log((1, 1, 0), (2, 2, 80), end=90)  # an operator accepted a loss there meanwhile
    assert not epochs.may_lead(A, mine, {C: later}, in_force(A, B, C, k=0), 0)


def test_what_is_missing_is_said() -> None:
    mine = log((1, 1, 0), end=100)
    said = epochs.missing_to_lead(B, mine, {C: log((1, 1, 0), end=200)}, in_force(A, B, C, k=1), 1)
    assert said == (
        "1 of 3 members agree and 2 are needed; no answer from node 1; "
        "the log of node 3 is ahead of this one: promote that one"
    )
    assert "not a member" in epochs.missing_to_lead(D, mine, {}, in_force(A, B, k=1), 1)
    assert "empty" in epochs.missing_to_lead(D, Summary((), 0), {}, (), 0)


# ── members ──


def test_kf55_both_sets_count_until_the_change_is_committed() -> None:
    changes = [(100, members(A, B, k=1)), (200, members(A, B, C, k=1))]
    assert epochs.membership_in_force(changes, 199) == in_force(A, B, k=1) + in_force(A, B, C, k=1)
    assert epochs.membership_in_force(changes, 200) == in_force(A, B, C, k=1)
    assert epochs.membership_in_force([], 0) == ()
    assert not epochs.may_change_members(changes, 199, 50)
    assert epochs.may_change_members(changes, 200, 50)
    assert not epochs.may_change_members(changes, 200, 201)  # this epoch's start is not committed yet


def test_the_change_after_an_accepted_loss_counts_alone() -> None:
    changes = [(100, members(A, B, C, k=1)), (260, members(B, k=0))]
    lossy = (HistoryEntry(1, 1, 0, 0), HistoryEntry(2, 2, 200, 5, True))
    assert epochs.membership_in_force(changes, 100, lossy) == in_force(B, k=0)
    earlier = (HistoryEntry(1, 1, 0, 0), HistoryEntry(2, 2, 50, 5, True))
    assert len(epochs.membership_in_force(changes, 100, earlier)) == 2


def test_those_that_did_not_grant_are_removed_with_the_loss() -> None:
    after = epochs.members_after_loss(members(A, B, C, k=2), Member(*B), [C])
    assert after == MembersChanged((Member(*B), Member(*C)), 1)
    alone = epochs.members_after_loss(members(A, B, C, k=2), Member(2, "copy"), [])
    assert alone == MembersChanged((Member(2, "copy"),), 0)


def test_a_removed_node_is_shipped_nothing() -> None:
    removal = [(100, members(A, B, C, k=1)), (200, members(A, B, k=1))]
    assert epochs.may_ship(removal, B)
    assert not epochs.may_ship(removal, C)
    assert epochs.may_ship(removal, D)  # a newcomer
    assert epochs.may_ship(removal, C, asked_for=True)
    assert epochs.may_ship([*removal, (300, members(A, B, C, k=1))], C)  # added again


# ── founding ──


def asked(node: Identity, summary: Summary, leader: int = 0, epoch: int = 0) -> Asked:
    return Asked(*node, NO_PROMISE, summary, leader, epoch)


EMPTY = Summary((), 0)


def test_kf58_an_empty_node_founds_only_over_empty_ones() -> None:
    listed = ["b:1", "c:1"]
    assert epochs.founding([], {}, False) == Found()
    assert isinstance(epochs.founding(listed, {"b:1": asked(B, EMPTY)}, False), Wait)
    assert epochs.founding(listed, {"b:1": asked(B, EMPTY), "c:1": asked(C, EMPTY)}, False) == Found()
    assert epochs.founding(listed, {}, True) == Found()
    holding = epochs.founding(listed, {"b:1": asked(B, log((4, 9, 0), end=10))}, True)
    assert isinstance(holding, Yield)
    assert (holding.leader, holding.epoch) == (2, 4)


def test_kf59_a_starting_node_does_not_depose_whom_others_hear() -> None:
    mine = log((1, 1, 0), end=10)
    assert epochs.live_leader(1, [asked(B, mine, leader=1, epoch=1), asked(C, mine)]) is None
    heard = epochs.live_leader(1, [asked(B, mine, leader=2, epoch=5), asked(C, mine, leader=4, epoch=3)])
    assert heard is not None
    assert (heard.leader, heard.epoch) == (2, 5)


# ── where logs part ──


@pytest.mark.parametrize(
    ("leader", "follower", "point"),
    [
        (log((1, 1, 0), end=100), log((1, 1, 0), end=60), 60),
        (log((1, 1, 0), (2, 2, 100), end=130), log((1, 1, 0), end=100), 100),
        (log((1, 1, 0), (2, 2, 100), end=130), log((1, 1, 0), end=120), 100),  # a tail that was never committed
        (log((1, 1, 0), (2, 2, 100), end=130), log((1, 1, 0), (2, 2, 100), end=130), 130),
        # kf2: two quick changes; the follower's last epoch is one that the leader does not know
        (log((1, 1, 0), (3, 3, 90), end=130), log((1, 1, 0), (2, 2, 80), end=120), 80),
        # kf3: it missed two epochs, and its tail only looks right
        (log((1, 1, 0), (2, 2, 50), (3, 3, 70), end=130), log((1, 1, 0), end=120), 50),
        # an old leader that lost its tail and leads again, over a follower that holds it
        (log((1, 1, 0), (2, 1, 80), end=130), log((1, 1, 0), end=120), 80),
        (log((1, 1, 0), end=10), Summary((), 0), 0),
        (log((1, 1, 0), end=10), log((1, 2, 0), end=10), 0),
        # histories whose oldest entries were left out
        (log((7, 1, 500), (8, 2, 600), end=700), log((8, 2, 600), end=650), 650),
    ],
)
def test_where_two_logs_part(leader: Summary, follower: Summary, point: int) -> None:
    assert epochs.diverging_point(leader, follower) == point


def test_the_same_epoch_number_with_another_chain_is_another_epoch() -> None:
    one = Summary((HistoryEntry(1, 1, 0, 0), HistoryEntry(2, 2, 50, 111)), 100)
    other = Summary((HistoryEntry(1, 1, 0, 0), HistoryEntry(2, 2, 50, 222)), 100)
    assert epochs.diverging_point(one, other) == 50


def test_a_follower_older_than_the_log_start_begins_anew() -> None:
    leader = log((1, 1, 0), (2, 2, 600), end=700, start=500)
    assert epochs.meet(leader, log((1, 1, 0), end=400)) == Meeting(Position(500), True, False)
    assert epochs.meet(leader, Summary((), 0)) == Meeting(Position(500), True, False)
    assert epochs.meet(leader, log((1, 1, 0), end=550)) == Meeting(Position(550), False, False)


def test_only_the_operators_loss_cuts_below_a_high_watermark() -> None:
    lossy = Summary((HistoryEntry(1, 1, 0, 7), HistoryEntry(3, 2, 80, 87, True)), 130)
    follower = log((1, 1, 0), end=120)
    met = epochs.meet(lossy, follower)
    assert met == Meeting(Position(80), False, True)
    assert epochs.accepted_loss(lossy.history, follower)
    assert not epochs.accepted_loss(log((1, 1, 0), (3, 2, 80), end=130).history, follower)
    assert not epochs.accepted_loss(lossy.history, Summary(lossy.history, 130))  # shared: nothing is cut by it
    assert not epochs.may_truncate(Position(80), False, Position(90), False)
    assert epochs.may_truncate(Position(80), False, Position(90), True)
    assert epochs.may_truncate(Position(80), False, Position(80), False)


def test_parity_says_what_differs() -> None:
    assert epochs.parity(10, 5, 5) == ""
    assert "chain value" in epochs.parity(10, 5, 6)
    assert "inside a frame" in epochs.parity(10, 5, None)
    assert epochs.summarise([], Position(1), Position(2), Checksum(3)) == Summary((), 2, 1, 3)
