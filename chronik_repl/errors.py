"""One tree of errors, grouped by what the caller must do.

    ChronikError
    ├── ConfigError          the operator edits a value: names the variable, the value, what is allowed
    ├── ProtocolError        drop this connection
    │   └── StaleEpoch       the peer was deposed
    ├── CorruptLog           stop; never skip: names the file and the positions
    ├── ForeignLog           stop; this directory is not ours to touch: says whose it is
    ├── FormatTooNew         stop; upgrade
    ├── DiskFailed           stop; nothing more is acked
    ├── DiskFull             refuse this append; reads go on
    │   └── StateFull        refuse this change; everything that is there goes on
    ├── OutOfRange           the position or offset is not (or no longer) in the log
    ├── NotLeader            ask the leader; names it if it is known
    ├── CannotLead           stop; another node leads or should: says which, and how to rejoin
    └── Refused              an operator's command cannot be done now: says what is missing

Each message says what happened, where, and what to do next.
"""

from __future__ import annotations

from typing import TypeVar

from chronik_repl.positions import Epoch, NodeId, Position

ErrorType = TypeVar("ErrorType", bound=BaseException)


class ChronikError(Exception):
    """Everything that this package raises on purpose."""


class ConfigError(ChronikError):
    """The operator edits a value."""


class ProtocolError(ChronikError):
    """The peer broke the protocol: drop this connection."""


class StaleEpoch(ProtocolError):
    """The peer speaks for an epoch that was promised away."""

    def __init__(self, epoch: Epoch, promised: Epoch, to: NodeId) -> None:
        super().__init__(f"epoch {epoch} is over: epoch {promised} was promised to node {to}")
        self.epoch, self.promised, self.to = epoch, promised, to


class CorruptLog(ChronikError):
    """Bytes below the durable mark are not what was written there. Never skipped."""

    def __init__(self, message: str, *, file: str = "", start: Position | None = None, end: Position | None = None):
        super().__init__(message)
        self.file, self.start, self.end = file, start, end


class ForeignLog(ChronikError):
    """The directory belongs to another cluster, node or process."""


class FormatTooNew(ChronikError):
    """Written by a newer version: upgrade this one."""


class DiskFailed(ChronikError):
    """A write or sync failed. Final: the process exits, and only a restart tells what survived."""


class DiskFull(ChronikError):
    """Below the floor of free space: appends are refused, reads go on."""


class StateFull(DiskFull):
    """Topics, groups and offsets have become too many: no more of them until some are removed."""


class OutOfRange(ChronikError):
    """The position or offset asked for is not in the log."""


class NotLeader(ChronikError):
    """This node does not lead (any more)."""

    def __init__(self, message: str, leader: NodeId | None = None) -> None:
        super().__init__(message)
        self.leader = leader


class CannotLead(ChronikError):
    """This process was started to lead and must not: another node does, or holds the log that this one lacks."""


class Refused(ChronikError):
    """An operator's command that cannot be carried out now; the message says what is missing."""


def first_of(group: BaseExceptionGroup[ErrorType]) -> ErrorType:
    """One error of a group, however deep it lies: where several say the same, one is enough to say."""
    error: ErrorType | BaseExceptionGroup[ErrorType] = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
