"""Leader and followers together: the same log everywhere, after whatever happens to them."""

from __future__ import annotations

from pathlib import Path

from tests.replication.cluster import produce, produced, running_cluster, until


async def test_two_followers_hold_the_leaders_log(tmp_path: Path) -> None:
    async with running_cluster(tmp_path) as cluster:
        leader = await cluster.leader_and(2)
        for number in range(500):
            last = produce(leader, b"%d" % number)
        await leader.up.log.committed.wait(last.end)
        await cluster.same_logs()
        for running in cluster.nodes.values():
            assert await produced(running) == [b"%d" % number for number in range(500)]


async def test_a_cluster_that_was_given_its_name_is_founded(tmp_path: Path) -> None:
    async with running_cluster(tmp_path) as cluster:
        leader = await cluster.leader_and(1, cluster_id="named")
        await leader.up.log.committed.wait(produce(leader, b"first").end)
        assert leader.up.cluster_id == "named"


async def test_followers_files_are_the_leaders_files(tmp_path: Path) -> None:
    async with running_cluster(tmp_path) as cluster:
        leader = await cluster.leader_and(2, replication_mode="sync")
        for number in range(300):
            produce(leader, b"%d" % number * 3000)  # several segments
        await cluster.same_logs()
        for running in cluster.nodes.values():
            await running.stop()
    files = [stream_bytes(running.path) for running in cluster.nodes.values()]
    assert len(files[0]) > 2
    assert files[0] == files[1] == files[2]


def stream_bytes(path: Path) -> dict[str, bytes]:
    """Of each segment the frames, without the blocks that are the node's own and the zeros at the end."""
    return {file.name: file.read_bytes()[12288:].rstrip(b"\0") for file in sorted(path.glob("wal/*.wal"))}


async def test_crashed_follower_rejoins_by_itself(tmp_path: Path) -> None:
    async with running_cluster(tmp_path) as cluster:
        leader = await cluster.leader_and(2, replication_mode="sync")
        produce(leader, b"before")
        await cluster.same_logs()
        await cluster.nodes[2].crash()
        produce(leader, b"while it is down")
        await cluster.nodes[2].start()
        await cluster.same_logs()
        assert await produced(cluster.nodes[2]) == [b"before", b"while it is down"]


async def test_crashed_leader_leads_again(tmp_path: Path) -> None:
    async with running_cluster(tmp_path) as cluster:
        leader = await cluster.leader_and(2, replication_mode="sync")
        for number in range(50):
            last = produce(leader, b"%d" % number)
        await leader.up.log.committed.wait(last.end)
        epoch = leader.up.epoch
        await leader.crash()
        await leader.start()
        await until(lambda: leader.up.ready, "the leader leads again")
        assert leader.up.epoch > epoch
        produce(leader, b"after")
        await cluster.same_logs()
        assert await produced(cluster.nodes[3]) == [b"%d" % n for n in range(50)] + [b"after"]


async def test_everyone_crashes_and_nobody_is_needed(tmp_path: Path) -> None:
    async with running_cluster(tmp_path) as cluster:
        leader = await cluster.leader_and(2, replication_mode="sync")
        last = produce(leader, b"kept")
        await leader.up.log.committed.wait(last.end)
        for running in cluster.nodes.values():
            await running.crash()
        for running in (leader, cluster.nodes[3], cluster.nodes[2]):
            await running.start()
        await until(lambda: leader.up.ready, "the leader leads again")
        await cluster.same_logs()
        assert await produced(cluster.nodes[2]) == [b"kept"]


async def test_promoted_follower_leads_and_the_old_leader_follows(tmp_path: Path) -> None:
    async with running_cluster(tmp_path) as cluster:
        leader = await cluster.leader_and(2, replication_mode="sync", wal_receiver_enabled="true")
        for number in range(50):
            produce(leader, b"%d" % number)
        new = cluster.nodes[2]
        await new.up.promote()
        assert new.up.role == "leader"
        await until(lambda: leader.up.role == "follower" and leader.up.leader is not None, "the old one follows")
        produce(new, b"after")
        await cluster.same_logs()
        assert await produced(leader) == [b"%d" % n for n in range(50)] + [b"after"]
