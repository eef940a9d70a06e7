"""A copy of a running node's directory: whole, of its own identity, and it starts."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import pytest
import trio

from chronik_repl import backup, identity
from chronik_repl.errors import CorruptLog, Refused
from chronik_repl.node import Node
from chronik_repl.positions import NodeId
from chronik_repl.wal.disk import RealDisk
from tests.replication.cluster import produce, produced, running_cluster, until


async def test_copy_of_a_busy_node_starts_as_a_new_member(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async with running_cluster(tmp_path) as cluster:
        leader = await cluster.leader_and(1, replication_mode="sync")

        async def load() -> None:
            for number in range(2000):
                produce(leader, b"%d" % number * 400)
                await trio.sleep(0.0005)

        cluster.nursery.start_soon(load)
        await until(lambda: leader.up.log.end > 1 << 20, "it is busy")
        source, target = cluster.nodes[2].path, tmp_path / "node-3"
        assert await trio.to_thread.run_sync(lambda: backup.backup(source, target, as_json=True)) == 0
        told = json.loads(capsys.readouterr().out.splitlines()[-1])
        assert told["end"] > 0
        copy = await cluster.add(3)
        assert copy.up._local.me.directory_id == told["directory_id"]
        assert copy.up.log.end >= told["end"], "nothing below the mark is lost"
        await leader.up.command({"command": "members-add", "address": copy.address}, print)
        await cluster.same_logs()
        assert await produced(copy) == await produced(leader)


async def test_copy_has_no_authority_of_the_original(tmp_path: Path) -> None:
    async with running_cluster(tmp_path) as cluster:
        leader = await cluster.leader_and(0)
        produce(leader, b"kept")
        await cluster.same_logs()
        await leader.stop()
        target = tmp_path / "copy"
        await trio.to_thread.run_sync(backup.backup, leader.path, target)
        leader.path = target
        await leader.start()
        with pytest.raises(Refused, match="is not a member"):
            await leader.up.promote()
        await _its_own_attempt_follows_a_promotion(leader.up)
        assert leader.up.role == "starting"
        await leader.up.promote(accept_loss=True)
        assert await produced(leader) == [b"kept"]


@pytest.mark.parametrize("lost", ["damaged", "gone"])
async def test_log_of_a_node_that_lost_its_promises_can_be_copied(tmp_path: Path, lost: str) -> None:
    """As the refusal to start says."""
    async with running_cluster(tmp_path) as cluster:
        leader = await cluster.leader_and(1)
        produce(leader, b"kept")
        await cluster.same_logs()
        follower = cluster.nodes[2]
        await follower.stop()
        file = follower.path / identity.FILE
        if lost == "gone":
            file.unlink()
        else:
            file.write_bytes(file.read_bytes().replace(b"promised_to", b"promised_ot"))
        with pytest.raises(CorruptLog, match="copy it with `chronik backup`"):
            await identity.load_or_make(RealDisk(follower.path), random.Random(), NodeId(2), "")
        target = tmp_path / "copy"
        await trio.to_thread.run_sync(backup.backup, follower.path, target)
        follower.path = target
        await follower.start()
        await leader.up.command({"command": "members-add", "address": follower.address}, print)
        await cluster.same_logs()
        assert await produced(follower) == [b"kept"]


async def _its_own_attempt_follows_a_promotion(node: Node) -> None:
    """They take turns. Both once used the one scope, and the process died of a promotion that was refused."""
    async with node._standing:
        await until(lambda: node._standing.statistics().tasks_waiting == 1, "its own attempt waits for its turn")
        node._stand_scope = trio.CancelScope()
        with node._stand_scope:
            pass  # the promotion's turn
    await until(lambda: not node._standing.locked(), "its own attempt had its turn")


async def test_plain_copy_beside_its_original_is_refused(tmp_path: Path) -> None:
    """Two live nodes with one directory id: the second is not served."""
    async with running_cluster(tmp_path) as cluster:
        leader = await cluster.leader_and(1)
        await cluster.nodes[2].stop()
        shutil.copytree(cluster.nodes[2].path, tmp_path / "node-3")
        await cluster.nodes[2].start()
        await until(lambda: leader.up.status().followers[0].state == "streaming", "the first is served")
        twin = cluster.nodes[3] = type(leader)(cluster, 2, tmp_path / "node-3", "follower", {})
        await twin.start()
        cluster.nursery.start_soon(leader.up.command, {"command": "members-add", "address": twin.address}, print)

        def refused() -> bool:
            return any(f.address == twin.address and "already served" in f.detail for f in leader.up.status().followers)

        await until(refused, "the leader says that it is a copy")
        del cluster.nodes[3]
        await twin.crash()


@pytest.mark.parametrize("lost", [True, False], ids=["lost", "damaged"])
async def test_a_directory_without_its_file_node_is_saved_by_a_copy(tmp_path: Path, lost: bool) -> None:
    """As the node that refuses to start says."""
    async with running_cluster(tmp_path) as cluster:
        leader = await cluster.leader_and(1)
        produce(leader, b"kept")
        await cluster.same_logs()
        hurt = cluster.nodes[2]
        await hurt.stop()
        (hurt.path / "node").unlink() if lost else (hurt.path / "node").write_text("rot")
        with pytest.raises(CorruptLog, match="copy it with `chronik backup`"):
            await identity.load_or_make(RealDisk(hurt.path), random.Random(1), NodeId(2), "")
        copied = tmp_path / "node-3"
        assert await trio.to_thread.run_sync(backup.backup, hurt.path, copied) == 0
        del cluster.nodes[2]
        copy = await cluster.add(3)
        assert copy.up.cluster_id == leader.up.cluster_id
        await leader.up.command({"command": "members-add", "address": copy.address}, print)
        await cluster.same_logs()
        assert await produced(copy) == [b"kept"]


def test_backup_refuses_what_it_should(tmp_path: Path) -> None:
    with pytest.raises(Refused, match="no node's directory"):
        backup.backup(tmp_path / "nothing", tmp_path / "copy")
    (tmp_path / "source" / "wal").mkdir(parents=True)
    (tmp_path / "source" / "node").write_bytes(identity.encode(identity.NodeFile("d")))
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    with pytest.raises(Refused, match="not empty"):
        backup.backup(tmp_path / "source", tmp_path / "full")
    with pytest.raises(Refused, match="is a file"):
        backup.backup(tmp_path / "source", tmp_path / "full" / "file")
    with pytest.raises(Refused, match="lies in"):
        backup.backup(tmp_path / "source", tmp_path / "source" / "copy")
    (tmp_path / "source" / "node").write_bytes(b"rot")
    with pytest.raises(CorruptLog):  # and no log that one could save
        backup.backup(tmp_path / "source", tmp_path / "copy")
