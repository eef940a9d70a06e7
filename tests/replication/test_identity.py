"""The file `node`: a promise is durable before it is told, and never made anew over a log that is there."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from chronik_repl import identity
from chronik_repl.errors import CorruptLog, ForeignLog, FormatTooNew
from chronik_repl.positions import NodeId
from chronik_repl.replication.epochs import Promise
from chronik_repl.wal.disk import RealDisk

CHANCE = random.Random(1)


async def test_made_once_and_kept(tmp_path: Path) -> None:
    disk = RealDisk(tmp_path)
    made = await identity.load_or_make(disk, CHANCE, NodeId(1), "")
    assert await identity.load_or_make(disk, CHANCE, NodeId(1), "") == made
    assert (
        made.directory_id != (await identity.load_or_make(RealDisk(tmp_path / "b"), CHANCE, NodeId(1), "")).directory_id
    )


async def test_promises_survive_and_remember_others(tmp_path: Path) -> None:
    disk = RealDisk(tmp_path)
    passport = identity.Passport(disk, await identity.load_or_make(disk, CHANCE, NodeId(1), ""))
    await passport.keep_promise(Promise(5, 2, "two"))
    await passport.keep_promise(Promise(6, *passport.me))
    again = identity.Passport(disk, await identity.load_or_make(disk, CHANCE, NodeId(1), ""))
    assert again.promise == Promise(6, *passport.me)
    assert again.promised_others == 5


async def test_another_nodes_directory_is_refused(tmp_path: Path) -> None:
    disk = RealDisk(tmp_path)
    await identity.load_or_make(disk, CHANCE, NodeId(1), "shop")
    with pytest.raises(ForeignLog, match="belongs to node 1"):
        await identity.load_or_make(disk, CHANCE, NodeId(2), "")
    with pytest.raises(ForeignLog, match="cluster 'shop'"):
        await identity.load_or_make(disk, CHANCE, NodeId(1), "bank")


async def test_kf06_lost_file_over_a_log_is_not_made_anew(tmp_path: Path) -> None:
    disk = RealDisk(tmp_path)
    (tmp_path / "wal").mkdir()
    (tmp_path / "wal" / f"{0:020d}.wal").write_bytes(b"")
    with pytest.raises(CorruptLog, match=r"no file `node`.*copy it with `chronik backup`"):
        await identity.load_or_make(disk, CHANCE, NodeId(1), "")
    assert not (tmp_path / "node").exists()


async def test_every_flipped_bit_is_noticed(tmp_path: Path) -> None:
    disk = RealDisk(tmp_path)
    await identity.load_or_make(disk, CHANCE, NodeId(1), "")
    good = (tmp_path / "node").read_bytes()
    for at in range(len(good)):
        bad = bytearray(good)
        bad[at] ^= 1 << at % 8
        with pytest.raises(CorruptLog):
            identity.decode(bytes(bad))
    for size in range(len(good)):
        with pytest.raises(CorruptLog):
            identity.decode(good[:size])


def test_newer_format_asks_for_an_upgrade() -> None:
    with pytest.raises(FormatTooNew):
        identity.decode(identity.encode(identity.NodeFile("d", format=99)))
