"""TLS over a TCP stream, for links that carry much: a megabyte is deciphered in one step of the event loop.

trio's own SSLStream gives out one TLS record (16 KiB) a call and awaits in between, which costs more than the cipher.
Here what the socket has is fed to the TLS engine at once and everything that comes out is handed over together. The
engine itself (ssl.SSLObject over memory) never waits; so one task may send while another receives.

There is no closing handshake: the messages inside say where they end, and a cut connection is an error anyway.
"""

from __future__ import annotations

import ssl

import trio

CIPHERTEXT_BYTES = 256 * 1024
RECORD_BYTES = 16 * 1024
PIECE_BYTES = 256 * 1024  # is enciphered and sent before the next, so that a large send holds no second copy


class TlsStream:
    def __init__(self, transport: trio.SocketStream, context: ssl.SSLContext, *, server_side: bool = False) -> None:
        self.transport = transport
        self._incoming = ssl.MemoryBIO()
        self._outgoing = ssl.MemoryBIO()
        self._engine = context.wrap_bio(self._incoming, self._outgoing, server_side=server_side)
        self._sending = trio.Lock()  # ciphertext leaves in the order in which it was made

    def version(self) -> str | None:
        return self._engine.version()

    async def do_handshake(self) -> None:
        """Raises trio.BrokenResourceError, with the ssl error as its cause."""
        while True:
            try:
                self._engine.do_handshake()
            except ssl.SSLWantReadError:
                await self._flush()
                await self._feed(RECORD_BYTES)
            except ssl.SSLError as error:
                await self._flush()  # the alert, for the other side's log
                raise trio.BrokenResourceError from error
            else:
                await self._flush()
                return

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        async with self._sending:
            with memoryview(data) as view:
                for at in range(0, len(view), PIECE_BYTES):
                    self._engine.write(view[at : at + PIECE_BYTES])
                    await self.transport.send_all(self._outgoing.read())

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        """At least one byte; b"" at the end. All that has arrived, up to about `max_bytes`."""
        wanted = max_bytes or CIPHERTEXT_BYTES
        while True:
            pieces: list[bytes] = []
            size = 0
            try:
                while size < wanted:
                    piece = self._engine.read(min(wanted - size, RECORD_BYTES))
                    if not piece:
                        break
                    pieces.append(piece)
                    size += len(piece)
            except ssl.SSLWantReadError:
                pass
            except ssl.SSLZeroReturnError:
                return b"".join(pieces)
            except ssl.SSLError as error:
                raise trio.BrokenResourceError from error
            if self._outgoing.pending:  # the engine answers by itself, as to a change of keys
                await self._flush()
            if pieces:
                await trio.lowlevel.checkpoint_if_cancelled()
                return b"".join(pieces)
            if not await self._feed(min(max(wanted, RECORD_BYTES), CIPHERTEXT_BYTES)):
                return b""

    async def _feed(self, size: int) -> bool:
        data = await self.transport.receive_some(size)
        if not data:
            self._incoming.write_eof()
            return False
        self._incoming.write(data)
        return True

    async def _flush(self) -> None:
        async with self._sending:
            if self._outgoing.pending:
                await self.transport.send_all(self._outgoing.read())

    async def aclose(self) -> None:
        await self.transport.aclose()
