"""A small cluster as a value, and every step it can take: the production decisions decide, this plays the world.

Everything that decides (may this be granted, who may lead, where do logs part, what is committed, which members count)
is called in `chronik_repl.replication.epochs` and `progress`, through the module, so that a variant that patches one
function there is checked as a whole. What the shells around them must keep (a promise is durable before it is told,
the reported end is read after it, …) are the switches of `Shell`.

One frame is one position. What was folded together, and why it hides nothing:

  - shipping and receiving are one step: a frame on its way touches only the follower, which refuses it once it has
    promised another epoch, so it might as well have arrived before.
  - what a node granted or acked can be counted at any later time, also after it crashed, was wiped or went elsewhere
    (`said` keeps that), and need not be counted at all.
  - crash and restart are one step: a node that is down, or paused, is one that takes no step for a while.
  - asking changes nothing. A candidate may know of every promise, or of its own only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any, NamedTuple

from chronik_repl.replication import epochs, progress
from chronik_repl.replication.epochs import Electorate, Identity, Promise, Summary
from chronik_repl.wal.changes import HistoryEntry, Member, MembersChanged

START, DATA, MEMBERS, LOSSY_START = range(4)
FOLLOWS, STANDS, LEADS = range(3)

Config = tuple[tuple[tuple[int, int], ...], int]  # ((node, directory), …), k
Label = tuple[object, ...]
Told = frozenset[tuple[tuple[int, int], "Log"]]  # who granted, and the log it told of


class Shell(NamedTuple):
    """What the code around the decisions keeps. Each False is a bug to be found."""

    grants_durably: bool = True  # a promise to another is durable before it is told
    takes_durably: bool = True  # one's own too, before anyone is asked for it
    end_after_promise: bool = True  # what is told of the log is read after the promise
    tells_unsynced: bool = True  # and includes what is not synced yet
    promise_ends_sessions: bool = True  # nothing of an older session is acked after it
    start_durable_first: bool = True  # the start frame is durable before anything is shipped or cut
    keeps_promised_others: bool = True
    new_epoch_on_restart: bool = True
    cm_after_cut: bool = True  # a follower believes a high watermark only once its log is a part of the leader's
    directory_counts: bool = True  # a wiped node is another member


class Bounds(NamedTuple):
    nodes: int = 3
    members: int = 3
    k: int = 1
    epochs: int = 3
    data: int = 1
    crashes: int = 1
    wipes: int = 0
    changes: int = 0
    losses: int = 0
    cm: bool = True  # followers hear of the high watermark
    kinds: tuple[str, ...] = ("add", "remove", "k")


class Frame(NamedTuple):
    epoch: int
    writer: int
    kind: int
    body: Any  # DATA: its number; MEMBERS: a Config


Log = tuple[Frame, ...]


class Node(NamedTuple):
    directory: int
    role: int
    log: Log
    durable: int
    promise: tuple[int, int]  # epoch, node
    kept_promise: tuple[int, int]
    high: int  # the high watermark that it knows
    kept_high: int
    others: int  # the highest epoch promised to another


class Used(NamedTuple):
    data: int = 0
    crashes: int = 0
    wipes: int = 0
    changes: int = 0
    losses: int = 0


class State(NamedTuple):
    nodes: tuple[Node, ...]
    acks: tuple[tuple[int, int, tuple[int, int], int], ...]  # (leader, epoch, member, end), of those gone elsewhere
    grants: tuple[tuple[int, int, tuple[int, int], Log], ...]  # (candidate, epoch, member, log told)
    committed: Log  # the longest prefix ever committed
    marks: tuple[tuple[int, int], ...]  # epoch → (leader, how far it committed)
    used: Used
    loss_epoch: int  # of the last --accept-loss


Step = tuple[Label, State, str]  # the last: what it breaks, or ""


@lru_cache(maxsize=1 << 17)
def summary_of(log: Log) -> Summary:
    return Summary(
        tuple(
            HistoryEntry(f.epoch, f.writer + 1, at, hash(log[:at]) & 0xFFFFFFFF, f.kind == LOSSY_START)
            for at, f in enumerate(log)
            if f.kind in (START, LOSSY_START)
        ),
        len(log),
    )


@lru_cache(maxsize=1 << 12)
def change_of(config: Config) -> MembersChanged:
    who, k = config
    return MembersChanged(tuple(Member(node + 1, str(directory)) for node, directory in who), k)


@lru_cache(maxsize=1 << 17)
def changes_of(log: Log) -> tuple[tuple[int, MembersChanged], ...]:
    return tuple((at + 1, change_of(f.body)) for at, f in enumerate(log) if f.kind == MEMBERS)


def config_of(change: MembersChanged) -> Config:
    return tuple((m.node_id - 1, int(m.directory_id)) for m in change.members), change.sync_replicas


def identity_of(member: tuple[int, int]) -> Identity:
    return Identity(member[0] + 1, str(member[1]))


def shared(one: Log, other: Log) -> int:
    length = min(len(one), len(other))
    if one[:length] == other[:length]:
        return length
    return next(at for at in range(length) if one[at] != other[at])


class World:
    def __init__(self, bounds: Bounds, shell: Shell | None = None) -> None:
        self.bounds, self.shell = bounds, shell or Shell()
        self.async_too = bounds.k == 0 or bounds.changes > 0 or bounds.losses > 0
        self._point = lru_cache(maxsize=1 << 17)(self._diverging_point)
        self._sets = lru_cache(maxsize=1 << 17)(self._sets_in_force)
        self._may_lead = lru_cache(maxsize=1 << 17)(self._decide_lead)
        self.session_acks_count = progress.ack_counts(0, 1)  # only in a variant

    def first(self) -> State:
        """Node 0 leads epoch 1; its start and the members are committed everywhere."""
        b = self.bounds
        log = (Frame(1, 0, START, 0), Frame(1, 0, MEMBERS, (tuple((i, 0) for i in range(b.members)), b.k)))
        member = Node(0, FOLLOWS, log, 2, (1, 0), (1, 0), 2, 2, 0)
        outsider = Node(0, FOLLOWS, (), 0, (0, -1), (0, -1), 0, 0, 0)
        nodes = (
            member._replace(role=LEADS),
            *(member._replace(others=1 if self.async_too else 0),) * (b.members - 1),
            *(outsider,) * (b.nodes - b.members),
        )
        return State(nodes, (), (), log, ((-1, 0), (0, 2), *(((-1, 0),) * (b.epochs - 1))), Used(), 0)

    # ── the production decisions, asked about these values ──

    def _diverging_point(self, leader: Log, follower: Log, high: int) -> int:
        return epochs.diverging_point(summary_of(leader), summary_of(follower)) if leader else 0

    def _sets_in_force(self, log: Log, high: int) -> tuple[Electorate, ...]:
        return epochs.membership_in_force(changes_of(log), high, summary_of(log).history)

    def _decide_lead(self, me: tuple[int, int], log: Log, high: int, others: int, grants: Told) -> bool:
        told = {identity_of(m): summary_of(g) for m, g in grants}
        return epochs.may_lead(identity_of(me), summary_of(log), told, self._sets(log, high), others)

    def member(self, i: int, n: Node) -> tuple[int, int]:
        return i, n.directory if self.shell.directory_counts else 0

    def told(self, n: Node) -> Log:
        return n.log if self.shell.tells_unsynced else n.log[: n.durable]

    def in_session(self, leader: Node, follower: Node) -> bool:
        return follower.promise == leader.promise and self._point(leader.log, follower.log, follower.high) == len(
            follower.log
        )

    # ── what was said stays said ──

    def leave(self, s: State, i: int) -> State:
        """Node i is about to outgrow or forget its promise: its grant or ack may still be counted."""
        n = s.nodes[i]
        epoch, to = n.promise
        if to in (-1, i) or s.nodes[to].promise != n.promise:
            return s
        if s.nodes[to].role == STANDS and self.shell.end_after_promise:
            return s._replace(grants=tuple(sorted({*s.grants, (to, epoch, self.member(i, n), self.told(n))})))
        if s.nodes[to].role == LEADS and self.in_session(s.nodes[to], n):
            return s._replace(acks=tuple(sorted({*s.acks, (to, epoch, self.member(i, n), n.durable)})))
        return s

    def step_down(self, s: State, i: int) -> State:
        """Acks on their way to a leader that stops: they matter only where sessions are not told apart."""
        if s.nodes[i].role == LEADS and self.session_acks_count:
            late = {
                (i, f.promise[0], self.member(j, f), f.durable)
                for j, f in enumerate(s.nodes)
                if j != i and self.in_session(s.nodes[i], f)
            }
            return s._replace(acks=tuple(sorted({*s.acks, *late})))
        return s

    def forget(self, s: State) -> State:
        """What nobody can count any more."""
        if s.acks:
            keep = tuple(
                a
                for a in s.acks
                if self.session_acks_count or (s.nodes[a[0]].role == LEADS and s.nodes[a[0]].promise[0] == a[1])
            )
            s = s._replace(acks=keep)
        if s.grants:
            s = s._replace(
                grants=tuple(g for g in s.grants if s.nodes[g[0]].role == STANDS and s.nodes[g[0]].promise[0] == g[1])
            )
        return s

    # ── steps ──

    def steps(self, s: State) -> Iterator[Step]:
        for i, n in enumerate(s.nodes):
            for make in (self._sync, self._crash, self._wipe, self._take, self._grant):
                for label, after, broken in make(s, i, n):
                    yield label, self.forget(after), broken
            make_role: Callable[[State, int, Node], Iterator[Step]] | None = None
            if n.role == STANDS:
                make_role = self._lead
            elif n.role == LEADS:
                make_role = self._work
            if make_role:
                for label, after, broken in make_role(s, i, n):
                    yield label, self.forget(after), broken

    def _sync(self, s: State, i: int, n: Node) -> Iterator[Step]:
        if n.durable == len(n.log) and n.high == n.kept_high and n.promise == n.kept_promise:
            return
        after = put(s, i, n._replace(durable=len(n.log), kept_high=n.high, kept_promise=n.promise))
        if not self.shell.promise_ends_sessions:  # what an older leader sent is synced now, and acked to it
            late = {
                (x, o.promise[0], self.member(i, n), len(n.log))
                for x, o in enumerate(s.nodes)
                if o.role == LEADS
                and o.promise[0] < n.promise[0]
                and n.log
                and n.log[-1].epoch == o.promise[0]
                and self._point(o.log, n.log, n.high) == len(n.log)
            }
            after = after._replace(acks=tuple(sorted({*after.acks, *late})))
        yield ("sync", i), after, ""

    def _crash(self, s: State, i: int, n: Node) -> Iterator[Step]:
        if s.used.crashes >= self.bounds.crashes:
            return
        before = self.leave(s, i) if n.promise != n.kept_promise else s
        before = self.step_down(before, i)._replace(used=s.used._replace(crashes=s.used.crashes + 1))
        for kept in range(n.durable, len(n.log) + 1):
            again = n._replace(
                role=FOLLOWS, log=n.log[:kept], durable=kept, high=min(n.kept_high, kept), promise=n.kept_promise
            )
            if again != n:
                yield ("crash", i, kept), put(before, i, again), ""

    def _wipe(self, s: State, i: int, n: Node) -> Iterator[Step]:
        if s.used.wipes < self.bounds.wipes and n.log:
            before = self.leave(s, i)._replace(used=s.used._replace(wipes=s.used.wipes + 1))
            yield ("wipe", i), put(before, i, Node(n.directory + 1, FOLLOWS, (), 0, (0, -1), (0, -1), 0, 0, 0)), ""

    def _take(self, s: State, i: int, n: Node) -> Iterator[Step]:
        if n.role == LEADS:
            return
        me = identity_of(self.member(i, n))
        sets = self._sets(n.log, n.high)
        if sets and (s.used.losses < self.bounds.losses or all(me in members.who for members in sets)):
            known = [n.promise[0]], [o.promise[0] for o in s.nodes]
            for epoch in sorted({int(epochs.next_epoch(promises)) for promises in known}):
                if epoch <= self.bounds.epochs:
                    mine = n._replace(role=STANDS, promise=(epoch, i))
                    if not self.shell.keeps_promised_others and self.async_too:  # only the last promise tells
                        mine = mine._replace(others=0 if n.promise[1] == i else n.promise[0])
                    if self.shell.takes_durably:
                        mine = mine._replace(kept_promise=(epoch, i))
                    yield ("take", i, epoch), put(self.leave(s, i), i, mine), ""
        led = n.role == FOLLOWS and n.promise[1] == i and n.log and (n.log[-1].epoch, n.log[-1].writer) == n.promise
        if led and not self.shell.new_epoch_on_restart:
            yield ("resume", i), put(s, i, n._replace(role=LEADS)), ""

    def _grant(self, s: State, i: int, n: Node) -> Iterator[Step]:
        for x, asker in enumerate(s.nodes):
            asked = asker.promise
            if x == i or asker.role == FOLLOWS or asked[1] != x or n.promise == asked:
                continue
            read = any(g[:3] == (x, asked[0], self.member(i, n)) for g in s.grants)
            if not self.shell.end_after_promise and asker.role == STANDS and not read:
                early = (x, asked[0], self.member(i, n), self.told(n))
                yield ("read end", i, x), s._replace(grants=tuple(sorted({*s.grants, early}))), ""
            elif epochs.may_grant(Promise(*n.promise), Promise(*asked)):
                mine = n._replace(role=FOLLOWS, promise=asked)
                if self.async_too:
                    mine = mine._replace(others=int(epochs.promised_to_others(n.others, Promise(*asked), i)))  # type: ignore[arg-type]
                if self.shell.grants_durably:
                    mine = mine._replace(kept_promise=asked)
                yield ("grant", i, x, asked[0]), put(self.step_down(self.leave(s, i), i), i, mine), ""

    def _lead(self, s: State, i: int, n: Node) -> Iterator[Step]:
        epoch = n.promise[0]
        after_promise = self.shell.end_after_promise
        told: dict[tuple[int, int], Log] = {
            member: log
            for x, e, member, log in s.grants
            if x == i and e == epoch and (after_promise or s.nodes[member[0]].promise == n.promise)
        }
        for j, f in enumerate(s.nodes):
            if j != i and f.promise == n.promise and (after_promise or self.member(j, f) not in told):
                told[self.member(j, f)] = self.told(f)
        me = self.member(i, n)
        if self._may_lead(me, n.log, n.high, n.others, frozenset(told.items())):
            mine = self._begin(n, (Frame(epoch, i, START, 0),))
            lost = heir(s, mine) and any(mine.log[:end] != s.committed[:end] for _, end in s.marks[:epoch])
            yield (
                ("lead", i, epoch),
                put(s, i, mine),
                "I1: a later leader begins without a committed frame" if lost else "",
            )
        elif s.used.losses < self.bounds.losses and n.log:
            now = changes_of(n.log)[-1][1]
            granted = [identity_of(m) for m in told]
            change = epochs.members_after_loss(now, Member(me[0] + 1, str(me[1])), granted)
            start, members = Frame(epoch, i, LOSSY_START, 0), Frame(epoch, i, MEMBERS, config_of(change))
            mine = self._begin(n, (start, members))
            kept = shared(s.committed, mine.log)
            forgiven = s._replace(
                committed=s.committed[:kept],
                marks=tuple((-1, min(end, kept)) for _, end in s.marks),
                used=s.used._replace(losses=s.used.losses + 1),
                loss_epoch=max(epoch, s.loss_epoch),
            )
            yield ("accept loss", i, epoch), put(forgiven, i, mine), ""

    def _begin(self, n: Node, frames: Log) -> Node:
        mine = n._replace(role=LEADS, log=n.log + frames)
        return mine._replace(durable=len(mine.log), kept_high=n.high) if self.shell.start_durable_first else mine

    def _work(self, s: State, i: int, n: Node) -> Iterator[Step]:
        epoch, history = n.promise[0], summary_of(n.log).history
        start_end = history[-1].start + 1
        changes, sets = changes_of(n.log), self._sets(n.log, n.high)
        if n.durable >= start_end:
            if s.used.data < self.bounds.data:
                frame = Frame(epoch, i, DATA, s.used.data)
                used = s.used._replace(data=s.used.data + 1)
                yield ("produce", i), put(s, i, n._replace(log=(*n.log, frame)))._replace(used=used), ""
            if s.used.changes < self.bounds.changes and epochs.may_change_members(changes, n.high, start_end):
                for config in self._wanted(s, i, config_of(changes[-1][1])):
                    frame = Frame(epoch, i, MEMBERS, config)
                    used = s.used._replace(changes=s.used.changes + 1)
                    yield ("members", i, config), put(s, i, n._replace(log=(*n.log, frame)))._replace(used=used), ""
        acked: dict[Identity, int] = {}
        for x, e, member, end in s.acks:
            if x == i and progress.ack_counts(e, epoch):
                acked[identity_of(member)] = max(end, acked.get(identity_of(member), 0))
        for j, f in enumerate(s.nodes):
            if j == i or f.promise != n.promise:
                continue
            who = identity_of(self.member(j, f))
            point = self._point(n.log, f.log, f.high)
            if point < len(f.log):
                yield self._cut(s, i, j, f, point)
            else:
                acked[who] = max(f.durable, acked.get(who, 0))
                if len(f.log) < len(n.log) and epochs.may_ship(changes, who):
                    more = f._replace(log=(*f.log, n.log[len(f.log)]))
                    yield ("ship", i, j, len(f.log)), put(s, j, more), self._reads(s, more)
            if self.bounds.cm and f.high < n.high and (point == len(f.log) or not self.shell.cm_after_cut):
                told = f._replace(high=n.high)
                yield ("committed", i, j, n.high), put(s, j, told), self._reads(s, told)
        highest = progress.high_watermark(identity_of(self.member(i, n)), n.durable, acked, sets, start_end, n.high)
        for high in range(n.high + 1, highest + 1):
            if high == highest or progress.may_count(high, start_end):
                yield self._commit(s, i, n, high)

    def _cut(self, s: State, i: int, j: int, f: Node, point: int) -> Step:
        history = summary_of(s.nodes[i].log).history
        broken = ""
        if not epochs.may_truncate(point, False, f.high, epochs.accepted_loss(history, summary_of(f.log))):  # type: ignore[arg-type]
            broken = "I5: truncated below the known high watermark"
        elif shared(f.log, s.committed) > point:
            broken = "I1: a committed frame is truncated"
        if not heir(s, s.nodes[i]):
            broken = ""
        cut = f._replace(
            log=f.log[:point], durable=min(f.durable, point), high=min(f.high, point) if s.loss_epoch else f.high
        )
        return ("cut", j, point, i), put(s, j, cut), broken

    def _wanted(self, s: State, i: int, now: Config) -> Iterator[Config]:
        who, k = now
        for j, other in enumerate(s.nodes):
            member = self.member(j, other)
            rest = tuple(m for m in who if m[0] != j)
            if member not in who and "add" in self.bounds.kinds:
                yield tuple(sorted((*rest, member))), k
            elif member in who and j != i and k < len(rest) and "remove" in self.bounds.kinds:
                yield rest, k
        if "k" in self.bounds.kinds:
            yield from ((who, other_k) for other_k in (k - 1, k + 1) if 0 <= other_k < len(who))

    def _reads(self, s: State, n: Node) -> str:
        if not heir(s, n):
            return ""
        length = min(n.high, len(n.log), len(s.committed))
        same = n.log[:length] == s.committed[:length]
        return "" if same else "I2: a node shows other frames than were committed"

    def _commit(self, s: State, i: int, n: Node, high: int) -> Step:
        epoch, prefix = n.promise[0], n.log[:high]
        after = put(s, i, n._replace(high=high))
        if not heir(s, n):
            return ("commit", i, high), after, ""
        length = min(high, len(s.committed))
        broken = ""
        if prefix[:length] != s.committed[:length]:
            broken = "I2: two different frames committed at one position"
        elif s.marks[epoch][0] not in (-1, i):
            broken = "I3: two leaders commit in one epoch"
        elif any(high < end for _, end in s.marks[:epoch]):
            broken = "I4: the new leader's high watermark is below what was acked"
        elif any(o.role == LEADS and o.promise[0] > epoch and o.log[:high] != prefix and heir(s, o) for o in s.nodes):
            broken = "I1: committed by an old leader, absent from a later one that has begun"
        marks = (*s.marks[:epoch], (i, high), *s.marks[epoch + 1 :])
        committed = prefix if high > len(s.committed) else s.committed
        return ("commit", i, high), after._replace(marks=marks, committed=committed), broken


def heir(s: State, n: Node) -> bool:
    """Does this log stand on the last accepted loss? What others go on to commit is what the operator gave up: the two
    histories refuse each other's truncation when they meet."""
    return not s.loss_epoch or any(f.kind == LOSSY_START and f.epoch == s.loss_epoch for f in n.log)


def put(s: State, i: int, node: Node) -> State:
    return s._replace(nodes=(*s.nodes[:i], node, *s.nodes[i + 1 :]))
