"""Asking around and taking an epoch: the conversations of an election. What the answers mean is decided in epochs.py.

    ask    HS without an epoch to everyone that can be reached; nothing changes anywhere
    take   HS with the epoch, after it is durable on the asker itself; whoever grants it has it durable before it
    answers

Every peer is asked at the same time and has the handshake's time to answer; one that is silent costs no more than that.
"""

from __future__ import annotations

from collections.abc import Iterable

import trio

from chronik_repl.errors import ProtocolError
from chronik_repl.positions import NO_EPOCH, Epoch
from chronik_repl.replication import epochs
from chronik_repl.replication.local import Local, described
from chronik_repl.replication.messages import Answer, HandshakeAnswer, Purpose
from chronik_repl.replication.session import HANDSHAKE_TIMEOUT_S, Connection, ConnectionLost, dial

Answers = dict[str, HandshakeAnswer]
OLD_LEADER = "the old leader's session"  # stands for an address where the connection is already there


def addresses(local: Local) -> tuple[str, ...]:
    """Everyone to ask: those listed, and the members that the log names."""
    found = dict.fromkeys(local.settings.replication_followers)
    for _, change in local.log.state.membership[-2:]:
        for member in change.members:
            if member.replication_address and epochs.identity(member) != local.me:
                found.setdefault(member.replication_address)
    found.pop(local.replication_address, None)
    return tuple(found)


async def ask(local: Local, whom: Iterable[str]) -> Answers:
    return await _everyone(local, whom, Purpose.ASK, NO_EPOCH, None)


async def take(local: Local, whom: Iterable[str], epoch: Epoch, old_leader: Connection | None = None) -> Answers:
    """`old_leader`: the connection of a session with a leader that was drained; it may have no address to dial."""
    return await _everyone(local, whom, Purpose.TAKE, epoch, old_leader)


async def _everyone(
    local: Local, whom: Iterable[str], purpose: Purpose, epoch: Epoch, old_leader: Connection | None
) -> Answers:
    answers: Answers = {}

    async def one(address: str, connection: Connection | None = None) -> None:
        try:
            connection = connection or await dial(local.network, address)
        except ProtocolError:
            return
        try:
            with trio.move_on_after(HANDSHAKE_TIMEOUT_S):
                await connection.say(local.handshake(purpose, epoch))
                while not isinstance(answer := await connection.receive(), HandshakeAnswer):
                    if address != OLD_LEADER:  # there, the rest of the stream comes first
                        raise ConnectionLost("the answer to a handshake is HA")
                answers[address] = answer
        except ProtocolError:
            return
        finally:
            await connection.aclose()

    async with trio.open_nursery() as nursery:
        for address in whom:
            nursery.start_soon(one, address)
        if old_leader is not None:
            nursery.start_soon(one, OLD_LEADER, old_leader)
    return answers


def of_this_cluster(answers: Answers) -> Answers:
    """Without other clusters, other protocols, copies of this directory: nothing that they say matters here."""
    known = (Answer.OK, Answer.PROMISED, Answer.DAMAGED)
    return {address: answer for address, answer in answers.items() if answer.status in known}


def grants(answers: Answers) -> dict[epochs.Identity, epochs.Summary]:
    """Who granted, and with which log. Where one directory answers twice, its longer log counts."""
    found: dict[epochs.Identity, epochs.Summary] = {}
    for answer in answers.values():
        who, log = epochs.Identity(answer.node_id, answer.directory_id), described(answer)
        if answer.status != Answer.OK:
            continue
        if who not in found or (log.last_epoch, log.end) > (found[who].last_epoch, found[who].end):
            found[who] = log
    return found
