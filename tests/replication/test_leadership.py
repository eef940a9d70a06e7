"""Who leads: at every order of starts, after promotions, and who must not."""

from __future__ import annotations

import itertools
import socket
from pathlib import Path

import pytest
import trio
import trio.lowlevel

from chronik_repl.errors import CannotLead, NotLeader, Refused
from chronik_repl.leader import Deposed, Leadership
from chronik_repl.positions import Epoch
from chronik_repl.replication.epochs import EPOCH_MAX, Promise
from chronik_repl.wal.changes import TopicMade
from tests.ports import free_port
from tests.replication.cluster import Cluster, Running, produce, produced, running_cluster, until

NODES = (1, 2, 3)


async def prepared(cluster: Cluster, **variables: str) -> dict[int, Running]:
    """Three nodes that know their ports and were never started."""
    ports = {node_id: f"127.0.0.1:{free_port()}" for node_id in NODES}
    for node_id in NODES:
        program = "leader" if node_id == 1 else "follower"
        mine = {"wal_receiver_bind_addr": ports[node_id], "wal_receiver_enabled": "true"}
        if node_id == 1:
            mine |= {"replication_followers": f"{ports[2]},{ports[3]}", "replication_mode": "sync"} | variables
        running = Running(cluster, node_id, cluster.path / f"node-{node_id}", program, mine)  # type: ignore[arg-type]
        cluster.nodes[node_id] = running
    return cluster.nodes


@pytest.mark.parametrize("order", list(itertools.permutations(NODES)), ids=str)
async def test_cluster_comes_up_in_every_order_of_starts(tmp_path: Path, order: tuple[int, ...]) -> None:
    async with running_cluster(tmp_path) as cluster:
        nodes = await prepared(cluster)
        for number, value in enumerate([b"founded", b"started again"]):
            for node_id in order:
                await nodes[node_id].start()
                await trio.sleep(0.05)
            await until(lambda: nodes[1].up.accepting and nodes[1].up.enough_replicas, "node 1 leads")
            await until(lambda: len(nodes[1].up.peers) == 3, "all are members")
            await nodes[1].up.log.committed.wait(produce(nodes[1], value).end)
            await cluster.same_logs()
            if number == 0:
                for running in nodes.values():
                    await running.crash()
        assert await produced(nodes[3]) == [b"founded", b"started again"]


async def test_kf58_empty_leader_founds_no_second_history(tmp_path: Path) -> None:
    async with running_cluster(tmp_path) as cluster:
        leader = await cluster.leader_and(1)
        produce(leader, b"the first history")
        await cluster.same_logs()
        await leader.crash()
        leader.path = tmp_path / "empty"
        cluster.forgiving = True
        await leader.start()
        await leader.ended.wait()
        assert leader.error is not None
        assert "Run `chronik promote` there" in str(_leaf(leader.error))
        assert isinstance(_leaf(leader.error), CannotLead)
        assert await produced(cluster.nodes[2]) == [b"the first history"]


async def test_founding_waits_for_everyone_listed_or_bootstrap(tmp_path: Path) -> None:
    async with running_cluster(tmp_path) as cluster:
        absent = f"127.0.0.1:{free_port()}"
        leader = await cluster.add(1, "leader", replication_followers=absent)
        await until(lambda: any("founding a cluster waits" in e.text for e in leader.up.status().events), "it says so")
        assert not leader.up.ready
        await leader.crash()
        leader.variables["bootstrap"] = "true"
        await leader.start()
        await until(lambda: leader.up.ready, "it leads")


async def test_a_list_that_names_the_node_itself_is_good_for_every_node(tmp_path: Path) -> None:
    async with running_cluster(tmp_path) as cluster:
        nodes = await prepared(cluster)
        mine, theirs = nodes[1].variables["wal_receiver_bind_addr"], nodes[1].variables["replication_followers"]
        nodes[1].variables["replication_followers"] = f"{mine},{theirs}"
        for node_id in NODES:
            await nodes[node_id].start()
        await until(lambda: nodes[1].up.accepting and len(nodes[1].up.peers) == 3, "node 1 leads, all are members")


