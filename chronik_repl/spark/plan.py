"""What is to be compared with what. Pure: from the copies' surveys to a list of spans.

A span is one segment as the log has it. Which segments there are is the union of what the copies hold; a copy is
expected to hold all of them from its own first one up to its own end. What it lacks before that is retention's work
or damage: that is decided at the end of a run, when the log start is known (`below_log_start`).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest

import msgspec

from chronik_repl.spark.survey import Copy, SegmentFile


class Part(msgspec.Struct, frozen=True):
    """What one copy should hold of a span: everything up to `upto`. `file` is None if it is not there."""

    copy: str
    file: SegmentFile | None
    upto: int
    sealed: bool  # the whole segment is compared, and this copy has gone on to a later one
    durable_end: int


class Span(msgspec.Struct, frozen=True):
    start: int
    end: int  # of the segment, or where the comparison ends
    parts: tuple[Part, ...]
    closed: bool = False  # `end` is where the segment ends: no frame may reach beyond it
    late: tuple[str, ...] = ()  # copies whose log begins after this span
    behind: tuple[str, ...] = ()  # copies whose log ends before it

    @property
    def reaches(self) -> int:
        """The highest position that any copy holds here."""
        return max((p.upto for p in self.parts), default=self.start)

    @property
    def cuts(self) -> tuple[int, ...]:
        """Where copies end inside the span."""
        return tuple(sorted({p.upto for p in self.parts if self.start < p.upto < self.reaches}))

    def part(self, copy: str) -> Part | None:
        return next((p for p in self.parts if p.copy == copy), None)


class Plan(msgspec.Struct, frozen=True):
    start: int
    end: int
    spans: tuple[Span, ...]
    extra_files: tuple[tuple[str, SegmentFile], ...] = ()  # segment files where no segment starts


def compared_end(copies: Sequence[Copy], high_watermark: int | None) -> int:
    """With a running leader its high watermark; offline the lowest durable end of the copies."""
    if high_watermark is not None:
        return high_watermark
    return min((c.durable_end for c in copies if not c.unreadable), default=0)


def boundaries(copies: Sequence[Copy]) -> tuple[list[int], list[tuple[str, SegmentFile]]]:
    """Where segments start, and files that stand where none does.

    A start that some copy lacks is a missing segment there, unless more copies have the middle of another segment at
    that place than have a segment: then those are files that do not belong.
    """
    starts = sorted({s.start for c in copies for s in c.segments})
    kept, extra = [], []
    for start in starts:
        holders = [(c.name, s) for c in copies for s in c.segments if s.start == start]
        against = 0
        for copy in copies:
            earlier = [s for s in copy.segments if s.start < start]
            later = any(s.start > start for s in copy.segments)
            has_it = any(s.start == start for s in copy.segments)
            against += bool(earlier and later and not has_it and earlier[-1].stream_end > start)
        if against > len(holders):
            extra.extend(holders)
        else:
            kept.append(start)
    return kept, extra


def make_plan(copies: Sequence[Copy], log_start: int, end: int) -> Plan:
    """Spans from `log_start`, as far as it is known, to `end`."""
    readable = [c for c in copies if not c.unreadable]
    starts, extra = boundaries(readable)
    spans = []
    for start, following in zip_longest(starts, starts[1:]):
        span_end = end if following is None else min(following, end)
        if start >= end or span_end <= log_start:
            continue
        parts, late, behind = [], [], []
        for copy in readable:
            if not copy.segments or copy.end <= start:
                behind.append(copy.name)
            elif copy.start > start:
                late.append(copy.name)
            else:
                file = next((s for s in copy.segments if s.start == start), None)
                sealed = span_end == following and any(s.start > start for s in copy.segments)
                parts.append(Part(copy.name, file, min(copy.end, span_end), sealed, copy.durable_end))
        spans.append(Span(start, span_end, tuple(parts), span_end == following, tuple(late), tuple(behind)))
    return Plan(spans[0].start if spans else min(log_start, end), end, tuple(spans), tuple(extra))


def below_log_start(span: Span, log_start: int) -> bool:
    """Retention removes whole segments: those that end at or below the log start."""
    return span.end <= log_start
