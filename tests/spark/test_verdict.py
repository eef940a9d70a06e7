"""What holds from one segment to the next, and what may be called the same: the ledger by itself."""

from __future__ import annotations

import msgspec
import pytest

from chronik_repl.spark.digest import Block, Scan
from chronik_repl.spark.layout import Tally, Walked
from chronik_repl.spark.plan import Part, Span
from chronik_repl.spark.survey import Copy, SegmentFile
from chronik_repl.spark.verdict import Ledger, Report, judge

FIRST = Walked(0, 100, 5, 10, 0, 77, 1, 2, 1000, 2000, 0, [Tally("t", 0, 0, 10, 10, 100)])
SECOND = Walked(100, 200, 5, 10, 77, 99, 2, 2, 2000, 3000, 0, [Tally("t", 0, 10, 20, 10, 100)])
COPIES = [Copy(name, f"/{name}", (SegmentFile(0, "", 1, 1),), 200, 200) for name in "ab"]


def report(*runs: Walked, digests: str = "..") -> Report:
    ledger = Ledger(COPIES, 0, 200, "the lowest durable end of the copies")
    for run in runs:
        parts = tuple(Part(n, SegmentFile(run.start, f"/{n}", 1, 1), run.end, True, 200) for n in "ab")
        scans = {
            name: Scan(name, run.start, blocks=[Block(run.start, run.end, 100, digest.encode())])
            for name, digest in zip("ab", digests, strict=True)
        }
        scans["a"].runs = [run]
        ledger.add(judge(Span(run.start, run.end, parts, True), scans, "a"))
    ledger.settle(0)
    return ledger.report("cluster")


def test_two_segments_that_join_are_the_same() -> None:
    told = report(FIRST, SECOND)
    assert (told.verdict, told.differences) == ("same", ())
    assert [(p.first, p.end, p.records, p.verdict) for p in told.partitions] == [(0, 20, 20, "same")]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"first_previous": 78}, "chain breaks"),
        ({"first_epoch": 1}, "epoch 1 follows epoch 2"),
        ({"first_time_ms": 1999}, "time goes back"),
        ({"tallies": [Tally("t", 0, 11, 21, 10, 100)]}, "offset 11 where 10 should follow"),
    ],
)
def test_equal_copies_of_a_log_that_does_not_join_are_not_called_good(changes: dict[str, object], words: str) -> None:
    told = report(FIRST, msgspec.structs.replace(SECOND, **changes))
    assert told.verdict == "different"
    assert [(d.kind, d.copy) for d in told.differences] == [("wrong log", "all")]
    assert words in told.differences[0].detail


def test_digests_that_differ_ask_for_a_closer_look() -> None:
    parts = tuple(Part(n, SegmentFile(0, f"/{n}", 1, 1), 100, True, 200) for n in "ab")
    scans = {n: Scan(n, 0, blocks=[Block(0, 100, 100, n.encode())]) for n in "ab"}
    scans["a"].runs = [FIRST]
    judged = judge(Span(0, 100, parts, True), scans, "a")
    assert judged.closer is not None
    assert [g.copies for g in judged.closer.groups] == [("a",), ("b",)]


def test_one_copy_alone_is_not_compared() -> None:
    part = Part("a", SegmentFile(0, "/a", 1, 1), 100, True, 200)
    scan = Scan("a", 0, blocks=[Block(0, 100, 100, b".")], runs=[FIRST])
    ledger = Ledger(COPIES, 0, 100, "the lowest durable end of the copies")
    ledger.add(judge(Span(0, 100, (part,), True, behind=("b",)), {"a": scan}, "a"))
    ledger.settle(0)
    told = ledger.report("cluster")
    assert (told.verdict, told.exit_code) == ("could not tell", 2)
    assert [(c.copy, c.status) for c in told.covers] == [("a", "not compared"), ("b", "behind")]
    assert [(p.records, p.not_compared, p.verdict) for p in told.partitions] == [(0, 10, "not compared")]
