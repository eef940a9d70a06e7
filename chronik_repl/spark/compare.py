"""Two runs of frames that are known to differ: what exactly is different. Pure, and with bounded memory.

In come the pieces (layout.py) of a reference copy and of another one; out come differences, in the order of the log.
Frames are matched first by (position, checksum), then by what they say apart from their place and chain: so a frame
that was taken out is one missing frame, though everything after it stands elsewhere. What is matched in the same
order on both sides is the backbone; what lies between two links of it is named:

    only in the reference                      missing
    only in the copy                           extra, or duplicated if the frame is there already
    bytes that are no frame over a frame       damaged
    other frames at the same place             stale (of an older epoch), else changed
    on both sides, in another order            out of order

Both runs are read through windows, so a segment of any size can be compared.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Literal

import msgspec

from chronik_repl.spark.layout import Piece

WINDOW_PIECES = 50_000
CANDIDATES_MAX = 16  # counterparts of one frame: the same change written twice in one millisecond is the same frame
RANGES_MAX = 16
PAIRS_MAX = 1_000_000  # of frames that stand in each other's place: beyond that they are not told apart

Kind = Literal[
    "missing", "extra", "damaged", "out of order", "duplicated", "stale", "changed", "header", "index", "wrong log"
]


class Range(msgspec.Struct, frozen=True, order=True):
    """Records of one partition; `end` is exclusive."""

    topic: str
    partition: int
    first: int
    end: int

    def __str__(self) -> str:
        last = f"–{self.end - 1}" if self.end - self.first > 1 else ""
        return f"{self.topic}/{self.partition} offset{'s' if last else ''} {self.first}{last}"


class Difference(msgspec.Struct, frozen=True):
    """One thing that is wrong with one copy, at positions [start, end)."""

    start: int
    end: int
    copy: str
    kind: Kind
    detail: str = ""
    frames: int = 0
    records: int = 0
    ranges: tuple[Range, ...] = ()
    ranges_more: int = 0  # further ranges that are not listed
    file: str = ""


class Rechained(msgspec.Struct, frozen=True):
    """Frames that say the same as the reference's but stand on other ones: what follows from an earlier difference."""

    start: int
    frames: int


Holds = Callable[[int, int], bool]  # does the reference hold a frame with this checksum at this position?


def find_differences(
    copy: str,
    reference: Iterable[Piece],
    other: Iterable[Piece],
    end: int,
    held_end: int,
    limit: int,
    holds: Holds,
) -> Iterator[Difference | Rechained]:
    """Both runs start at the same position. The reference ends at `end`, the copy's bytes at `held_end`; what the copy
    has beyond `limit` is not compared.
    """
    references, others = iter(reference), iter(other)
    ours: list[Piece] = []
    theirs: list[Piece] = []
    before: Piece | None = None  # of the copy: the piece before the window
    shift = 0  # how much further on the copy's bytes stand than the reference's
    while True:
        ours += islice(references, WINDOW_PIECES - len(ours))
        theirs += islice(others, WINDOW_PIECES - len(theirs))
        if not ours and not theirs:
            return
        equal = _equal_prefix(ours, theirs)
        if equal:
            before, shift = theirs[equal - 1], 0
            del ours[:equal], theirs[:equal]
            continue
        last_window = len(ours) < WINDOW_PIECES and len(theirs) < WINDOW_PIECES
        window = _Window(copy, ours, theirs, end, held_end, limit, holds, before, shift)
        used_ours, used_theirs = (len(ours), len(theirs)) if last_window else window.settled()
        yield from window.differences(used_ours, used_theirs)
        if used_theirs:
            before, shift = theirs[used_theirs - 1], window.shift
        del ours[:used_ours], theirs[:used_theirs]


def _equal_prefix(ours: list[Piece], theirs: list[Piece]) -> int:
    count = 0
    for mine, other in zip(ours, theirs, strict=False):
        if mine.key is None or mine != other:
            break
        count += 1
    return count


