"""Opening a log: what is in the folder, which of it counts, what the state is. Reads only; changes nothing.

Of sealed segments only the heads are read. What stands in the folder that is not ours, is missing, or is of another
cluster is an error that names it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from chronik_repl.errors import CorruptLog, ForeignLog
from chronik_repl.positions import CHAIN_SEED, ORIGIN, Position
from chronik_repl.wal.disk import Disk
from chronik_repl.wal.index import ActiveIndex
from chronik_repl.wal.mending import read_impaired
from chronik_repl.wal.recovery import Damaged, judge
from chronik_repl.wal.replay import Replayed, look_at_head, replay
from chronik_repl.wal.segment import FOLDER, FRAMES_AT, NAME, Header, Mark, best_mark, decode_header, segment_name
from chronik_repl.wal.segments import Segment, Store
from chronik_repl.wal.state import State

LEFTOVERS = ("spare", "next", "repair")  # files that were to become segments
NO_MARK = Mark(0, ORIGIN, ORIGIN)


class Loaded(NamedTuple):
    cluster_id: str | None
    mark: Mark  # the last segment's
    replayed: Replayed
    leftovers: list[str]
    file_end: Position  # how far the last segment's file reaches


async def load(disk: Disk, store: Store, cluster_id: str | None) -> Loaded:
    """Fills the store with the segments that are there. Raises CorruptLog, ForeignLog, FormatTooNew."""
    files = await disk.list(FOLDER)
    sizes, leftovers = _sort_out(files)
    if not sizes:
        nothing = Replayed(State(), ActiveIndex(ORIGIN, CHAIN_SEED), [], ORIGIN, CHAIN_SEED, "")
        return Loaded(cluster_id, NO_MARK, nothing, leftovers, ORIGIN)
    header, mark = Header(ORIGIN, CHAIN_SEED, ""), NO_MARK
    store.list += [Segment(start, CHAIN_SEED) for start, _ in sizes]
    _bound(store.list, sizes)
    for segment, (_, size) in zip(store.list, sizes, strict=True):
        async with store.pinned(segment):  # opened once
            header, mark = await _read_head(disk, store, segment, size, cluster_id)
            cluster_id = header.cluster_id
            segment.chain = header.chain
            segment.made = True
            await look_at_head(store, segment)
        segment.sealed = segment.file_offset(segment.end) == size and f"{segment.start:020d}.idx" in files
    _check_gaps(store.list, sizes)
    last = store.list[-1]
    last.sealed = False
    if last.index_name.removeprefix(f"{FOLDER}/") in files:
        if await read_impaired(disk) is None:
            raise _missing_after(last)
        leftovers.append(last.index_name.removeprefix(f"{FOLDER}/"))
    file_end = last.end
    replayed = await replay(store, last.end, mark.high_watermark)
    _check_tail(store, last, replayed, mark)
    _check_start(store.list[0], max(replayed.state.log_start, header.log_start))
    return Loaded(cluster_id, mark, replayed, leftovers, file_end)


def _sort_out(files: dict[str, int]) -> tuple[list[tuple[Position, int]], list[str]]:
    """Segments by position with their sizes, and what a crash left behind. Raises ForeignLog for anything else."""
    segments, leftovers = [], []
    for name, size in sorted(files.items()):
        if found := NAME.match(name):
            segments.append((Position(int(found[1])), size))
        elif name in LEFTOVERS or name.endswith(".new"):
            leftovers.append(name)
        elif not (name.endswith(".idx") and NAME.match(name[:-4] + ".wal")):
            raise ForeignLog(f"{FOLDER}/{name} is no file of this program. Move it away; nothing was changed")
    known = {segment_name(start) for start, _ in segments}
    leftovers += [name for name in files if name.endswith(".idx") and name[:-4] + ".wal" not in known]
    return segments, leftovers


async def _read_head(
    disk: Disk, store: Store, segment: Segment, size: int, cluster_id: str | None
) -> tuple[Header, Mark]:
    name = segment.name
    if size < FRAMES_AT:
        raise CorruptLog(f"{name}: {size} bytes are too few for a segment", file=name, start=segment.start)
    async with store.pinned(segment) as file:
        blocks = await disk.read(file, 0, FRAMES_AT)
    header = decode_header(blocks, name)
    if header.start != segment.start:
        raise CorruptLog(
            f"{name} holds the segment of position {header.start}: it was copied or renamed. Move it away",
            file=name,
            start=segment.start,
        )
    if cluster_id is not None and header.cluster_id != cluster_id:
        raise ForeignLog(
            f"{name} is of cluster {header.cluster_id!r}, this node is of {cluster_id!r}. "
            f"Set CHRONIK_CLUSTER_ID, or give this node another data directory"
        )
    return header, best_mark(blocks) or Mark(0, segment.start, ORIGIN)


def _bound(segments: Sequence[Segment], sizes: Sequence[tuple[Position, int]]) -> None:
    """Each segment ends where the next begins; the last one where its file does."""
    for segment, following in pairwise(segments):
        segment.end = following.start
    segments[-1].end = Position(segments[-1].start + sizes[-1][1] - FRAMES_AT)


def _check_gaps(segments: Sequence[Segment], sizes: Sequence[tuple[Position, int]]) -> None:
    for segment, (_, size) in zip(segments, sizes, strict=True):
        file_end = Position(segment.start + size - FRAMES_AT)
        if file_end < segment.end:
            raise CorruptLog(
                f"{segment.name} ends at position {file_end} and the next segment begins at {segment.end}: "
                f"what is between them is missing",
                file=segment.name,
                start=file_end,
                end=segment.end,
            )


def _missing_after(last: Segment) -> CorruptLog:
    """Its index is written when a segment follows, and goes before that one is cut off: here it was lost."""
    name = f"{FOLDER}/{segment_name(last.end)}"
    return CorruptLog(
        f"{name} is missing: {last.name} was finished, and another segment followed. Put it back; a follower fetches "
        "it again, a leader needs the file from a backup, or another node promoted",
        file=name,
        start=last.end,
    )


def _check_tail(store: Store, last: Segment, replayed: Replayed, mark: Mark) -> None:
    """Raises CorruptLog where frames end below what was durable. A torn tail is no error."""
    verdict = judge(replayed.end, max(mark.durable_end, last.start))
    if isinstance(verdict, Damaged):
        name = store.holding(verdict.start).name if verdict.start < last.start else last.name
        raise CorruptLog(
            f"{name}: damaged from position {verdict.start}; it was durable to {verdict.end}: "
            f"{replayed.why or 'the file ends here'}. `chronik wal verify` shows all of it; a follower fetches it "
            f"again, a leader needs the file from a backup, or another node promoted",
            file=name,
            start=verdict.start,
            end=verdict.end,
        )


def _check_start(first: Segment, expected: Position) -> None:
    if first.start > expected:
        raise CorruptLog(
            f"{FOLDER}/: the log begins at {first.start}, but should at {expected}: its first segments are missing",
            file=first.name,
            start=expected,
            end=first.start,
        )
