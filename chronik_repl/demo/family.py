"""The demo's processes: none outlives it, however it ends.

What it starts is killed by the kernel when the demo dies. What that has started in turn (Spark's Java and its workers)
becomes the demo's own when its parent ends, so that it can be ended too.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36


def dies_with_us() -> Callable[[], None] | None:
    """For `preexec_fn`. Only from the main thread: the kernel means the thread, and another may end before the demo."""
    if threading.current_thread() is not threading.main_thread():
        return None
    prctl = ctypes.CDLL(None).prctl
    return lambda: prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def adopt_orphans() -> None:
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)


def end_children() -> None:
    """All of them, and those that become ours by that."""
    me = os.getpid()
    while found := [pid for pid, (parent, _) in processes().items() if parent == me]:
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for pid in found:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)


def processes() -> dict[int, tuple[int, str]]:
    """Every process: whose child it is, and its program's name."""
    found = {}
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            try:
                stat = Path(entry.path, "stat").read_text()
            except (FileNotFoundError, ProcessLookupError):
                continue
            name, rest = stat[stat.index("(") + 1 : stat.rindex(")")], stat[stat.rindex(")") + 2 :].split()
            found[int(entry.name)] = (int(rest[1]), name)
    return found
