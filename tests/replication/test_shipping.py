"""Known failures 24 to 37: what goes wrong between a leader and its followers, and does not here."""

from __future__ import annotations

import socket
from pathlib import Path

import msgspec
import pytest
import structlog
import trio
import trio.lowlevel

from chronik_repl import leader as leader_module
from chronik_repl.config import Settings
from chronik_repl.errors import NotLeader
from chronik_repl.positions import Position
from chronik_repl.replication.streams import TcpStream
from chronik_repl.standing import FollowerStatus
from chronik_repl.wal import ages
from chronik_repl.wal.changes import CommittedOffset, OffsetsCommitted
from tests.replication.cluster import TOPIC, Cluster, Running, produce, produced, running_cluster, until
from tests.replication.proxy import Wire


async def wired(cluster: Cluster, followers: int, **variables: str) -> tuple[Running, dict[int, Wire]]:
    """A leader that reaches each follower through a wire of its own."""
    wires: dict[int, Wire] = {}
    for node_id in range(2, followers + 2):
        running = await cluster.add(node_id)
        wires[node_id] = Wire(running.address)
        await cluster.nursery.start(wires[node_id].run)
    listed = ",".join(wire.address for wire in wires.values())
    leader = await cluster.add(1, "leader", replication_followers=listed, **variables)
    await until(lambda: leader.up.ready and len(leader.up.peers) == followers + 1, "all are members")
    await cluster.same_logs()
    return leader, wires


def follower(leader: Running, node_id: int) -> FollowerStatus:
    return next(f for f in leader.up.status().followers if f.node_id == node_id)


async def test_kf24_ring_overflow_is_caught_up_from_disk(tmp_path: Path) -> None:
    async with running_cluster(tmp_path) as cluster:
        leader = await cluster.leader_and(
            2, replication_max_queue_size="16", replication_max_queue_bytes="65536", replication_mode="sync"
        )
        for number in range(40):
            for _ in range(50):  # in one step: the senders cannot take them meanwhile
                produce(leader, b"%d" % number * 100)
            await trio.lowlevel.checkpoint()
        await cluster.same_logs()
        assert all(f.ring_drops > 0 for f in leader.up.status().followers)
        expected = [b"%d" % number * 100 for number in range(40) for _ in range(50)]
        assert await produced(cluster.nodes[2]) == await produced(cluster.nodes[3]) == expected


async def test_kf25_reconnects_neither_lose_nor_repeat(tmp_path: Path) -> None:
    async with running_cluster(tmp_path) as cluster:
        leader, wires = await wired(cluster, 1, replication_mode="sync")
        for number in range(300):
            produce(leader, b"%d" % number * 500)
            if number % 50 == 10:
                seen = wires[2].connections
                wires[2].reset()
                await until(lambda: wires[2].connections > seen, "it dials again")  # noqa: B023
            await trio.lowlevel.checkpoint()
        await cluster.same_logs()
        assert follower(leader, 2).reconnects >= 3
        assert await produced(cluster.nodes[2]) == [b"%d" % n * 500 for n in range(300)]


async def test_kf27_slow_follower_pins_neither_memory_nor_segments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leader_module, "RETENTION_INTERVAL_S", 0.05)
    async with running_cluster(tmp_path) as cluster:
        leader, wires = await wired(
            cluster,
            2,
            replication_max_queue_bytes="256KiB",
            wal_retention_bytes="2MiB",
            wal_keep_bytes="4MiB",
            replication_heartbeat_timeout_secs="5",
        )
        wires[3].cut()
        for _ in range(400):
            produce(leader, bytes(50_000))
            await trio.sleep(0.001)
        log = leader.up.log
        await until(lambda: log.end - log.start < 8 << 20, "old segments are gone")
        assert follower(leader, 3).ring_bytes <= 256 << 10
        wires[3].mend()
        await cluster.same_logs()  # it was too old, and began anew from the leader's log start
        assert cluster.nodes[3].up.log.start > 0


