"""The real network: who gets in, and who does not."""

from __future__ import annotations

import random
import ssl
from pathlib import Path

import pytest
import trio

from chronik_repl import certs
from chronik_repl.errors import ConfigError, Refused
from chronik_repl.replication import tcp
from chronik_repl.replication.network import Stream
from chronik_repl.replication.tcp import TcpNetwork, tls_contexts
from chronik_repl.replication.tls import TlsStream
from tests.replication.cluster import Running, produce, running_cluster, until


def network(folder: Path, node: str) -> TcpNetwork:
    return TcpNetwork(tls_contexts(str(folder / f"{node}.pem"), str(folder / f"{node}.key"), str(folder / "ca.pem")))


async def receive_some(stream: Stream, size: int) -> bytes:
    buffer = memoryview(bytearray(size))
    return bytes(buffer[: await stream.receive_into(buffer)])


async def echo(stream: Stream) -> None:
    while data := await receive_some(stream, 1000):
        await stream.send_all(data)


async def test_nodes_of_one_ca_talk_over_tls_1_3(tmp_path: Path) -> None:
    certs.make(tmp_path, ["node-1", "node-2"])
    async with trio.open_nursery() as nursery:
        address = await nursery.start(network(tmp_path, "node-1").listen, "127.0.0.1:0", echo)
        stream = await network(tmp_path, "node-2").dial(address)
        assert isinstance(stream, TlsStream)
        await stream.send_all(b"hello")
        assert await receive_some(stream, 100) == b"hello"
        assert stream.version() == "TLSv1.3"
        nursery.cancel_scope.cancel()


async def test_large_messages_pass_tls_both_ways_at_once(tmp_path: Path) -> None:
    certs.make(tmp_path, ["node-1", "node-2"])
    data = random.Random(1).randbytes(5_000_000)

    async def answer(stream: Stream) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(stream.send_all, data)
            nursery.start_soon(take, stream)

    async def take(stream: Stream) -> None:
        got = bytearray()
        while len(got) < len(data):
            piece = await receive_some(stream, 1 << 20)
            assert piece
            got += piece
        assert got == data

    with trio.fail_after(20):
        async with trio.open_nursery() as nursery:
            address = await nursery.start(network(tmp_path, "node-1").listen, "127.0.0.1:0", answer)
            await answer(await network(tmp_path, "node-2").dial(address))
            nursery.cancel_scope.cancel()


async def test_a_record_that_is_here_in_part_is_not_waited_for_again(tmp_path: Path) -> None:
    """Who waits for the whole of a message must not ask the socket for bytes that the TLS engine holds already."""
    certs.make(tmp_path, ["node-1", "node-2"])
    answered: list[TlsStream] = []
    there = trio.Event()

    async def answer(stream: Stream) -> None:
        assert isinstance(stream, TlsStream)
        answered.append(stream)
        there.set()
        await trio.sleep_forever()

    buffer = memoryview(bytearray(400_000))
    with trio.fail_after(10):
        async with trio.open_nursery() as nursery:
            address = await nursery.start(network(tmp_path, "node-1").listen, "127.0.0.1:0", answer)
            stream = await network(tmp_path, "node-2").dial(address)
            assert isinstance(stream, TlsStream)
            await there.wait()
            (far,) = answered
            await stream.send_all(bytes(300_000))  # so that it receives much at once from here on
            got = 0
            while got < 300_000:
                got += await far.receive_into(buffer)
            stream._encipher(bytes(100_000))
            ciphertext = stream._outgoing.read()
            await stream.transport.send_all(ciphertext[:60_000])
            got = await far.receive_into(buffer)
            while got < 45_000:
                got += await far.receive_into(buffer)
            await stream.transport.send_all(ciphertext[60_000:])
            while got < 100_000:
                got += await far.receive_into(buffer, 100_000 - got)
            nursery.cancel_scope.cancel()


