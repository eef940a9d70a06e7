"""Who this directory is, and what it has promised: the file `node`.

    {"format": 1, "directory_id": …, "node_id": …, "cluster_id": …, "promised_epoch": …, "promised_to": …,
     "promised_directory": …, "promised_others": …, "log_begun": …}
    crc32c of the line above, as eight hex digits

A directory gets a random id on the day it is made and keeps it: that id, not the node's number, is what votes. A
promise (an epoch, and the node that asked for it) is durable here before anyone hears of it, and never goes back.
Beside it stands the highest epoch ever promised to *another* node: an async leader that once promised its loyalty
elsewhere must not start alone afterwards.

A lost or damaged file is not made anew over a log that is there: the promise in it would be given twice. Nor is a log
begun anew under a file that says that one was begun: what stood in it was acked under this directory's id, and a node
that has forgotten it must not vote by that id. So `log_begun` is durable here before the first ack, and taken back
before the last segment goes by a leader's word.
"""

from __future__ import annotations

import random

import msgspec
import trio
from crc32c import crc32c

from chronik_repl.errors import ConfigError, CorruptLog, ForeignLog, FormatTooNew
from chronik_repl.positions import NO_EPOCH, NOBODY, Epoch, NodeId
from chronik_repl.replication.epochs import Identity, Promise, promised_to_others
from chronik_repl.wal.disk import Disk
from chronik_repl.wal.mending import read_impaired
from chronik_repl.wal.segment import FOLDER

FILE = "node"
FORMAT = 1
LOST = (
    "what this directory has promised. If its log is wanted, copy it with `chronik backup` (the copy is a new member); "
    "if not, start with an empty directory"
)

GONE = (
    f"{FOLDER}/ holds no log, and the file `{FILE}` says that one was begun here: others count on what it acked. If it "
    f"is on a disk that is not mounted, mount that. If it was moved, put it back. If it is gone, remove the file "
    f"`{FILE}` too: this node then begins as a new one, with a new directory id, and fetches everything from its leader"
)


class NodeFile(msgspec.Struct, frozen=True):
    """What the file says. `node_id` 0 (a fresh copy): the configured one at its first start."""

    directory_id: str
    node_id: NodeId = NOBODY
    cluster_id: str = ""
    promised_epoch: Epoch = NO_EPOCH
    promised_to: NodeId = NOBODY
    promised_directory: str = ""
    promised_others: Epoch = NO_EPOCH
    format: int = FORMAT
    log_begun: bool = False  # something was acked from a log here


def new_directory_id(rng: random.Random) -> str:
    return f"{rng.getrandbits(128):032x}"


def encode(content: NodeFile) -> bytes:
    line = msgspec.json.encode(content)
    return b"%s\n%08x\n" % (line, crc32c(line))


def decode(data: bytes) -> NodeFile:
    """Raises CorruptLog or FormatTooNew."""
    line, _, crc = data.partition(b"\n")
    if crc != b"%08x\n" % crc32c(line):
        raise CorruptLog(f"the file `node` is damaged, and with it {LOST}", file=FILE)
    try:
        content = msgspec.json.decode(line, type=NodeFile)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CorruptLog(f"the file `node` is unreadable ({error}), and with it {LOST}", file=FILE) from error
    if content.format > FORMAT:
        raise FormatTooNew(f"`node` has format {content.format}; this version reads {FORMAT}. Upgrade chronik-repl")
    return content


async def read(disk: Disk) -> NodeFile | None:
    """None where there is no such file."""
    try:
        file = await disk.open(FILE)
    except FileNotFoundError:
        return None
    try:
        return decode(await disk.read(file, 0, 64 * 1024))
    finally:
        file.close()


async def write(disk: Disk, content: NodeFile) -> None:
    """Durable when it returns."""
    await disk.replace(FILE, encode(content))