async def test_a_leadership_that_ended_before_its_first_step_writes_nothing(tmp_path: Path) -> None:
    async with running_cluster(tmp_path) as cluster:
        await cluster.leader_and(1)
        node = cluster.nodes[2].up
        end = node.log.end
        leadership = Leadership(node._local, Epoch(7), lambda connection, asked: None)
        leadership.depose(Promise(8, 3, "another"))
        with pytest.raises(Deposed):
            await leadership.run()
        assert node.log.end == end
        with pytest.raises(NotLeader):
            node.log.append_change(TopicMade("t", 1))


async def test_a_followers_clients_make_no_more_topics_than_the_cluster_may_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running_cluster(tmp_path) as cluster:
        leader = await cluster.leader_and(1)
        monkeypatch.setattr("chronik_repl.leader.ALL_PARTITIONS_MAX", 1)
        for name in ("first", "second"):
            cluster.nodes[2].up.ask_for_topic(name)
        await until(lambda: "first" in leader.up.log.state.topics, "the first is made")
        await cluster.same_logs()
        await leader.up.log.committed.wait(produce(leader, b"what was asked before it is answered").end)
        assert "second" not in leader.up.log.state.topics


async def test_a_node_that_promised_the_last_epoch_of_all_says_so_and_lives(tmp_path: Path) -> None:
    async with running_cluster(tmp_path) as cluster:
        leader = await cluster.leader_and(1, wal_receiver_enabled="true")
        follower = cluster.nodes[2]
        assert await follower.up.promise(Promise(EPOCH_MAX, 9, "nobody's"))
        with pytest.raises(Refused, match="epoch 4294967296 would be the next"):
            await follower.up.promote(accept_loss=True)
        await until(lambda: "4294967296" in leader.up._waits_for, "the old leader says so too")
        assert follower.up._local.passport.promise.epoch == EPOCH_MAX


@pytest.mark.parametrize(
    "command",
    [
        {"command": "members-add", "address": "nonsense"},
        {"command": "members-add", "address": 7},
        {"command": "members-remove", "node_id": "two"},
        {"command": "members-remove", "address": ""},
        {"command": "members-remove", "address": ["127.0.0.1:9291"]},
        {"command": "members-remove"},
    ],
    ids=str,
)
async def test_a_command_that_makes_no_sense_is_refused(tmp_path: Path, command: dict[str, object]) -> None:
    async with running_cluster(tmp_path) as cluster:
        leader = await cluster.leader_and(1)
        with trio.fail_after(5.0), pytest.raises(Refused):
            await leader.up.command(command, lambda text: None)
        await leader.up.log.committed.wait(produce(leader, b"it goes on").end)


async def test_kf59_restarted_old_leader_follows_the_new_one(tmp_path: Path) -> None:
    async with running_cluster(tmp_path) as cluster:
        nodes = await prepared(cluster)
        for running in nodes.values():
            await running.start()
        await until(lambda: nodes[1].up.enough_replicas and len(nodes[1].up.peers) == 3, "all are members")
        await cluster.same_logs()
        await nodes[1].crash()
        await nodes[2].up.promote()
        epoch = nodes[2].up.epoch
        await nodes[1].start()
        await until(lambda: nodes[1].up.role == "follower" and nodes[1].up.epoch == epoch, "it follows")
        await nodes[2].up.log.committed.wait(produce(nodes[2], b"by the new one").end)
        assert nodes[2].up.epoch == epoch
        await cluster.same_logs()
        # And the other way round: all are killed, and the node that led last leads again, whatever its program is.
        for running in nodes.values():
            await running.crash()
        for running in nodes.values():
            await running.start()
        await until(lambda: nodes[2].up.role == "leader", "the one that led last leads again")
        await cluster.same_logs()


async def test_leader_that_cannot_be_dialled_does_not_fight_the_new_one(tmp_path: Path) -> None:
    async with running_cluster(tmp_path) as cluster:
        leader = await cluster.leader_and(2, replication_mode="sync")
        await cluster.settled()
        await leader.crash()
        await cluster.nodes[2].up.promote()
        cluster.forgiving = True
        await leader.start()
        await leader.ended.wait()
        assert isinstance(_leaf(leader.error), CannotLead)
        assert "node 2 leads since epoch 2" in str(_leaf(leader.error))
        assert cluster.nodes[2].up.epoch == 2