class _Window:
    """One alignment: a stretch of the reference beside a stretch of the copy."""

    def __init__(
        self,
        copy: str,
        ours: list[Piece],
        theirs: list[Piece],
        end: int,
        held_end: int,
        limit: int,
        holds: Holds,
        before: Piece | None,
        shift: int,
    ) -> None:
        self.copy, self.ours, self.theirs, self.end, self.held_end = copy, ours, theirs, end, held_end
        self.limit, self.holds, self.before, self.shift = limit, holds, before, shift
        candidates = self._candidates()
        self.backbone = _longest_rising([(t, o) for t in sorted(candidates) for o in candidates[t]])
        self.taken = {o for _, o in self.backbone}
        linked = {t for t, _ in self.backbone}
        self.displaced: dict[int, int] = {}  # index in theirs → index in ours, of frames that stand elsewhere
        for t in sorted(candidates):
            free = [o for o in candidates[t] if o not in self.taken]
            if t not in linked and free:
                self.displaced[t] = free[-1]
                self.taken.add(free[-1])

    def _candidates(self) -> dict[int, list[int]]:
        """For each of their frames, which of ours it may be, the last first: the very same, else those that say the
        same.
        """
        exact = {(p.position, p.checksum): i for i, p in enumerate(self.ours) if p.key is not None}
        by_key: dict[int, list[int]] = defaultdict(list)
        for i, piece in enumerate(self.ours):
            if piece.key is not None and len(by_key[piece.key]) < CANDIDATES_MAX:
                by_key[piece.key].append(i)
        found: dict[int, list[int]] = {}
        for i, piece in enumerate(self.theirs):
            if piece.key is not None:
                same = exact.get((piece.position, piece.checksum))
                found[i] = by_key.get(piece.key, [])[::-1] if same is None else [same]
        return found

    def settled(self) -> tuple[int, int]:
        """How much of the window may be judged: up to its last link. What follows may find its counterpart later."""
        if not self.backbone:
            return len(self.ours), len(self.theirs)
        for theirs, ours in reversed(self.backbone):
            if all((t <= theirs) == (o <= ours) for t, o in self.displaced.items()):
                return ours + 1, theirs + 1
        return len(self.ours), len(self.theirs)

    def differences(self, used_ours: int, used_theirs: int) -> Iterator[Difference | Rechained]:
        found: list[Difference | Rechained] = []
        previous = (-1, -1)
        links = [link for link in self.backbone if link[0] < used_theirs and link[1] < used_ours]
        for link in [*links, (used_theirs, used_ours)]:
            ours = [self.ours[i] for i in range(previous[1] + 1, link[1]) if i not in self.taken]
            theirs = [i for i in range(previous[0] + 1, link[0]) if i not in self.displaced]
            if ours or theirs:
                found += self._gap(ours, [self.theirs[i] for i in theirs])
            previous = link
            if link[0] < len(self.theirs) and link[1] < len(self.ours):
                self.shift = self.theirs[link[0]].place - self.ours[link[1]].place
        found += self._out_of_order(used_theirs)
        found += self._rechained(links)
        yield from sorted(found, key=lambda d: d.start)

    def _gap(self, ours: list[Piece], theirs: list[Piece]) -> Iterator[Difference]:
        theirs = [p for p in theirs if p.place < self.limit and (p.key is None or p.position < self.limit)]
        frames = [p for p in theirs if p.key is not None]
        if frames and ours and max(p.epoch for p in frames) < min(p.epoch for p in ours):
            detail = f"frames of epoch {frames[0].epoch}, where the others have epoch {ours[0].epoch}"
            yield self._named("stale", frames, frames[0].place, frames[-1].place + frames[-1].size, detail)
            return
        if len(ours) * len(frames) > PAIRS_MAX:
            detail = f"{len(frames)} other frames than the others have here"
            yield self._named("changed", ours, theirs[0].place, theirs[-1].place + theirs[-1].size, detail)
            return
        ends_here = (
            bool(theirs)
            and theirs[-1].key is None
            and (theirs[-1].place + theirs[-1].size >= self.held_end and self.held_end < self.end)
        )
        cut_at = theirs[-1].place if ends_here else self.held_end
        left = list(ours)
        shift = self.shift
        for piece in theirs:
            over = [
                p for p in left if p.place + shift < piece.place + piece.size and piece.place < p.place + shift + p.size
            ]
            if piece.key is None and piece.place >= cut_at:
                continue  # a torn rest: what it should have been is missing
            if piece.key is None:
                detail = "zeros" if piece.zeros else "no good frame stands here"
                if over:
                    yield self._named("damaged", over, over[0].place, over[-1].place + over[-1].size, detail)
                else:
                    yield self._named("extra", [], piece.place, piece.place + piece.size, "bytes that are no frame")
                left = [p for p in left if p not in over]
            elif over:
                yield self._changed(over[0], piece)
                left.remove(over[0])
                shift += piece.size - over[0].size
            else:
                yield self._surplus(piece)
                shift += piece.size
        for run in _adjacent(left):
            stop = run[-1].place + run[-1].size
            detail = (
                "the copy's bytes end before"
                if stop > self.held_end and run[0].place >= min(cut_at, self.held_end)
                else ""
            )
            yield self._named("missing", run, run[0].place, stop, detail)

    def _surplus(self, piece: Piece) -> Difference:
        twice = any(p.key == piece.key for p in self.ours) or (
            piece.position != piece.place and self.holds(piece.position, piece.checksum)
        )
        if twice:
            detail = (
                f"the frame of position {piece.position} once more"
                if piece.position != piece.place
                else "there already"
            )
            return self._named("duplicated", [piece], piece.place, piece.place + piece.size, detail)
        detail = "" if piece.position == piece.place else f"a frame of position {piece.position}"
        return self._named("extra", [piece], piece.place, piece.place + piece.size, detail)

    def _changed(self, mine: Piece, other: Piece) -> Difference:
        return self._named("changed", [mine], other.place, other.place + other.size, changes(mine, other))

    def _out_of_order(self, used_theirs: int) -> Iterator[Difference]:
        """Frames that are there but elsewhere; two that changed places are one difference."""
        groups: list[list[int]] = []
        for theirs, ours in sorted(self.displaced.items(), key=lambda item: item[1]):
            if theirs >= used_theirs:
                continue
            overtaken = list(islice((o for t, o in self.backbone if (t - theirs) * (o - ours) < 0), 2))
            group = sorted([ours, *overtaken]) if len(overtaken) == 1 else [ours]
            if groups and (set(group) & set(groups[-1]) or group[0] == groups[-1][-1] + 1):
                groups[-1] = sorted({*groups[-1], *group})
            else:
                groups.append(group)
        for group in groups:
            pieces = [self.ours[i] for i in group]
            yield self._named(
                "out of order",
                pieces,
                pieces[0].place,
                pieces[-1].place + pieces[-1].size,
                "there, but in another order",
            )

    def _rechained(self, links: list[tuple[int, int]]) -> Iterator[Difference | Rechained]:
        start, count = 0, 0
        for theirs, ours in links:
            mine, other = self.ours[ours], self.theirs[theirs]
            if mine.checksum == other.checksum:
                continue
            before = self.theirs[theirs - 1] if theirs else self.before
            if before is not None and before.key is not None and other.previous != before.checksum:
                yield self._named(
                    "changed",
                    [mine],
                    other.place,
                    other.place + other.size,
                    "chained to another frame than the one before it",
                )
                continue
            start = start or other.place
            count += 1
        if count:
            yield Rechained(start, count)

    def _named(self, kind: Kind, frames: list[Piece], start: int, end: int, detail: str) -> Difference:
        ranges, more = ranges_of(frames)
        return Difference(
            start, end, self.copy, kind, detail, len(frames), sum(p.record_count for p in frames), ranges, more
        )


