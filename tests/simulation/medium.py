"""What a disk holds, kept twice: as a reader sees it, and as a power cut may leave it. No time, no tasks: plain values.

Each file has its durable bytes and a list of changes that no sync has covered yet; each folder has its durable
entries and a list of links, unlinks and renames that no directory sync has covered. `cut` is the power failing: of
every list any subset survives, writes torn at sectors of 512 bytes. That is what POSIX allows and more than ext4 does:
a file's own sync says nothing of its directory entry; a rename happens wholly or not at all.

A failed sync leaves its changes visible and clean, as Linux does: later syncs do not write them, and a cut may lose
them still. Every change can be recorded as an event and played again on another medium, up to any point: that is
how crash states are enumerated (tests/crash/).
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

SECTOR = 512


@dataclass(slots=True)
class Change:
    """To a file: bytes at a place, or with `data` None a new size."""

    at: int
    data: bytes | None
    clean: bool = False  # a failed sync gave it up

    @property
    def end(self) -> int:
        return self.at + len(self.data or b"")

    def sectors(self) -> Iterator[tuple[int, int]]:
        """Start and end, in the file, of each piece that survives or not on its own."""
        at = self.at
        while at < self.end:
            end = min(self.end, (at // SECTOR + 1) * SECTOR)
            yield at, end
            at = end


@dataclass(slots=True)
class Inode:
    durable: bytearray = field(default_factory=bytearray)
    seen: bytearray = field(default_factory=bytearray)
    unsynced: list[Change] = field(default_factory=list)


@dataclass(slots=True)
class Entry:
    """A change to a folder: `old` goes (unless ""), `new` stands for the inode (unless "")."""

    old: str
    new: str
    inode: int


@dataclass(slots=True)
class Folder:
    durable: dict[str, int] = field(default_factory=dict)
    seen: dict[str, int] = field(default_factory=dict)
    unsynced: list[Entry] = field(default_factory=list)


Event = tuple[str, tuple[object, ...]]
Keep = Callable[[int, Change | Entry, int], bool]  # (number of the change, the change, the sector's start) → survives?


class Medium:
    def __init__(self) -> None:
        self.inodes: dict[int, Inode] = {}
        self.folders: dict[str, Folder] = {"": Folder()}
        self.events: list[Event] | None = None

    def record(self) -> list[Event]:
        self.events = []
        return self.events

    def note(self, *what: object) -> None:
        """For the recorder: something that a test wants to find again between the changes."""
        if self.events is not None:
            self.events.append(("note", what))

    def play(self, event: Event) -> None:
        name, arguments = event
        if name != "note":
            getattr(self, name)(*arguments)

    def clone(self) -> Medium:
        other = Medium()
        other.inodes, other.folders = copy.deepcopy((self.inodes, self.folders))
        return other

    # As a reader sees it

    def find(self, name: str) -> int | None:
        folder, _, leaf = name.rpartition("/")
        return self.folders[folder].seen.get(leaf) if folder in self.folders else None

    def bytes_of(self, name: str) -> bytes:
        inode = self.find(name)
        assert inode is not None, name
        return bytes(self.inodes[inode].seen)

    def image(self) -> dict[str, bytes]:
        """Every file and its bytes."""
        return {
            f"{folder}/{leaf}".lstrip("/"): bytes(self.inodes[inode].seen)
            for folder, entries in self.folders.items()
            for leaf, inode in entries.seen.items()
        }

    def digest(self) -> bytes:
        total = hashlib.blake2b(digest_size=16)
        for name, data in sorted(self.image().items()):
            total.update(b"%s %d " % (name.encode(), len(data)) + hashlib.blake2b(data, digest_size=16).digest())
        return total.digest()

    def used_bytes(self) -> int:
        linked = {inode for folder in self.folders.values() for inode in folder.seen.values()}
        return sum(len(self.inodes[inode].seen) for inode in linked)

    # Changes. Each is one event.

    def create(self, name: str) -> int:
        folder, _, leaf = name.rpartition("/")
        inode = len(self.inodes)
        self.inodes[inode] = Inode()
        self._enter(folder, Entry("", leaf, inode))
        self._event("create", name)
        return inode

    def write(self, inode: int, at: int, data: bytes) -> None:
        change = Change(at, data)
        _apply(self.inodes[inode].seen, change)
        self.inodes[inode].unsynced.append(change)
        self._event("write", inode, at, data)

    def resize(self, inode: int, size: int) -> None:
        change = Change(size, None)
        _apply(self.inodes[inode].seen, change)
        self.inodes[inode].unsynced.append(change)
        self._event("resize", inode, size)

    def sync(self, inode: int) -> None:
        node = self.inodes[inode]
        given_up: list[Change] = []
        for change in node.unsynced:
            if change.clean:
                given_up.append(change)
            else:
                _apply(node.durable, change)
                given_up = [piece for old in given_up for piece in _without(old, change)]
        node.unsynced = given_up
        self._event("sync", inode)

    def fail_sync(self, inode: int) -> None:
        for change in self.inodes[inode].unsynced:
            change.clean = True
        self._event("fail_sync", inode)

    def rename(self, old: str, new: str) -> None:
        folder, _, leaf = old.rpartition("/")
        new_folder, _, new_leaf = new.rpartition("/")
        inode = self.folders[folder].seen[leaf]
        if folder == new_folder:
            self._enter(folder, Entry(leaf, new_leaf, inode))
        else:  # two folders, two syncs
            self._enter(new_folder, Entry("", new_leaf, inode))
            self._enter(folder, Entry(leaf, "", inode))
        self._event("rename", old, new)

    def unlink(self, name: str) -> None:
        folder, _, leaf = name.rpartition("/")
        self._enter(folder, Entry(leaf, "", self.folders[folder].seen[leaf]))
        self._event("unlink", name)

    def make_folder(self, folder: str) -> None:
        self.folders.setdefault(folder, Folder())
        self._event("make_folder", folder)

    def sync_dir(self, folder: str) -> None:
        entries = self.folders[folder]
        for entry in entries.unsynced:
            _enter(entries.durable, entry)
        entries.unsynced.clear()
        self._event("sync_dir", folder)

    def rot(self, name: str, at: int, bit: int) -> None:
        inode = self.find(name)
        assert inode is not None, name
        node = self.inodes[inode]
        for data in (node.seen, node.durable):
            if at < len(data):
                data[at] ^= 1 << bit
        self._event("rot", name, at, bit)

    # The power fails

    def undecided(self) -> list[Change | Entry]:
        """What a cut now would keep or lose, in the order in which `cut` numbers it."""
        return [
            *(entry for _, folder in sorted(self.folders.items()) for entry in folder.unsynced),
            *(change for _, node in sorted(self.inodes.items()) for change in node.unsynced),
        ]

    def cut(self, keep: Keep, *, grow: bool = False) -> None:
        """Only the durable and what `keep` says is left. With `grow`, files whose last bytes were lost have their
        new size all the same, and zeros there."""
        number = 0
        for _, folder in sorted(self.folders.items()):
            for entry in folder.unsynced:
                if keep(number, entry, 0):
                    _enter(folder.durable, entry)
                number += 1
            folder.seen = dict(folder.durable)
            folder.unsynced = []
        for _, node in sorted(self.inodes.items()):
            for change in node.unsynced:
                if change.data is None:
                    if keep(number, change, 0):
                        _apply(node.durable, change)
                else:
                    for start, end in change.sectors():
                        if keep(number, change, start):
                            piece = Change(start, change.data[start - change.at : end - change.at])
                            _apply(node.durable, piece)
                    if grow and len(node.durable) < change.end <= len(node.seen):
                        node.durable.extend(bytes(change.end - len(node.durable)))
                number += 1
            node.seen = bytearray(node.durable)
            node.unsynced = []

    def _enter(self, folder: str, entry: Entry) -> None:
        _enter(self.folders[folder].seen, entry)
        self.folders[folder].unsynced.append(entry)

    def _event(self, name: str, *arguments: object) -> None:
        if self.events is not None:
            self.events.append((name, arguments))


def _apply(data: bytearray, change: Change) -> None:
    if change.data is None:
        if change.at < len(data):
            del data[change.at :]
        else:
            data.extend(bytes(change.at - len(data)))
        return
    if change.at > len(data):
        data.extend(bytes(change.at - len(data)))
    data[change.at : change.end] = change.data


def _enter(entries: dict[str, int], entry: Entry) -> None:
    if entry.old:
        entries.pop(entry.old, None)
    if entry.new:
        entries[entry.new] = entry.inode


def _without(old: Change, new: Change) -> list[Change]:
    """What is left of `old` where `new` was written over it."""
    if old.data is None:
        return [] if new.data is None else [old]
    if new.data is None:
        new = Change(new.at, bytes(max(0, old.end - new.at)))
    assert new.data is not None
    pieces = []
    if old.at < new.at:
        pieces.append(Change(old.at, old.data[: new.at - old.at], old.clean))
    if old.end > new.end:
        pieces.append(Change(max(old.at, new.end), old.data[max(0, new.end - old.at) :], old.clean))
    return [piece for piece in pieces if piece.data]
