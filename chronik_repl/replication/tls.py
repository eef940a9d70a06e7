"""TLS over a TCP stream, for links that carry much: a megabyte is deciphered in one step of the event loop.

trio's own SSLStream gives out one TLS record (16 KiB) a call and awaits in between, which costs more than the cipher.
Here what the socket has is fed to the TLS engine at once and everything that comes out is put where the caller wants
it. The engine itself (ssl.SSLObject over memory) never waits; so one task may send while another receives.

There is no closing handshake: the messages inside say where they end, and a cut connection is an error anyway.
"""

from __future__ import annotations

import ssl
from collections.abc import Callable
from typing import cast

import trio

from chronik_repl.replication.streams import TcpStream
from chronik_repl.wal.seam import Buffer

RECORD_BYTES_MAX = 16 * 1024 + 512  # with what the cipher adds
CIPHERTEXT_BYTES_MIN = 32 * 1024
CIPHERTEXT_BYTES_MAX = 512 * 1024  # received at once
ANSWERS_BYTES_MAX = 64 * 1024
PIECE_BYTES = 256 * 1024  # is enciphered and sent before the next, so that a large send holds no second copy


class TlsStream:
    def __init__(self, transport: TcpStream, context: ssl.SSLContext, *, server_side: bool = False) -> None:
        self.transport = transport
        self._incoming = ssl.MemoryBIO()
        self._outgoing = ssl.MemoryBIO()
        self._engine = context.wrap_bio(self._incoming, self._outgoing, server_side=server_side)
        self._ciphertext = memoryview(bytearray(CIPHERTEXT_BYTES_MIN))
        self._answers_bytes = 0  # of the engine's own, that wait to be sent

    def version(self) -> str | None:
        return self._engine.version()

    async def do_handshake(self) -> None:
        """Raises trio.BrokenResourceError, with the ssl error as its cause."""
        while True:
            try:
                self._engine.do_handshake()
            except ssl.SSLWantReadError:
                await self._flush()
                await self._feed(1)
            except ssl.SSLError as error:
                await self._flush()  # the alert, for the other side's log
                raise trio.BrokenResourceError from error
            else:
                await self._flush()
                return

    def send_now(self, *pieces: Buffer) -> bool:
        # What was enciphered leaves in the order in which it was: nothing waits between the engine and the socket.
        for piece in pieces:
            self._encipher(piece)
        return self.transport.send_now(self._outgoing.read())

    async def send_all(self, *pieces: Buffer) -> None:
        for piece in pieces:
            with memoryview(piece) as view:
                for at in range(0, len(view), PIECE_BYTES):
                    self._encipher(view[at : at + PIECE_BYTES])
                    await self._flush()
        await self.transport.send_all()

    def _encipher(self, piece: Buffer) -> None:
        if piece:
            try:
                self._engine.write(piece)
            except ssl.SSLError as error:
                raise trio.BrokenResourceError from error

    async def receive_into(self, buffer: memoryview, least: int = 1) -> int:
        while True:
            size, read_into = 0, cast("Callable[[int, memoryview], int]", self._engine.read)
            try:
                while size < len(buffer) and (got := read_into(len(buffer) - size, buffer[size:])):
                    size += got
            except ssl.SSLWantReadError:
                pass
            except ssl.SSLZeroReturnError:
                return size
            except ssl.SSLError as error:
                raise trio.BrokenResourceError from error
            if self._outgoing.pending:
                self._answer()
            if size:
                return size
            if not await self._feed(least):
                return 0

    def _answer(self) -> None:
        """The engine answers by itself, as to a change of keys. Another task may be waiting to send: the answer goes
        with what that one has, or with what is sent next."""
        data = self._outgoing.read()
        self._answers_bytes = 0 if self.transport.send_now(data) else self._answers_bytes + len(data)
        if self._answers_bytes > ANSWERS_BYTES_MAX:
            raise trio.BrokenResourceError("the peer asks for new keys and does not take the answers")

    async def _feed(self, least: int) -> bool:
        room = self._ciphertext
        # A part of it may be here already, in a record that is not whole.
        missing = max(1, least - self._incoming.pending - RECORD_BYTES_MAX)
        size = await self.transport.receive_into(room, min(missing, len(room)))
        if not size:
            self._incoming.write_eof()
            return False
        self._incoming.write(room[:size])
        if size == len(room) < CIPHERTEXT_BYTES_MAX:
            self._ciphertext = memoryview(bytearray(4 * len(room)))
        return True

    async def _flush(self) -> None:
        await self.transport.send_all(self._outgoing.read())

    async def aclose(self) -> None:
        await self.transport.aclose()