@pytest.mark.parametrize("stranger", ["another CA", "no certificate", "plain text", "TLS 1.2"])
async def test_strangers_are_not_read_at_all(tmp_path: Path, stranger: str) -> None:
    certs.make(tmp_path / "ours", ["node-1", "node-2"])
    certs.make(tmp_path / "theirs", ["node-2"])
    heard: list[bytes] = []

    async def listen_to(stream: Stream) -> None:
        heard.append(await receive_some(stream, 100))

    with trio.fail_after(10):
        async with trio.open_nursery() as nursery:
            address = await nursery.start(network(tmp_path / "ours", "node-1").listen, "127.0.0.1:0", listen_to)
            host, port = address.split(":")
            plain = await trio.open_tcp_stream(host, int(port))
            stream: trio.abc.Stream = plain
            if stranger != "plain text":
                context = ssl.create_default_context(cafile=str(tmp_path / "ours" / "ca.pem"))
                context.check_hostname = False
                if stranger == "another CA":
                    context.load_cert_chain(tmp_path / "theirs" / "node-2.pem", tmp_path / "theirs" / "node-2.key")
                elif stranger == "TLS 1.2":
                    context.load_cert_chain(tmp_path / "ours" / "node-2.pem", tmp_path / "ours" / "node-2.key")
                    context.maximum_version = ssl.TLSVersion.TLSv1_2
                stream = trio.SSLStream(plain, context)
            with pytest.raises(trio.BrokenResourceError):  # noqa: PT012  where it shows depends on the stranger
                await stream.send_all(b"HS let me in")
                if await stream.receive_some(100) == b"":
                    raise trio.BrokenResourceError
            nursery.cancel_scope.cancel()
    assert heard == []


async def test_slow_tls_handshake_is_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp, "HANDSHAKE_TIMEOUT_S", 0.2)
    certs.make(tmp_path, ["node-1"])
    async with trio.open_nursery() as nursery:
        address = await nursery.start(network(tmp_path, "node-1").listen, "127.0.0.1:0", echo)
        host, port = address.split(":")
        with trio.fail_after(3):
            async with await trio.open_tcp_stream(host, int(port)) as silent:
                assert await silent.receive_some(1) == b""
        nursery.cancel_scope.cancel()


async def test_connections_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp, "CONNECTIONS_MAX", 2)
    async with trio.open_nursery() as nursery:
        address = await nursery.start(TcpNetwork().listen, "127.0.0.1:0", echo)
        host, port = address.split(":")
        kept = [await trio.open_tcp_stream(host, int(port)) for _ in range(2)]
        for stream in kept:
            await stream.send_all(b"x")
            assert await stream.receive_some(1) == b"x"
        with trio.fail_after(3):
            third = await trio.open_tcp_stream(host, int(port))
            with pytest.raises(trio.BrokenResourceError):  # noqa: PT012  closed on arrival; where it shows is a race
                while await third.receive_some(1):
                    pass
                raise trio.BrokenResourceError
        nursery.cancel_scope.cancel()


async def test_port_in_use_says_so() -> None:
    async with trio.open_nursery() as nursery:
        address = await nursery.start(TcpNetwork().listen, "127.0.0.1:0", echo)
        with pytest.raises(
            ConfigError, match=r"CHRONIK_WAL_RECEIVER_BIND_ADDR=.*cannot listen there: .*end the program that has it"
        ):
            await TcpNetwork().listen(address, echo)
        nursery.cancel_scope.cancel()


async def test_cluster_over_tls(tmp_path: Path) -> None:
    certs.make(tmp_path / "certs", ["node-1", "node-2"])
    async with running_cluster(tmp_path) as cluster:
        follower = cluster.nodes[2] = Running(cluster, 2, tmp_path / "node-2", "follower", {})
        await follower.start(network(tmp_path / "certs", "node-2"))
        listed = {"replication_followers": follower.address, "replication_mode": "sync"}
        leader = cluster.nodes[1] = Running(cluster, 1, tmp_path / "node-1", "leader", listed)
        await leader.start(network(tmp_path / "certs", "node-1"))
        await until(lambda: leader.up.accepting and leader.up.enough_replicas, "it leads")
        for number in range(200):
            produce(leader, b"%d" % number * 1000)
        await cluster.same_logs()


def test_unusable_certificates_are_a_config_error(tmp_path: Path) -> None:
    (tmp_path / "junk").write_text("junk")
    with pytest.raises(ConfigError, match="chronik certs"):
        tls_contexts(*[str(tmp_path / "junk")] * 3)


def test_certs_adds_nodes_to_the_same_ca_and_overwrites_nothing(tmp_path: Path) -> None:
    first = certs.make(tmp_path, ["node-1"])
    ca = (tmp_path / "ca.pem").read_bytes()
    assert len(first) == 4
    assert len(certs.make(tmp_path, ["node-2"], hosts=["node2.example", "10.0.0.2"])) == 2
    assert (tmp_path / "ca.pem").read_bytes() == ca
    assert (tmp_path / "node-2.key").stat().st_mode & 0o777 == 0o600
    with pytest.raises(Refused, match="there already"):
        certs.make(tmp_path, ["node-2"])
    (tmp_path / "ca.key").unlink()
    with pytest.raises(Refused, match="only one is there"):
        certs.make(tmp_path, ["node-3"])
