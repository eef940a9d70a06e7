"""The machine's own faults: killed processes, failing syncs, full file systems, power cuts. `scripts/faults --help`.

Each function runs one fault and returns what is wrong, or raises `CannotDo` with what this machine lacks.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import gc
import itertools
import multiprocessing
import os
import random
import shutil
import signal
import struct
import subprocess
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import trio

from chronik_repl.errors import ChronikError, CorruptLog, DiskFailed
from chronik_repl.wal.seam import Buffer
from tests.crash.life import AHEAD, live, missing

EXT4_IOC_SHUTDOWN = 0x8004587D
NO_LOG_FLUSH = 2
_SERVER = multiprocessing.get_context("forkserver")  # a process that never had a thread: its children may fork and live
_SERVER.set_forkserver_preload([__name__])
MKFS = ("mkfs.ext4", "-q", "-F", "-E", "lazy_itable_init=0,lazy_journal_init=0")


class CannotDo(Exception):
    """This machine cannot; the message says what is missing."""


def traced_life(
    directory: Path, groups: int, seed: int, injection: str, *, ahead: bool = False
) -> tuple[int, list[str]]:
    """Run a life under strace with one fault; its exit code and what it said."""
    strace = shutil.which("strace")
    if strace is None:
        raise CannotDo("strace is not installed")
    process = subprocess.run(
        [strace, "-f", "-qq", "-o", os.devnull, "-e", f"inject={injection}",
         sys.executable, "-m", "tests.crash.life", str(directory), str(groups), str(seed),
         *(["ahead"] if ahead else [])],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    if "ptrace" in process.stderr or "strace:" in process.stderr:
        raise CannotDo(f"strace does not work here: {process.stderr.strip().splitlines()[0]}")
    return process.returncode, process.stdout.splitlines()


def kill_at_write(directory: Path, n: int, groups: int = 8) -> tuple[bool, str]:
    """kill -9 in the nth write. (whether it was reached, what is wrong)."""
    code, said = traced_life(directory, groups, n, f"pwritev2,pwritev,pwrite64:signal=SIGKILL:when={n}")
    if code == 0:
        return False, ""
    if code not in (-9, 137):
        return True, f"ended with code {code}: {said[-1:]}"
    return True, _check(directory, said)


def kill_inside_write(directory: Path, n: int, groups: int = 24, *, ahead: bool = False) -> tuple[bool, str]:
    """kill -9 when half of the nth write's bytes are written, by the process itself: no strace, so it takes a tenth of
    the time. (whether it was reached, what is wrong)."""
    said = directory.with_suffix(".said")
    process = _SERVER.Process(target=_live_until, args=(said, directory, groups, n, ahead))
    process.start()
    process.join()
    if process.exitcode == 0:
        return False, ""
    if process.exitcode != -signal.SIGKILL:
        return True, f"ended with code {process.exitcode}"
    return True, _check(directory, said.read_text().splitlines())


def _live_until(said: Path, directory: Path, groups: int, n: int, ahead: bool) -> None:
    """In a process of its own; what it says goes into a file, a write a line."""
    fd = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    writes = itertools.count(1)
    write = os.pwritev

    def write_or_die(fd: int, buffers: Sequence[Buffer], at: int) -> int:
        if next(writes) == n:
            whole = b"".join(buffers)
            os.pwrite(fd, whole[: len(whole) // 2], at)
            os.kill(os.getpid(), signal.SIGKILL)
        return write(fd, buffers, at)

    os.pwritev = write_or_die  # type: ignore[assignment]

    def say(line: str) -> None:
        os.write(fd, line.encode() + b"\n")

    trio.run(partial(live, directory, groups, 1, say, ahead=ahead))


def fail_nth_sync(directory: Path, n: int, groups: int = 8, *, ahead: bool = False) -> tuple[bool, str]:
    """EIO at the nth fdatasync; the next ones succeed again. (whether it was reached, what is wrong)."""
    return _failed(directory, f"fdatasync:error=EIO:when={n}", n, groups, ahead)


def fail_nth_write(directory: Path, n: int, groups: int = 8, *, ahead: bool = False) -> tuple[bool, str]:
    """EIO at the nth write of each thread, the same otherwise."""
    return _failed(directory, f"pwritev2,pwritev:error=EIO:when={n}", n, groups, ahead)


def _failed(directory: Path, injection: str, seed: int, groups: int, ahead: bool) -> tuple[bool, str]:
    code, said = traced_life(directory, groups, seed, injection, ahead=ahead)
    if code == 0:
        return False, ""
    if code != 3 or not said[-1].startswith("failed ") or "Input/output error" not in said[-1]:
        return True, f"ended with code {code}: {said[-1:]}"
    return True, _check(directory, said[:-1])


def _check(directory: Path, said: list[str]) -> str:
    if any(not line.startswith("acked ") for line in said):
        return f"said something else than acks: {said}"
    try:
        lost = trio.run(missing, directory, said)
    except ChronikError as error:
        return f"does not open: {error}"
    return f"lost: {lost}" if lost else ""


@contextlib.contextmanager
def mounted(what: list[str], where: Path) -> Iterator[Path]:
    where.mkdir(exist_ok=True)
    if os.geteuid() != 0:
        raise CannotDo("mounting needs root")
    done = subprocess.run(["mount", *what, str(where)], capture_output=True, text=True, check=False)
    if done.returncode:
        raise CannotDo(f"mount {' '.join(what)}: {done.stderr.strip()}")
    try:
        yield where
    finally:
        gc.collect()  # a mapped index of a log that died keeps the file system busy
        if subprocess.run(["umount", str(where)], check=False, capture_output=True).returncode:
            subprocess.run(["umount", "--lazy", str(where)], check=False)  # leave nothing behind
            raise AssertionError(f"{where}: something still holds a file there")


class PowerCuts:
    """An ext4 of its own on a loop device, whose power can be cut. A log lives there through all of them."""

    def __init__(self, scratch: Path, seed: int, *, ahead: bool = False) -> None:
        if shutil.which("mkfs.ext4") is None:
            raise CannotDo("mkfs.ext4 is not installed")
        self._rng = random.Random(seed)
        self._ahead = ahead
        self._image, self._where = scratch / "disk.img", scratch / "mounted"
        self.acked: list[str] = []
        self.cuts_in_flight = 0
        with open(self._image, "wb") as file:
            file.truncate(96 * 1024 * 1024)
        subprocess.run([*MKFS, str(self._image)], check=True, capture_output=True)

    def cut(self) -> str:
        """Live for a random while, cut, mount again, look. What is wrong, or ""."""
        rng = self._rng
        step = 2 * AHEAD if self._ahead else 1  # acks that may come at once
        after = rng.randrange(1 + step, 24 + step)
        # Soon after this ack, in whatever it does then.
        middle = rng.randrange(1, after - step + 1) if rng.random() < 0.5 else 0
        said: list[str] = []
        # What is said after a cut in the middle is heard by nobody: the power is gone. This process lives on, though,
        # and a sync that was under way may tell it that all is well: jbd2 does, where its journal is aborted meanwhile.
        heard: int | None = None
        with mounted(["-o", "loop", str(self._image)], self._where) as where:
            mount_fd = os.open(where, os.O_RDONLY)
            in_the_middle = trio.Event()

            def say(line: str) -> None:
                said.append(line)
                if len(said) == middle:
                    in_the_middle.set()
                if len(said) == after:
                    shut_down(mount_fd)

            async def main() -> None:
                nonlocal heard
                async with trio.open_nursery() as nursery:
                    seed = rng.randrange(1 << 30)
                    nursery.start_soon(partial(live, where / "log", 60, seed, say, ahead=self._ahead))
                    if middle:
                        await in_the_middle.wait()
                        for _ in range(rng.randrange(20)):
                            await trio.lowlevel.checkpoint()
                        if len(said) < after:
                            heard = len(said)
                            shut_down(mount_fd)
                            self.cuts_in_flight += 1

            try:
                trio.run(main)
            except* (DiskFailed, CorruptLog, OSError):  # the file system is gone, under writes, reads, open()
                pass
            finally:
                os.close(mount_fd)
        with mounted(["-o", "loop", str(self._image)], self._where) as where:
            self.acked = [*self.acked[-200:], *said[:heard]]
            if not (where / "log").exists():
                return f"the directory is gone, with {len(self.acked)} acks" if self.acked else ""
            return _check(where / "log", self.acked)


def shut_down(mount_fd: int) -> None:
    """The power fails: nothing more reaches the device, not even the journal."""
    flags = struct.pack("I", NO_LOG_FLUSH)
    with contextlib.suppress(OSError):  # twice is once
        fcntl.ioctl(mount_fd, EXT4_IOC_SHUTDOWN, flags)


def can_shut_down() -> None:
    """Raises CannotDo where namespaces or capabilities forbid it."""
    if ctypes.CDLL(None).prctl(23, 21, 0, 0, 0) != 1:  # PR_CAPBSET_READ, CAP_SYS_ADMIN
        raise CannotDo("CAP_SYS_ADMIN is missing: no mounting, no shutdown of a file system")
