"""What the check says, for people at a terminal and for programs: tables by rich, and JSON.

The JSON is the `Report` of verdict.py as it is. The HTML page is page.py's.
"""

from __future__ import annotations

import msgspec
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from chronik_repl.spark.compare import Difference
from chronik_repl.spark.verdict import CopyReport, Report
from chronik_repl.words import size_of

LISTED_MAX = 50  # differences and partitions on a terminal; --json and --report have more
COLOURS = {
    "same": "green",
    "different": "red",
    "could not tell": "yellow",
    "behind": "yellow",
    "not compared": "yellow",
}


def as_json(report: Report) -> str:
    return msgspec.json.format(msgspec.json.encode(report), indent=2).decode()


def copy_says(copy: CopyReport) -> str:
    if copy.why:
        return f"not compared: {copy.why}"
    words: list[str] = [copy.verdict if copy.verdict != "behind" else "nothing to compare yet"]
    if copy.behind:
        words.append(f"behind by {copy.behind:,} bytes")
    return ", ".join(words)


def headline(report: Report) -> str:
    compared = sum(c.end - c.start for c in report.covers if c.status in ("same", "proved earlier", "different"))
    if report.verdict == "same":
        return f"The copies are the same: {size_of(compared)} compared, positions {report.start:,} to {report.end:,}."
    if report.verdict == "different":
        first = report.differences[0]
        places = f"{report.differences_all:,} place{'s' if report.differences_all > 1 else ''}"
        return f"The copies differ in {places}, first at position {first.start:,} ({first.copy}: {first.kind})."
    return "It could not be told whether the copies are the same."


def where(difference: Difference) -> str:
    """The records by topic, partition and offset; for other frames, what they are."""
    words = [str(r) for r in difference.ranges[:4]]
    more = len(difference.ranges) - len(words) + difference.ranges_more
    if more:
        words.append(f"and {more} more")
    if words:
        return ", ".join(words)
    return difference.file or (f"{difference.frames} frame(s) without records" if difference.frames else "")


def print_report(report: Report, console: Console) -> None:
    console.print(f"[bold {COLOURS[report.verdict]}]{escape(headline(report))}[/]", highlight=False)
    console.print(
        f"up to {report.end:,}, {report.end_is}; {report.records:,} records in {report.frames:,} frames; "
        f"read {size_of(report.bytes_read)}, proved earlier {size_of(report.bytes_proved_earlier)}; "
        f"start-up {report.startup_s:.1f} s, work {report.work_s:.1f} s",
        highlight=False,
    )
    for note in report.notes:
        console.print(f"note: {escape(note)}", highlight=False)
    console.print(_copies(report))
    if report.differences:
        console.print(_differences(report))
    if report.partitions:
        console.print(_partitions(report))


def _copies(report: Report) -> Table:
    table = Table("copy", "from", "to", "durable to", "verdict", "path", title="Copies", title_justify="left")
    for column in table.columns[1:4]:
        column.justify = "right"
    for copy in report.copies:
        colour = COLOURS.get(copy.verdict, "white")
        table.add_row(
            escape(copy.name),
            f"{copy.start:,}",
            f"{copy.end:,}",
            f"{copy.durable_end:,}",
            f"[{colour}]{escape(copy_says(copy))}[/]",
            escape(copy.path),
        )
    return table


def _differences(report: Report) -> Table:
    table = Table(
        "copy", "what", "positions", "records", "detail", title="Differences, the first one first", title_justify="left"
    )
    for difference in report.differences[:LISTED_MAX]:
        table.add_row(
            escape(difference.copy),
            f"[red]{difference.kind}[/]",
            f"{difference.start:,} to {difference.end:,}",
            escape(where(difference)),
            escape(difference.detail),
        )
    left = report.differences_all - min(len(report.differences), LISTED_MAX)
    if left:
        table.caption = f"and {left:,} more: see --json or --report"
    return table


def _partitions(report: Report) -> Table:
    table = Table(
        "topic", "partition", "offsets", "records", "not compared", "verdict", title="Topics", title_justify="left"
    )
    for column in table.columns[1:5]:
        column.justify = "right"
    rows = sorted(report.partitions, key=lambda p: (p.verdict != "different", p.topic, p.partition))
    for p in rows[:LISTED_MAX]:
        offsets = f"{p.first:,} to {p.end - 1:,}" if p.end > p.first else ""
        table.add_row(
            escape(p.topic),
            str(p.partition),
            offsets,
            f"{p.records:,}",
            f"{p.not_compared:,}" if p.not_compared else "",
            f"[{COLOURS[p.verdict]}]{p.verdict}[/]",
        )
    if len(rows) > LISTED_MAX:
        table.caption = f"and {len(rows) - LISTED_MAX:,} more: see --json or --report"
    return table
