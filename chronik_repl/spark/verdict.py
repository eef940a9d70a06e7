"""From what the tasks saw to what is said about it. Pure.

`judge` looks at one span: which copies hold the same bytes, what is already clear, what needs a closer look. `Ledger`
takes the spans in the log's order, checks what holds from one to the next (chain, offsets), and writes the report. It
never says "same" of anything that was not compared: every position of every copy gets a word of its own.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

import msgspec

from chronik_repl.spark.closer import Closer, CloserTask, Group
from chronik_repl.spark.compare import Difference, Range, Rechained, joined, merged
from chronik_repl.spark.digest import Scan
from chronik_repl.spark.layout import Walked
from chronik_repl.spark.plan import Part, Span, below_log_start
from chronik_repl.spark.survey import Copy
from chronik_repl.words import count_of

Status = Literal["same", "proved earlier", "different", "missing", "behind", "not compared"]
Verdict = Literal["same", "different", "could not tell"]
EXIT_CODES: Mapping[Verdict, int] = {"same": 0, "different": 1, "could not tell": 2}
UNREAD = "could not be read"
_UNKNOWN = -1
DIFFERENCES_MAX = 10_000  # listed in the report; all are counted


class Cover(msgspec.Struct, frozen=True):
    """What is said of one copy between two positions."""

    copy: str
    start: int
    end: int
    status: Status
    why: str = ""


class CopyReport(msgspec.Struct, frozen=True):
    name: str
    path: str
    start: int
    end: int
    durable_end: int
    behind: int  # bytes, against what it was compared with
    verdict: Status
    differences: int
    why: str = ""


class PartitionReport(msgspec.Struct, frozen=True):
    """Offsets [first, end) were compared on at least two copies; `not_compared` records more are on one only."""

    topic: str
    partition: int
    first: int
    end: int
    records: int
    not_compared: int
    verdict: Status
    differences: int


class Report(msgspec.Struct, frozen=True):
    verdict: Verdict
    exit_code: int
    cluster_id: str
    start: int
    end: int
    end_is: str  # in words: what `end` is
    copies: tuple[CopyReport, ...]
    partitions: tuple[PartitionReport, ...]
    differences: tuple[Difference, ...]
    differences_all: int
    covers: tuple[Cover, ...]
    notes: tuple[str, ...]
    frames: int = 0
    records: int = 0
    bytes_read: int = 0
    bytes_proved_earlier: int = 0
    started: str = ""
    startup_s: float = 0.0
    work_s: float = 0.0


class Judged(msgspec.Struct):
    """A span after the first pass."""

    span: Span
    reference: str = ""
    runs: list[Walked] = []
    status: dict[str, Status] = {}
    why: dict[str, str] = {}
    gone: tuple[str, ...] = ()  # copies whose file was removed while we read
    differences: list[Difference] = []
    closer: CloserTask | None = None
    recheck_index: tuple[str, ...] = ()  # copies whose index is not the one that was checked
    more: int = 0
    rechained: dict[str, Rechained] = {}


def judge(span: Span, scans: Mapping[str, Scan], reference: str, proved: Iterable[str] = ()) -> Judged:
    """`reference` names the copy whose frames were walked; `proved` those that an earlier run has compared with it."""
    judged = Judged(span, reference, status={}, why={}, differences=[], rechained={})
    main = scans.get(reference)
    judged.runs = list(main.runs) if main else []
    contents: dict[tuple[object, ...], list[Part]] = defaultdict(list)
    gone = []
    for part in span.parts:
        scanned = scans.get(part.copy)
        if part.copy in proved:
            judged.status[part.copy] = "proved earlier"
        elif part.file is None:
            judged.status[part.copy] = "missing"
            judged.differences.append(whole_segment(span, part, judged.runs))
        elif scanned is None or scanned.failed:
            judged.status[part.copy] = "not compared"
            judged.why[part.copy] = f"{UNREAD}: {scanned.failed}" if scanned else UNREAD
        elif scanned.missing:
            gone.append(part.copy)
            judged.status[part.copy] = "not compared"
            judged.why[part.copy] = "removed while it was being read"
        else:
            contents[_content(scanned, main, part)].append(part)
    judged.gone = tuple(gone)
    _compare_contents(judged, contents, main)
    _judge_indexes(judged, scans, main)
    return judged


def _content(scanned: Scan, main: Scan | None, part: Part) -> tuple[object, ...]:
    """Copies with the same answer hold the same bytes, as far as each of them goes."""
    if main is not None and not scanned.excess and not main.excess:
        ours = main.blocks[: len(scanned.blocks)]
        if scanned.blocks == ours:
            return ("reference",)
    return (part.upto, scanned.excess, *scanned.blocks)


def _compare_contents(judged: Judged, contents: dict[tuple[object, ...], list[Part]], main: Scan | None) -> None:
    span = judged.span
    agreeing = sum(len(parts) for parts in contents.values()) + sum(
        s == "proved earlier" for s in judged.status.values()
    )
    for parts in contents.values():
        for part in parts:
            judged.status[part.copy] = "same" if agreeing > 1 else "not compared"
            if agreeing < 2:
                judged.why[part.copy] = "no other copy holds it"
    if main is not None and (main.wrong or any(content != ("reference",) for content in contents)):
        groups = tuple(
            Group(
                tuple(p.copy for p in parts),
                longest.file.path if longest.file else "",
                longest.upto,
                longest.sealed,
                longest.durable_end,
            )
            for parts in contents.values()
            for longest in [max(parts, key=lambda p: p.upto)]
        )
        judged.closer = CloserTask(span.start, span.end, groups)


def _judge_indexes(judged: Judged, scans: Mapping[str, Scan], main: Scan | None) -> None:
    recheck = []
    for copy, scanned in scans.items():
        if main is None or judged.status.get(copy) in ("missing", None) or not scanned.index_digest:
            continue
        if scanned.index_digest == main.index_digest:
            if main.index_lie:
                judged.differences.append(index_lie(judged.span, copy, main.index_lie))
        elif not main.wrong:
            recheck.append(copy)
    judged.recheck_index = tuple(recheck)


def index_lie(span: Span, copy: str, lie: str) -> Difference:
    part = span.part(copy)
    file = part.file.index_path if part and part.file else ""
    return Difference(span.start, span.end, copy, "index", lie, file=file)


def whole_segment(
    span: Span, part: Part, runs: Sequence[Walked], detail: str = "the segment's file is not there"
) -> Difference:
    held = [r for r in runs if r.start < part.upto]
    ranges, more = joined(Range(t.topic, t.partition, t.first, t.next) for r in held for t in r.tallies)
    frames, records = sum(r.frames for r in held), sum(r.records for r in held)
    return Difference(span.start, part.upto, part.copy, "missing", detail, frames, records, ranges, more)


def take_closer(judged: Judged, closer: Closer) -> None:
    """Put what the closer look found into the judgement."""
    if closer.gone:
        for copy, status in judged.status.items():
            if status == "same":
                judged.status[copy], judged.why[copy] = "not compared", "removed while it was being read"
        judged.gone = tuple(judged.status)
        return
    judged.differences += closer.differences
    judged.more += closer.more
    judged.rechained = dict(closer.rechained)
    for copy in {d.copy for d in closer.differences} | set(closer.rechained):
        judged.status[copy] = "different"


class _Partition:
    def __init__(self, first: int) -> None:
        self.first, self.next, self.compared_end = first, first, first
        self.records = self.not_compared = 0
        self.different = False  # in a way that no listed range names


class Ledger:
    """Spans come in order. What it keeps grows with partitions and segments, never with records."""

    def __init__(self, copies: Sequence[Copy], start: int, end: int, end_is: str) -> None:
        self.copies, self.start, self.end, self.end_is = copies, start, end, end_is
        self.differences: list[Difference] = []
        self.more = 0
        self.notes: list[str] = []
        self.log_start = 0
        self.frames = self.records = 0
        self._partitions: dict[tuple[str, int], _Partition] = {}
        self._spans: list[tuple[Span, dict[str, Status], dict[str, str], list[Walked], tuple[str, ...]]] = []
        self._last: Walked | None = None  # the last run, if it was good to its end
        self._different: set[str] = set()

    def add(self, judged: Judged) -> None:
        span = judged.span
        self._headers(judged)
        for copy, rechained in judged.rechained.items():
            if copy not in self._different and not any(d.copy == copy for d in judged.differences):
                words = f"{count_of(rechained.frames, 'frame')}, the same as the others' but on another history"
                judged.differences.append(
                    Difference(rechained.start, span.end, copy, "changed", words, rechained.frames)
                )
        self._chain(judged)
        for run in judged.runs:
            self._tally(run, judged)
        if not judged.runs or judged.runs[-1].wrong:  # what follows cannot be checked against what was not seen
            for seen in self._partitions.values():
                seen.next = _UNKNOWN
        self.more += judged.more
        self.differences += judged.differences
        self._different |= {d.copy for d in judged.differences}
        kept = judged.runs if span.late or judged.gone else []  # to name what may turn out to be missing
        self._spans.append((span, judged.status, judged.why, kept, judged.gone))
        self.log_start = max([self.log_start, *(r.log_start for r in judged.runs)])

    def _headers(self, judged: Judged) -> None:
        previous = judged.runs[0].first_previous if judged.runs and judged.runs[0].frames else None
        for part in judged.span.parts:
            file = part.file
            if file is None or part.copy in judged.gone:
                continue
            wrong = file.wrong
            if not wrong and file.chain is not None and previous is not None and file.chain != previous:
                chain = f"{file.chain:#010x} is not that of its first frame, {previous:#010x}"
                wrong = f"{file.path}: the header's chain value {chain}"
            if wrong:
                judged.differences.append(
                    Difference(judged.span.start, judged.span.start, part.copy, "header", wrong, file=file.path)
                )

    def _chain(self, judged: Judged) -> None:
        """What must hold from one segment to the next, whoever has them."""
        first, before = next(iter(judged.runs), None), self._last
        if first and before and first.frames and first.start == before.end and not judged.closer:
            words = ""
            if before.last_checksum != first.first_previous:
                words = "the chain breaks between two segments"
            elif first.first_epoch < before.last_epoch:
                words = f"epoch {first.first_epoch} follows epoch {before.last_epoch}"
            elif first.first_time_ms < before.last_time_ms:
                words = f"the log's time goes back from {before.last_time_ms} to {first.first_time_ms}"
            if words:
                judged.differences.append(Difference(first.start, first.start, "all", "wrong log", words))
        last = judged.runs[-1] if judged.runs else None
        self._last = last if last and last.frames and not last.wrong else None

    def _tally(self, run: Walked, judged: Judged) -> None:
        good = [
            c for c, s in judged.status.items() if s in ("same", "proved earlier") and _reaches(judged.span, c, run.end)
        ]
        compared = len(good) > 1
        unnamed = "missing" in judged.status.values() or any(d.ranges_more for d in judged.differences)
        self.frames += run.frames
        self.records += run.records
        for tally in run.tallies:
            key = (tally.topic, tally.partition)
            seen = self._partitions.get(key)
            if seen is None:
                seen = self._partitions[key] = _Partition(tally.first)
            elif seen.next not in (tally.first, _UNKNOWN) and not judged.closer and not judged.differences:
                words = f"offset {tally.first} where {seen.next} should follow"
                where = (Range(tally.topic, tally.partition, tally.first, tally.next),)
                judged.differences.append(Difference(run.start, run.end, "all", "wrong log", words, ranges=where))
            seen.next = tally.next
            seen.different = seen.different or unnamed
            if compared:
                seen.records += tally.records
                seen.compared_end = tally.next
            else:
                seen.not_compared += tally.records

    def needs_log_start(self) -> bool:
        """Is something not there that retention may have removed?"""
        return any(span.late or gone for span, _, _, _, gone in self._spans)

    def settle(self, log_start: int) -> None:
        """The log start is known now: what a copy lacks above it is missing, what lies below it was not compared."""
        log_start = max(log_start, self.log_start)
        below = [span for span, *_ in self._spans if below_log_start(span, log_start)]
        if below:
            limit = below[-1].end
            self.notes.append(f"below the log start {log_start}: {limit - below[0].start} bytes are not compared")
            self.differences = [d for d in self.differences if d.start >= limit or d.end > limit]
        for span, status, why, runs, gone in self._spans:
            if span in below:
                for copy in status:
                    status[copy], why[copy] = "not compared", "below the log start"
                continue
            for copy in (*span.late, *gone):
                part = Part(copy, None, span.end, True, 0)
                detail = "the copy's log begins later" if copy in span.late else "the segment's file was removed"
                self.differences.append(whole_segment(span, part, runs, detail))
                for tally in (t for r in runs for t in r.tallies):
                    self._partitions[tally.topic, tally.partition].different = True
                status[copy] = "missing"

    def report(self, cluster_id: str) -> Report:
        differences = merged(self.differences)
        covers = list(self._covers())
        copies = tuple(self._copy(c, covers, differences) for c in self.copies)
        partitions = tuple(self._partition(k, p, differences) for k, p in sorted(self._partitions.items()))
        compared = any(c.status in ("same", "proved earlier", "different", "missing") for c in covers)
        failed = any(c.why.startswith(UNREAD) for c in covers)
        unsure = not compared or failed or any(c.unreadable for c in self.copies)
        verdict: Verdict = "different" if differences else "could not tell" if unsure else "same"
        notes = list(self.notes)
        if not compared:
            notes.append("nothing was compared: no position is held by two of the copies")
        return Report(
            verdict,
            EXIT_CODES[verdict],
            cluster_id,
            self.start,
            self.end,
            self.end_is,
            copies,
            partitions,
            tuple(differences[:DIFFERENCES_MAX]),
            len(differences) + self.more,
            tuple(covers),
            tuple(notes),
            self.frames,
            self.records,
        )

    def _covers(self) -> Iterable[Cover]:
        for copy in self.copies:
            open_cover: Cover | None = None
            for cover in self._covers_of(copy):
                if open_cover and (open_cover.end, open_cover.status, open_cover.why) == (
                    cover.start,
                    cover.status,
                    cover.why,
                ):
                    open_cover = Cover(copy.name, open_cover.start, cover.end, cover.status, cover.why)
                else:
                    if open_cover:
                        yield open_cover
                    open_cover = cover
            if open_cover:
                yield open_cover

    def _covers_of(self, copy: Copy) -> Iterable[Cover]:
        if copy.unreadable:
            yield Cover(copy.name, self.start, self.end, "not compared", copy.unreadable)
            return
        for span, status, why, _, _ in self._spans:
            part = span.part(copy.name)
            upto = part.upto if part else span.start
            if copy.name in status and (part or status[copy.name] == "missing" or why.get(copy.name)):
                stop = upto if part else span.end
                yield Cover(copy.name, span.start, stop, status[copy.name], why.get(copy.name, ""))
                upto = stop
            elif copy.name in span.late:
                yield Cover(copy.name, span.start, span.end, "not compared", "below the log start")
                upto = span.end
            if upto < span.end:
                yield Cover(copy.name, upto, span.end, "behind")

    def _copy(self, copy: Copy, covers: list[Cover], differences: list[Difference]) -> CopyReport:
        mine = [c for c in covers if c.copy == copy.name]
        count = sum(d.copy in (copy.name, "all") for d in differences)
        furthest = self.end if self.end_is.startswith("the high") else max((c.end for c in self.copies), default=0)
        behind = 0 if copy.unreadable else max(0, furthest - copy.end)
        seen = {c.status for c in mine}
        verdict: Status = "not compared"
        if count:
            verdict = "different"
        elif seen & {"same", "proved earlier"}:
            verdict = "same"
        elif "behind" in seen and not copy.unreadable:
            verdict = "behind"
        return CopyReport(
            copy.name, copy.path, copy.start, copy.end, copy.durable_end, behind, verdict, count, copy.unreadable
        )

    def _partition(self, key: tuple[str, int], seen: _Partition, differences: list[Difference]) -> PartitionReport:
        count = sum(any((r.topic, r.partition) == key for r in d.ranges) for d in differences)
        count = count or int(seen.different)
        verdict: Status = "different" if count else "same" if seen.records else "not compared"
        return PartitionReport(*key, seen.first, seen.compared_end, seen.records, seen.not_compared, verdict, count)


def _reaches(span: Span, copy: str, end: int) -> bool:
    part = span.part(copy)
    return part is not None and part.upto >= end
