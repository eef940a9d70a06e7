"""A follower that lost the end of its log, or all of it, has no vote before it holds again what it acked."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import trio
from crc32c import crc32c

from chronik_repl.errors import CorruptLog, Refused, first_of
from chronik_repl.identity import NodeFile, decode
from tests.replication.cluster import Cluster, Running, produce, produced, running_cluster, until
from tests.replication.test_damage import filled


def header_rots(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[20] ^= 0xFF
    file.write_bytes(data)


def cut_in_its_header(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:100])


def cut_to_nothing(file: Path) -> None:
    file.write_bytes(b"")


def is_gone(file: Path) -> None:
    file.unlink()


DAMAGES = (header_rots, cut_in_its_header, cut_to_nothing, is_gone)


def node_file(running: Running) -> NodeFile:
    return decode((running.path / "node").read_bytes())


@pytest.mark.parametrize("damage", DAMAGES)
async def test_kf07_nobody_leads_by_the_word_of_a_node_that_lost_its_last_segment(
    tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    """Node 3 lags, and what nodes 1 and 2 acked meanwhile stands in node 2's last segment, which is lost. With node 1
    gone, node 2's word must not make node 3 the leader."""
    async with running_cluster(tmp_path) as cluster:
        leader = await filled(cluster, 2, replication_mode="sync")
        running, lagging = cluster.nodes[2], cluster.nodes[3]
        await lagging.crash()
        acked = produce(leader, b"acked by nodes 1 and 2")
        await leader.up.log.committed.wait(acked.end)
        await running.crash()
        await leader.crash()
        damage(sorted(running.path.glob("wal/*.wal"))[-1])
        await running.start()
        await lagging.start()
        assert running.up.log.end < acked.end
        with pytest.raises(Refused, match="1 of 3 members agree"):
            await lagging.up.promote()
        with pytest.raises(Refused, match="damaged and set aside"):
            await running.up.promote()
        await leader.start()
        await until(lambda: leader.up.ready, "the leader leads again")
        await cluster.same_logs()
        await until(lambda: running.up.log.impaired_until is None, "it is what it was")
        assert await produced(running) == await produced(leader)
        await leader.crash()
        await until(lambda: not running.up.leader or not running.up.leader.live, "nobody leads")
        await lagging.up.promote()  # and its word counts again


async def test_a_loss_accepted_on_a_damaged_node_stands_in_the_log(tmp_path: Path) -> None:
    """Not even where the others say that they are not ahead: what was acked may have been here alone."""
    async with running_cluster(tmp_path) as cluster:
        leader = await filled(cluster, 2, replication_mode="sync")
        running, lagging = cluster.nodes[2], cluster.nodes[3]
        await lagging.crash()
        for number in range(10):  # into another segment
            await leader.up.log.committed.wait(produce(leader, b"%d" % number * 200_000).end)
        await running.crash()
        await leader.crash()
        header_rots(sorted(running.path.glob("wal/*.wal"))[-1])
        await running.start()
        await lagging.start()
        assert lagging.up.log.end < running.up.log.end
        await running.up.promote(accept_loss=True)
        assert running.up.log.state.history[-1].accept_loss
        await until(lambda: running.up.log.impaired_until is None, "its log is the history from here on")


async def test_kf58_an_end_of_0_that_damage_left_is_no_empty_log(tmp_path: Path) -> None:
    async with running_cluster(tmp_path) as cluster:
        leader = await cluster.leader_and(1)
        produce(leader, b"the first history")
        await cluster.settled()
        running = cluster.nodes[2]
        await leader.crash()
        await running.crash()
        for file in running.path.glob("wal/*.wal"):
            header_rots(file)
        await running.start()
        assert running.up.log.end == 0
        leader.path = tmp_path / "empty"
        await leader.start()
        await until(lambda: any("held one that was damaged" in e.text for e in leader.up.status().events), "it says so")
        assert not leader.up.ready
        await running.crash()
        await running.start()
        assert running.up.log.impaired_until is not None