async def test_kf57_async_leader_that_promised_another_does_not_start_alone(tmp_path: Path) -> None:
    async with running_cluster(tmp_path) as cluster:
        leader = await cluster.leader_and(1, wal_receiver_enabled="true")
        await cluster.same_logs()
        await cluster.nodes[2].up.promote()  # the old leader promised it its loyalty …
        await until(lambda: leader.up.role == "follower", "the old one follows")
        produce(cluster.nodes[2], b"by the new one")
        await leader.crash()  # … and may not have taken the new epoch's start yet
        await cluster.nodes[2].crash()
        await leader.start()
        with pytest.raises(Refused):
            await leader.up.promote()
        assert leader.up.role != "leader"


async def test_mode_and_sync_replicas_are_changed_by_variables_and_kept_by_the_log(tmp_path: Path) -> None:
    async with running_cluster(tmp_path) as cluster:
        leader = await cluster.leader_and(2, replication_mode="sync", replication_sync_replicas="2")
        assert leader.up.status().sync_replicas == 2
        await leader.crash()
        del leader.variables["replication_mode"], leader.variables["replication_sync_replicas"]
        await leader.start()
        await until(lambda: leader.up.enough_replicas, "it leads")
        assert leader.up.status().sync_replicas == 2
        await leader.crash()
        leader.variables["replication_mode"] = "async"
        await leader.start()
        await until(lambda: leader.up.ready and leader.up.status().mode == "async", "k is 0 now")
        await cluster.same_logs()


async def test_accepted_loss_is_written_and_what_is_cut_is_kept(tmp_path: Path) -> None:
    async with running_cluster(tmp_path) as cluster:
        nodes = await prepared(cluster, replication_mode="async")
        for running in nodes.values():
            await running.start()
        await until(lambda: nodes[1].up.accepting and len(nodes[1].up.peers) == 3, "all are members")
        await cluster.settled()
        for node_id in (2, 3):
            await nodes[node_id].crash()
        lost = produce(nodes[1], b"acked by the leader alone")
        await nodes[1].up.log.committed.wait(lost.end)
        await nodes[1].crash()
        for node_id in (2, 3):
            await nodes[node_id].start()
        with pytest.raises(Refused, match="no answer from node 1"):
            await nodes[2].up.promote()
        await nodes[2].up.promote(accept_loss=True)
        assert nodes[2].up.log.state.history[-1].accept_loss
        assert [peer.node_id for peer in nodes[2].up.peers] == [2, 3]
        produce(nodes[2], b"the new history")
        await cluster.same_logs(nodes[2], nodes[3])
        await nodes[1].start()
        await nodes[2].up.command({"command": "members-add", "address": nodes[1].address}, print)
        await cluster.same_logs()
        kept = b"".join(file.read_bytes() for file in sorted((nodes[1].path / "lost").iterdir()))
        assert b"acked by the leader alone" in kept
        assert await produced(nodes[1]) == [b"the new history"]


async def test_accepted_loss_outlasts_epochs_that_its_leader_never_heard_of(tmp_path: Path) -> None:
    """Those who were gone have promised later epochs than the candidate knew: they follow it all the same when they
    come back, and do not depose it."""
    async with running_cluster(tmp_path) as cluster:
        nodes = await prepared(cluster)
        for running in nodes.values():
            await running.start()
        await until(lambda: nodes[1].up.accepting and len(nodes[1].up.peers) == 3, "all are members")
        await cluster.settled()
        await nodes[3].crash()
        for leader in (2, 1, 2, 1):  # epochs 2 to 5
            await until(lambda: nodes[1].up.enough_replicas or nodes[2].up.enough_replicas, "one follows the other")
            await nodes[leader].up.promote()
        lost = produce(nodes[1], b"while node 3 was away")
        await nodes[1].up.log.committed.wait(lost.end)
        for node_id in (1, 2):
            await nodes[node_id].crash()
        await nodes[3].start()
        await nodes[3].up.promote(accept_loss=True)
        produce(nodes[3], b"the new history")
        for node_id in (1, 2):
            await nodes[node_id].start()
            await nodes[3].up.command({"command": "members-add", "address": nodes[node_id].address}, print)
        await cluster.same_logs()
        assert nodes[3].up.role == "leader"
        assert await produced(nodes[1]) == [b"the new history"]


