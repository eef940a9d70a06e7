"""Clients of the HTTP door that are slow, silent, greedy or hostile: each within its limits, none in another's way."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import repeat
from pathlib import Path

import pytest
import trio

from chronik_repl.addresses import split_address
from chronik_repl.http.conversation import Limits
from tests.http.test_server import Door, opened

DEADLINE_S = 10


async def connect(door: Door) -> trio.SocketStream:
    host, port = split_address(door.address)
    return await trio.open_tcp_stream(host, port)


async def rest(stream: trio.SocketStream) -> bytes:
    """All that comes until the other side closes."""
    found = b""
    with trio.fail_after(DEADLINE_S):
        try:
            while piece := await stream.receive_some(65536):
                found += piece
        except trio.BrokenResourceError:
            pass  # closed with bytes of ours unread
    return found


async def until_closed(stream: trio.SocketStream, pieces: Iterable[bytes], pause_s: float = 0) -> None:
    """Send them; the other side must have closed before they are all sent."""
    with trio.fail_after(DEADLINE_S):
        try:
            for piece in pieces:
                await stream.send_all(piece)
                await trio.sleep(pause_s)
        except trio.BrokenResourceError:
            return
    pytest.fail("the connection was not closed")


def dropped(door: Door) -> dict[str, float]:
    return {reason: count for (reason,), count in door.house.meters.values["http_connections_dropped"].items()}


async def test_a_full_house_makes_room_for_those_who_come(tmp_path: Path) -> None:
    async with opened(tmp_path, Limits(connections_max=8)) as door:
        silent = [await connect(door) for _ in range(8)]
        assert (await door.get("/healthz"))[0] == 200, "the ninth"
        assert await rest(silent[0]) == b"", "the one that was there longest has left"
        await silent[-1].send_all(b"GET /healthz HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        assert (await rest(silent[-1])).endswith(b"ok\n"), "the others are still served"
        assert dropped(door) == {"made room": 1}


async def test_who_is_answered_keeps_a_place_before_who_says_nothing(tmp_path: Path) -> None:
    async with opened(tmp_path, Limits(connections_max=4)) as door:
        watcher = await connect(door)
        silent = [await connect(door) for _ in range(3)]
        await watcher.send_all(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
        assert b"200" in await watcher.receive_some(65536)
        await connect(door)
        assert await rest(silent[0]) == b""
        await watcher.send_all(b"GET /healthz HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        assert (await rest(watcher)).endswith(b"ok\n")


@pytest.mark.parametrize("first_request", [b"", b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n"], ids=["first", "later"])
async def test_a_byte_now_and_then_is_no_request(first_request: bytes, tmp_path: Path) -> None:
    """The deadline is for the whole request, not for each byte of it."""
    async with opened(tmp_path, Limits(request_timeout_s=0.5)) as door:
        stream = await connect(door)
        if first_request:
            await stream.send_all(first_request)
            assert b"200" in await stream.receive_some(65536)
        began = trio.current_time()
        await until_closed(stream, [bytes([byte]) for byte in b"GET /healthz HTTP/1.1\r\nX: " + b"x" * 1000], 0.02)
        assert 0.4 < trio.current_time() - began < DEADLINE_S
        assert dropped(door) == {"slow request": 1}


async def test_who_does_not_read_is_let_go(tmp_path: Path) -> None:
    async with opened(tmp_path, Limits(answer_timeout_s=0.5)) as door:
        stream = await connect(door)
        await until_closed(stream, repeat(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * 100))
        assert dropped(door) == {"slow reader": 1}


async def test_who_does_not_read_does_not_keep_the_node_from_ending(tmp_path: Path) -> None:
    with trio.fail_after(DEADLINE_S):
        async with opened(tmp_path) as door:
            stream = await connect(door)
            with trio.move_on_after(0.5):
                while True:
                    await stream.send_all(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * 100)


async def test_a_head_has_a_size(tmp_path: Path) -> None:
    async with opened(tmp_path) as door:
        stream = await connect(door)
        await stream.send_all(b"GET / HTTP/1.1\r\nHost: x\r\nX-Long: " + b"x" * 20_000)
        assert (await rest(stream)).startswith(b"HTTP/1.1 431 ")


@pytest.mark.parametrize("head", [b"Content-Length: 1000000000", b"Transfer-Encoding: chunked"])
@pytest.mark.parametrize(("method", "code"), [(b"POST", 405), (b"GET", 413)])
async def test_a_body_is_refused_before_it_is_read(method: bytes, code: int, head: bytes, tmp_path: Path) -> None:
    async with opened(tmp_path) as door:
        stream = await connect(door)
        await stream.send_all(method + b" /status HTTP/1.1\r\nHost: x\r\n" + head + b"\r\n\r\n")
        answer = await rest(stream)
        assert answer.startswith(b"HTTP/1.1 %d " % code)
        assert b"connection: close" in answer.lower()


async def test_a_refusal_arrives_though_the_body_is_on_its_way(tmp_path: Path) -> None:
    async with opened(tmp_path) as door:
        stream = await connect(door)
        await stream.send_all(b"POST /status HTTP/1.1\r\nHost: x\r\nContent-Length: 100000\r\n\r\n" + b"x" * 100_000)
        assert (await rest(stream)).startswith(b"HTTP/1.1 405 ")


NONSENSE = (
    b"\x16\x03\x01\x02\x00\x01\r\n\r\n",
    b"GET / HTTP/9\r\n\r\n",
    b"\0" * 20_000,
    b"GET /status HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n",
    b"GET /status HTTP/1.1\r\n\r\n",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
)


@pytest.mark.parametrize("nonsense", NONSENSE)
async def test_nonsense_is_answered_and_ended(nonsense: bytes, tmp_path: Path) -> None:
    async with opened(tmp_path) as door:
        stream = await connect(door)
        await stream.send_all(nonsense)
        assert (await rest(stream)).startswith((b"HTTP/1.1 400 ", b"HTTP/1.1 431 ", b"HTTP/1.1 405 "))
        assert (await door.get("/healthz"))[0] == 200


@pytest.mark.parametrize("upgrade", [b"websocket", b"h2c"])
async def test_nobody_is_upgraded(upgrade: bytes, tmp_path: Path) -> None:
    async with opened(tmp_path) as door:
        stream = await connect(door)
        await stream.send_all(
            b"GET /healthz HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: " + upgrade + b"\r\n\r\n"
        )
        assert (await rest(stream)).startswith(b"HTTP/1.1 200 ")


async def test_requests_in_one_go_are_answered_in_order(tmp_path: Path) -> None:
    async with opened(tmp_path) as door:
        stream = await connect(door)
        await stream.send_all(
            b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\nHEAD /status HTTP/1.1\r\nHost: x\r\n\r\n"
            b"GET /nowhere HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
        )
        answers = (await rest(stream)).split(b"HTTP/1.1 ")[1:]
        assert [answer[:3] for answer in answers] == [b"200", b"200", b"404"]
        assert answers[1].endswith(b"\r\n\r\n"), "HEAD has no body"