async def refused(cluster: Cluster, running: Running) -> str:
    """Start it: it ends, and says why."""
    cluster.forgiving = True
    running.node = None
    with pytest.raises(BaseExceptionGroup) as caught:
        await running.start()
    error = first_of(caught.value)
    assert isinstance(error, CorruptLog)
    return str(error)


def removed(folder: Path) -> None:
    shutil.rmtree(folder)


def emptied(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.mkdir()


@pytest.mark.parametrize("lose", [removed, emptied])
@pytest.mark.parametrize("which", [1, 2])
async def test_kf22_an_empty_wal_under_an_old_directory_id_is_refused(
    tmp_path: Path, which: int, lose: Callable[[Path], None]
) -> None:
    async with running_cluster(tmp_path) as cluster:
        leader = await cluster.leader_and(2, replication_mode="sync")
        await leader.up.log.committed.wait(produce(leader, b"acked").end)
        running = cluster.nodes[which]
        await running.crash()
        lose(running.path / "wal")
        before = (running.path / "node").read_bytes()
        said = await refused(cluster, running)
        assert "is not mounted" in said
        assert "remove the file `node` too" in said
        assert (running.path / "node").read_bytes() == before
        if which == 1:
            await cluster.nodes[2].up.promote()
            await cluster.nodes[2].up.log.committed.wait(produce(cluster.nodes[2], b"still here").end)
            assert await produced(cluster.nodes[2]) == [b"acked", b"still here"]
        else:  # as it says: a new node, which its leader takes in
            (running.path / "node").unlink()
            await running.start()
            await cluster.same_logs()
            assert node_file(running).directory_id != decode(before).directory_id


async def test_a_directory_of_an_older_version_is_marked_at_its_first_start(tmp_path: Path) -> None:
    async with running_cluster(tmp_path) as cluster:
        await cluster.leader_and(1)
        running = cluster.nodes[2]
        await running.crash()
        content = (running.path / "node").read_bytes().partition(b"\n")[0]
        assert content.endswith(b',"log_begun":true}')
        line = content.replace(b',"log_begun":true', b"")
        (running.path / "node").write_bytes(b"%s\n%08x\n" % (line, crc32c(line)))
        assert not node_file(running).log_begun
        await running.start()
        assert node_file(running).log_begun


async def test_a_new_follower_is_not_marked_before_it_holds_anything(tmp_path: Path) -> None:
    async with running_cluster(tmp_path) as cluster:
        running = await cluster.add(2)
        assert not node_file(running).log_begun
        await running.crash()
        await running.start()
        leader = await cluster.add(1, "leader", replication_followers=running.address)
        await until(lambda: leader.up.ready, "it leads")
        await until(lambda: len(leader.up.peers) == 2, "both are members")
        await cluster.same_logs()
        assert node_file(running).log_begun
        assert node_file(leader).log_begun


async def test_one_that_begins_anew_may_crash_in_the_middle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the removal of what it had and the first of what comes: that is no lost log."""
    async with running_cluster(tmp_path) as cluster:
        leader = await filled(cluster, 1, wal_retention_bytes="1MiB", wal_keep_bytes="1MiB")
        running = cluster.nodes[2]
        await running.crash()
        await goes_beyond(leader, running)
        monkeypatch.setattr("chronik_repl.wal.log.Log.append_received", lambda log, data: len(data))
        await running.start()
        await until(lambda: not list(running.path.glob("wal/*.wal")), "it has removed what it had")
        await running.crash()
        monkeypatch.undo()
        await running.start()
        await cluster.same_logs()
        assert node_file(running).log_begun


async def goes_beyond(leader: Running, running: Running) -> None:
    """The leader's log goes on until its start is beyond what the other one has."""
    end = max(int(file.stem) for file in running.path.glob("wal/*.wal")) + (1 << 20)
    with trio.fail_after(30):
        while leader.up.log.start <= end:
            await leader.up.log.committed.wait(produce(leader, b"x" * 200_000).end)
