"""Planted bugs: each breaks one rule of the production code, by putting another function in its place.

`failures` are the numbers of docs/reliability.md. `CAUGHT` says which seed caught it when it was last searched for
(`scripts/simulate --search`); the tests replay those.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec
import trio

from chronik_repl import identity
from chronik_repl.errors import DiskFailed
from chronik_repl.kafka import producers
from chronik_repl.kafka.producer_ids import Ids
from chronik_repl.positions import ORIGIN, Position
from chronik_repl.replication import epochs, progress
from chronik_repl.replication.following import Following
from chronik_repl.replication.messages import Ack
from chronik_repl.replication.receiver import Receiver
from chronik_repl.replication.ring import Ring
from chronik_repl.replication.shipper import Link
from chronik_repl.wal.changes import ProducerIdGiven
from chronik_repl.wal.committer import Committer
from chronik_repl.wal.log import Log
from chronik_repl.wal.watermark import Watermark
from tests.simulation.disk import SimDisk

Patch = tuple[Any, str, Any]


class Bug(NamedTuple):
    what: str
    failures: tuple[int, ...]
    patches: tuple[Patch, ...]


_in_force = epochs.membership_in_force
_point = epochs.diverging_point
_held_by = progress.held_by
_keep_promise = identity.Passport.keep_promise
_load_or_make = identity.load_or_make
_open = Log.open.__func__  # type: ignore[attr-defined]
_begin_epoch = Log.begin_epoch
_following = Following.__init__
_meet = Link._meet
_complete = Committer._complete
_next_mark = Committer._next_mark
_take = Ring.take
_wait = Watermark.wait


async def _open_and_cut(cls: type[Log], *args: Any, **kwargs: Any) -> Log:
    log: Log = await _open(cls, *args, **kwargs)
    if log.committed.value < log.end and log.committed.value > log.start:
        await log.truncate(log.committed.value)
    return log


async def _keep_in_memory(self: identity.Passport, asked: epochs.Promise) -> None:
    if asked != self.promise:
        others = epochs.promised_to_others(self.promised_others, asked, self.node_id)
        self._content = msgspec.structs.replace(
            self._content,
            promised_epoch=asked.epoch,
            promised_to=asked.node_id,
            promised_directory=asked.directory_id,
            promised_others=others,
        )


async def _keep_own_in_memory(self: identity.Passport, asked: epochs.Promise) -> None:
    await (_keep_in_memory if asked.node_id == self.node_id else _keep_promise)(self, asked)


async def _same_directory(disk: Any, rng: Any, node_id: Any, cluster_id: str) -> identity.NodeFile:
    content = await _load_or_make(disk, rng, node_id, cluster_id)
    if content.directory_id != f"{node_id:032x}":
        content = msgspec.structs.replace(content, directory_id=f"{node_id:032x}")
        await identity.write(disk, content)
    return content


async def _ack_what_is_appended(self: Following) -> None:
    log = self._log
    while True:
        told = log.end
        self._show()
        await self.connection.say(Ack(told, log.end_checksum, self._drain_wanted))
        with trio.move_on_after(0.001):
            await log.durable.wait_beyond(told)
        while log.end == told:
            await trio.sleep(0.001)


def _show_all(self: Following) -> None:
    self._log.commit_to(self._log.durable.value)


def _show_back(self: Following) -> None:
    self._log.commit_to(min(self._told_watermark, self._log.durable.value))
    if self._told_watermark and self._told_watermark < self._log.committed.value:
        self._log.committed.value = self._told_watermark


def _believe_at_once(self: Following, local: Any, connection: Any, handshake: Any, *rest: Any) -> None:
    _following(self, local, connection, handshake, *rest)
    local.log.commit_to(min(handshake.high_watermark, local.log.durable.value))


async def _no_end(self: Receiver) -> None:
    return None


def _all_of_them(members: Any, me: Any, acked: Any, durable_end: int) -> int:
    if members.sync_replicas:
        return int(_held_by(members, me, acked, durable_end))
    return int(min([durable_end, *(acked.get(who, 0) for who in members.who if who != me)]))


def _begin_at_once(self: Log, *args: Any) -> Any:
    appended = _begin_epoch(self, *args)

    async def not_now(position: int) -> None:
        del self.durable.wait

    self.durable.wait = not_now  # type: ignore[method-assign]
    return appended


async def _complete_anyway(self: Committer, begun: Any) -> None:
    try:
        await _complete(self, begun)
    except DiskFailed:
        self._done(begun.group.end, begun.group.chain)


def _take_on(self: Ring, bytes_max: int) -> Any:
    if self._next < self._oldest:
        self._next = self._oldest
    return _take(self, bytes_max)


async def _meet_and_resend(self: Link, connection: Any, answer: Any) -> None:
    await _meet(self, connection, answer)
    self._position = self._log.start


def _point_of_known_epochs(one: epochs.Summary, other: epochs.Summary) -> Any:
    if other.history and other.last_epoch not in {e.epoch for e in one.history}:
        return min(one.end, other.end)  # guessed
    return _point(one, other)


async def _always_park(self: Watermark, position: Any) -> None:
    await _wait(self, max(position, self.value + 1))


async def _give_at_once(self: Ids) -> int | None:
    if not self._house.accepting:
        return None
    log = self._house.log
    producer_id = log.state.next_producer_id
    log.append_change(ProducerIdGiven(producer_id))
    return producer_id


def _mark_without(self: Committer, durable_end: Position) -> Any:
    known, self._high_watermark = self._high_watermark, lambda: ORIGIN
    try:
        return _next_mark(self, durable_end)
    finally:
        self._high_watermark = known


async def _not_synced(self: SimDisk, folder: str) -> None:
    await trio.lowlevel.checkpoint()


BUGS: dict[str, Bug] = {
    "truncate-to-high-watermark": Bug(
        "a restarted node cuts its log to the high watermark that it knows",
        (1,),
        ((Log, "open", classmethod(_open_and_cut)),),
    ),
    "guess-unknown-epoch": Bug(
        "an epoch that the leader does not know is taken for a part of its log",
        (2, 3),
        ((epochs, "diverging_point", _point_of_known_epochs),),
    ),
    "no-truncation": Bug(
        "a tail that differs is kept", (3,), ((epochs, "diverging_point", lambda a, b: min(a.end, b.end)),)
    ),
    "shorter-log-leads": Bug(
        "a log of the same epoch is never ahead, however long",
        (4,),
        ((epochs, "own_last_epoch", lambda t, m, me: True),),
    ),
    "older-epoch-granted": Bug(
        "an older epoch is followed again", (5,), ((epochs, "may_grant", lambda promised, asked: True),)
    ),
    "promise-in-memory": Bug(
        "a promise is told before it is durable", (6,), ((identity.Passport, "keep_promise", _keep_in_memory),)
    ),
    "own-promise-in-memory": Bug(
        "a candidate's own promise is not durable", (6,), ((identity.Passport, "keep_promise", _keep_own_in_memory),)
    ),
    "log-ahead-ignored": Bug("who is behind may lead", (7,), ((epochs, "log_ahead", lambda theirs, mine, me: False),)),
    "one-grant-fewer": Bug(
        "one grant fewer is enough",
        (7,),
        ((epochs, "grants_needed", lambda members: len(members.who) - members.sync_replicas - 1),),
    ),
    "old-session-goes-on": Bug(
        "what an older session brings is still appended and acked", (8,), ((Receiver, "end_session", _no_end),)
    ),
    "high-watermark-back": Bug(
        "a follower shows what its leader says, also when that is less", (9,), ((Following, "_show", _show_back),)
    ),
    "high-watermark-not-kept": Bug(
        "the high watermark is not written to disk", (9,), ((Committer, "_next_mark", _mark_without),)
    ),
    "failed-sync-ignored": Bug(
        "after a failed sync the group counts, and the disk is used on",
        (15, 16),
        ((Committer, "_complete", _complete_anyway), (SimDisk, "_check", lambda self: None)),
    ),
    "directory-not-synced": Bug(
        "a new segment's directory entry is not synced", (18,), ((SimDisk, "_sync_dir", _not_synced),)
    ),
    "ack-before-sync": Bug(
        "a follower acks what it has appended", (23,), ((Following, "_acknowledge", _ack_what_is_appended),)
    ),
    "ring-gap": Bug("a lapped reader of the ring goes on with a gap", (24,), ((Ring, "take", _take_on),)),
    "overlap": Bug(
        "after a reconnect the leader sends from its log's start again", (25,), ((Link, "_meet", _meet_and_resend),)
    ),
    "retry-again": Bug(
        "what a producer sends again is appended again", (26,), ((producers, "check", lambda *asked: None),)
    ),
    "early-ack-missed": Bug(
        "who waits for what is already there waits for the next one", (33,), ((Watermark, "wait", _always_park),)
    ),
    "acks-all-is-local": Bug(
        "acks=all is the leader's own disk in sync mode too",
        (34,),
        ((progress, "held_by", lambda members, me, acked, durable_end: durable_end),),
    ),
    "sync-begins-alone": Bug(
        "a leader acks all before as many followers as are asked for are members",
        (34,),
        ((progress, "in_force", lambda asked, sets: True),),
    ),
    "async-waits": Bug(
        "in async mode the slowest follower holds everyone up", (35,), ((progress, "held_by", _all_of_them),)
    ),
    "count-old-frames": Bug(
        "frames of older epochs are committed by counting them alone",
        (51,),
        ((progress, "may_count", lambda position, start_end: True),),
    ),
    "start-not-durable": Bug(
        "the start frame is shipped before it is durable", (52,), ((Log, "begin_epoch", _begin_at_once),)
    ),
    "equal-epoch": Bug(
        "an equal epoch of another node is granted",
        (53,),
        ((epochs, "may_grant", lambda promised, asked: asked.epoch >= promised.epoch),),
    ),
    "amnesia": Bug(
        "a wiped node comes back under its old directory id", (54,), ((identity, "load_or_make", _same_directory),)
    ),
    "new-members-alone": Bug(
        "a change of members counts before it is committed",
        (55,),
        ((epochs, "membership_in_force", lambda c, h, x=(): _in_force(c[-1:], h, x)),),
    ),
    "old-members-alone": Bug(
        "the members before a change count alone until it is committed",
        (55,),
        ((epochs, "membership_in_force", lambda c, h, x=(): _in_force(c, h, x)[:1]),),
    ),
    "k-beside-the-log": Bug(
        "one sync replica fewer counts than the log says",
        (55,),
        (
            (
                epochs,
                "electorate",
                lambda change: epochs.Electorate(
                    frozenset(epochs.identity(m) for m in change.members), max(0, change.sync_replicas - 1)
                ),
            ),
        ),
    ),
    "many-changes": Bug(
        "members change again before the last change is committed",
        (55,),
        ((epochs, "may_change_members", lambda changes, high_watermark, start_end: True),),
    ),
    "show-before-cut": Bug(
        "a high watermark is believed before the truncation", (56,), ((Following, "__init__", _believe_at_once),)
    ),
    "show-unconfirmed": Bug("a follower shows all that it holds", (56,), ((Following, "_show", _show_all),)),
    "async-starts-alone": Bug(
        "an async leader that promised another its loyalty starts alone",
        (57,),
        ((epochs, "may_start_alone", lambda me, mine, others: bool(mine.history) and mine.history[-1].leader == me),),
    ),
    "second-history": Bug(
        "an empty leader founds over followers that hold a log",
        (58,),
        ((epochs, "founding", lambda listed, answers, bootstrap: epochs.Found()),),
    ),
    "deposes-by-asking": Bug(
        "a restarted old leader does not ask who leads", (59,), ((epochs, "live_leader", lambda me, answers: None),)
    ),
    "id-before-commit": Bug(
        "a producer is told its id before that is committed", (60,), ((Ids, "_give", _give_at_once),)
    ),
}

# The first seed that caught it when it was last searched for.
CAUGHT: dict[str, int] = {
    "truncate-to-high-watermark": 1,
    "guess-unknown-epoch": 2,
    "no-truncation": 2,
    "shorter-log-leads": 18,
    "older-epoch-granted": 4,
    "promise-in-memory": 1,
    "own-promise-in-memory": 1,
    "log-ahead-ignored": 18,
    "one-grant-fewer": 3,
    "old-session-goes-on": 12,
    "high-watermark-back": 5,
    "high-watermark-not-kept": 1,
    "failed-sync-ignored": 5,
    "directory-not-synced": 1,
    "ack-before-sync": 1,
    "ring-gap": 5,
    "overlap": 1,
    "retry-again": 4,
    "early-ack-missed": 1,
    "acks-all-is-local": 2,
    "sync-begins-alone": 5,
    "async-waits": 1,
    "count-old-frames": 2,
    "start-not-durable": 1,
    "equal-epoch": 51,
    "amnesia": 14,
    "new-members-alone": 13,
    "old-members-alone": 2,
    "k-beside-the-log": 2,
    "many-changes": 7,
    "show-before-cut": 2,
    "show-unconfirmed": 1,
    "async-starts-alone": 1,
    "second-history": 12,
    "deposes-by-asking": 8,
    "id-before-commit": 2,
}
