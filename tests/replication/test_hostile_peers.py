"""Known failures 45 to 50: what a stranger, or a broken peer, sends to a node. It is dropped; the cluster goes on."""

from __future__ import annotations

import struct
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path

import msgspec
import pytest
import trio

from chronik_repl.replication import session
from chronik_repl.replication.messages import (
    PROTOCOL,
    Answer,
    Committed,
    Handshake,
    HandshakeAnswer,
    Heartbeat,
    Purpose,
    Truncate,
    encode,
)
from chronik_repl.wal.frame import encode as encode_frame
from chronik_repl.wal.frame import topic_prefix
from tests.replication.cluster import Cluster, Running, produce, running_cluster, until

HEAD = struct.Struct(">2sHI")


@pytest.fixture(autouse=True)
def quick_handshakes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "HANDSHAKE_TIMEOUT_S", 0.5)


async def connect(address: str) -> trio.SocketStream:
    host, port = address.rsplit(":", 1)
    return await trio.open_tcp_stream(host, int(port))


async def dropped(stream: trio.SocketStream, within_s: float = 3.0) -> bytes:
    """The peer closes this connection in time; what it said before."""
    said = b""
    with trio.fail_after(within_s):
        try:
            while piece := await stream.receive_some(65536):
                said += bytes(piece)
        except trio.BrokenResourceError:
            pass
    await stream.aclose()
    return said


async def still_works(cluster: Cluster, leader: Running) -> None:
    produce(leader, b"the cluster goes on")
    await cluster.same_logs()


def handshake(cluster: str, /, **fields: object) -> Handshake:
    values: dict[str, object] = {"protocol": PROTOCOL, "cluster_id": cluster, "node_id": 9, "epoch": 99}
    values |= {"directory_id": "d" * 32, "purpose": Purpose.SHIP}
    return Handshake(**(values | fields))  # type: ignore[arg-type]


SHOTS = {
    "kf45_length_of_4_gib": HEAD.pack(b"HS", 1, 2**32 - 1),
    "kf45_frame_length_of_4_gib": HEAD.pack(b"WA", 2, 2**32 - 1),
    "kf46_tls_client_hello": bytes.fromhex("1603010200010001fc0303") + bytes(600),
    "kf46_http": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "kf47_deep_msgpack": HEAD.pack(b"HS", 1, 100_000) + b"\x91" * 100_000,
    "kf47_huge_msgpack": HEAD.pack(b"HS", 1, 9) + b"\xdd\xff\xff\xff\xff\x01\x02\x03\x04",
    "kf47_bad_utf8": HEAD.pack(b"HS", 1, 6) + b"\x81\xa4\xff\xfe\xff\xfe",
    "kf50_unknown_kind_of_message": HEAD.pack(b"ZZ", 1, 0),
    "kf50_frames_before_the_handshake": encode_frame(topic_prefix("t"), 0, 1, 0, 0, 1, 0, 0, 0, (b"x",))[0],
    "kf50_a_session_without_handshake": encode(Heartbeat(1, 2, 3)),
    "nothing_but_zeros": bytes(4096),
}


@pytest.mark.parametrize("shot", SHOTS)
async def test_nonsense_is_dropped(tmp_path: Path, shot: str) -> None:
    async with running_cluster(tmp_path) as cluster:
        leader = await cluster.leader_and(1, wal_receiver_enabled="true")
        for running in cluster.nodes.values():
            stream = await connect(running.address)
            with suppress(trio.BrokenResourceError):
                await stream.send_all(SHOTS[shot])
            await dropped(stream)
        await still_works(cluster, leader)


async def test_kf48_silence_before_the_handshake(tmp_path: Path) -> None:
    async with running_cluster(tmp_path) as cluster:
        leader = await cluster.leader_and(1)
        assert await dropped(await connect(cluster.nodes[2].address)) == b""
        await still_works(cluster, leader)


async def test_kf48_silence_after_the_handshake(tmp_path: Path) -> None:
    """A would-be leader of a later epoch that says no more: its session ends; the cluster finds a leader again."""
    async with running_cluster(tmp_path) as cluster:
        leader = await cluster.leader_and(1, wal_receiver_enabled="true")
        stream = await connect(cluster.nodes[2].address)
        await stream.send_all(encode(handshake(leader.up.cluster_id)))
        said = await dropped(stream)
        assert said.startswith(b"HA")
        await until(lambda: leader.up.accepting and leader.up.epoch > 99, "somebody leads again")
        await still_works(cluster, leader)


@pytest.mark.parametrize("what", ["before", "after"])
async def test_kf49_a_byte_now_and_then(tmp_path: Path, what: str) -> None:
    """The deadline is for the whole message, not for the next byte. (Nobody else is there to end the session.)"""
    async with running_cluster(tmp_path) as cluster:
        running = await cluster.add(2)
        stream = await connect(running.address)
        drip = encode(handshake("drops"))
        allowed_s = 0.5
        if what == "after":
            await stream.send_all(drip + encode(Truncate(99, 0, 0)))
            drip = HEAD.pack(b"CM", 1, 1000) + bytes(1000)
            allowed_s = running.up._local.settings.replication_heartbeat_timeout_secs
        began = trio.current_time()
        with trio.fail_after(10):
            try:
                for byte in drip:
                    await stream.send_all(bytes([byte]))
                    await trio.sleep(0.1)
            except trio.BrokenResourceError:
                pass
            await dropped(stream)
        assert allowed_s - 0.1 < trio.current_time() - began < allowed_s + 1


