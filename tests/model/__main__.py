"""`scripts/model`: explores worlds named here, or of given bounds; or shows each rule left out."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial

from tests.model.explore import VARIANTS, Found, breadth_first, explore, say, walks
from tests.model.world import Bounds, World

# What is explored when nothing is asked for: together well above a million states.
WORLDS = {
    "three nodes, sync to 1": Bounds(),
    "three nodes, sync to 2": Bounds(k=2),
    "two nodes, sync to 1, two crashes": Bounds(nodes=2, members=2, epochs=4, data=2, crashes=2),
    "three nodes, sync to 1, a removal": Bounds(epochs=2, crashes=0, changes=1, kinds=("remove",)),
    "three nodes, sync to 1, a wipe and an addition": Bounds(
        epochs=2, crashes=0, wipes=1, changes=1, kinds=("add",), cm=False
    ),
    "three nodes, async": Bounds(k=0, crashes=0),
    "three nodes, sync to 1, a loss accepted": Bounds(epochs=3, crashes=0, data=1, losses=1, cm=False),
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/model", description=__doc__)
    parser.add_argument("--variants", action="store_true", help="each rule left out: all must break")
    parser.add_argument("--states-max", type=int, default=3_000_000, help="of one world")
    parser.add_argument("--walks", type=int, default=0, metavar="STEPS", help="random steps through a larger world")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--world", choices=sorted(WORLDS), help="only this one")
    asked = parser.parse_args()
    failed = False
    if asked.variants:
        for name, variant in VARIANTS.items():
            found = timed(name, partial(explore, variant, asked.states_max))
            failed |= not found.broken
        return int(failed)
    if asked.walks:
        large = Bounds(nodes=4, members=3, epochs=4, data=3, crashes=3, wipes=1, changes=2, losses=1)
        return int(bool(timed("walks", lambda: walks(World(large), asked.walks, 90, asked.seed)).broken))
    states = 0
    for name, bounds in WORLDS.items():
        if asked.world in (None, name):
            found = timed(name, partial(breadth_first, World(bounds), asked.states_max))
            states += found.states
            failed |= bool(found.broken)
    print(f"{states:,} states")
    return int(failed)


def timed(name: str, run: Callable[[], Found]) -> Found:
    began = time.monotonic()
    found = run()
    how = "all" if found.exhausted else "the nearest"
    print(
        f"{name}: {found.broken or 'holds'} ({how} {found.states:,} states, {time.monotonic() - began:.0f} s)",
        flush=True,
    )
    if found.trace:
        print(f"    {len(found.trace)} steps: {say(found.trace)}", flush=True)
    return found


raise SystemExit(main())