async def test_an_address_where_nobody_answers_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("chronik_repl.leader.ANSWER_TIMEOUT_S", 0.3)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and does not listen
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        async with running_cluster(tmp_path) as cluster:
            leader = await cluster.leader_and(1)
            with (
                trio.fail_after(10),
                pytest.raises(Refused, match=f"nobody answers at {address}: .*correct the address"),
            ):
                await leader.up.command({"command": "members-add", "address": address}, print)
            assert [follower.address for follower in leader.up.status().followers] == [cluster.nodes[2].address]


async def test_a_node_of_another_cluster_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("chronik_repl.leader.ANSWER_TIMEOUT_S", 0.3)
    async with running_cluster(tmp_path) as cluster, running_cluster(tmp_path / "another") as another:
        leader = await cluster.leader_and(1)
        await another.leader_and(1)
        stranger = another.nodes[2].address
        why = f"node 2 at {stranger} cannot be added: .* of cluster .*: correct the address"
        with trio.fail_after(10), pytest.raises(Refused, match=why):
            await leader.up.command({"command": "members-add", "address": stranger}, print)
        assert [follower.address for follower in leader.up.status().followers] == [cluster.nodes[2].address]


async def test_a_member_that_never_answered_this_leader_is_known_by_its_address(tmp_path: Path) -> None:
    """Who it is, why it does not answer, and that it counts; and once it is removed nobody dials it any more."""
    async with running_cluster(tmp_path) as cluster:
        leader = await cluster.leader_and(1)
        gone = cluster.nodes.pop(2)
        await gone.crash()
        await leader.crash()
        await leader.start()
        await until(lambda: bool(leader.up.status().followers), "it leads again")
        await until(lambda: bool(leader.up.status().followers[0].detail), "it has dialled")
        (follower,) = leader.up.status().followers
        assert (follower.node_id, follower.member, follower.state) == (2, True, "connecting")
        assert follower.detail == f"cannot connect to {gone.address}: Connection refused"
        await leader.up.command({"command": "members-remove", "node_id": 2}, print)
        assert leader.up.status().followers == ()


async def test_where_nobody_leads_nobody_is_named_to_change_members(tmp_path: Path) -> None:
    async with running_cluster(tmp_path) as cluster:
        leader = await cluster.leader_and(1)
        follower = cluster.nodes[2].up
        command = {"command": "members-remove", "node_id": 1}
        with pytest.raises(Refused, match="node 1 leads: run it there"):
            await follower.command(command, print)
        await leader.crash()
        del cluster.nodes[1]
        await until(lambda: bool(follower.status().no_leader), "it is missed")
        with pytest.raises(Refused, match="nobody leads: see `chronik status`"):
            await follower.command(command, print)


async def test_drained_leader_loses_nothing_that_was_pending(tmp_path: Path) -> None:
    """While records stream in, another node is promoted: every record that was accepted is in the new leader's log."""
    async with running_cluster(tmp_path) as cluster:
        leader = await cluster.leader_and(2, replication_mode="sync", wal_receiver_enabled="true")
        accepted: list[bytes] = []
        waiting: list[int] = []

        async def load() -> None:
            number = 0
            while leader.up.accepting:
                accepted.append(b"%d" % number)
                waiting.append(produce(leader, accepted[-1]).end)
                number += 1
                await trio.lowlevel.checkpoint()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(load)
            await until(lambda: len(accepted) > 200, "records stream in")
            await cluster.nodes[2].up.promote()
        new = cluster.nodes[2].up.log
        await new.committed.wait(new.end)
        assert await produced(cluster.nodes[2]) == accepted
        with pytest.raises(NotLeader):
            produce(leader, b"too late")
        await until(lambda: leader.up.role == "follower", "it follows")
        await cluster.same_logs()


def _leaf(error: BaseException | None) -> BaseException | None:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
