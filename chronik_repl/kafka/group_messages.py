"""What passes between a consumer group (groups.py), its members and the shell around it (coordinator.py)."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple, NewType

from chronik_repl.kafka.codes import Code
from chronik_repl.wal.changes import GroupChanged

Ticket = NewType("Ticket", int)  # a request that waits; the shell's


class Phase(Enum):
    EMPTY = "Empty"
    PREPARING = "PreparingRebalance"
    COMPLETING = "CompletingRebalance"
    STABLE = "Stable"


class Join(NamedTuple):
    """What a member says of itself when it joins."""

    member_id: str
    instance_id: str  # "": a dynamic member
    client_id: str
    client_host: str
    session_timeout_ms: int
    rebalance_timeout_ms: int
    protocol_type: str
    protocols: tuple[tuple[str, bytes], ...]
    new_member_id: str  # used if it has none yet
    id_first: bool = False  # a newcomer is told its id and has to ask again with it
    can_skip: bool = False  # understands skip_assignment


class Joined(NamedTuple):
    code: Code
    member_id: str = ""
    generation: int = -1
    protocol_type: str | None = None
    protocol: str | None = None
    leader: str = ""
    members: tuple[tuple[str, str, bytes], ...] = ()  # member id, instance id, metadata: for the leader alone
    skip_assignment: bool = False


class Synced(NamedTuple):
    code: Code
    protocol_type: str | None = None
    protocol: str | None = None
    assignment: bytes = b""


class Write(NamedTuple):
    change: GroupChanged


class Answer(NamedTuple):
    ticket: Ticket
    reply: Joined | Synced


Effect = Write | Answer


@dataclass(slots=True)
class Member:
    member_id: str
    instance_id: str
    client_id: str
    client_host: str
    session_timeout_ms: int
    rebalance_timeout_ms: int
    protocols: tuple[tuple[str, bytes], ...]
    assignment: bytes = b""
    deadline: float = 0.0
    is_new: bool = False
    can_skip: bool = False
    joining: Ticket | None = None
    syncing: Ticket | None = None

    def metadata(self, protocol: str) -> bytes:
        return next((metadata for name, metadata in self.protocols if name == protocol), b"")

    def size(self) -> int:
        return sum(len(name) + len(metadata) for name, metadata in self.protocols)

    @property
    def waits(self) -> bool:
        """For our answer: then its silence is our doing. Only a newcomer may be forgotten meanwhile."""
        return self.syncing is not None or (self.joining is not None and not self.is_new)

    def expired(self, now: float) -> bool:
        return not self.waits and now >= self.deadline