async def test_kf48_silence_in_a_session(tmp_path: Path) -> None:
    async with running_cluster(tmp_path) as cluster:
        running = await cluster.add(2)
        stream = await connect(running.address)
        await stream.send_all(encode(handshake("drops")) + encode(Truncate(99, 0, 0)))
        await until(lambda: running.up.status().leader is not None, "it follows")
        await dropped(stream)
        assert running.up.status().leader.live is False  # type: ignore[union-attr]


REFUSED: dict[str, tuple[dict[str, object], Answer, str]] = {
    "kf50_another_cluster": ({"cluster_id": "another"}, Answer.OTHER_CLUSTER, "correct the address"),
    "kf50_another_protocol": ({"protocol": 99}, Answer.OTHER_PROTOCOL, "upgrade the older"),
    "an_older_epoch": ({"epoch": 1}, Answer.PROMISED, "is promised to node 1"),
    "the_same_node_id": ({"node_id": 2}, Answer.SAME_NODE_ID, "give the newer one its own"),
}


@pytest.mark.parametrize("case", REFUSED)
async def test_strangers_are_refused_with_a_reason(tmp_path: Path, case: str) -> None:
    async with running_cluster(tmp_path) as cluster:
        leader = await cluster.leader_and(1)
        fields, status, says = REFUSED[case]
        stream = await connect(cluster.nodes[2].address)
        await stream.send_all(encode(handshake(leader.up.cluster_id, **fields)))
        answer = msgspec.msgpack.decode((await dropped(stream))[8:], type=HandshakeAnswer)
        assert answer.status == status
        assert says in answer.reason
        await still_works(cluster, leader)


async def test_kf54_a_copied_directory_is_refused(tmp_path: Path) -> None:
    async with running_cluster(tmp_path) as cluster:
        leader = await cluster.leader_and(1)
        me = cluster.nodes[2].up._local.me
        stream = await connect(cluster.nodes[2].address)
        await stream.send_all(encode(handshake(leader.up.cluster_id, directory_id=me.directory_id)))
        answer = msgspec.msgpack.decode((await dropped(stream))[8:], type=HandshakeAnswer)
        assert answer.status == Answer.SAME_DIRECTORY
        assert "copy with `chronik backup`" in answer.reason
        await still_works(cluster, leader)


def frame(position: int, previous: int, **fields: object) -> bytes:
    values: dict[str, object] = {"topic": "t", "kind": 0, "epoch": 99, "data": b"x"}
    values |= fields
    prefix = struct.pack(">H", len(str(values["topic"]))) + str(values["topic"]).encode()
    return encode_frame(
        prefix, 0, 1, 0, values["kind"], values["epoch"], position, previous, 0, (values["data"],)  # type: ignore[arg-type]
    )[0]  # fmt: skip


async def session_with(running: Running, leader: Running, after: Callable[[int, int], list[bytes]]) -> None:
    """Play a leader of epoch 99 to this follower, up to the frames; it must drop us then."""
    log = running.up.log
    stream = await connect(running.address)
    history = tuple(log.state.history)
    await stream.send_all(
        encode(handshake(leader.up.cluster_id, history=history, log_end=log.end, log_start=log.start))
    )
    await stream.send_all(encode(Truncate(99, log.end, log.end_checksum)))
    end = log.end
    for piece in after(log.end, log.end_checksum):
        await stream.send_all(piece)
    await dropped(stream)
    assert running.up.log.end == end


FRAMES: dict[str, Callable[[int, int], list[bytes]]] = {
    "kf50_unknown_kind": lambda end, chain: [frame(end, chain, kind=77)],
    "kf50_topic_with_slashes": lambda end, chain: [frame(end, chain, topic="../../etc/passwd")],
    "kf50_unknown_version": lambda end, chain: [b"WA\x00\x63" + frame(end, chain)[4:]],
    "kf24_gap_in_positions": lambda end, chain: [frame(end + 100, chain)],
    "a_frame_that_follows_another": lambda end, chain: [frame(end, chain ^ 1)],
    "a_flipped_bit": lambda end, chain: [bytes([*frame(end, chain)[:-1], 0])],
    "an_epoch_without_a_beginning": lambda end, chain: [frame(end, chain)],
    "a_segment_nobody_asked_for": lambda end, chain: [HEAD.pack(b"RQ", 1, 20) + bytes(20)],
    "a_second_truncation": lambda end, chain: [encode(Truncate(99, 0, 0))],
    "an_answer_instead": lambda end, chain: [encode(Handshake(1, "x", 9, "d", 99))],
}


