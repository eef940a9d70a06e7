"""Bytes to and from one client: a plain socket, or TLS over it.

Both offer the same four moves. Two never wait (`receive_now`, `send_now`) and are what most requests take: data that is
there is read, an answer that fits into the socket's buffer is gone, and no other task runs in between. Two wait. A
plain socket is driven by its own system calls and trio's readiness waits, because trio's streams reschedule the task on
every call, which costs more than the call. TLS goes through trio's own stream; its `_now` moves do nothing and say so.

A peer that is gone raises OSError from any of them. What an interrupted send left behind nobody knows: close.
"""

from __future__ import annotations

import socket
import ssl
from collections.abc import Sequence
from typing import Protocol

import trio

Buffer = bytes | bytearray | memoryview
PIECES_MAX = 512  # of one gathering send; the kernel's own limit is 1024


class Wire(Protocol):
    def receive_now(self, into: memoryview) -> int | None:
        """How many bytes came, 0 at the end of the stream; None: nothing is there yet."""

    async def receive(self, into: memoryview) -> int:
        """The same, waiting for at least one byte."""

    def send_now(self, pieces: Sequence[Buffer]) -> int:
        """How many bytes of the pieces are on their way."""

    async def send(self, pieces: Sequence[Buffer]) -> None:
        """All of them."""

    async def close(self) -> None: ...


def rest_of(pieces: Sequence[Buffer], sent: int) -> list[Buffer]:
    """What remains after `sent` bytes; nothing is copied."""
    for index, piece in enumerate(pieces):
        size = len(piece)
        if sent < size:
            rest = list(pieces[index:])
            if sent:
                rest[0] = memoryview(piece)[sent:]
            return rest
        sent -= size
    return []


def first_of(pieces: Sequence[Buffer], size_max: int) -> list[Buffer]:
    """As much of the pieces' beginning; nothing is copied."""
    first: list[Buffer] = []
    for piece in pieces:
        if len(piece) >= size_max:
            first.append(memoryview(piece)[:size_max])
            break
        first.append(piece)
        size_max -= len(piece)
    return first


class PlainWire:
    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # known failure 36
        self._socket = sock
        self._send = sock.send
        self._receive_into = sock.recv_into

    def fileno(self) -> int:
        return self._socket.fileno()

    def receive_now(self, into: memoryview) -> int | None:
        try:
            return self._receive_into(into)
        except (BlockingIOError, InterruptedError):
            return None

    async def receive(self, into: memoryview) -> int:
        while True:
            await trio.lowlevel.wait_readable(self._socket)
            count = self.receive_now(into)
            if count is not None:
                return count

    def send_now(self, pieces: Sequence[Buffer]) -> int:
        try:
            if len(pieces) == 1:
                return self._send(pieces[0])
            return self._socket.sendmsg(pieces[:PIECES_MAX])
        except (BlockingIOError, InterruptedError):
            return 0

    async def send(self, pieces: Sequence[Buffer]) -> None:
        while pieces:
            sent = self.send_now(pieces)
            if sent:
                pieces = rest_of(pieces, sent)
                await trio.lowlevel.checkpoint()
            else:
                await trio.lowlevel.wait_writable(self._socket)

    async def close(self) -> None:
        trio.lowlevel.notify_closing(self._socket)
        self._socket.close()


class TlsWire:
    RECORD = 16 * 1024  # of TLS: a larger send is no faster

    def __init__(self, stream: trio.SSLStream[trio.SocketStream]) -> None:
        self._stream = stream

    @classmethod
    async def accept(cls, sock: socket.socket, context: ssl.SSLContext) -> TlsWire:
        """After the handshake. Raises OSError for a peer that does not speak TLS, or shows no certificate of ours."""
        stream = trio.SSLStream(
            trio.SocketStream(trio.socket.from_stdlib_socket(sock)), context, server_side=True, https_compatible=True
        )
        try:
            await stream.do_handshake()
        except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
            await trio.aclose_forcefully(stream)
            cause = error.__cause__
            raise ConnectionError(str(cause or "the TLS handshake failed")) from error
        return cls(stream)

    def receive_now(self, into: memoryview) -> int | None:
        return None

    async def receive(self, into: memoryview) -> int:
        try:
            data = await self._stream.receive_some(len(into))
        except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
            raise ConnectionError(str(error.__cause__ or error)) from error
        into[: len(data)] = data
        return len(data)

    def send_now(self, pieces: Sequence[Buffer]) -> int:
        return 0

    async def send(self, pieces: Sequence[Buffer]) -> None:
        try:
            small: list[Buffer] = []
            size = 0
            for piece in pieces:
                if size + len(piece) > self.RECORD and small:
                    await self._stream.send_all(b"".join(small))
                    small, size = [], 0
                if len(piece) >= self.RECORD:
                    await self._stream.send_all(piece)
                else:
                    small.append(piece)
                    size += len(piece)
            if small:
                await self._stream.send_all(b"".join(small))
        except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
            raise ConnectionError(str(error.__cause__ or error)) from error

    async def close(self) -> None:
        await trio.aclose_forcefully(self._stream)
