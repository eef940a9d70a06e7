"""`scripts/demo` as a person runs it, with its page open in a real browser; and what is left when it ends: nothing."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio

from chronik_repl.demo.__main__ import main
from chronik_repl.demo.scratch import PREFIX, scratch_folder
from tests.http.browser import has_browser, open_page

DEMO = str(Path(__file__).parent.parent / "scripts" / "demo")
TIMEOUT_S = 300  # for a machine that has other things to do
VICTIM = "document.querySelector('#picture [data-node=\"3\"]')"
STATE = f"{VICTIM}?.dataset.state"
LAG = f"Number({VICTIM}?.dataset.lag)"
LINE = "document.querySelector('#lag [data-follower=\"3\"]')?.getAttribute('d')"


def environ(folder: Path) -> dict[str, str]:
    """Almost none, as on a new machine."""
    return {"PATH": os.environ["PATH"], "HOME": str(folder), "TMPDIR": str(folder)}


def processes_of(folder: Path) -> Iterator[int]:
    """Those whose environment speaks of the folder."""
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):  # it has ended, or is not ours
            if str(folder).encode() in path.read_bytes():
                yield int(path.parent.name)


def files(folder: Path) -> list[Path]:
    return sorted(folder.iterdir())


class Told:
    """What the demo says, line by line."""

    def __init__(self, process: trio.Process) -> None:
        self._stdout = process.stdout
        self.text = ""

    async def until(self, pattern: str) -> re.Match[str]:
        assert self._stdout is not None
        with trio.fail_after(TIMEOUT_S):
            while not (found := re.search(pattern, self.text)):
                piece = await self._stdout.receive_some()
                assert piece, f"it ended without {pattern!r}:\n{self.text}"
                self.text += bytes(piece).decode()
        return found

    async def rest(self) -> str:
        assert self._stdout is not None
        async for piece in self._stdout:
            self.text += bytes(piece).decode()
        return self.text


@asynccontextmanager
async def demo(folder: Path, *arguments: str) -> AsyncIterator[tuple[trio.Process, Told]]:
    process = await trio.lowlevel.open_process(
        [DEMO, *arguments], cwd="/", env=environ(folder), stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    try:
        yield process, Told(process)
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def test_the_demo_keeps_its_word_on_the_terminal_and_on_its_page(tmp_path: Path) -> None:
    """From another directory, with an empty environment and a new home."""
    async with demo(tmp_path, "--exit", "--away", "4") as (process, told):
        if has_browser():
            async with open_page("about:blank") as page:
                address = await told.until(r"look at it: (http://127\.0\.0\.1:\d+/)")
                await page.call("Page.navigate", url=address[1])
                await page.until("document.querySelectorAll('#picture .node').length === 3")
                await page.until("document.querySelector('#picture [data-node=\"1\"]').classList.contains('leader')")
                await page.until("parseFloat(document.querySelector('#rate').textContent) > 0")
                await page.until("document.querySelector('#ready').textContent.includes('ready')")

                await page.until(f"{STATE} === 'connecting'")  # the demo kills node 3
                await page.until(f"{LAG} > 10000")
                grown = await page.value(LAG)
                await page.until(f"{LAG} > {grown}")
                await page.until("document.querySelectorAll('#events li.warning').length > 0")

                await page.until(f"{STATE} === 'streaming' && {LAG} < {grown}")
                await page.until(f"({LINE} || '').split(' L ').length > 5")
                await page.until("document.querySelector('#parity').textContent === 'same'")
                assert page.complaints == []
        output = await told.rest()
        assert await process.wait() == 0, output
    assert "all three copies are the same" in output
    assert files(tmp_path) == []
    assert list(processes_of(tmp_path)) == []
    if not has_browser():
        pytest.skip("the demo kept its word; there is no Chromium here to look at its page (apt-get install chromium)")


async def test_two_at_once_and_what_a_killed_one_leaves(tmp_path: Path) -> None:
    async with demo(tmp_path) as (first, told_first), demo(tmp_path) as (second, told_second):
        pages = {(await told.until(r"look at it: (\S+)"))[1] for told in (told_first, told_second)}
        assert len(pages) == 2, "each has ports of its own"
        folders = files(tmp_path)
        assert len(folders) == 2, "and a folder of its own"

        first.kill()
        await first.wait()
        second.send_signal(signal.SIGINT)
        assert "ended" in await told_second.rest()
        assert await second.wait() == 130
        await gone(tmp_path)
        (left,) = files(tmp_path)
        assert left in folders, "nobody can tidy up after kill -9; but the next one does"
    async with demo(tmp_path) as (third, told_third):
        await told_third.until(r"look at it")
        assert not left.exists()
        third.send_signal(signal.SIGTERM)
        await told_third.rest()
        assert await third.wait() == 130
    assert files(tmp_path) == []
    await gone(tmp_path)


async def gone(folder: Path) -> None:
    """The kernel ends a dead demo's nodes by itself, but takes a moment."""
    with trio.fail_after(20):
        while left := list(processes_of(folder)):
            assert len(left) < 100
            await trio.sleep(0.05)


def test_what_is_missing_is_said_with_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    monkeypatch.setattr("sys.argv", ["demo"])
    assert main() == 2
    assert "pip install 'chronik-repl[demo]'" in capsys.readouterr().out


def test_only_a_dead_demos_folder_is_taken_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "file").write_text("mine")
    (tmp_path / f"{PREFIX}link").symlink_to(precious)
    dead = tmp_path / f"{PREFIX}dead"
    (dead / "node-1").mkdir(parents=True)
    with scratch_folder() as living:
        assert not dead.exists()
        with scratch_folder() as other:
            assert living.exists()
            assert other != living
        assert not other.exists()
        assert living.exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"{PREFIX}link", "precious"]
    assert (precious / "file").read_text() == "mine"
