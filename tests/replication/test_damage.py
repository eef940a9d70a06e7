"""Rot on a follower's disk: fetched again from the leader, and until then no one may lead by that node's word."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio
import trio.lowlevel

from chronik_repl.errors import CorruptLog, Refused
from chronik_repl.positions import Position
from chronik_repl.wal.values import Damage
from tests.replication.cluster import Cluster, Running, produce, produced, running_cluster, until


async def filled(cluster: Cluster, followers: int = 1, **variables: str) -> Running:
    """A few sealed segments everywhere."""
    leader = await cluster.leader_and(followers, **variables)
    for number in range(100):
        produce(leader, b"%d" % number * 20_000)
        await trio.lowlevel.checkpoint()
    await cluster.same_logs()
    await cluster.settled()
    for running in cluster.nodes.values():
        await until(lambda: len(sealed(running.path)) >= 2, "segments are sealed")  # noqa: B023
    return leader


def sealed(path: Path) -> list[Path]:
    return [file for file in sorted(path.glob("wal/*.wal")) if not file.stat().st_mode & 0o200]


def rot(file: Path, at: int = 12288 + 5000) -> None:
    file.chmod(0o644)
    data = bytearray(file.read_bytes())
    data[at] ^= 0xFF
    file.write_bytes(data)
    file.chmod(0o444)


def notice(running: Running, file: Path) -> None:
    """As the scrubber does when it comes by."""
    start = int(file.stem)
    running.up.log._note_damage(Damage(f"wal/{file.name}", start + 5000, start + 6000, "checksum"))


async def test_rotten_segment_is_fetched_again(tmp_path: Path) -> None:
    async with running_cluster(tmp_path) as cluster:
        leader = await filled(cluster)
        running = cluster.nodes[2]
        file = sealed(running.path)[1]
        whole = file.read_bytes()
        rot(file)
        notice(running, file)
        await until(lambda: not running.up.log.damage, "it is repaired")
        assert file.read_bytes()[12288:] == whole[12288:]
        produce(leader, b"and the stream goes on")
        await cluster.same_logs()


async def test_rot_on_both_sides_is_said_and_not_tried_for_ever(tmp_path: Path) -> None:
    async with running_cluster(tmp_path) as cluster:
        leader = await filled(cluster)
        running = cluster.nodes[2]
        file = sealed(running.path)[1]
        rot(file)
        rot(leader.path / "wal" / file.name)
        notice(running, file)
        await until(lambda: any("cannot be repaired" in e.text for e in running.up.status().events), "it says so")
        await until(lambda: any("needs the segment" in e.text for e in leader.up.status().events), "the leader too")
        said = len(running.up.status().events)
        produce(leader, b"and the stream goes on")
        await cluster.same_logs()
        await trio.sleep(1)  # three heartbeats
        assert len(running.up.status().events) == said
        assert running.up.log.damage


async def test_follower_with_damage_below_its_mark_sets_it_aside_and_heals(tmp_path: Path) -> None:
    async with running_cluster(tmp_path) as cluster:
        leader = await filled(cluster, 2, replication_mode="sync")
        running = cluster.nodes[2]
        await running.crash()
        last = sorted(running.path.glob("wal/*.wal"))[-1]
        rot(last, 12288 + 300)
        last.chmod(0o644)
        await running.start()
        await cluster.same_logs()
        await until(lambda: running.up.log.impaired_until is None, "it is what it was")
        assert list((running.path / "damaged").iterdir())
        assert await produced(running) == await produced(leader)


async def test_impaired_follower_has_no_vote(tmp_path: Path) -> None:
    """It once held what the candidate may lack; with the leader gone nobody may lead by its word."""
    async with running_cluster(tmp_path) as cluster:
        leader = await filled(cluster, 2, replication_mode="sync")
        await leader.crash()
        running, candidate = cluster.nodes[2], cluster.nodes[3]
        await running.crash()
        last = sorted(running.path.glob("wal/*.wal"))[-1]
        rot(last, 12288 + 300)
        last.chmod(0o644)
        await running.start()
        assert running.up.log.impaired_until is not None
        with pytest.raises(Refused, match="1 of 3 members agree"):
            await candidate.up.promote()
        with pytest.raises(Refused, match="damaged"):
            await running.up.promote()
        await leader.start()
        await until(lambda: leader.up.ready, "the leader leads again")
        await cluster.same_logs()
        await until(lambda: running.up.log.impaired_until is None, "it is what it was")


async def test_leader_with_damage_refuses_to_start_and_says_where(tmp_path: Path) -> None:
    async with running_cluster(tmp_path) as cluster:
        leader = await filled(cluster)
        await leader.crash()
        last = sorted(leader.path.glob("wal/*.wal"))[-1]
        before = last.read_bytes()
        rot(last, 12288 + 300)
        last.chmod(0o644)
        damaged = last.read_bytes()
        with pytest.RaisesGroup(CorruptLog, flatten_subgroups=True, allow_unwrapped=True):
            await leader.start()
        assert last.read_bytes() == damaged != before


async def test_leaders_own_rot_does_not_make_a_follower_reconnect_for_ever(tmp_path: Path) -> None:
    async with running_cluster(tmp_path) as cluster:
        leader = await filled(cluster, 1)
        rot(sealed(leader.path)[1])
        newcomer = await cluster.add(3)
        cluster.nursery.start_soon(_add, leader, newcomer.address)

        def refused() -> bool:
            found = [f for f in leader.up.status().followers if f.address == newcomer.address]
            return bool(found) and found[0].state == "refused" and "damaged" in found[0].detail

        await until(refused, "the leader says that its own log is damaged")
        produce(leader, b"the other one goes on")
        await cluster.same_logs(leader, cluster.nodes[2])
        assert newcomer.up.log.end < Position(leader.up.log.end)


async def _add(leader: Running, address: str) -> None:
    await leader.up.command({"command": "members-add", "address": address}, print)