def changes(mine: Piece, other: Piece) -> str:
    """In words, what two frames at one place say differently."""
    fields = (
        ("kind", mine.kind, other.kind),
        ("topic", mine.topic.decode("ascii", "replace"), other.topic.decode("ascii", "replace")),
        ("partition", mine.partition, other.partition),
        ("offset", mine.base_offset, other.base_offset),
        ("record count", mine.record_count, other.record_count),
        ("epoch", mine.epoch, other.epoch),
        ("time", mine.time_ms, other.time_ms),
        ("size", mine.size, other.size),
    )
    words = [f"{name} {theirs} where the others have {ours}" for name, ours, theirs in fields if ours != theirs]
    return "; ".join(words) or "other data, with a right checksum"


def _adjacent(frames: list[Piece]) -> list[list[Piece]]:
    runs: list[list[Piece]] = []
    for piece in frames:
        if runs and runs[-1][-1].place + runs[-1][-1].size == piece.place:
            runs[-1].append(piece)
        else:
            runs.append([piece])
    return runs


def ranges_of(frames: Iterable[Piece]) -> tuple[tuple[Range, ...], int]:
    """The records of these frames by partition, neighbours joined: at most RANGES_MAX, and how many more."""
    return joined(
        Range(p.topic.decode("ascii", "replace"), p.partition, p.base_offset, p.base_offset + p.record_count)
        for p in frames
        if p.kind == 0 and p.key is not None
    )


def joined(ranges: Iterable[Range]) -> tuple[tuple[Range, ...], int]:
    out: list[Range] = []
    for r in sorted(ranges):
        if out and (out[-1].topic, out[-1].partition) == (r.topic, r.partition) and r.first <= out[-1].end:
            out[-1] = Range(r.topic, r.partition, out[-1].first, max(out[-1].end, r.end))
        else:
            out.append(r)
    return tuple(out[:RANGES_MAX]), max(0, len(out) - RANGES_MAX)


def _longest_rising(pairs: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """The longest run of pairs in which both numbers rise. They come sorted by their first, then falling."""
    tails: list[int] = []
    tail_at: list[int] = []
    back = [-1] * len(pairs)
    for i, (_, value) in enumerate(pairs):
        k = bisect_left(tails, value)
        if k == len(tails):
            tails.append(value)
            tail_at.append(i)
        elif value < tails[k]:  # of two that are the same the first one stays
            tails[k], tail_at[k] = value, i
        back[i] = tail_at[k - 1] if k else -1
    out = []
    i = tail_at[-1] if tail_at else -1
    while i >= 0:
        out.append(pairs[i])
        i = back[i]
    return out[::-1]


def merged(differences: Iterable[Difference]) -> list[Difference]:
    """In the order of the log; neighbours of one kind on one copy are one difference."""
    out: list[Difference] = []
    for d in sorted(differences, key=lambda d: (d.copy, d.kind, d.start)):
        last = out[-1] if out else None
        joins = (
            last is not None
            and (last.copy, last.kind, last.detail) == (d.copy, d.kind, d.detail)
            and last.end == d.start
        )
        if joins and last is not None and d.kind in ("missing", "extra", "damaged", "stale"):
            ranges, more = joined((*last.ranges, *d.ranges))
            out[-1] = Difference(
                last.start,
                d.end,
                d.copy,
                d.kind,
                d.detail,
                last.frames + d.frames,
                last.records + d.records,
                ranges,
                more + last.ranges_more + d.ranges_more,
                last.file if last.file == d.file else "",
            )
        else:
            out.append(d)
    return sorted(out, key=lambda d: (d.start, d.copy))