async def test_what_stands_in_the_active_segment_goes_by_age_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One record and then silence: the leader ends the segment by its age, and every node removes it in time."""
    monkeypatch.setattr(leader_module, "RETENTION_INTERVAL_S", 0.05)
    async with running_cluster(tmp_path) as cluster:
        leader, _ = await wired(cluster, 1, wal_retention_hours="0.0003")  # a second, and an eighth of one
        produce(leader, b"old")
        for node in (leader, cluster.nodes[2]):
            log = node.up.log
            await until(lambda: log.start > 0, "the segment is gone")  # noqa: B023
            await until(lambda: log.log_start_offset(TOPIC, 0) == 1, "the record is gone")  # noqa: B023


async def test_kf28_retention_passes_a_catch_up_that_is_reading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leader_module, "RETENTION_INTERVAL_S", 0.05)
    async with running_cluster(tmp_path) as cluster:
        small = {"replication_max_queue_bytes": "64KiB", "wal_retention_bytes": "2MiB", "wal_keep_bytes": "3MiB"}
        leader, wires = await wired(cluster, 1, **small)
        wires[2].reset()
        wires[2].bytes_per_s = 2e6  # so that retention is faster than the catch-up
        for _ in range(400):
            produce(leader, bytes(50_000))
            await trio.sleep(0.001)
        wires[2].bytes_per_s = 0
        await cluster.same_logs()
        texts = [event.text for event in cluster.nodes[2].up.status().events]
        assert any("begins anew" in text for text in texts)


async def test_kf29_half_open_connection_is_noticed_on_both_sides(tmp_path: Path) -> None:
    async with running_cluster(tmp_path) as cluster:
        leader, wires = await wired(cluster, 1)
        wires[2].cut()
        await until(lambda: follower(leader, 2).state == "connecting", "the leader notices", 5)
        await until(lambda: cluster.nodes[2].up.status().leader.live is False, "the follower notices", 5)  # type: ignore[union-attr]
        wires[2].mend()
        produce(leader, b"after")
        await cluster.same_logs()


@pytest.mark.parametrize("way", ["forward", "backward"])
async def test_kf30_one_way_partition_ends_the_session(tmp_path: Path, way: str) -> None:
    async with running_cluster(tmp_path) as cluster:
        leader, wires = await wired(cluster, 1, replication_mode="sync")
        wires[2].cut(**{way: True})
        last = produce(leader, b"not yet")
        await until(lambda: not leader.up.enough_replicas, "the leader notices", 5)
        assert leader.up.log.committed.value < last.end
        wires[2].mend()
        await leader.up.log.committed.wait(last.end)
        await cluster.same_logs()


async def test_kf31_wall_clock_jumps_change_nothing(tmp_path: Path) -> None:
    async with running_cluster(tmp_path) as cluster:
        leader = await cluster.leader_and(1, replication_mode="sync")
        jump = [0.0]
        real = leader.up._local._clock
        leader.up._local._clock = lambda: real() + jump[0]
        leader.up.log._writer._clock_ms = lambda: int((real() + jump[0]) * 1000)
        stamps = []
        for jump[0] in (0.0, -86400.0, 86400.0, -1.0):
            appended = produce(leader, b"tick")
            await leader.up.log.committed.wait(appended.end)
            stamps.append(appended.timestamp_ms)
            await trio.sleep(0.5)
        assert stamps == sorted(stamps)
        assert follower(leader, 2).reconnects == 0
        await cluster.same_logs()


async def test_kf31_a_clock_that_leaps_a_week_expires_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leader_module, "RETENTION_INTERVAL_S", 0.05)
    async with running_cluster(tmp_path) as cluster:
        leader = await cluster.leader_and(1, replication_mode="sync", wal_segment_bytes="64KiB")
        log, jump_s = leader.up.log, [0.0]
        real = leader.up._local._clock
        log._writer._clock_ms = log.ages._wall_ms = lambda: int((real() + jump_s[0]) * 1000)
        log.append_change(OffsetsCommitted("idle", (CommittedOffset(TOPIC, 0, 1),)))

        async def fill(segments: int) -> None:
            before = log.segments
            while log.segments < before + segments:
                end = produce(leader, bytes(10_000)).end
                await log.committed.wait(end)

        await fill(3)
        jump_s[0] = 8 * 24 * 3600.0
        await until(lambda: log.ages.ahead_s > 600_000, "it is noticed")
        await until(lambda: "8 days, 0:00:00 ahead" in leader.up.status().events[-1].text, "and said")
        assert leader.up.status().log.clock_ahead_s > 600_000
        await fill(3)  # with a snapshot of the state each, and rounds of retention in between
        assert log.start == 0
        assert "idle" in log.state.groups
        jump_s[0] = 0.0  # somebody mends the clock
        await until(lambda: log.ages.ahead_s == 0, "that is noticed too")
        await fill(2)
        assert log.start == 0
        assert "idle" in log.state.groups
        jump_s[0] = 8 * 24 * 3600.0
        monkeypatch.setattr(ages, "PATIENCE_S", 0.1)  # and this time it stays
        await until(lambda: log.start > 0, "what is a week old goes")
        await cluster.same_logs()


async def test_kf32_cancelled_between_write_and_ack(tmp_path: Path) -> None:
    """Whoever waits may give up: the record is there or not, as its position says, and never twice."""
    async with running_cluster(tmp_path) as cluster:
        leader = await cluster.leader_and(1, replication_mode="sync")
        for number in range(50):
            end = produce(leader, b"%d" % number).end
            with trio.move_on_after(0):
                await leader.up.log.committed.wait(end)
        await leader.up.log.committed.wait(end)
        await cluster.nodes[2].crash()
        await cluster.nodes[2].start()
        await cluster.same_logs()
        assert await produced(cluster.nodes[2]) == [b"%d" % n for n in range(50)]


async def test_kf33_ack_before_anyone_waits(tmp_path: Path) -> None:
    async with running_cluster(tmp_path) as cluster:
        leader = await cluster.leader_and(1, replication_mode="sync")
        end = produce(leader, b"early").end
        await until(lambda: leader.up.log.committed.value >= end, "committed")
        with trio.fail_after(0.1):
            await leader.up.log.committed.wait(end)


async def test_kf34_everything_is_replicated_whoever_asked(tmp_path: Path) -> None:
    """In sync mode the high watermark stands still without followers; what acks=1 wrote meanwhile reaches them too."""
    async with running_cluster(tmp_path) as cluster:
        leader = await cluster.leader_and(2, replication_mode="sync", replication_sync_replicas="2")
        before = leader.up.log.committed.value
        await cluster.nodes[2].crash()
        await until(lambda: not leader.up.enough_replicas, "too few are live")
        end = produce(leader, b"acks=1").end
        await leader.up.log.durable.wait(end)
        await cluster.nodes[3].up.log.durable.wait(end)
        assert leader.up.log.committed.value == before
        await cluster.nodes[2].start()
        await leader.up.log.committed.wait(end)
        await cluster.same_logs()


async def test_kf35_one_slow_follower_does_not_delay_another(tmp_path: Path) -> None:
    async with running_cluster(tmp_path) as cluster:
        leader, wires = await wired(
            cluster,
            2,
            replication_mode="sync",
            replication_heartbeat_timeout_secs="20",
            replication_max_queue_bytes="1MiB",
        )
        wires[3].cut()
        took = []
        for _ in range(200):
            began = trio.current_time()
            await leader.up.log.committed.wait(produce(leader, bytes(100_000)).end)
            took.append(trio.current_time() - began)
        assert sorted(took)[100] < 0.3
        assert follower(leader, 3).lag_positions > 10_000_000
        wires[3].mend()
        await cluster.same_logs()


async def test_kf36_small_sends_do_not_meet_nagle(tmp_path: Path) -> None:
    async with running_cluster(tmp_path) as cluster:
        leader = await cluster.leader_and(1, replication_mode="sync")
        took = []
        for _ in range(50):
            began = trio.current_time()
            await leader.up.log.committed.wait(produce(leader, b"small").end)
            took.append(trio.current_time() - began)
        assert sorted(took)[25] < 0.15, "200 ms is what Nagle and a delayed ack cost"
        session = cluster.nodes[2].up._receiver.session
        assert session is not None
        stream = session.connection._stream
        assert isinstance(stream, TcpStream)
        assert stream.socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


async def test_kf37_no_log_line_a_record(tmp_path: Path) -> None:
    async with running_cluster(tmp_path) as cluster:
        leader = await cluster.leader_and(2, replication_mode="sync")
        with structlog.testing.capture_logs() as lines:
            for number in range(2000):
                end = produce(leader, b"%d" % number).end
                if number % 100 == 0:
                    await trio.lowlevel.checkpoint()
            await leader.up.log.committed.wait(end)
            await cluster.same_logs()
        assert len(lines) < 5


async def test_follower_with_an_empty_directory_just_works(tmp_path: Path) -> None:
    async with running_cluster(tmp_path) as cluster:
        leader = await cluster.leader_and(1)
        for number in range(100):
            produce(leader, b"%d" % number * 5000)
        newcomer = await cluster.add(3)
        await leader.up.command({"command": "members-add", "address": newcomer.address}, print)
        await cluster.same_logs()
        assert [peer.node_id for peer in leader.up.peers] == [1, 2, 3]


@pytest.mark.parametrize("by", ["node_id", "address"])
async def test_removed_member_is_shipped_nothing_more(tmp_path: Path, by: str) -> None:
    async with running_cluster(tmp_path) as cluster:
        leader = await cluster.leader_and(2)
        removed = cluster.nodes[3]
        end = removed.up.log.end
        which = {"node_id": 3, "address": removed.address}[by]
        await leader.up.command({"command": "members-remove", by: which}, print)
        produce(leader, b"not for 3")
        await cluster.same_logs(leader, cluster.nodes[2])
        assert removed.up.log.end == end
        assert [peer.node_id for peer in leader.up.peers] == [1, 2]
        await leader.up.command({"command": "members-add", "address": removed.address}, print)
        await cluster.same_logs()


async def test_wiped_follower_replaces_itself(tmp_path: Path) -> None:
    async with running_cluster(tmp_path) as cluster:
        leader = await cluster.leader_and(2, replication_mode="sync")
        produce(leader, b"kept")
        await cluster.same_logs()
        wiped = cluster.nodes[2]
        old = wiped.up._local.me.directory_id
        await wiped.crash()
        wiped.path = tmp_path / "another-disk"
        await wiped.start()
        await until(lambda: {p.directory_id for p in leader.up.peers}.isdisjoint({old}), "the new one is the member")
        await cluster.same_logs()
        assert len(leader.up.peers) == 3
        assert await produced(wiped) == [b"kept"]


async def test_wiped_member_of_a_promoted_leader_replaces_itself_too(tmp_path: Path) -> None:
    """A promoted follower has no list of its own: it knows the members' addresses from the log."""
    async with running_cluster(tmp_path) as cluster:
        leader = await cluster.leader_and(2, replication_mode="sync", wal_receiver_enabled="true")
        new, wiped = cluster.nodes[2], cluster.nodes[3]
        await cluster.settled()
        await new.up.promote()
        await until(lambda: new.up.accepting and new.up.enough_replicas, "it leads")
        produce(new, b"kept")
        await cluster.settled()
        await wiped.crash()
        wiped.path = tmp_path / "another-disk"
        await wiped.start()
        await until(lambda: any(p.directory_id == wiped.up._local.me.directory_id for p in new.up.peers), "it is back")
        await cluster.same_logs()
        assert await produced(wiped) == await produced(leader) == [b"kept"]


