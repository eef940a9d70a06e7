"""What the check says, for people at a terminal and for programs: tables, and JSON.

The JSON is the `Report` of verdict.py as it is. The HTML page is page.py's.
"""

from __future__ import annotations

import msgspec
from rich.console import Console
from rich.text import Text

from chronik_repl.columns import paragraph, table
from chronik_repl.spark.compare import Difference
from chronik_repl.spark.verdict import CopyReport, Report
from chronik_repl.words import count_of, size_of

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
        words.append(f"behind by {count_of(copy.behind, 'byte')}")
    return ", ".join(words)


def headline(report: Report) -> str:
    compared = sum(c.end - c.start for c in report.covers if c.status in ("same", "proved earlier", "different"))
    if report.verdict == "same":
        return f"The copies are the same: {size_of(compared)} compared, positions {report.start:,} to {report.end:,}."
    if report.verdict == "different":
        first = report.differences[0]
        places = count_of(report.differences_all, "place")
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
    return difference.file or (f"{count_of(difference.frames, 'frame')} without records" if difference.frames else "")


def print_report(report: Report, console: Console) -> None:
    width = console.width
    facts = [
        Text(headline(report), f"bold {COLOURS[report.verdict]}"),
        Text(
            f"up to {report.end:,}, {report.end_is}; {count_of(report.records, 'record')} in "
            f"{count_of(report.frames, 'frame')}; read {size_of(report.bytes_read)}, proved earlier "
            f"{size_of(report.bytes_proved_earlier)}; start-up {report.startup_s:.1f} s, work {report.work_s:.1f} s",
        ),
        *(Text(f"note: {note}") for note in report.notes),
    ]
    parts = [Text("\n").join(paragraph(fact, width) for fact in facts), _copies(report, width)]
    if report.differences:
        parts.append(_differences(report, width))
    if report.partitions:
        parts.append(_partitions(report, width))
    console.print(Text("\n\n").join(parts))


def _copies(report: Report, width: int) -> Text:
    rows = [
        (
            copy.name,
            f"{copy.start:,}",
            f"{copy.end:,}",
            f"{copy.durable_end:,}",
            Text(copy_says(copy), COLOURS.get(copy.verdict, "")),
            copy.path,
        )
        for copy in report.copies
    ]
    names = ("copy", "from", "to", "durable to", "verdict", "path")
    return table(names, rows, width, numbers=frozenset(names[1:4]))


def _differences(report: Report, width: int) -> Text:
    """The first one first."""
    rows = [
        (
            difference.copy,
            Text(difference.kind, "red"),
            f"{difference.start:,} to {difference.end:,}",
            where(difference),
            difference.detail,
        )
        for difference in report.differences[:LISTED_MAX]
    ]
    return _and_more(
        table(("differs", "what", "positions", "records", "detail"), rows, width), report.differences_all - len(rows)
    )


def _partitions(report: Report, width: int) -> Text:
    ordered = sorted(report.partitions, key=lambda p: (p.verdict != "different", p.topic, p.partition))
    rows = [
        (
            p.topic,
            str(p.partition),
            f"{p.first:,} to {p.end - 1:,}" if p.end > p.first else "",
            f"{p.records:,}",
            f"{p.not_compared:,}" if p.not_compared else "",
            Text(p.verdict, COLOURS[p.verdict]),
        )
        for p in ordered[:LISTED_MAX]
    ]
    names = ("topic", "partition", "offsets", "records", "not compared", "verdict")
    return _and_more(table(names, rows, width, numbers=frozenset(names[1:5])), len(ordered) - len(rows))


def _and_more(listed: Text, left: int) -> Text:
    return Text("\n").join([listed, Text(f"and {left:,} more: see --json or --report")]) if left > 0 else listed
