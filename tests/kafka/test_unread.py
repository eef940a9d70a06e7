"""Clients that ask for large answers and never read them, against a real process whose memory is measured."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import trio

from chronik_repl.addresses import split_address
from chronik_repl.kafka import codec
from chronik_repl.kafka.context import KIB, MIB
from tests.end_to_end.processes import Process, running_processes, until
from tests.kafka.client import KafkaClient, batch, connect

MEMBERS, METADATA_BYTES = 8, 900 * KIB
ANSWER_BYTES = MEMBERS * METADATA_BYTES
INFLIGHT_BYTES = 32 * MIB  # half of it for answers
SLACK_BYTES = 40 * MIB  # of the process, beside what it promises
CROWD = 40
QUIET_S, IDLE_TICKS = 1.0, 4


def memory_of(process: Process) -> int:
    """What it has in memory now."""
    pages = (Path("/proc") / str(process.process.pid) / "statm").read_text().split()[1]
    return int(pages) * 4 * KIB


def count_of(process: Process, metric: str) -> float:
    lines = (process.get("/metrics") or "").splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(metric))


def cpu_of(process: Process) -> int:
    """In hundredths of a second."""
    fields = (Path("/proc") / str(process.process.pid) / "stat").read_text().rsplit(")", 1)[1].split()
    return int(fields[11]) + int(fields[12])


async def highest_memory(process: Process, done: Callable[[], bool]) -> int:
    """Until all is answered, or nothing more is done for it."""
    highest, worked, quiet_since = 0, 0, trio.current_time()
    with trio.fail_after(60):
        while not done() and trio.current_time() - quiet_since < QUIET_S:
            highest = max(highest, memory_of(process))
            if (now := cpu_of(process)) > worked + IDLE_TICKS:
                worked, quiet_since = now, trio.current_time()
            await trio.sleep(0.05)
    return max(highest, memory_of(process))


async def one_who_never_reads(clients: AsyncExitStack, process: Process) -> KafkaClient:
    """With as little room in its socket as there may be."""
    sock = trio.socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 * KIB)
    host, port = split_address(process.kafka)
    await sock.connect((host, port))
    return KafkaClient(await clients.enter_async_context(trio.SocketStream(sock)))


@asynccontextmanager
async def with_a_large_group(path: Path) -> AsyncIterator[tuple[Process, Process]]:
    """A leader and its follower, and a group whose description takes megabytes."""
    with running_processes(path) as cluster:
        leader = cluster.leader_and(
            1,
            replication_mode="sync",
            kafka_max_inflight_bytes=str(INFLIGHT_BYTES),
            replication_heartbeat_timeout_secs="60",
        )
        until(lambda: leader.status()["sync_in_force"], "sync")
        async with AsyncExitStack() as clients:
            members = [await clients.enter_async_context(connect(leader.kafka)) for _ in range(MEMBERS)]
            assert await members[0].make_topic("t") == 0
            await form_group(members)
            yield leader, cluster.nodes[2]


def join() -> codec.JoinGroupRequest:
    return codec.JoinGroupRequest(
        group_id="g",
        session_timeout_ms=300_000,
        rebalance_timeout_ms=60_000,
        member_id="",
        protocol_type="consumer",
        protocols=[codec.JoinGroupRequest.JoinGroupRequestProtocol(name="range", metadata=bytes(METADATA_BYTES))],
    )


async def form_group(members: list[KafkaClient]) -> None:
    for member in members:  # within the time that an empty group gives its first members
        await member.send(join(), 3)
    joined = [await member.answer() for member in members]
    assert {answer.generation_id for answer in joined} == {joined[0].generation_id}
    for member, answer in zip(members, joined, strict=True):
        assignment = codec.SyncGroupRequest.SyncGroupRequestAssignment
        everyone = [assignment(member_id=other.member_id, assignment=b"") for other in joined]
        await member.send(
            codec.SyncGroupRequest(
                group_id="g",
                generation_id=answer.generation_id,
                member_id=answer.member_id,
                assignments=everyone if answer.leader == answer.member_id else [],
            ),
            2,
        )
    for member in members:
        assert (await member.answer()).error_code == 0


async def test_answers_that_many_clients_do_not_read_are_bounded_together(tmp_path: Path) -> None:
    async with with_a_large_group(tmp_path) as (leader, _), AsyncExitStack() as clients:
        before = memory_of(leader)
        for _ in range(CROWD):
            client = await one_who_never_reads(clients, leader)
            await client.send(codec.DescribeGroupsRequest(groups=["g"]), 0)

        def done() -> bool:
            answered = count_of(leader, 'chronik_kafka_requests_total{api="DescribeGroups"}')
            return answered == CROWD or count_of(leader, "chronik_kafka_connections_refused_total") > 0

        grown = await highest_memory(leader, done) - before
        assert grown < INFLIGHT_BYTES // 2 + ANSWER_BYTES + SLACK_BYTES


async def test_answers_behind_one_that_waits_are_bounded(tmp_path: Path) -> None:
    """The first of a connection's answers waits for a follower, so none of the others can be sent."""
    async with with_a_large_group(tmp_path) as (leader, follower), connect(leader.kafka) as client:
        before = memory_of(leader)
        follower.pause()
        try:
            await client.send(client.produce_request("t", batch(b"waits"), timeout_ms=60_000), 9)
            for _ in range(60):
                await client.send(codec.DescribeGroupsRequest(groups=["g"]), 0)
            grown = await highest_memory(leader, lambda: False) - before
        finally:
            follower.resume()
        assert grown < 8 * MIB + ANSWER_BYTES + SLACK_BYTES
        for _ in range(61):  # and in the end all of them come
            await client.answer()


async def test_a_group_that_is_named_often_is_described_once(tmp_path: Path) -> None:
    async with with_a_large_group(tmp_path) as (leader, _), connect(leader.kafka) as client:
        before = memory_of(leader)
        answer = await client.ask(codec.DescribeGroupsRequest(groups=["g"] * 50), 0)
        grown = memory_of(leader) - before
        assert len(answer.groups) == 1
        assert grown < ANSWER_BYTES + SLACK_BYTES
