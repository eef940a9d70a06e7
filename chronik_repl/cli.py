"""`chronik`: what an operator types.

Each command is a module's own: it registers its parser here and imports what is heavy only when it runs, so that help
is quick. A command returns its exit code; what this package raises on purpose becomes lines that say what to do, and
code 2.
"""

from __future__ import annotations

import argparse
import errno
import os
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

from chronik_repl import __version__
from chronik_repl.errors import ChronikError

Run = Callable[[argparse.Namespace], int]
# Modules with `register(subcommands)`: operators' own first, then the rooms'.
MODULES = (
    "chronik_repl.operators",
    "chronik_repl.config_command",
    "chronik_repl.kafka.users",
    "chronik_repl.wal.commands",
    "chronik_repl.spark.commands",
)
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG)
EXAMPLES = """examples:
  chronik status --watch              the cluster, live, from this machine's node
  chronik status --http leader:9644   from another one's
  chronik topics                      topics and their offsets
  chronik promote --data-dir /var/lib/chronik
  chronik wal verify /var/lib/chronik
  chronik config /etc/chronik/leader.env

Commands that act on a node speak to it through control.sock in its data directory: run them on its machine, as its
user. `chronik COMMAND --help` has more examples."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = build_parser()
    if sys.stdout is None:  # closed by whoever started us
        sys.stdout = os.fdopen(os.open(os.devnull, os.O_WRONLY), "w")
    words = sys.argv[1:] if arguments is None else arguments
    if not words:
        parser.print_help(sys.stderr)
        return 2
    parsed = parser.parse_args(words)
    try:
        run: Run = parsed.run
        code = run(parsed)
        sys.stdout.flush()
        return code
    except ChronikError as error:
        for line in str(error).splitlines():
            print(f"chronik: {line}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # `chronik wal dump … | head`
        _give_up_output()
        return 0
    except OSError as error:
        if error.filename is None and error.errno not in NO_ROOM:
            raise  # not of a path that someone gave: a bug, which needs its traceback
        where = error.filename or "where the output goes"
        print(f"chronik: {where}: {error.strerror}. {_what_to_do(error)}", file=sys.stderr)
        if error.filename is None:
            _give_up_output()
        return 2
    except KeyboardInterrupt:
        return 130


def _give_up_output() -> None:
    """What is still buffered would fail again at the end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def _what_to_do(error: OSError) -> str:
    if error.errno in (errno.EACCES, errno.EPERM):
        return "Run this as the user that runs the node, or as one who may use that path."
    if error.errno in NO_ROOM:
        return "Make room there, or name another place."
    return "Is the path right?"


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="chronik",
        description="Look at, check and steer a chronik-repl cluster.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"chronik {__version__}")
    subcommands = parser.add_subparsers(metavar="COMMAND", required=True, title="commands")
    for name in MODULES:
        register: Callable[[Any], None] = import_module(name).register
        register(subcommands)
    return parser


if __name__ == "__main__":
    sys.exit(main())
