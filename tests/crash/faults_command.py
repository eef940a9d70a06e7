"""`scripts/faults`: each fault as often as you like, where CI does a few."""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from tests.crash.faults import CannotDo, PowerCuts, can_shut_down, fail_nth_sync, kill_at_write, kill_inside_write


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/faults", description="Hurt a log on purpose, and look what is left.")
    parser.add_argument("fault", choices=("power-cut", "kill", "torn-write", "eio", "damage"))
    parser.add_argument("--times", type=int, default=200, help="power cuts, or the highest n of the nth write or sync")
    parser.add_argument("--seed", type=int, default=int(time.time()), help="of the power cuts, and of bits in padding")
    parser.add_argument("--part", default="1/1", help="of the damage: 2/3 is the second third of all places")
    parser.add_argument(
        "--ahead", action="store_true", help="power-cut, torn-write, eio: large frames, two groups with the disk"
    )
    options = parser.parse_args()
    runs: dict[str, Callable[[argparse.Namespace, Path], Iterator[str]]] = {
        "power-cut": power_cuts,
        "kill": lambda o, scratch: at_each(kill_at_write, o, scratch),
        "torn-write": lambda o, scratch: at_each(partial(kill_inside_write, ahead=o.ahead), o, scratch),
        "eio": lambda o, scratch: at_each(partial(fail_nth_sync, ahead=o.ahead), o, scratch),
        "damage": damage,
    }
    began, count = time.monotonic(), 0
    with tempfile.TemporaryDirectory(prefix="chronik-faults-") as scratch:
        try:
            for wrong in runs[options.fault](options, Path(scratch)):
                count += 1
                if wrong:
                    print(f"\n{options.fault} {count}: {wrong}")
                    return 1
                if sys.stdout.isatty():
                    print(f"\r{options.fault} {count}", end="", flush=True)
        except CannotDo as error:
            print(f"not on this machine: {error}")
            return 2
    print(f"{count} × {options.fault} in {time.monotonic() - began:.0f} s: everything acked was there")
    return 0


def power_cuts(options: argparse.Namespace, scratch: Path) -> Iterator[str]:
    can_shut_down()
    print(f"seed {options.seed}")
    cuts = PowerCuts(scratch, options.seed, ahead=options.ahead)
    for _ in range(options.times):
        yield cuts.cut()


def at_each(
    run: Callable[[Path, int, int], tuple[bool, str]], options: argparse.Namespace, scratch: Path
) -> Iterator[str]:
    for n in range(1, options.times + 1):
        hit, wrong = run(scratch / str(n), n, max(8, options.times // 3))
        if not hit:
            return
        yield wrong


def damage(options: argparse.Namespace, scratch: Path) -> Iterator[str]:
    from tests.crash.test_damage import check_all, cut_short, damaged, make_whole, places

    whole = make_whole()
    rng = random.Random(options.seed)
    part, parts = map(int, options.part.split("/"))
    for name, at, _ in places(whole, padding_step=1):
        if at % parts != part - 1:
            continue
        meaning = at < 128 or at % 4096 < 32 or at >= 12288
        bits = range(8) if meaning else [rng.randrange(8)]
        check_all(((f"{name} byte {at}", damaged(whole, name, at, bit)) for bit in bits), whole)
        yield from [""] * len(bits)
    for name, data in sorted(whole.medium.image().items()):
        sizes = range(part - 1, len(data), parts)
        check_all(((f"{name} cut to {size}", cut_short(whole, name, size)) for size in sizes), whole)
        yield from [""] * len(sizes)


if __name__ == "__main__":
    sys.exit(main())
