"""A span as tasks, and the tasks' answers as one. Pure.

Usually a task is one copy's whole segment. A large segment is split at frames that the index of the copy to be walked
names, the same places on every copy, so that digests stay comparable. The index is only a hint where to cut: if no
frame stands there, or two pieces do not join, the answer says so, and the caller walks the segment in one piece.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

from chronik_repl.spark.digest import Scan, ScanTask, block_bounds
from chronik_repl.spark.layout import Tally, Walked
from chronik_repl.spark.plan import Part, Span
from chronik_repl.spark.storage import is_local

PIECE_BYTES = 128 * 1024 * 1024

Landmark = tuple[int, int]  # the position of a frame, and the checksum of the one before it


def split_points(start: int, end: int, landmarks: Iterable[Landmark]) -> tuple[Landmark, ...]:
    """Of the landmarks, one about every PIECE_BYTES; none if the segment is not larger than two pieces."""
    if end - start <= 2 * PIECE_BYTES:
        return ()
    chosen: list[Landmark] = []
    next_at = start + PIECE_BYTES
    for position, chain in sorted(landmarks):
        if next_at <= position <= end - PIECE_BYTES // 2:
            chosen.append((position, chain))
            next_at = position + PIECE_BYTES
    return tuple(chosen)


def scan_tasks(span: Span, part: Part, walk: bool, splits: tuple[Landmark, ...]) -> list[ScanTask]:
    """All that is to be read of one copy's segment."""
    file = part.file
    if file is None:
        return []
    whole = part.sealed and part.upto == span.end
    index_path = file.index_path if whole and is_local(file.path) else ""
    chains = dict(splits)
    edges = [span.start, *(p for p, _ in splits if p < part.upto), part.upto]
    tasks = []
    for low, high in pairwise(edges):
        last = high == part.upto
        tasks.append(
            ScanTask(
                copy=part.copy,
                path=file.path,
                start=span.start,
                bounds=block_bounds(low, high, span.cuts),
                walk=walk,
                chain=chains.get(low),
                sealed_end=span.end if part.sealed and last else None,
                runs=span.cuts,
                open_end=last and not (span.closed and part.upto == span.end),
                index_path=index_path,
            )
        )
    return tasks


def joined_scans(scans: Sequence[Scan], cuts: Sequence[int]) -> Scan:
    """The answers of one copy's pieces, as if one task had read them all."""
    if len(scans) == 1:
        return scans[0]
    ordered = sorted(scans, key=lambda s: s.blocks[0].start if s.blocks else -1)
    whole = Scan(ordered[0].copy, ordered[0].start, blocks=[], runs=[])
    for piece in ordered:
        whole.missing = whole.missing or piece.missing
        whole.failed = whole.failed or piece.failed
        whole.excess = whole.excess or piece.excess
        whole.bytes_read += piece.bytes_read
        whole.blocks += piece.blocks
        whole.index_digest = whole.index_digest or piece.index_digest
        whole.index_lie = whole.index_lie or piece.index_lie
        for run in piece.runs:
            last = whole.runs[-1] if whole.runs else None
            if last is not None and last.wrong:
                break
            if last is not None and run.start not in cuts:
                whole.runs[-1] = _continued(last, run)
            else:
                whole.runs.append(run)
    return whole


def _continued(run: Walked, following: Walked) -> Walked:
    """Two runs that meet, as one. What does not fit is wrong where they meet."""
    if run.end != following.start or (following.frames and run.last_checksum != following.first_previous):
        run.wrong = "two pieces of the segment do not join"
        return run
    if following.frames and (following.first_epoch < run.last_epoch or following.first_time_ms < run.last_time_ms):
        run.wrong = "epoch or time goes back"
        return run
    tallies = {(t.topic, t.partition): t for t in run.tallies}
    for t in following.tallies:
        before = tallies.get((t.topic, t.partition))
        if before is None:
            tallies[t.topic, t.partition] = t
        elif before.next != t.first:
            run.wrong = f"offset {t.first} of {t.topic}/{t.partition} follows {before.next - 1}"
            return run
        else:
            tallies[t.topic, t.partition] = Tally(
                t.topic, t.partition, before.first, t.next, before.records + t.records, before.bytes + t.bytes
            )
    return Walked(
        start=run.start,
        end=following.end,
        frames=run.frames + following.frames,
        records=run.records + following.records,
        first_previous=run.first_previous,
        last_checksum=following.last_checksum,
        first_epoch=run.first_epoch,
        last_epoch=following.last_epoch,
        first_time_ms=run.first_time_ms,
        last_time_ms=following.last_time_ms,
        log_start=max(run.log_start, following.log_start),
        tallies=list(tallies.values()),
        wrong=following.wrong,
    )
