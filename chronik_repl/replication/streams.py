"""A TCP connection that carries much: received into the caller's memory, sent from where the frames stand.

trio's own stream makes a new object of what it receives, wants one buffer to send, and lets every other task run
after each call. At thousands of groups a second that is a good part of a node's time. Here a call that need not wait
does not; who calls on and on without waiting sees to it that others get their turn.
"""

from __future__ import annotations

import socket
from collections import deque

import trio

from chronik_repl.wal.seam import Buffer

PIECES_MAX = 512  # in one system call
LOW_WATER_BYTES_MIN = 32 * 1024  # for less than this it is not worth telling the kernel
LOW_WATER_BYTES_MAX = 1024 * 1024
TURN_BYTES = 1024 * 1024  # received without waiting, before others get a turn


class TcpStream:
    def __init__(self, sock: socket.socket) -> None:
        """A connected one that does not block."""
        self._socket = sock
        self._rest: deque[memoryview] = deque()  # was to be sent and has not left
        self._full = False  # the last receive filled its buffer: there may be more at once
        self._low_water_bytes = 1
        self._unbroken_bytes = 0  # received since others had a turn

    @property
    def socket(self) -> socket.socket:
        return self._socket

    def send_now(self, *pieces: Buffer) -> bool:
        if self._rest:
            self._rest.extend(memoryview(piece) for piece in pieces)
        else:
            size = sum(map(len, pieces))
            try:
                sent = self._socket.sendmsg(pieces if len(pieces) <= PIECES_MAX else pieces[:PIECES_MAX])
            except BlockingIOError:
                sent = 0
            except OSError as error:
                raise self._failed() from error
            if sent == size:
                return True
            self._rest.extend(memoryview(piece) for piece in pieces)
            self._left(sent)
            if len(pieces) <= PIECES_MAX:
                return False
        return self._push()

    def _push(self) -> bool:
        """As much of the rest as the kernel takes; True if that was all."""
        rest = self._rest
        while rest:
            pieces = [rest[n] for n in range(min(len(rest), PIECES_MAX))]
            try:
                sent = self._socket.sendmsg(pieces)
            except BlockingIOError:
                return False
            except OSError as error:
                raise self._failed() from error
            self._left(sent)
            if sent < sum(map(len, pieces)):
                return False  # it is full; trying again and again would fill every gap by itself
        return True

    def _left(self, size: int) -> None:
        rest = self._rest
        while rest and size >= len(rest[0]):
            size -= len(rest.popleft())
        if size:
            rest[0] = rest[0][size:]

    async def send_all(self, *pieces: Buffer) -> None:
        await trio.lowlevel.checkpoint_if_cancelled()
        # What was left over did not fit a moment ago: the kernel says when it is worth trying again.
        done = self.send_now(*pieces) if pieces else not self._rest
        while not done:
            await trio.lowlevel.wait_writable(self._socket)
            done = self._push()

    async def receive_into(self, buffer: memoryview, least: int = 1) -> int:
        if not self._full:
            await self._wait_for(least)
        elif self._unbroken_bytes > TURN_BYTES:
            self._unbroken_bytes = 0
            await trio.lowlevel.checkpoint()
        else:
            await trio.lowlevel.checkpoint_if_cancelled()
        while True:
            try:
                size = self._socket.recv_into(buffer)
            except BlockingIOError:
                await self._wait_for(least)
                continue
            except OSError as error:
                raise self._failed() from error
            self._full = size == len(buffer)
            self._unbroken_bytes += size
            return size

    async def _wait_for(self, least: int) -> None:
        self._unbroken_bytes = 0
        low_water_bytes = min(least, LOW_WATER_BYTES_MAX) if least >= LOW_WATER_BYTES_MIN else 1
        if low_water_bytes != self._low_water_bytes:
            try:
                self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, low_water_bytes)
            except OSError as error:
                raise self._failed() from error
            self._low_water_bytes = low_water_bytes
        if self._socket.fileno() < 0:
            raise trio.ClosedResourceError
        await trio.lowlevel.wait_readable(self._socket)

    def _failed(self) -> Exception:
        return trio.ClosedResourceError() if self._socket.fileno() < 0 else trio.BrokenResourceError()

    def close(self) -> None:
        """Whoever waits gets ClosedResourceError."""
        if self._socket.fileno() >= 0:
            trio.lowlevel.notify_closing(self._socket)
            self._socket.close()

    async def aclose(self) -> None:
        self.close()
        await trio.lowlevel.checkpoint()