async def test_deposed_leader_fails_those_who_wait(tmp_path: Path) -> None:
    async with running_cluster(tmp_path) as cluster:
        leader, wires = await wired(cluster, 2, replication_mode="sync", wal_receiver_enabled="true")
        for wire in wires.values():
            wire.cut()
        end = produce(leader, b"never acked").end
        failed = []

        async def wait() -> None:
            try:
                await leader.up.log.committed.wait(end)
            except NotLeader as error:
                failed.append(error)

        cluster.nursery.start_soon(wait)
        for node_id in (2, 3):
            await until(lambda: cluster.nodes[node_id].up.status().leader.live is False, "lost", 5)  # type: ignore[union-attr]  # noqa: B023
        for wire in wires.values():
            wire.target = "127.0.0.1:1"  # and it stays away
        new = cluster.nodes[2]
        # The members know each other by the wires' addresses; the new leader needs the real one of node 3.
        new.up._local.settings = _with(new, cluster.nodes[3].address)
        await new.up.promote()
        await until(lambda: bool(failed), "the old leader's waiter is told")
        assert leader.up.role != "leader"
        assert leader.up.log.committed.value < Position(end)


def _with(running: Running, follower: str) -> Settings:
    return msgspec.structs.replace(running.up._local.settings, replication_followers=(follower,))
