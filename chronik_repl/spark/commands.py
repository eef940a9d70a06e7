"""`chronik parity`, and the same arguments for spark-submit (submit.py). Light to import: Spark comes when it runs."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from chronik_repl.errors import ChronikError, ConfigError

if TYPE_CHECKING:
    from chronik_repl.spark.parity import Progress

WHAT = "Are all copies of the log the same? Compares every byte below the high watermark, on Spark."
EXAMPLES = """examples:
  chronik parity leader=/var/lib/chronik follower=/mnt/follower/chronik
  chronik parity --leader http://leader:9644 a=/data/a b=/data/b c=/data/c --report parity.html
  chronik parity --state /var/lib/chronik-parity a=/data/a b=hdfs://name/backup/chronik
  spark-submit --master spark://host:7077 chronik_repl/spark/submit.py a=/data/a b=/data/b

exit codes: 0 the same, 1 different, 2 could not tell"""


def register(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "parity",
        help="are all copies of the log the same?",
        description=WHAT,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_arguments(parser)
    parser.add_argument(
        "--master", metavar="URL", help="where Spark runs; default: all cores of this machine (local[*])"
    )
    parser.set_defaults(run=run_parity)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "copies",
        nargs="+",
        metavar="NAME=PATH",
        help="a copy: a node's data directory, local or on a file system that Spark reads",
    )
    parser.add_argument(
        "--leader",
        metavar="URL",
        help="the leader's HTTP address: compare up to its high watermark (without it: the lowest durable end)",
    )
    parser.add_argument("--state", metavar="DIR", help="keep what was proved there and do not read it again")
    parser.add_argument("--full", action="store_true", help="read everything, whatever was proved before")
    parser.add_argument("--json", action="store_true", help="the report as one object on stdout")
    parser.add_argument("--report", metavar="FILE", help="write the report there as a page (HTML)")
    parser.add_argument("--no-progress", action="store_true", help="no progress bar on stderr")


def parse_copies(words: Sequence[str]) -> tuple[tuple[str, str], ...]:
    copies: dict[str, str] = {}
    for word in words:
        name, equals, path = word.partition("=")
        if not equals or not name or not path:
            raise ConfigError(f"{word!r} is not NAME=PATH, for example leader=/var/lib/chronik")
        if name in copies or name == "all":
            raise ConfigError(
                f"the name {name!r} is {'taken' if name in copies else 'not allowed'}: give each copy its own"
            )
        copies[name] = path
    if len(copies) < 2:
        raise ConfigError(
            "one copy has nothing to be compared with: give at least two (for one log: chronik wal verify)"
        )
    return tuple(copies.items())


def run_parity(arguments: argparse.Namespace) -> int:
    return check(arguments, getattr(arguments, "master", None))


def check(arguments: argparse.Namespace, master: str | None) -> int:
    """The whole command. Returns the exit code; whatever keeps it from telling is one line on stderr and 2."""
    copies = parse_copies(arguments.copies)
    report_file = _writable(arguments.report)
    from chronik_repl.spark.session import open_session, require_spark, ship_package

    require_spark()
    began = time.monotonic()
    with _progress(arguments) as progress:
        progress("starting Spark", 0, 0)
        spark = None
        try:
            spark = open_session(master)
            ship_package(spark.sparkContext)
            from chronik_repl.spark.parity import Options, run

            options = Options(copies, arguments.leader, arguments.state, arguments.full)
            report = run(spark, options, progress, time.monotonic() - began)
        except ChronikError:
            raise
        except _spark_errors() as error:
            raise ChronikError(
                f"Spark could not do it: {_why(error)}. Is --master right, and may its workers read the copies? "
                "Spark's own log says more"
            ) from error
        finally:
            if spark is not None:
                spark.stop()
    from chronik_repl.spark.page import as_page
    from chronik_repl.spark.report import as_json, print_report

    if report_file is not None:
        report_file.write_text(as_page(report), encoding="utf-8")
    if arguments.json:
        print(as_json(report))
    else:
        from chronik_repl.columns import terminal

        print_report(report, terminal())
    return report.exit_code


def _why(error: BaseException) -> str:
    """In one line; what Java says where it was Java's: Py4J's own first line says only that something was called."""
    thrown = getattr(error, "java_exception", None)
    return (str(error) if thrown is None else str(thrown.toString())).strip().splitlines()[0].rstrip(".")


def _spark_errors() -> tuple[type[BaseException], ...]:
    from py4j.protocol import Py4JError  # type: ignore[import-untyped]
    from pyspark.errors import PySparkException

    return Py4JError, PySparkException


def _writable(name: str | None) -> Path | None:
    """Better now than after an hour."""
    if name is None:
        return None
    path = Path(name)
    parent = path.absolute().parent
    if path.is_dir() or not parent.is_dir() or not os.access(path if path.exists() else parent, os.W_OK):
        raise ConfigError(f"--report {name}: name a file in a directory that is there and may be written to")
    return path


@contextmanager
def _progress(arguments: argparse.Namespace) -> Iterator[Progress]:
    """A bar on a terminal; elsewhere a line at each new step."""
    # spark-submit puts a driver's stderr into stdout: nothing may stand there beside the JSON.
    if arguments.no_progress or (arguments.json and "PYSPARK_GATEWAY_PORT" in os.environ):
        yield lambda *_: None
        return
    if not sys.stderr.isatty():
        yield _lines()
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
    from rich.progress import Progress as Bar

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Bar(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=None)
        yield lambda what, done, total: bar.update(task, description=what, completed=done, total=total or None)


def _lines() -> Progress:
    last = ""

    def say(what: str, done: int, total: int) -> None:
        nonlocal last
        tenths = 10 * done // total if total else 0
        line = f"parity: {what}" + (f", {10 * tenths} %" if total else "")
        if line != last:
            last = line
            print(line, file=sys.stderr, flush=True)

    return say
