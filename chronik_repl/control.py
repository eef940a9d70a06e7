"""How an operator speaks to a running node: `control.sock` in its data directory, mode 0600.

One JSON object a line each way: {"command": "promote", "accept_loss": false} → {"ok": true, …} or {"ok": false,
"error": "…"}. Whoever may open the socket owns the data directory anyway; HTTP, which others can reach, is read-only.

Commands: status · topics · groups · promote (accept_loss) · members · members-add (address) · members-remove (node_id
or address).
A long command (a promotion drains the old leader first) writes {"progress": "…"} lines before its answer.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import trio

from chronik_repl.errors import ChronikError, Refused

FILE = "control.sock"
LINE_BYTES_MAX = 64 * 1024
CONNECTIONS_MAX = 16
REQUEST_TIMEOUT_S = 10.0
TIMEOUT_S = 120.0  # of a command that waits for other nodes

Say = Callable[[str], None]
Handler = Callable[[dict[str, Any], Say], Awaitable[dict[str, Any]]]

_decoder = msgspec.json.Decoder(dict[str, Any])


async def serve(
    data_dir: Path, handler: Handler, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
) -> None:
    """Until cancelled. The lock on the directory is held by then, so an old socket there is a dead one's."""
    listener = trio.socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    directory = os.open(data_dir, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(FILE, dir_fd=directory)
        mask = os.umask(0o177)
        try:
            await listener.bind(_short_path(directory))
        finally:
            os.umask(mask)
        listener.listen(CONNECTIONS_MAX)
        async with trio.open_nursery() as nursery:
            await nursery.start(
                trio.serve_listeners, lambda stream: _converse(stream, handler), [trio.SocketListener(listener)]
            )
            task_status.started()
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(FILE, dir_fd=directory)
        os.close(directory)
        listener.close()


async def _converse(stream: trio.SocketStream, handler: Handler) -> None:
    """One command a connection."""
    with contextlib.suppress(trio.BrokenResourceError, trio.ClosedResourceError):
        async with stream:
            line = b""
            with trio.move_on_after(REQUEST_TIMEOUT_S):
                while not line.endswith(b"\n") and len(line) < LINE_BYTES_MAX:
                    piece = await stream.receive_some(LINE_BYTES_MAX)
                    if not piece:
                        break
                    line += piece
            try:
                request = _decoder.decode(line)
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                await stream.send_all(_encode({"ok": False, "error": "one JSON object on one line is expected"}))
                return
            await _answer(stream, handler, request)


async def _answer(stream: trio.SocketStream, handler: Handler, request: dict[str, Any]) -> None:
    """Runs the command to its end even if the caller goes away: half a promotion helps nobody."""
    send, receive = trio.open_memory_channel[dict[str, Any]](64)

    def say(text: str) -> None:
        with contextlib.suppress(trio.WouldBlock):
            send.send_nowait({"progress": text})

    async def forward() -> None:
        with contextlib.suppress(trio.BrokenResourceError, trio.ClosedResourceError):
            async for message in receive:
                await stream.send_all(_encode(message))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(forward)
        try:
            answer: dict[str, Any] = {"ok": True, **await handler(request, say)}
        except ChronikError as error:
            answer = {"ok": False, "error": str(error), "kind": type(error).__name__}
        with contextlib.suppress(trio.WouldBlock):
            send.send_nowait(answer)
        send.close()


def call(
    data_dir: Path, command: dict[str, Any], *, timeout_s: float = TIMEOUT_S, say: Say | None = None
) -> dict[str, Any]:
    """Ask the node that runs in this directory. Raises Refused with what the node, or its absence, says."""
    try:
        with _connected(data_dir) as connection:
            connection.settimeout(timeout_s)
            connection.sendall(_encode(command))
            for line in connection.makefile("rb"):
                answer = _decoder.decode(line)
                if "progress" in answer:
                    if say is not None:
                        say(answer["progress"])
                    continue
                if not answer.get("ok"):
                    raise Refused(str(answer.get("error", "the node gave no reason")))
                return answer
    except TimeoutError:
        raise Refused(f"the node in {data_dir} did not answer within {timeout_s:.0f} s; look at its log") from None
    except (FileNotFoundError, ConnectionRefusedError, NotADirectoryError):
        raise Refused(
            f"no node runs in {data_dir}. Start it, or give its directory with --data-dir or CHRONIK_DATA_DIR"
        ) from None
    except PermissionError:
        raise Refused(f"{data_dir / FILE} belongs to another user: run this as the user that runs the node") from None
    except (OSError, msgspec.DecodeError) as error:
        raise Refused(f"the node in {data_dir} broke off: {error}; look at its log") from error
    raise Refused(f"the node in {data_dir} ended before it answered; look at its log")


@contextlib.contextmanager
def _connected(data_dir: Path) -> Iterator[socket.socket]:
    directory = os.open(data_dir, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.connect(_short_path(directory))
            yield connection
    finally:
        os.close(directory)


def _short_path(directory: int) -> str:
    """A unix socket's path has 108 bytes at most, a data directory's may be longer."""
    return f"/proc/self/fd/{directory}/{FILE}"


def _encode(message: dict[str, Any]) -> bytes:
    return msgspec.json.encode(message) + b"\n"
