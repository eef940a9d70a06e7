"""HTTP/1.1 between a door that only answers and clients that may be slow, silent or hostile. h11 reads the bytes.

Everything has a limit: how many connections there are, how large a request's head is, how long all of it may take to
arrive, and how long its answer may take to be fetched. No body is taken: nothing here asks for one. When all places are
taken, the connection whose last answer is longest ago makes room. So whoever holds a place by silence, or by a byte
a second, keeps nobody out.
"""

from __future__ import annotations

import ssl
from collections.abc import Callable
from email.utils import formatdate

import h11
import msgspec
import trio

from chronik_repl.meters import Meters

READ_BYTES = 16 * 1024
REFUSED_BYTES_MAX = 256 * 1024  # of a body that we do not want: read, so that the refusal is not lost in a reset
CLOSE_TIMEOUT_S = 1.0


class Limits(msgspec.Struct, frozen=True):
    connections_max: int = 200
    head_bytes_max: int = 16 * 1024
    request_timeout_s: float = 30  # from the connection, or the answer before, to the last byte of the request
    answer_timeout_s: float = 30


class Answer(msgspec.Struct, frozen=True):
    status: int
    body: bytes
    content_type: str = "text/plain; charset=utf-8"
    headers: dict[str, str] = {}


Stream = trio.SocketStream | trio.SSLStream[trio.SocketStream]
Get = Callable[[str], Answer]  # what the request line asks for → its answer


class Conversations:
    """All connections of one door."""

    def __init__(self, get: Get, limits: Limits, meters: Meters) -> None:
        self._get = get
        self._limits = limits
        self._meters = meters
        self._places: dict[trio.CancelScope, None] = {}  # in the order of their last answers

    async def serve(self, listeners: list[trio.SocketListener], tls: ssl.SSLContext | None) -> None:
        """Until cancelled."""

        async def accept(socket: trio.SocketStream) -> None:
            await self._welcome(trio.SSLStream(socket, tls, server_side=True, https_compatible=True) if tls else socket)

        await trio.serve_listeners(accept, listeners)

    async def _welcome(self, stream: Stream) -> None:
        if len(self._places) >= self._limits.connections_max:
            first = next(iter(self._places))
            del self._places[first]
            first.cancel()
            self._meters.add("http_connections_dropped", 1, "made room")
        with trio.CancelScope() as place:
            self._places[place] = None
            self._meters.set("http_connections", len(self._places))
            try:
                await self._converse(stream, place)
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                pass  # the client is gone
            finally:
                self._places.pop(place, None)
                self._meters.set("http_connections", len(self._places))
        with trio.move_on_after(CLOSE_TIMEOUT_S):
            await stream.aclose()

    async def _converse(self, stream: Stream, place: trio.CancelScope) -> None:
        http = h11.Connection(h11.SERVER, max_incomplete_event_size=self._limits.head_bytes_max)
        while True:
            with trio.move_on_after(self._limits.request_timeout_s) as waiting:
                request = await self._request(stream, http)
            if waiting.cancelled_caught:
                self._meters.add("http_connections_dropped", 1, "slow request")
                return
            if request is None:
                return
            with trio.move_on_after(self._limits.answer_timeout_s) as sending:
                await self._send(stream, http, request)
            if sending.cancelled_caught:
                self._meters.add("http_connections_dropped", 1, "slow reader")
                return
            if http.our_state is not h11.DONE or http.their_state is not h11.DONE:
                return
            http.start_next_cycle()
            if place in self._places:
                del self._places[place]
                self._places[place] = None

    async def _request(self, stream: Stream, http: h11.Connection) -> h11.Request | h11.RemoteProtocolError | None:
        """The head and, if no body was announced, the end. None: the client has left."""
        request = None
        try:
            while request is None or (http.their_state is h11.SEND_BODY and not announces_body(request)):
                event = http.next_event()
                if event is h11.NEED_DATA:
                    http.receive_data(bytes(await stream.receive_some(READ_BYTES)))
                elif isinstance(event, h11.Request):
                    request = event
                elif isinstance(event, h11.ConnectionClosed):
                    return None
        except h11.RemoteProtocolError as error:
            return error
        return request

    async def _send(self, stream: Stream, http: h11.Connection, request: h11.Request | h11.RemoteProtocolError) -> None:
        if isinstance(request, h11.RemoteProtocolError):
            if http.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
                return
            answer, with_body = Answer(request.error_status_hint, f"{request}\n".encode()), True
        else:
            answer, with_body = self._answer(request), request.method != b"HEAD"
        last = http.their_state is not h11.DONE
        self._meters.add("http_requests", 1, str(answer.status))
        headers = {
            "Date": formatdate(usegmt=True),
            "Content-Type": answer.content_type,
            "Content-Length": str(len(answer.body)),
            "X-Content-Type-Options": "nosniff",
            **answer.headers,
            **({"Connection": "close"} if last else {}),
        }
        data = http.send(h11.Response(status_code=answer.status, headers=list(headers.items())))
        data += http.send(h11.Data(answer.body)) if with_body else b""
        data += http.send(h11.EndOfMessage())
        await stream.send_all(data)
        if last:
            await _hang_up(stream)

    def _answer(self, request: h11.Request) -> Answer:
        if request.method not in (b"GET", b"HEAD"):
            return Answer(405, b"only GET: nothing can be changed from here\n", headers={"Allow": "GET, HEAD"})
        if announces_body(request):
            return Answer(413, b"a GET with a body is not answered\n")
        return self._get(request.target.decode("latin1"))


def announces_body(request: h11.Request) -> bool:
    return any(
        name == b"transfer-encoding" or (name == b"content-length" and value.strip(b"0"))
        for name, value in request.headers
    )


async def _hang_up(stream: Stream) -> None:
    """Say that nothing more comes, and let what is on its way arrive: else its reset overtakes our answer."""
    if isinstance(stream, trio.SocketStream):
        await stream.send_eof()
    read = 0
    with trio.move_on_after(CLOSE_TIMEOUT_S):
        while read < REFUSED_BYTES_MAX and (piece := await stream.receive_some(READ_BYTES)):
            read += len(piece)
