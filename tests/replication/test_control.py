"""The control socket: one command a line, for whoever owns the directory."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import trio

from chronik_repl import control
from chronik_repl.errors import Refused


async def handler(request: dict[str, Any], say: control.Say) -> dict[str, Any]:
    if request.get("command") == "fail":
        raise Refused("not today")
    say("working on it")
    return {"heard": request}


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Path]:
    folder = tmp_path / ("a-rather-long-name-" * 8)  # longer than a socket's path may be
    folder.mkdir()
    async with trio.open_nursery() as nursery:
        await nursery.start(control.serve, folder, handler)
        yield folder
        nursery.cancel_scope.cancel()


async def call(folder: Path, command: dict[str, Any], **options: Any) -> dict[str, Any]:
    return await trio.to_thread.run_sync(lambda: control.call(folder, command, **options))


async def test_answer_and_progress(served: Path) -> None:
    said: list[str] = []
    assert (await call(served, {"command": "x"}, say=said.append))["heard"] == {"command": "x"}
    assert said == ["working on it"]
    assert (served / "control.sock").stat().st_mode & 0o777 == 0o600


async def test_refusal_comes_out_as_such(served: Path) -> None:
    with pytest.raises(Refused, match="not today"):
        await call(served, {"command": "fail"})


@pytest.mark.parametrize("line", [b"junk\n", b"[1,2]\n", b"\xff\xfe\n", b"[" * 60_000 + b"\n", b"{" * 70_000])
async def test_nonsense_gets_an_answer_and_the_next_one_works(served: Path, line: bytes) -> None:
    def nonsense() -> bytes:
        with control._connected(served) as connection:
            connection.sendall(line)
            connection.shutdown(socket.SHUT_WR)
            return connection.makefile("rb").readline()

    assert b"one JSON object" in await trio.to_thread.run_sync(nonsense)
    assert (await call(served, {"command": "x"}))["ok"]


async def test_nobody_there(tmp_path: Path) -> None:
    with pytest.raises(Refused, match="no node runs in"):
        await call(tmp_path, {"command": "x"})
    with pytest.raises(Refused, match="no node runs in"):
        await call(tmp_path / "nothing", {"command": "x"})
