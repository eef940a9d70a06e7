"""One copy of one segment, read once: the digests of its blocks and, if asked, a strict walk over its frames.

This runs in the tasks. The stream's bytes are hashed raw, in blocks that are the same for every copy: a grid of 4 MiB
from the segment's start, with a cut more where a copy ends. Two copies are the same in a block if its SHA-256 and its
size are. Only one copy of each segment is walked in the same pass: what is true of its frames is true of every copy
with the same digests.
"""

from __future__ import annotations

import hashlib

import msgspec

from chronik_repl.spark.index import IndexFile, lies, read_index
from chronik_repl.spark.layout import Walk, Walked, frame_at, frame_bytes_at
from chronik_repl.spark.storage import Bytes, open_local
from chronik_repl.wal.frame import HEAD
from chronik_repl.wal.segment import FRAMES_AT

BLOCK_BYTES = 4 * 1024 * 1024
INDEXED_BYTES_MAX = (1 << 32) - 1  # an index counts positions in 32 bits


class Block(msgspec.Struct, array_like=True, frozen=True):
    """A stretch of the stream, as one copy holds it."""

    start: int
    end: int
    held: int  # bytes that are there; fewer than end - start at the end of a file
    digest: bytes


class ScanTask(msgspec.Struct, frozen=True):
    """Read `copy`'s file of the segment at `start` in these blocks."""

    copy: str
    path: str
    start: int
    bounds: tuple[int, ...]  # positions: block i is bounds[i] to bounds[i + 1]
    walk: bool
    chain: int | None  # the checksum before the first frame, as far as it is known
    sealed_end: int | None  # where the segment ends if it is sealed: nothing but zeros may follow
    runs: tuple[int, ...] = ()  # positions where the walk's tally is cut
    open_end: bool = False  # the comparison ends inside the segment, perhaps in the middle of a frame
    index_path: str = (
        ""  # of a sealed segment: the index is digested, and checked against the frames if they are walked
    )


class Scan(msgspec.Struct):
    """What the task saw. `missing`: the file was not there."""

    copy: str
    start: int
    missing: bool = False
    failed: str = ""  # the file could not be read
    blocks: list[Block] = []
    excess: bool = False  # bytes that are not zero after a sealed segment's end
    runs: list[Walked] = []
    bytes_read: int = 0
    index_digest: bytes = b""
    index_lie: str = ""  # what the index says that the frames do not

    @property
    def wrong(self) -> str:
        return self.runs[-1].wrong if self.runs else ""


def block_bounds(start: int, end: int, cuts: tuple[int, ...]) -> tuple[int, ...]:
    """The grid between start and end, and every cut inside."""
    grid = set(range(start, end, BLOCK_BYTES)) | {end} | {c for c in cuts if start < c < end}
    return tuple(sorted(grid))


def scan_local(task: ScanTask) -> Scan:
    try:
        file = open_local(task.path)
        index = open_local(task.index_path) if task.index_path and file else None
    except OSError as error:
        return Scan(task.copy, task.start, failed=f"{task.path}: {error.strerror}")
    if file is None:
        return Scan(task.copy, task.start, missing=True)
    try:
        return scan(task, file, index.read(0, index.size) if index else b"")
    except OSError as error:
        return Scan(task.copy, task.start, failed=f"{task.path}: {error.strerror}")
    finally:
        file.close()
        if index is not None:
            index.close()


def scan(task: ScanTask, file: Bytes, raw_index: bytes = b"") -> Scan:
    result = Scan(task.copy, task.start, blocks=[], runs=[])
    index: IndexFile | None = None
    if raw_index and task.bounds[-1] - task.start <= INDEXED_BYTES_MAX:
        result.index_digest = hashlib.sha256(raw_index).digest()
        found = read_index(raw_index, task.start) if task.walk else None
        if isinstance(found, str):
            result.index_lie = found
        else:
            index = found
    walk = Walk(task.bounds[0], task.chain, index, task.open_end, task.start) if task.walk else None
    end = task.bounds[-1]
    cuts = [c for c in task.runs if task.bounds[0] < c < end]
    buffer = bytearray(BLOCK_BYTES + (1 << 20))
    left = 0  # bytes at the buffer's front that the walk has not used: the beginning of a frame
    for start, stop in zip(task.bounds, task.bounds[1:], strict=False):
        if left + stop - start > len(buffer):
            buffer = bytearray(buffer[:left]) + bytearray(stop - start)
        with memoryview(buffer) as whole:
            held = file.readinto(whole[left : left + stop - start], FRAMES_AT + start - task.start)
            result.blocks.append(Block(start, stop, held, hashlib.sha256(whole[left : left + held]).digest()))
            result.bytes_read += held
            if walk is not None:
                left = _walk(walk, whole[: left + held], end, cuts, result.runs)
    if walk is not None:
        last = walk.close_run()
        if not last.wrong and last.end < end and not (task.open_end and _crosses(file, task, walk, end)):
            last.wrong = "the bytes end in the middle of a frame" if left else "the bytes end here"
        if last.frames or last.wrong or not result.runs:
            result.runs.append(last)
        if index is not None and walk.index_rows is not None and not last.wrong:
            result.index_lie = lies(
                index,
                walk.index_rows,
                walk.landmarks_seen,
                task.start,
                task.bounds[0],
                walk.position,
                walk.previous or 0,
            )
    if task.sealed_end is not None and file.size > FRAMES_AT + task.sealed_end - task.start:
        result.excess = not _zeros_from(file, FRAMES_AT + task.sealed_end - task.start)
    return result


def _walk(walk: Walk, view: memoryview, end: int, cuts: list[int], runs: list[Walked]) -> int:
    """Walk what is whole in `view`, closing a run at each cut. Returns how many bytes were left, now at the front."""
    used = 0
    while not walk.wrong:
        limit = cuts[0] if cuts else end
        available = (
            view[used:] if len(view) - used <= limit - walk.position else view[used : used + limit - walk.position]
        )
        used += walk.feed(available, end)
        if not cuts or walk.position < limit:
            if cuts and len(view) - used > 0 and walk.position + len(view) - used > limit:
                cuts.pop(0)  # no frame ends at this cut: the run goes on to the next
                continue
            break
        runs.append(walk.close_run())
        cuts.pop(0)
    left = len(view) - used
    if left and not walk.wrong:
        view[:left] = bytes(view[used:])
        return left
    return 0


def _crosses(file: Bytes, task: ScanTask, walk: Walk, end: int) -> bool:
    """Is it the right next frame that stands here and reaches beyond the end?"""
    at = FRAMES_AT + walk.position - task.start
    size = frame_bytes_at(memoryview(file.read(at, HEAD.size)), 0)
    if walk.position + size <= end or at + size > file.size:
        return False
    frame = frame_at(memoryview(file.read(at, size)), 0, walk.position)
    return frame is not None and frame.position == walk.position and walk.previous in (None, frame.previous)


def _zeros_from(file: Bytes, at: int) -> bool:
    while True:
        piece = file.read(at, BLOCK_BYTES)
        if not piece:
            return True
        if piece.count(0) != len(piece):
            return False
        at += len(piece)
