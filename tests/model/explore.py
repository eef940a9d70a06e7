"""All states of a small world, nearest first, or deep walks by a seed; and the variants that leave one rule out.

`breadth_first` finds a shortest trace of what breaks. A variant patches one decision in `epochs` or `progress`, or
turns one switch of the world's `Shell`; `VARIANTS` names the smallest bounds in which it is known to show.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any, NamedTuple

from chronik_repl.replication import epochs, progress
from tests.model.world import Bounds, Label, Shell, State, World

RARE = {"crash", "wipe", "take", "members", "accept loss"}  # steps that use up a bound


class Found(NamedTuple):
    broken: str
    trace: tuple[Label, ...]
    states: int
    depth: int
    exhausted: bool


def breadth_first(world: World, states_max: int = 10**9) -> Found:
    """States are told apart by a 64-bit hash. Stops at the first that breaks something, or at `states_max`."""
    first = world.first()
    parents: dict[int, tuple[int, Label] | None] = {hash(first): None}
    frontier, depth = [(hash(first), first)], 0
    while frontier:
        following: list[tuple[int, State]] = []
        depth += 1
        for here, state in frontier:
            for label, after, broken in world.steps(state):
                if broken:
                    return Found(broken, (*_path(parents, here), label), len(parents), depth, False)
                key = hash(after)
                if key not in parents:
                    parents[key] = (here, label)
                    following.append((key, after))
            if len(parents) > states_max:
                return Found("", (), len(parents), depth, False)
        frontier = following
    return Found("", (), len(parents), depth, True)


def _path(parents: dict[int, tuple[int, Label] | None], key: int) -> tuple[Label, ...]:
    labels: list[Label] = []
    while (step := parents[key]) is not None:
        key, label = step
        labels.append(label)
    return tuple(reversed(labels))


def walks(world: World, steps_max: int, depth_max: int, seed: int) -> Found:
    """Deep random walks: for bounds that cannot be exhausted. That they find nothing is weak evidence."""
    chance, seen, taken = random.Random(seed), set[int](), 0
    while taken < steps_max:
        state, trace = world.first(), list[Label]()
        for _ in range(depth_max):
            options = list(world.steps(state))
            if not options:
                break
            for label, _, broken in options:
                if broken:
                    return Found(broken, (*trace, label), len(seen), len(trace) + 1, False)
            common = [o for o in options if o[0][0] not in RARE]
            label, state, _ = chance.choice(common if common and chance.random() < 0.9 else options)
            trace.append(label)
            seen.add(hash(state))
            taken += 1
    return Found("", (), len(seen), depth_max, False)


def say(trace: Sequence[Label]) -> str:
    """A trace in words; nodes are A, B, C, D."""
    letters = "ABCD"
    nodes_at = {"grant": (0, 1), "read end": (0, 1), "ship": (0, 1), "committed": (0, 1), "cut": (0, 2)}
    words = []
    for name, *rest in trace:
        at = nodes_at.get(str(name), (0,))
        said = [letters[x] if n in at and isinstance(x, int) else str(x) for n, x in enumerate(rest)]
        words.append(" ".join((said[0], str(name), *said[1:])))
    return "; ".join(words)


# ── one rule left out ────────────────────────────────────────────────────────────────────────────────────────────


class Variant(NamedTuple):
    what: str
    bounds: Bounds
    shell: Shell = Shell()
    patches: tuple[tuple[ModuleType, str, Callable[..., Any]], ...] = ()


@contextmanager
def planted(patches: Sequence[tuple[ModuleType, str, Callable[..., Any]]]) -> Iterator[None]:
    """The production module with these functions in place of its own."""
    kept = [(module, name, getattr(module, name)) for module, name, _ in patches]
    try:
        for module, name, function in patches:
            setattr(module, name, function)
        yield
    finally:
        for module, name, function in kept:
            setattr(module, name, function)


def explore(variant: Variant, states_max: int) -> Found:
    with planted(variant.patches):
        return breadth_first(World(variant.bounds, variant.shell), states_max)


_in_force = epochs.membership_in_force
_log_ahead = epochs.log_ahead
_point = epochs.diverging_point
QUIET = Bounds(cm=False)


def _generous(theirs: Any, mine: Any, me: int) -> bool:
    return not (theirs.history and theirs.history[-1].leader == me) and _log_ahead(theirs, mine, me)


VARIANTS: dict[str, Variant] = {
    "start-frame-first": Variant(
        "older frames are committed by counting them alone",
        QUIET,
        patches=((progress, "may_count", lambda p, s: True),),
    ),
    "figure-8": Variant(
        "the same, and a leader's own epoch is no exception",
        QUIET._replace(epochs=4),
        patches=((progress, "may_count", lambda p, s: True), (epochs, "own_last_epoch", lambda t, m, me: False)),
    ),
    "one-grant-fewer": Variant(
        "n - k grants are enough",
        QUIET,
        patches=((epochs, "grants_needed", lambda m: len(m.who) - m.sync_replicas - 1),),
    ),
    "log-ahead": Variant(
        "a granter's log may be ahead", QUIET, patches=((epochs, "log_ahead", lambda t, m, me: False),)
    ),
    "grant-not-durable": Variant("a promise is told before it is durable", QUIET, Shell(grants_durably=False)),
    "take-not-durable": Variant("a candidate's own promise is not durable", QUIET, Shell(takes_durably=False)),
    "end-before-promise": Variant("the end is read before the promise", QUIET, Shell(end_after_promise=False)),
    "late-acks": Variant(
        "only the synced end is told, and acks go on after the promise",
        QUIET,
        Shell(tells_unsynced=False, promise_ends_sessions=False),
    ),
    "equal-epoch": Variant(
        "an equal epoch of another node is granted",
        QUIET,
        patches=((epochs, "may_grant", lambda promised, asked: asked.epoch >= promised.epoch),),
    ),
    "ordered-by-node": Variant(
        "promises are ordered by (epoch, node)",
        QUIET,
        patches=((epochs, "may_grant", lambda promised, asked: asked >= promised),),
    ),
    "no-truncation": Variant(
        "nothing is cut", Bounds(), patches=((epochs, "diverging_point", lambda a, b: min(a.end, b.end)),)
    ),
    "epochs-only": Variant(
        "history entries are compared by epoch number",
        Bounds(k=2, crashes=0),
        patches=((epochs, "same_entry", lambda a, b: a.epoch == b.epoch),),
    ),
    "new-set-alone": Variant(
        "a change of members counts before it is committed",
        Bounds(nodes=4, crashes=0, changes=1, cm=False, kinds=("add",)),
        patches=((epochs, "membership_in_force", lambda c, h, x=(): _in_force(c[-1:], h, x)),),
    ),
    "old-set-alone": Variant(
        "the members before a change count alone until it is committed",
        Bounds(epochs=2, crashes=0, changes=1, kinds=("k",)),
        patches=((epochs, "membership_in_force", lambda c, h, x=(): _in_force(c, h, x)[:1]),),
    ),
    "many-changes": Variant(
        "members change again before the last change is committed",
        Bounds(data=0, crashes=0, changes=2),
        patches=((epochs, "may_change_members", lambda c, h, s: bool(c)),),
    ),
    "directory": Variant(
        "a wiped node is still a member",
        Bounds(epochs=2, crashes=0, wipes=1),
        Shell(directory_counts=False),
    ),
    "same-epoch-again": Variant(
        "a restarted leader goes on in its epoch", Bounds(epochs=2, data=2), Shell(new_epoch_on_restart=False)
    ),
    "acks-of-any-epoch": Variant(
        "acks of older sessions count", Bounds(), patches=((progress, "ack_counts", lambda session, epoch: True),)
    ),
    "generous-exception": Variant(
        "a later epoch that I led is no reason either, and the start frame is shipped before it is durable",
        Bounds(),
        Shell(start_durable_first=False),
        ((epochs, "log_ahead", _generous),),
    ),
    "async-by-log": Variant(
        "async: who led last by its own log starts alone",
        Bounds(k=0),
        patches=(
            (epochs, "may_start_alone", lambda me, mine, others: bool(mine.history) and mine.history[-1].leader == me),
        ),
    ),
    "async-by-last-promise": Variant(
        "async: only the last promise is looked at",
        Bounds(k=0, epochs=4, crashes=0),
        Shell(keeps_promised_others=False),
    ),
    "cm-before-cut": Variant("a high watermark is believed before the cut", Bounds(), Shell(cm_after_cut=False)),
}
