"""What a producer was told is safe, and what a consumer then found: what every client's test ends with."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from itertools import pairwise

RECORDS = 100_000
PARTITIONS = 4


def number_of(value: bytes) -> int:
    return int(value.split(b" ", 1)[0])


def value_of(number: int) -> bytes:
    """Numbered, and large enough to be worth compressing."""
    return b"%d record of a test, the same words in every one of them" % number


class Ledger:
    """Record n goes into partition n % PARTITIONS, in the order of n."""

    def __init__(self) -> None:
        self.acked: set[int] = set()
        self.found: dict[int, list[int]] = defaultdict(list)

    def took(self, partition: int, value: bytes) -> None:
        self.found[partition].append(number_of(value))

    def took_all(self, records: Iterable[tuple[int, bytes]]) -> None:
        for partition, value in records:
            self.took(partition, value)

    def nothing_lost(self) -> None:
        """Every acked record is there, at least once, in its partition."""
        for partition in range(PARTITIONS):
            missing = sorted({n for n in self.acked if n % PARTITIONS == partition} - set(self.found[partition]))
            assert not missing, f"{len(missing)} acked records of partition {partition} are gone, first {missing[:5]}"

    def once_and_in_order(self) -> None:
        """Nothing lost, nothing twice, nothing out of order."""
        self.nothing_lost()
        for partition, numbers in self.found.items():
            for before, after in pairwise(numbers):
                assert before < after, f"in partition {partition} record {after} stands after {before}"

    def complete(self, records: int = RECORDS) -> bool:
        """All of them were acked, and are there."""
        return len(self.acked) == records and sum(map(len, self.found.values())) >= records
