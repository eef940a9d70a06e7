"""`chronik wal verify` and `chronik wal dump`: what an operator asks of one log. They only read."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from chronik_repl.errors import ConfigError
from chronik_repl.words import count_of

if TYPE_CHECKING:
    from chronik_repl.wal.values import Damage
    from chronik_repl.wal.verify import Verified

WAL = """examples:
  chronik wal verify /var/lib/chronik
  chronik wal dump /var/lib/chronik --records"""
VERIFY = """examples:
  chronik wal verify /var/lib/chronik
  chronik wal verify --json /var/lib/chronik | jq '.damage[]'

exit codes: 0 all is well, 1 damage, 2 the log cannot be read"""
DUMP = """examples:
  chronik wal dump /var/lib/chronik | less
  chronik wal dump --topic orders --records /var/lib/chronik
  chronik wal dump --json /var/lib/chronik | jq 'select(.kind != "data")'
  diff <(chronik wal dump DIR1) <(chronik wal dump DIR2)

exit codes: 0, 1 damage (named on stderr; what is good is shown), 2 the log cannot be read"""


def register(subparsers: Any) -> None:
    style = argparse.RawDescriptionHelpFormatter
    wal = subparsers.add_parser(
        "wal", help="check or show one log", description="Check or show one log.", epilog=WAL, formatter_class=style
    )
    commands = wal.add_subparsers(metavar="COMMAND", required=True, title="commands")
    verify = commands.add_parser(
        "verify",
        help="check every frame, the chain, the segments and the indexes",
        description="Check every frame, the chain, the segments and the indexes of one log.",
        epilog=VERIFY,
        formatter_class=style,
    )
    verify.add_argument("directory", type=Path, metavar="DIR", help="a node's data directory")
    verify.add_argument("--json", action="store_true", help="the findings as one object")
    verify.set_defaults(run=run_verify)
    dump = commands.add_parser(
        "dump",
        help="a line a frame, and on demand the records",
        description="A line a frame, and on demand the records. Two equal logs give equal dumps.",
        epilog=DUMP,
        formatter_class=style,
    )
    dump.add_argument("directory", type=Path, metavar="DIR", help="a node's data directory")
    dump.add_argument("--json", action="store_true", help="an object a line")
    dump.add_argument("--records", action="store_true", help="the decoded records too, of every compression")
    dump.add_argument("--from", dest="start", type=int, default=0, metavar="POSITION", help="frames at or after it")
    dump.add_argument("--to", dest="end", type=int, metavar="POSITION", help="frames before it")
    dump.add_argument("--topic", help="only frames of this topic")
    dump.add_argument("--partition", type=int, help="only frames of this partition")
    dump.set_defaults(run=run_dump)


def run_verify(arguments: argparse.Namespace) -> int:
    from chronik_repl.wal.verify import bytes_to_read, verify

    directory: Path = arguments.directory
    total = bytes_to_read(directory)
    if sys.stderr.isatty() and not arguments.json:
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

        columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
        with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task("verify", total=total)
            found = verify(directory, lambda size: bar.advance(task, size))
    else:
        found = verify(directory)
    if arguments.json:
        import json

        import msgspec

        whole = {"ok": found.ok, **msgspec.to_builtins(found)}
        print(json.dumps(whole, indent=2))
    else:
        _show_findings(found)
    return 0 if found.ok else 1


def _show_findings(found: Verified) -> None:
    for damage in found.damage:
        print(f"DAMAGE {show_damage(damage)}")
    for note in found.notes:
        print(f"note: {note}")
    what = (
        f"{count_of(found.segments, 'segment')}, {count_of(found.frames, 'frame')}, "
        f"{count_of(found.records, 'record')}, {count_of(found.bytes, 'byte')}, "
        f"{count_of(found.indexes, 'index', 'indexes')}; positions {found.start} to {found.end}, "
        f"checksum {found.end_checksum:08x}"
    )
    if found.ok:
        print(f"ok: {what}")
    else:
        print(f"{len(found.damage)} damaged in {what}")
        print("A follower repairs itself from its leader at the next start; a leader needs another node promoted.")


def show_damage(damage: Damage) -> str:
    """One line that names the place in every way that is known."""
    place = f"{damage.file}: position {damage.start}"
    if damage.end > damage.start:
        place += f" to {damage.end}"
    if damage.topic:
        place += f", {damage.topic}/{damage.partition} offset {damage.offset}"
    return f"{place}: {damage.what}"


def run_dump(arguments: argparse.Namespace) -> int:
    from chronik_repl.wal.dump import Trouble, Wanted, dump

    wanted = Wanted(
        arguments.start, arguments.end, arguments.topic, arguments.partition, arguments.records, arguments.json
    )
    if arguments.end is not None and arguments.end <= arguments.start:
        raise ConfigError(
            f"--to {arguments.end}: must be above --from ({arguments.start}), or there is nothing between"
        )
    code = 0
    for line in dump(arguments.directory, wanted):
        if isinstance(line, Trouble):
            sys.stdout.flush()
            print(f"chronik: {line.text}", file=sys.stderr)
            code = 1
        else:
            print(line)
    return code
