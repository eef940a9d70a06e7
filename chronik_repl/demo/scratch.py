"""The demo's temporary folder. It goes with the demo; if the demo was killed, the next one takes it away.

A running demo holds a lock on its folder: one that nobody has locked is a dead demo's.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

PREFIX = "chronik-demo-"
BEING_MADE = ".new-"


@contextlib.contextmanager
def scratch_folder() -> Iterator[Path]:
    parent = Path(tempfile.gettempdir())
    _remove_leftovers(parent)
    # Made under another name and locked before it has its own: nobody can take it for a leftover.
    made = Path(tempfile.mkdtemp(prefix=BEING_MADE + PREFIX, dir=parent))
    folder = parent / made.name.removeprefix(BEING_MADE)
    held = os.open(made, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(held, fcntl.LOCK_EX)
        made.rename(folder)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(held)


def _remove_leftovers(parent: Path) -> None:
    for entry in os.scandir(parent):
        if entry.name.startswith(PREFIX) and entry.is_dir(follow_symlinks=False):
            with contextlib.suppress(OSError):  # another user's, or another demo was quicker
                _remove_if_dead(Path(entry.path))


def _remove_if_dead(folder: Path) -> None:
    found = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        if os.fstat(found).st_uid == os.getuid():
            fcntl.flock(found, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder)
    finally:
        os.close(found)
