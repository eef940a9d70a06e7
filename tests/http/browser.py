"""A real headless Chromium, driven over its own DevTools protocol: JSON over one WebSocket."""

from __future__ import annotations

import base64
import json
import os
import shutil
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

import pytest
import trio
from wsproto import ConnectionType, WSConnection
from wsproto.events import AcceptConnection, BytesMessage, Ping, Request, TextMessage

FLAGS = (
    "--headless",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
    "--remote-debugging-port=0",
)
START_TIMEOUT_S = 60
ANSWER_TIMEOUT_S = 60


class Page:
    def __init__(self, stream: trio.SocketStream, socket: WSConnection) -> None:
        self._stream = stream
        self._socket = socket
        self._last = 0
        self._text = ""
        self.complaints: list[str] = []  # errors that the page's own code raised or logged

    async def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._last += 1
        message = json.dumps({"id": self._last, "method": method, "params": parameters})
        await self._stream.send_all(self._socket.send(TextMessage(message)))
        with trio.fail_after(ANSWER_TIMEOUT_S):
            while True:
                answer = await self._message()
                if answer.get("id") == self._last:
                    assert "error" not in answer, answer
                    result: dict[str, Any] = answer["result"]
                    return result
                self._listen(answer)

    def _listen(self, event: dict[str, Any]) -> None:
        if event.get("method") == "Runtime.exceptionThrown":
            self.complaints.append(json.dumps(event["params"]["exceptionDetails"])[:500])
        elif event.get("method") == "Log.entryAdded" and event["params"]["entry"]["level"] == "error":
            entry = event["params"]["entry"]
            if entry.get("source") != "network":  # a node that is down is what these tests are about
                self.complaints.append(entry["text"])

    async def _message(self) -> dict[str, Any]:
        while True:
            for event in self._socket.events():
                if isinstance(event, TextMessage):
                    self._text += event.data
                    if event.message_finished:
                        text, self._text = self._text, ""
                        found: dict[str, Any] = json.loads(text)
                        return found
                elif isinstance(event, Ping):
                    await self._stream.send_all(self._socket.send(event.response()))
                else:
                    assert not isinstance(event, BytesMessage)
            self._socket.receive_data(await self._stream.receive_some() or None)

    async def value(self, expression: str) -> Any:
        """What this JavaScript expression is in the page."""
        answer = await self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    async def until(self, expression: str, timeout_s: float = 60) -> None:
        """Wait until it is true in the page."""
        with trio.move_on_after(timeout_s):
            while not await self.value(expression):
                await trio.sleep(0.1)
            return
        raise AssertionError(
            f"not true within {timeout_s} s: {expression}\n{await self.value('document.body.innerText')}"
        )

    async def screenshot(self) -> bytes:
        return base64.b64decode((await self.call("Page.captureScreenshot", format="png"))["data"])


def has_browser() -> bool:
    return _program() is not None


def _program() -> str | None:
    return shutil.which("chromium") or shutil.which("google-chrome")


@asynccontextmanager
async def open_page(url: str, *, width: int = 1240, height: int = 1180, dark: bool = False) -> AsyncIterator[Page]:
    """Skips the test where there is no Chromium."""
    program = _program()
    if program is None:
        pytest.skip("no Chromium on this machine (apt-get install chromium)")
    profile = tempfile.mkdtemp(prefix="chronik-browser-")
    sandbox = ("--no-sandbox",) if os.geteuid() == 0 else ()
    command = [
        program,
        *FLAGS,
        *sandbox,
        f"--user-data-dir={profile}",
        f"--window-size={width},{height}",
        "about:blank",
    ]
    try:
        async with trio.open_nursery() as nursery:
            process = await nursery.start(_start, command)
            try:
                address = await _address(process)
                page = await _connect(address)
                for domain in ("Page", "Runtime", "Log"):
                    await page.call(f"{domain}.enable")
                if dark:
                    scheme = [{"name": "prefers-color-scheme", "value": "dark"}]
                    await page.call("Emulation.setEmulatedMedia", features=scheme)
                await page.call("Page.navigate", url=url)
                await page.until(f"document.readyState === 'complete' && location.href.startsWith({url!r})")
                yield page
            finally:
                process.kill()
            nursery.cancel_scope.cancel()
    finally:
        shutil.rmtree(profile, ignore_errors=True)


async def _start(command: list[str], *, task_status: trio.TaskStatus[trio.Process]) -> None:
    from functools import partial
    from subprocess import DEVNULL, PIPE

    run = partial(trio.run_process, command, stdin=DEVNULL, stdout=DEVNULL, stderr=PIPE, check=False)
    await run(task_status=task_status)


async def _address(process: trio.Process) -> str:
    """Chromium tells its port on stderr; the list of pages there has each one's own socket."""
    assert process.stderr is not None
    text = ""
    with trio.fail_after(START_TIMEOUT_S):
        while "DevTools listening on ws://" not in text or not text.endswith("\n"):
            piece = await process.stderr.receive_some()
            assert piece, f"Chromium ended: {text}"
            text += bytes(piece).decode(errors="replace")
        host = urlsplit(text.split("DevTools listening on ")[1].split()[0]).netloc
        while True:
            pages = json.loads(await trio.to_thread.run_sync(_get, f"http://{host}/json/list"))
            for one in pages:
                if one["type"] == "page":
                    found: str = one["webSocketDebuggerUrl"]
                    return found
            await trio.sleep(0.05)


def _get(url: str) -> bytes:
    from urllib.request import urlopen

    with urlopen(url, timeout=10) as answer:
        data: bytes = answer.read()
        return data


async def _connect(address: str) -> Page:
    parts = urlsplit(address)
    assert parts.hostname is not None
    assert parts.port is not None
    stream = await trio.open_tcp_stream(parts.hostname, parts.port)
    socket = WSConnection(ConnectionType.CLIENT)
    await stream.send_all(socket.send(Request(host=parts.netloc, target=parts.path)))
    accepted = False
    while not accepted:
        socket.receive_data(await stream.receive_some())
        accepted = any(isinstance(event, AcceptConnection) for event in socket.events())
    return Page(stream, socket)