async def load_or_make(disk: Disk, rng: random.Random, node_id: NodeId, cluster_id: str) -> NodeFile:
    """This directory's identity; made now if the directory is new. Raises ForeignLog where it is someone else's."""
    found = await read(disk)
    holds_log = any(name.endswith(".wal") for name in await disk.list(FOLDER))
    if found is None:
        if holds_log:
            raise CorruptLog(f"there is a log here but no file `node`, and so not {LOST}", file=FILE)
        if node_id == NOBODY:
            raise ConfigError(
                "CHRONIK_NODE_ID is needed for a new data directory: a number from 1 on, its own for each node"
            )
        found = NodeFile(new_directory_id(rng), node_id, cluster_id)
        await write(disk, found)
        return found
    if found.log_begun and not holds_log and await read_impaired(disk) is None:
        raise CorruptLog(GONE, file=FOLDER)
    if found.node_id == NOBODY:
        if node_id == NOBODY:
            raise ConfigError(
                "CHRONIK_NODE_ID is needed: this directory is a fresh copy. Set it to a number that no other node has"
            )
        found = msgspec.structs.replace(found, node_id=node_id)
        await write(disk, found)
    if node_id not in (NOBODY, found.node_id):
        raise ForeignLog(
            f"this directory belongs to node {found.node_id}, but CHRONIK_NODE_ID is {node_id}. Correct one of the two"
        )
    if cluster_id and found.cluster_id and cluster_id != found.cluster_id:
        raise ForeignLog(
            f"this directory belongs to cluster {found.cluster_id!r}, but CHRONIK_CLUSTER_ID is {cluster_id!r}. "
            "Correct CHRONIK_CLUSTER_ID or CHRONIK_DATA_DIR"
        )
    if cluster_id and not found.cluster_id:
        found = msgspec.structs.replace(found, cluster_id=cluster_id)
    # What was read may be in the page cache only: a write of the last process whose sync failed. A power cut would take
    # that promise back, so it is made durable before anyone hears of it.
    await write(disk, found)
    return found


class Passport:
    """The file, while the node runs. What it shows is durable."""

    def __init__(self, disk: Disk, content: NodeFile) -> None:
        self._disk = disk
        self._content = content
        self._writing = trio.Lock()

    @property
    def me(self) -> Identity:
        return Identity(self._content.node_id, self._content.directory_id)

    @property
    def node_id(self) -> NodeId:
        return self._content.node_id

    @property
    def directory_id(self) -> str:
        return self._content.directory_id

    @property
    def cluster_id(self) -> str:
        return self._content.cluster_id

    @property
    def promise(self) -> Promise:
        content = self._content
        return Promise(content.promised_epoch, content.promised_to, content.promised_directory)

    @property
    def promised_others(self) -> Epoch:
        """The highest epoch ever promised to another node."""
        return self._content.promised_others

    async def keep_promise(self, asked: Promise) -> None:
        """Durable when it returns. That it may be given was decided before (epochs.may_grant)."""
        async with self._writing:
            if asked == self.promise:
                return
            await self._change(
                promised_epoch=Epoch(asked.epoch),
                promised_to=NodeId(asked.node_id),
                promised_directory=asked.directory_id,
                promised_others=promised_to_others(self.promised_others, asked, self.node_id),
            )

    @property
    def log_begun(self) -> bool:
        return self._content.log_begun

    async def begin_log(self) -> None:
        """Before anything is acked from it. Durable when it returns."""
        await self._note_log(True)

    async def forget_log(self) -> None:
        """Before the last of it is removed."""
        await self._note_log(False)

    async def _note_log(self, begun: bool) -> None:
        if self.log_begun == begun:
            return
        async with self._writing:
            await self._change(log_begun=begun)

    async def join_cluster(self, cluster_id: str) -> None:
        """The first leader that this directory follows, or its own founding, says which cluster it is of."""
        async with self._writing:
            if self.cluster_id != cluster_id:
                await self._change(cluster_id=cluster_id)

    async def _change(self, **fields: object) -> None:
        content = msgspec.structs.replace(self._content, **fields)
        with trio.CancelScope(shield=True):  # what is being written must be what is known, whoever gives up
            await write(self._disk, content)
        self._content = content
