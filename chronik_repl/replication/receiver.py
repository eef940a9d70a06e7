"""What a node answers to those who dial it: asking, promising, and one session with its leader.

Every connection starts with `HS`. Asking changes nothing. A request for an epoch is decided by `epochs.may_grant`,
and the promise is durable before `HA` says so; the log's end in that answer is read after it. Only one session is
served at a time: a newer one, of the same leader or of a later epoch, ends the older and waits until that has let go
of the log.

A node without a listening address has a receiver too: a leader that is drained for another's promotion grants
over the connection that it dialled itself.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import trio

from chronik_repl.errors import ProtocolError
from chronik_repl.replication import epochs
from chronik_repl.replication.following import Diverged, Following
from chronik_repl.replication.local import LiveLeader, Local
from chronik_repl.replication.messages import PROTOCOL, Answer, Handshake, HandshakeAnswer, Purpose
from chronik_repl.replication.network import Stream
from chronik_repl.replication.session import Connection, ConnectionLost

HANDSHAKES_MAX = 8  # of one connection: ask, take, and again
MEND = ". Keep this directory for `chronik parity` and `chronik wal verify`, and start this node with an empty one"

Promiser = Callable[[epochs.Promise], Awaitable[bool]]


class Receiver:
    def __init__(self, local: Local, promise: Promiser) -> None:
        """`promise`: decides, ends what is older, makes it durable; False if it may not be given."""
        self._local = local
        self._promise = promise
        self._log_in_hand = trio.Lock()  # held by the session that may change the log
        self.session: Following | None = None
        self.diverged = ""  # why this node's log is not its leader's; "" after a session that met
        self.sessions = 0
        self._heard: LiveLeader | None = None
        self._heard_at = trio.current_time()

    def live(self) -> LiveLeader | None:
        return self.session.live() if self.session is not None else None

    def last_heard(self) -> LiveLeader | None:
        """The leader of the last session that met, living or not."""
        return self.live() or self._heard

    @property
    def heard_at(self) -> float:
        """When a leader was last heard; this node itself counts, and its start."""
        session = self.session
        return session.connection.last_received_at if session is not None and session.met else self._heard_at

    def led_until_now(self) -> None:
        self._heard_at = trio.current_time()

    async def end_session(self) -> None:
        """After this no session of an older promise touches the log or acks."""
        if self.session is not None:
            self.session.end()
        async with self._log_in_hand:
            pass

    async def surrender(self) -> Connection | None:
        """End the session but keep its connection: who is to lead asks the old leader for its promise over it."""
        session = self.session
        if session is None:
            return None
        session.surrendered = True
        await self.end_session()
        return session.connection

    async def serve(self, stream: Stream) -> None:
        """The handler of one connection."""
        await self.adopt(Connection(stream))

    async def adopt(self, connection: Connection, first: Handshake | None = None) -> None:
        """Serve a connection; `first` is what was already read from it."""
        try:
            await self._converse(connection, first)
        except ConnectionLost as lost:
            if self.session is not None and self.session.connection is connection and self.session.met:
                self._local.say("warning", f"lost leader {self.session.leader.node_id}: {lost}")
        except Diverged as error:
            self.diverged = f"{error}{MEND}"
            self._local.say("error", f"no reads are served here: {self.diverged}")
        except ProtocolError as error:
            self._local.say("warning", f"connection dropped: {error}")
        finally:
            session = self.session
            ours = session is not None and session.connection is connection
            if ours:
                self._heard_at = self.heard_at
                self.session = None
            if ours and session is not None and session.surrendered:
                await connection.closed.wait()  # by whom it was surrendered to
            else:
                await connection.aclose()

    async def _converse(self, connection: Connection, first: Handshake | None) -> None:
        for _ in range(HANDSHAKES_MAX):
            received = first or await connection.receive()
            first = None
            if not isinstance(received, Handshake):
                raise ProtocolError(f"a conversation begins with HS, not with {type(received).__name__}")
            refusal = self._refusal(received)
            if refusal is None and received.purpose != Purpose.ASK:
                refusal = await self._grant(received)
            await connection.say(refusal or self._answer(received.purpose))
            if refusal is not None:
                return
            if received.purpose == Purpose.SHIP:
                await self._follow(connection, received)
                return

    def _answer(self, purpose: Purpose) -> HandshakeAnswer:
        """A node that has lost a part of its log to damage promises and follows, but no one may lead by its word: it
        might have held what the candidate lacks."""
        known = self._local.log.impaired_until
        if known is not None and purpose != Purpose.SHIP:
            text = f"this node lost a part of its log, which reached {known} at least, to damage: it votes again "
            return self._local.answer(Answer.DAMAGED, text + "once it has caught up with a leader")
        return self._local.answer(Answer.OK)

    def _refusal(self, asked: Handshake) -> HandshakeAnswer | None:
        local, passport = self._local, self._local.passport
        if asked.protocol != PROTOCOL:
            text = (
                f"this node speaks protocol {PROTOCOL}, node {asked.node_id} speaks {asked.protocol}: upgrade the older"
            )
            return local.answer(Answer.OTHER_PROTOCOL, text)
        if asked.node_id < 1 or not asked.directory_id:
            raise ProtocolError(f"a handshake of nobody: node {asked.node_id}, directory {asked.directory_id!r}")
        if asked.directory_id == passport.directory_id:
            text = (
                f"node {asked.node_id} shows this node's own directory id {passport.directory_id}: one is a copy. Stop "
                "it, and copy with `chronik backup`"
            )
            return local.answer(Answer.SAME_DIRECTORY, text)
        if asked.node_id == passport.node_id:
            return local.answer(
                Answer.SAME_NODE_ID, f"both nodes have CHRONIK_NODE_ID {asked.node_id}: give the newer one its own"
            )
        if (
            passport.cluster_id
            and asked.cluster_id != passport.cluster_id
            and (asked.cluster_id or asked.purpose != Purpose.ASK)
        ):
            text = (
                f"this node is of cluster {passport.cluster_id!r}, the other of {asked.cluster_id!r}: correct the "
                "address, or start this one with an empty directory"
            )
            return local.answer(Answer.OTHER_CLUSTER, text)
        if asked.purpose != Purpose.ASK and (asked.epoch < 1 or not asked.cluster_id):
            raise ProtocolError(f"{asked.purpose.name} without an epoch or a cluster")
        return None

    async def _grant(self, asked: Handshake) -> HandshakeAnswer | None:
        wanted = epochs.Promise(asked.epoch, asked.node_id, asked.directory_id)
        if await self._promise(wanted):
            return None
        given = self._local.passport.promise
        text = f"epoch {given.epoch} is promised to node {given.node_id}"
        return self._local.answer(Answer.PROMISED, text)

    async def _follow(self, connection: Connection, asked: Handshake) -> None:
        settings = self._local.settings
        session = Following(self._local, connection, asked, self._met)
        if self.session is not None:
            self.session.end()
        self.session = session
        async with self._log_in_hand:
            if session.ended or self._local.passport.promise != session.promise:
                return
            connection.established(settings.max_frame_bytes, settings.replication_heartbeat_timeout_secs)
            self.sessions += 1
            await session.run()

    def _met(self, session: Following) -> None:
        before = self._heard
        self._heard = LiveLeader(session.leader, session.epoch)
        self.diverged = ""
        if before is None or before.epoch != session.epoch:
            self._local.say("info", f"following leader {session.leader.node_id}", epoch=session.epoch)
