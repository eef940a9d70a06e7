"""A sync cluster that begins, or goes on, with fewer followers than it asks for: it promises nothing, and says so."""

from __future__ import annotations

from pathlib import Path

from chronik_repl.kafka import codec
from chronik_repl.kafka.codes import Code
from tests.end_to_end.processes import Process, running_processes, until
from tests.kafka.client import KafkaClient, batch, connect

REFUSED = "NOT_ENOUGH_REPLICAS until 1 follower has joined"


async def take_id(client: KafkaClient) -> int:
    return int((await client.ask(codec.InitProducerIdRequest(transactional_id=None), 4)).error_code)


async def refuses(leader: Process) -> None:
    """Nothing is appended for whoever wants more than this node's own disk; acks=1 goes on."""
    async with connect(leader.kafka) as client:
        end = leader.status()["log"]["end"]
        assert (await client.produce("t", batch(b"all"))).error_code == Code.NOT_ENOUGH_REPLICAS
        assert await take_id(client) == Code.COORDINATOR_LOAD_IN_PROGRESS
        assert await client.make_topic("another") == Code.NOT_ENOUGH_REPLICAS
        assert leader.status()["log"]["end"] == end
        assert (await client.produce("t", batch(b"one"), acks=1)).error_code == Code.NONE


async def accepts(leader: Process) -> None:
    async with connect(leader.kafka) as client:
        assert (await client.produce("t", batch(b"all"))).error_code == Code.NONE
        assert await take_id(client) == Code.NONE
        assert await client.make_topic("another") == Code.NONE


async def test_kf34_a_sync_leader_alone_acks_nothing_for_all(tmp_path: Path) -> None:
    with running_processes(tmp_path) as cluster:
        leader = cluster.add(1, "leader")
        leader.start()
        leader.wait_ready()
        async with connect(leader.kafka) as client:
            assert await client.make_topic("t") == Code.NONE  # while it is an async one
        leader.kill()
        leader.start(replication_mode="sync")
        leader.wait_ready()  # it leads, and takes acks=1
        status = leader.status()
        assert (status["mode"], status["sync_replicas"], status["sync_in_force"]) == ("sync", 1, False)
        assert status["acks_all_means"] == REFUSED
        assert "chronik_sync_replicas 1" in leader.get("/metrics")
        await refuses(leader)
        until(lambda: f"acks=all means {REFUSED}" in leader.said(), "it says so")
        follower = cluster.add(2)
        follower.start()
        leader.call("members-add", address=follower.replication)
        until(lambda: leader.status()["sync_in_force"], "one follower is enough")
        assert "from now on acks=all means durable on the leader and 1 follower" in leader.said()
        await accepts(leader)
