"""What an idempotent producer's batch is: new, a duplicate, out of order, or of a producer that was fenced."""

from __future__ import annotations

import time

import pytest

from chronik_repl.kafka.codes import Code
from chronik_repl.kafka.producers import SEQUENCE_MAX, Duplicate, check
from chronik_repl.positions import Offset, Position
from chronik_repl.wal.state import PartitionState

PRODUCER = 7


class Partition:
    """Batches as the log folds them."""

    def __init__(self) -> None:
        self.state = PartitionState("t", 0)
        self.position = 0

    def write(self, base_sequence: int, records: int = 10, *, epoch: int = 0) -> Duplicate:
        base, self.position = self.state.next_offset, self.position + 100
        self.state.next_offset = Offset(base + records)
        end = Position(self.position)
        self.state.produced(PRODUCER, epoch, base_sequence, (base, end, records), 1)
        return Duplicate(base, end)

    def check(self, base_sequence: int, records: int = 10, *, epoch: int = 0) -> Duplicate | Code | None:
        return check(self.state, PRODUCER, epoch, base_sequence, records - 1)


def test_batches_in_order_are_new() -> None:
    partition = Partition()
    for sequence in range(0, 100, 10):
        assert partition.check(sequence) is None
        partition.write(sequence)


def test_any_of_the_last_five_is_a_duplicate_with_its_own_offset() -> None:
    partition = Partition()
    written = [partition.write(sequence) for sequence in range(0, 70, 10)]
    for index in range(2, 7):
        assert partition.check(index * 10) == written[index]
    for index in range(2):
        assert partition.check(index * 10) is Code.OUT_OF_ORDER_SEQUENCE_NUMBER


def test_gaps_and_halves_are_refused() -> None:
    partition = Partition()
    partition.write(0)
    assert partition.check(11) is Code.OUT_OF_ORDER_SEQUENCE_NUMBER
    assert partition.check(0, 5) is Code.OUT_OF_ORDER_SEQUENCE_NUMBER  # the same start, another end: not that batch
    assert partition.check(5, 5) is Code.OUT_OF_ORDER_SEQUENCE_NUMBER
    assert partition.check(10) is None


def test_an_older_epoch_is_fenced_and_a_newer_one_begins_at_zero() -> None:
    partition = Partition()
    partition.write(0, epoch=3)
    assert partition.check(10, epoch=2) is Code.INVALID_PRODUCER_EPOCH
    assert partition.check(10, epoch=4) is Code.OUT_OF_ORDER_SEQUENCE_NUMBER
    assert partition.check(0, epoch=4) is None
    partition.write(0, epoch=4)
    assert partition.check(10, epoch=3) is Code.INVALID_PRODUCER_EPOCH


def test_an_unknown_producer_begins_where_it_likes() -> None:
    """It may have been forgotten after seven days, or its records removed by retention."""
    partition = Partition()
    assert partition.check(4711) is None
    assert check(partition.state, PRODUCER, -1, 0, 0) is Code.INVALID_RECORD
    assert check(partition.state, PRODUCER, 0, -1, 0) is Code.INVALID_RECORD


@pytest.mark.parametrize("records", [1, 7])
def test_sequences_begin_anew_after_the_largest(records: int) -> None:
    partition = Partition()
    first = partition.write(SEQUENCE_MAX - 2, 3)
    assert partition.check(SEQUENCE_MAX - 2, 3) == first
    assert partition.check(0, records) is None
    across = Partition()
    base = SEQUENCE_MAX - 4
    second = across.write(base, 10)
    assert across.check(base, 10) == second
    assert across.check(5, records) is None


def test_a_check_costs_less_than_two_microseconds() -> None:
    partition = Partition()
    for sequence in range(0, 60, 10):
        partition.write(sequence)
    rounds = 20_000
    best = 1.0
    for _ in range(5):
        start = time.perf_counter()
        for _ in range(rounds):
            check(partition.state, PRODUCER, 0, 60, 9)
        best = min(best, (time.perf_counter() - start) / rounds)
    assert best < 2e-6
