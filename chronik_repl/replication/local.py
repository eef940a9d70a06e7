"""What a node says of itself: one place for receiver, election and shipper to take it from.

Handshakes and their answers are made here, from the passport, the log and whom the node hears, as they are at that
moment. It also carries what the roles need from outside (network, wall clock, chance), so that the simulator can give
its own, and `say`: one line a change of state, kept for /status and written to the process's log.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from typing import Literal, NamedTuple

import structlog

from chronik_repl.config import Settings
from chronik_repl.identity import Passport
from chronik_repl.positions import NO_EPOCH, Epoch
from chronik_repl.replication import epochs
from chronik_repl.replication.messages import PROTOCOL, Answer, Handshake, HandshakeAnswer, Purpose, newest
from chronik_repl.replication.network import Network
from chronik_repl.standing import Event
from chronik_repl.wal.changes import Member
from chronik_repl.wal.log import Log

EVENTS_KEPT = 100

logger = structlog.get_logger("chronik")


class LiveLeader(NamedTuple):
    """Whom this node hears now (or that it leads itself)."""

    member: Member
    epoch: Epoch


class Local:
    def __init__(
        self,
        settings: Settings,
        passport: Passport,
        log: Log,
        network: Network,
        clock: Callable[[], float],
        rng: random.Random,
    ) -> None:
        self.settings = settings
        self.passport = passport
        self.log = log
        self.network = network
        self.rng = rng
        self._clock = clock
        self.replication_address = ""
        self.kafka_address = settings.kafka_advertised_addr or settings.kafka_bind_addr
        self.http_address = settings.http_bind_addr
        self.live: Callable[[], LiveLeader | None] = lambda: None
        self.events: deque[Event] = deque(maxlen=EVENTS_KEPT)

    @property
    def listening(self) -> bool:
        """Can a leader reach this node?"""
        return bool(self.replication_address)

    @property
    def me(self) -> epochs.Identity:
        return self.passport.me

    @property
    def member(self) -> Member:
        """This node as a membership frame names it."""
        return Member(
            self.passport.node_id,
            self.passport.directory_id,
            self.replication_address,
            self.kafka_address,
            self.http_address,
            self.settings.rack,
        )

    def now_ms(self) -> int:
        return int(self._clock() * 1000)

    def say(self, level: Literal["info", "warning", "error"], text: str, **detail: object) -> None:
        """A change of state. `text` is for people and stands alone; `detail` is for those who search."""
        shown = f"{text} ({', '.join(f'{name} {value}' for name, value in detail.items())})" if detail else text
        self.events.append(Event(self.now_ms(), level, shown))
        getattr(logger, level)(text, **detail)

    def summary(self) -> epochs.Summary:
        """The log as it is now, with what is appended and not yet synced."""
        log = self.log
        return epochs.summarise(log.state.history, log.start, log.end, log.end_checksum)

    def sets(self) -> tuple[epochs.Electorate, ...]:
        """The membership in force by this log."""
        state = self.log.state
        return epochs.membership_in_force(state.membership, self.log.committed.value, state.history)

    def sync_replicas_asked(self, by_the_log: int) -> int:
        """The k that the variables ask for; what is not set stays as the log says."""
        settings = self.settings
        if settings.is_set("replication_mode"):
            if settings.replication_mode == "async":
                return 0
            if settings.is_set("replication_sync_replicas") or not by_the_log:
                return settings.replication_sync_replicas
        elif settings.is_set("replication_sync_replicas") and by_the_log:
            return settings.replication_sync_replicas
        return by_the_log

    def handshake(self, purpose: Purpose, epoch: Epoch = NO_EPOCH) -> Handshake:
        log, me = self.log, self.member
        return Handshake(
            protocol=PROTOCOL,
            cluster_id=self.passport.cluster_id,
            node_id=me.node_id,
            directory_id=me.directory_id,
            epoch=epoch,
            purpose=purpose,
            sync=any(members.sync_replicas > 0 for members in self.sets()),
            log_start=log.start,
            log_end=log.end,
            history=newest(log.state.history),
            replication_address=me.replication_address,
            kafka_address=me.kafka_address,
            http_address=me.http_address,
            rack=me.rack,
            high_watermark=log.committed.value,
        )

    def answer(self, status: Answer, reason: str = "") -> HandshakeAnswer:
        log, me, promise = self.log, self.member, self.passport.promise
        live = self.live()
        return HandshakeAnswer(
            status=status,
            reason=reason[:2000],
            protocol=PROTOCOL,
            cluster_id=self.passport.cluster_id,
            node_id=me.node_id,
            directory_id=me.directory_id,
            promised_epoch=promise.epoch,
            promised_node=promise.node_id,
            promised_directory=promise.directory_id,
            live_leader=live.member.node_id if live else 0,
            live_epoch=live.epoch if live else 0,
            log_start=log.start,
            log_end=log.end,
            end_checksum=log.end_checksum,
            durable_end=log.durable.value,
            high_watermark=log.committed.value,
            history=newest(log.state.history),
            replication_address=me.replication_address,
            kafka_address=me.kafka_address,
            http_address=me.http_address,
            rack=me.rack,
            live_replication_address=live.member.replication_address if live else "",
            live_kafka_address=live.member.kafka_address if live else "",
            live_http_address=live.member.http_address if live else "",
        )


def described(answer: HandshakeAnswer) -> epochs.Summary:
    """The log that an answer speaks of."""
    return epochs.Summary(answer.history, answer.log_end, answer.log_start, answer.end_checksum)


def answered(answer: HandshakeAnswer) -> epochs.Asked:
    """An answer as the decisions want it."""
    promise = epochs.Promise(answer.promised_epoch, answer.promised_node, answer.promised_directory)
    return epochs.Asked(
        answer.node_id, answer.directory_id, promise, described(answer), answer.live_leader, answer.live_epoch
    )


def answering_member(answer: HandshakeAnswer, address: str) -> Member:
    """Who answered, under the address by which it was reached: its own view of that may be a wildcard."""
    return Member(answer.node_id, answer.directory_id, address, answer.kafka_address, answer.http_address, answer.rack)
