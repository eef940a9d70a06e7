"""From acks to the high watermark, as transcripts."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from chronik_repl.positions import Epoch, Position
from chronik_repl.replication import progress
from chronik_repl.replication.epochs import Electorate, Identity
from chronik_repl.replication.progress import Progress

A, B, C, D, E = (Identity(n, f"d{n}") for n in (1, 2, 3, 4, 5))


def three(k: int) -> tuple[Electorate, ...]:
    return (Electorate(frozenset((A, B, C)), k),)


def leading(start_end: int = 110, known: int = 100) -> Progress:
    return Progress(A, Epoch(7), Position(start_end), Position(known))


def test_sync_to_one_follows_the_faster_follower() -> None:
    p = leading()
    assert p.advance(500, three(1)) == 100  # nobody acked
    p.ack(B, 7, Position(300))
    assert p.advance(500, three(1)) == 300
    p.ack(C, 7, Position(450))
    assert p.advance(500, three(1)) == 450
    assert p.advance(500, three(2)) == 450  # never back
    p.ack(C, 7, Position(600))
    assert p.advance(500, three(1)) == 500  # never beyond the leader's own durable end


def test_async_is_the_leaders_own_durable_end() -> None:
    assert leading().advance(500, three(0)) == 500


def test_kf51_nothing_counts_before_the_start_frame() -> None:
    p = leading(start_end=110, known=100)
    p.ack(B, 7, Position(109))
    assert p.advance(500, three(1)) == 100
    p.ack(B, 7, Position(110))
    assert p.advance(500, three(1)) == 110


def test_kf8_acks_of_another_epochs_session_do_not_count() -> None:
    p = leading()
    assert not p.ack(B, 6, Position(400))
    assert p.advance(500, three(1)) == 100


def test_while_members_change_both_sets_must_hold_it() -> None:
    p = leading()
    both = (Electorate(frozenset((A, B, C)), 1), Electorate(frozenset((A, B, C, D, E)), 2))
    p.ack(D, 7, Position(400))
    p.ack(E, 7, Position(400))
    assert p.advance(500, both) == 100  # B and C are what the old set goes by
    p.ack(B, 7, Position(300))
    assert p.advance(500, both) == 300


def test_one_that_differs_counts_no_more_until_it_is_readmitted() -> None:
    p = leading()
    p.ack(B, 7, Position(200))
    p.set_apart(B)
    assert not p.ack(B, 7, Position(300))
    assert p.advance(500, three(1)) == 100
    p.readmit(B)
    p.ack(B, 7, Position(300))
    assert p.advance(500, three(1)) == 300


def test_enough_live() -> None:
    assert progress.enough_live(A, three(1), {B})
    assert not progress.enough_live(A, three(1), {A, D})
    assert progress.enough_live(A, three(0), set())
    assert not progress.enough_live(A, (*three(1), Electorate(frozenset((A, D)), 1)), {B})


def test_k_is_in_force_when_every_set_that_counts_holds_to_it() -> None:
    assert progress.in_force(1, three(1))
    assert progress.in_force(0, three(0))
    assert not progress.in_force(1, three(0))
    assert not progress.in_force(1, (Electorate(frozenset((A,)), 0), *three(1)))  # the change is not committed
    assert not progress.in_force(2, three(1))
    assert not progress.in_force(0, ())


@given(
    st.lists(st.tuples(st.sampled_from([B, C, D]), st.integers(0, 1000)), max_size=30),
    st.integers(0, 3),
    st.integers(0, 1000),
)
def test_what_is_committed_is_held_by_k_others_and_never_goes_back(
    acks: list[tuple[Identity, int]], k: int, durable: int
) -> None:
    sets = (Electorate(frozenset((A, B, C, D)), k),)
    p = leading(start_end=50, known=20)
    held: dict[Identity, int] = {}
    last = 20
    for who, position in acks:
        p.ack(who, 7, Position(position))
        held[who] = max(position, held.get(who, 0))
        now = p.advance(durable, sets)
        assert now >= last
        if now > 20:
            assert 50 <= now <= durable
            assert sum(end >= now for end in held.values()) >= k
        last = now