@pytest.mark.parametrize("case", FRAMES)
async def test_bad_frames_end_the_session_and_change_nothing(tmp_path: Path, case: str) -> None:
    async with running_cluster(tmp_path) as cluster:
        leader = await cluster.leader_and(1, wal_receiver_enabled="true")
        await session_with(cluster.nodes[2], leader, FRAMES[case])
        await until(lambda: leader.up.accepting, "somebody leads again")
        await still_works(cluster, leader)


async def test_truncation_below_the_high_watermark_is_refused_on_both_sides(tmp_path: Path) -> None:
    async with running_cluster(tmp_path) as cluster:
        leader = await cluster.leader_and(1, wal_receiver_enabled="true")
        produce(leader, b"committed")
        await cluster.same_logs()
        running = cluster.nodes[2]
        end = running.up.log.end
        stream = await connect(running.address)
        await stream.send_all(encode(handshake(leader.up.cluster_id)))
        await stream.send_all(encode(Truncate(99, 0, 0)))
        said = await dropped(stream)
        assert b"high watermark" in said
        assert running.up.log.end == end
        assert not running.up.serving
        await until(lambda: running.up.serving, "a session with the true leader heals that")
        await still_works(cluster, leader)


async def test_kf56_high_watermark_is_not_believed_before_the_truncation(tmp_path: Path) -> None:
    async with running_cluster(tmp_path) as cluster:
        leader = await cluster.leader_and(1, replication_mode="sync", wal_receiver_enabled="true")
        running = cluster.nodes[2]
        before = running.up.log.committed.value
        stream = await connect(running.address)
        await stream.send_all(encode(handshake(leader.up.cluster_id)) + encode(Committed(1 << 40)))
        await dropped(stream)
        assert running.up.log.committed.value == before


Peer = Callable[[trio.SocketStream], Awaitable[None]]


async def garbage(stream: trio.SocketStream) -> None:
    await stream.send_all(bytes(range(256)) * 16)


async def silence(stream: trio.SocketStream) -> None:
    await trio.sleep_forever()


async def wrong_answer(stream: trio.SocketStream) -> None:
    await stream.receive_some(65536)
    await stream.send_all(encode(Heartbeat(1, 2, 3)))
    await trio.sleep_forever()


async def huge_ack(stream: trio.SocketStream) -> None:
    asked = await stream.receive_some(65536)
    hello = msgspec.msgpack.decode(asked[8:], type=Handshake)
    answer = HandshakeAnswer(Answer.OK, "", PROTOCOL, hello.cluster_id, 9, "e" * 32, hello.epoch, hello.node_id)
    await stream.send_all(encode(answer) + HEAD.pack(b"AK", 1, 2**31))
    await trio.sleep_forever()


async def lying_ack(stream: trio.SocketStream) -> None:
    """Acks what was never sent."""
    asked = await stream.receive_some(65536)
    hello = msgspec.msgpack.decode(asked[8:], type=Handshake)
    answer = HandshakeAnswer(Answer.OK, "", PROTOCOL, hello.cluster_id, 9, "e" * 32, hello.epoch, hello.node_id)
    body = msgspec.msgpack.encode({"position": 1 << 40, "checksum": 0})
    await stream.send_all(encode(answer) + HEAD.pack(b"AK", 1, len(body)) + body)
    await trio.sleep_forever()


async def wrong_chain(stream: trio.SocketStream) -> None:
    asked = await stream.receive_some(65536)
    hello = msgspec.msgpack.decode(asked[8:], type=Handshake)
    answer = HandshakeAnswer(Answer.OK, "", PROTOCOL, hello.cluster_id, 9, "e" * 32, hello.epoch, hello.node_id)
    body = msgspec.msgpack.encode({"position": 0, "checksum": 12345})
    await stream.send_all(encode(answer) + HEAD.pack(b"AK", 1, len(body)) + body)
    await trio.sleep_forever()


@pytest.mark.parametrize("peer", [garbage, silence, wrong_answer, huge_ack, lying_ack, wrong_chain])
async def test_a_bad_follower_costs_the_others_nothing(tmp_path: Path, peer: Peer) -> None:
    async with running_cluster(tmp_path) as cluster:
        leader = await cluster.leader_and(1, replication_mode="sync")

        async def serve(stream: trio.SocketStream) -> None:
            with suppress(trio.BrokenResourceError):
                await peer(stream)

        listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
        cluster.nursery.start_soon(trio.serve_listeners, serve, listeners)
        address = "{}:{}".format(*listeners[0].socket.getsockname())
        cluster.nursery.start_soon(_add, leader, address)

        def seen() -> bool:
            return any(f.address == address and f.detail for f in leader.up.status().followers)

        await until(seen, "the leader has something to say of it")
        await still_works(cluster, leader)
        bad = next(f for f in leader.up.status().followers if f.address == address)
        assert not bad.member
        if peer is wrong_chain:
            assert bad.parity_mismatches > 0


async def _add(leader: Running, address: str) -> None:
    await leader.up.command({"command": "members-add", "address": address}, print)
