"""`chronik backup SRC DST`: a copy of a node's directory, taken while it runs, with an identity of its own.

Segments are copied oldest first, each from its first byte on. The marks stand before the frames, so what a copied mark
speaks of was durable before the frames were read; what was written meanwhile above it is a torn tail at worst, and
opening the copy cuts that, as after a crash. A segment that retention removes meanwhile is left out.

The copy is a new member: a directory id of its own, no node id (the first start takes CHRONIK_NODE_ID), and the
promises of the original, so that it can never start alone in the original's place. Where the original has lost its file
`node` those promises are lost too, and nobody misses them: they bound a directory that does not come back, and the copy
counts for nothing until a leader, or `promote --accept-loss`, makes it a member.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import trio

from chronik_repl import identity
from chronik_repl.errors import CorruptLog, Refused
from chronik_repl.positions import NOBODY, Position
from chronik_repl.wal.disk import RealDisk, Write
from chronik_repl.wal.segment import FOLDER, FRAMES_AT, NAME, best_mark, decode_header
from chronik_repl.wal.verify import verify
from chronik_repl.words import count_of

PIECE_BYTES = 8 * 1024 * 1024


class Copied(NamedTuple):
    segments: int
    start: Position
    end: Position
    directory_id: str


def backup(source: Path, target: Path, *, as_json: bool = False) -> int:
    """The command. Raises Refused, CorruptLog."""
    try:
        names = sorted(file.name for file in (source / FOLDER).iterdir() if NAME.match(file.name))
        original = _identity(source, names)
    except PermissionError as error:
        raise Refused(f"{error.filename}: {error.strerror}. Run this as the user that runs the node") from error
    except OSError as error:
        raise Refused(
            f"{source} is no node's directory: {error.strerror} ({error.filename}). Give what CHRONIK_DATA_DIR names"
        ) from error
    if target.resolve().is_relative_to(source.resolve()):
        raise Refused(f"{target} lies in {source}: give a directory elsewhere, best on another disk")
    if target.exists() and not target.is_dir():
        raise Refused(f"{target} is a file: give a directory that is not there yet")
    if target.exists() and any(target.iterdir()):
        raise Refused(f"{target} is not empty: give a directory that is not there yet")
    copied = trio.run(copy, source, target, original, names)
    verified = verify(target)
    if not verified.ok:
        raise CorruptLog(
            f"the copy in {target} is not whole: do not use it. Check the original with `chronik wal verify {source}`",
            file=str(target),
        )
    if as_json:
        print(json.dumps({"target": str(target), **copied._asdict()}))
        return 0
    print(f"{target}: {count_of(copied.segments, 'segment')}, positions {copied.start} to {copied.end}")
    print(
        f"Start it as a new node: CHRONIK_NODE_ID=<its own> CHRONIK_DATA_DIR={target} chronik-follower, and add it on "
        "the leader: chronik members add HOST:PORT",
        file=sys.stderr,
    )
    return 0


def _identity(source: Path, names: Sequence[str]) -> identity.NodeFile:
    try:
        return identity.decode((source / identity.FILE).read_bytes())
    except (FileNotFoundError, CorruptLog):
        if not names:
            raise
    print(f"The file `node` of {source} is lost or damaged; the copy does without", file=sys.stderr)
    return identity.NodeFile("")


async def copy(source: Path, target: Path, original: identity.NodeFile, names: Sequence[str]) -> Copied:
    disk = RealDisk(target)
    disk.lock()
    try:
        await disk.make_folder(FOLDER)
        copied = await _copy_segments(disk, source / FOLDER, names)
        cluster_id, start, end = _bounds(target / FOLDER, copied)
        mine = msgspec.structs.replace(
            original,
            directory_id=identity.new_directory_id(random.SystemRandom()),
            node_id=NOBODY,
            cluster_id=original.cluster_id or cluster_id,
            promised_others=max(original.promised_epoch, original.promised_others),
            log_begun=False,
        )
        await identity.write(disk, mine)  # last: before it the directory is refused as damaged
        return Copied(len(copied), start, end, mine.directory_id)
    finally:
        disk.close()


async def _copy_segments(disk: RealDisk, folder: Path, names: Sequence[str]) -> list[str]:
    copied: list[str] = []
    for name in names:
        if await _copy_one(disk, folder / name):
            copied.append(name)
            continue
        for gone in copied:  # retention has passed it, and so all before it
            await disk.remove(f"{FOLDER}/{gone}")
        copied = []
    await disk.sync_dir(FOLDER)
    return copied


async def _copy_one(disk: RealDisk, source: Path) -> bool:
    """False when it is no longer there."""
    try:
        reading = await trio.open_file(source, "rb")
    except FileNotFoundError:
        return False
    async with reading:
        file = await disk.open(f"{FOLDER}/{source.name}", create=True)
        try:
            at = 0
            while piece := await reading.read(FRAMES_AT if at == 0 else PIECE_BYTES):
                await disk.commit(file, [Write(at, (piece,))])
                at += len(piece)
        finally:
            file.close()
    return True


def _bounds(folder: Path, names: list[str]) -> tuple[str, Position, Position]:
    """Of which cluster, from where, to where."""
    if not names:
        return "", Position(0), Position(0)
    with (folder / names[0]).open("rb") as first:
        header = decode_header(first.read(FRAMES_AT), names[0])
    with (folder / names[-1]).open("rb") as last:
        mark: Any = best_mark(last.read(FRAMES_AT))
    return header.cluster_id, header.start, mark.durable_end if mark else header.start
