"""Standing for leadership: ask, judge, take, judge. What comes out is an epoch that was won, or why it was not.

    ask      everyone that can be reached, changing nothing. Where a living leader is heard, a node that merely starts
             yields to it; an operator's `promote` goes on
    judge    could it be won with these answers? If not, nothing is taken from anyone
    drain    (`promote`) the living leader stops accepting and sends the rest
    take     an epoch above every promise known: durable here first, then everywhere
    judge    enough grants, with logs that are not ahead

The judging is in epochs.py. An empty node that was started to lead founds a cluster instead, if nobody holds a log.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

import trio

from chronik_repl.errors import CannotLead, Refused
from chronik_repl.positions import Epoch
from chronik_repl.replication import election, epochs
from chronik_repl.replication.local import Local, answered
from chronik_repl.replication.messages import Answer
from chronik_repl.replication.receiver import Promiser, Receiver
from chronik_repl.replication.session import Connection, ConnectionLost
from chronik_repl.wal.changes import MembersChanged
from chronik_repl.words import count_of

DRAIN_TIMEOUT_S = 10.0
IMPAIRED = (
    "part of this log was damaged and set aside: this node must catch up with a leader before it can lead. If there is "
    "none any more, `chronik promote --accept-loss` on the node that holds most; what only others held is lost"
)
NO_VOTE = (
    "part of this log, which reached {} at least, was damaged: what is left of it is set aside in damaged/, and until "
    "this node has caught up with a leader it has no vote"
)
WITHOUT_THEM = ". Start what is missing, or lead without it: `chronik promote --accept-loss`; what only it held is lost"

Say = Callable[[str], None]


class Won(NamedTuple):
    epoch: Epoch
    accept_loss: bool = False
    members: MembersChanged | None = None  # what founding, or an accepted loss, makes of the membership


class Campaign:
    def __init__(self, local: Local, receiver: Receiver, promise: Promiser) -> None:
        self._local = local
        self._receiver = receiver
        self._promise = promise

    async def stand(self, *, promoted: bool = False, accept_loss: bool = False, say: Say = lambda text: None) -> Won:
        """Ask, judge, take, judge. Raises Refused; CannotLead where this process has nothing to do."""
        local, me = self._local, self._local.me
        whom = election.addresses(local)
        say(f"asking {count_of(len(whom), 'other node')}")
        if local.log.impaired_until is not None and not accept_loss:
            raise Refused(IMPAIRED)
        answers = await election.ask(local, whom)
        for address, answer in answers.items():
            if answer.status != Answer.OK:
                say(f"{address} has no say: {answer.reason}")
        asked = {address: answered(answer) for address, answer in election.of_this_cluster(answers).items()}
        founds = not local.log.state.history
        if founds:
            await self._found(asked, [a for a, answer in answers.items() if answer.status == Answer.DAMAGED], promoted)
        elif not promoted and (other := epochs.live_leader(me.node_id, asked.values())) is not None:
            self._yield_to(other)
        elif not promoted and local.log.state.history[-1].leader != me.node_id:
            last = local.log.state.history[-1]
            raise Refused(f"node {last.leader} led epoch {last.epoch}: if it is gone, run `chronik promote` here")
        known = [a.promise.epoch for a in asked.values()] + [a.log.last_epoch for a in asked.values()]
        epoch = epochs.next_epoch([*known, local.passport.promise.epoch, local.summary().last_epoch])
        old_leader: Connection | None = None
        if not founds:
            would = election.grants(answers)
            session = self._receiver.session if self._receiver.live() else None
            if session is not None:  # reachable by its own session, and drained it holds what we hold
                would[epochs.Identity(session.leader.node_id, session.leader.directory_id)] = local.summary()
            try:
                self._check(would)
            except Refused as refusal:
                if not accept_loss:
                    raise Refused(f"{refusal}{WITHOUT_THEM if promoted else ''}") from None
                epoch = epochs.epoch_after_loss(epoch)
            if session is not None:
                old_leader = await self._drain(say)
        if epoch > epochs.EPOCH_MAX:
            raise Refused(
                f"epoch {epoch} would be the next, and the last is {epochs.EPOCH_MAX}: some node claimed that one. "
                "Nobody can lead this log any more; followers serve its records, to be copied into a new cluster"
            )
        say(f"taking epoch {epoch}")
        if not await self._promise(epochs.Promise(epoch, *me)):
            raise Refused("another node was promised a later epoch meanwhile: see who leads (`chronik status`)")
        taken = await election.take(local, whom, epoch, old_leader)
        if founds:
            return Won(epoch, members=MembersChanged((local.member,), 0))
        granted = election.grants(taken)
        try:
            self._check(granted)
        except Refused:
            if not accept_loss:
                raise
            changes = local.log.state.membership
            now = changes[-1][1] if changes else MembersChanged((), 0)
            return Won(epoch, True, epochs.members_after_loss(now, local.member, granted))
        return Won(epoch)

    def _check(self, grants: Mapping[epochs.Identity, epochs.Summary]) -> None:
        local = self._local
        if local.log.impaired_until is not None:
            raise Refused(IMPAIRED)
        missing = epochs.missing_to_lead(
            local.me, local.summary(), grants, local.sets(), local.passport.promised_others
        )
        if missing:
            raise Refused(missing)

    async def _found(self, asked: Mapping[str, epochs.Asked], damaged: Sequence[str], promoted: bool) -> None:
        local, settings = self._local, self._local.settings
        if promoted:
            raise Refused("this node's log is empty: promote one that holds the log")
        if damaged:  # an end of 0 may be what damage left there
            raise Refused(
                f"this node's log is empty, and {damaged[0]} held one that was damaged: run `chronik promote` on a "
                "node that holds the log, and start this one as a follower"
            )
        others = [address for address in settings.replication_followers if address != local.replication_address]
        match epochs.founding(others, asked, settings.bootstrap):
            case epochs.Wait(missing):
                raise Refused(missing)
            case epochs.Yield(_, _, reason):
                raise CannotLead(reason)
        cluster_id = local.passport.cluster_id or settings.cluster_id or f"{local.rng.getrandbits(64):016x}"
        await local.passport.join_cluster(cluster_id)
        if local.log.cluster_id is None:
            local.log.found(cluster_id)
            local.say("info", f"founding cluster {cluster_id}")

    def _yield_to(self, other: epochs.Yield) -> None:
        if not self._local.listening:
            raise CannotLead(
                f"{other.reason}. To follow it, start this directory with chronik-follower "
                "(or CHRONIK_WAL_RECEIVER_ENABLED=true); to lead instead, run `chronik promote` here then"
            )
        raise Refused(f"{other.reason}; waiting to be dialled by it")

    async def _drain(self, say: Say) -> Connection | None:
        """Ask the living leader to stop accepting and to send the rest; then keep the connection for its promise."""
        session = self._receiver.session
        if session is None:
            return None
        say(f"draining node {session.leader.node_id}")
        drained = False
        with trio.move_on_after(DRAIN_TIMEOUT_S) as scope:
            async with trio.open_nursery() as nursery:

                async def watch() -> None:
                    await session.connection.closed.wait()
                    scope.cancel()

                nursery.start_soon(watch)
                with suppress(ConnectionLost):  # it died just now
                    await session.drain_leader()
                    drained = True
                nursery.cancel_scope.cancel()
        if not drained:
            say("it is gone, or did not drain in time: going on without that")
        return await self._receiver.surrender()
