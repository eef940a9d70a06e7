"""The check as one page: a verdict, a map of what was compared (copies × positions), the lag, the differences, the
topics.

Self-contained: no script, no font, no address outside the file. Light and dark follow the reader's own setting. Its
size is bounded by limits on every list; what is left out is said.
"""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

from chronik_repl.spark.report import copy_says, headline, where
from chronik_repl.spark.verdict import Cover, Report
from chronik_repl.words import count_of, size_of

DIFFERENCES_MAX = 1000
PARTITIONS_MAX = 2000
CELLS_MAX = 4000  # of the map, a copy
MAP_WIDTH, ROW, GAP, LEFT = 1000, 26, 10, 0
DIFFERENCE_WIDTH_MIN = 3.0  # a single frame in a terabyte must still be seen

CLASS = {
    "same": "same",
    "proved earlier": "proved",
    "different": "same",
    "missing": "bad",
    "behind": "behind",
    "not compared": "none",
}

STYLE = """
:root{color-scheme:light
dark;--bg:#fff;--fg:#1b1f24;--dim:#5f6b7a;--line:#dde3ea;--card:#f6f8fa;--same:#2f9e6e;--proved:#8fcdb1;
--bad:#d92d3a;--behind:#e0a72e;--none:#b9c2cc}
@media(prefers-color-scheme:dark){:root{--bg:#12161b;--fg:#e4e9ef;--dim:#94a1b0;--line:#2a323c;--card:#1a2027;--same:#35a877;
--proved:#1f6347;--bad:#ff5c66;--behind:#c9932a;--none:#46515e}} *{box-sizing:border-box}body{margin:0
auto;max-width:1100px;padding:28px 20px 60px;background:var(--bg);color:var(--fg); font:15px/1.5
system-ui,-apple-system,"Segoe UI",Roboto,sans-serif} h1{font-size:21px;margin:0 0 4px}h2{font-size:16px;margin:34px 0
10px}p{margin:4px 0}.dim{color:var(--dim)} .banner{border-left:6px solid var(--c);background:var(--card);padding:14px
18px;border-radius:6px;margin:14px 0} .banner
b{font-size:18px}.same{--c:var(--same)}.different{--c:var(--bad)}.could{--c:var(--behind)}
table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums}.scroll{overflow-x:auto}
th,td{text-align:left;padding:6px 10px;border-bottom:1px solid
var(--line);vertical-align:top}th{color:var(--dim);font-weight:600}
td.n,th.n{text-align:right;white-space:nowrap}.bad{color:var(--bad);font-weight:600}.good{color:var(--same)}.warn{color:var(--behind)}
svg{display:block;width:100%;height:auto;font:12px system-ui,sans-serif}svg text{fill:var(--fg)}svg
.dim{fill:var(--dim)}
rect.same{fill:var(--same)}rect.proved{fill:var(--proved)}rect.bad{fill:var(--bad)}rect.behind{fill:var(--behind)}
rect.none{fill:url(#none)}.key{display:flex;gap:18px;flex-wrap:wrap;color:var(--dim);margin-top:8px;font-size:13px}
.key i{display:inline-block;width:12px;height:12px;border-radius:3px;margin-right:6px;vertical-align:-1px}
code{font:13px ui-monospace,monospace;word-break:break-all}
"""


def as_page(report: Report) -> str:
    kind = {"same": "same", "different": "different"}.get(report.verdict, "could")
    parts = [
        "<!doctype html><html lang='en'><meta charset='utf-8'><meta name='viewport' content='width=device-width'>",
        f"<title>Parity: {escape(report.verdict)}</title><style>{STYLE}</style>",
        f"<h1>Parity of {len(report.copies)} copies</h1><p class='dim'>cluster {escape(report.cluster_id or '?')}, "
        f"{escape(report.started)}</p>",
        f"<div class='banner {kind}'><b>{escape(headline(report))}</b>"
        f"<p class='dim'>Compared from position {report.start:,} to "
        f"{report.end:,}, {escape(report.end_is)}. {count_of(report.records, 'record')} in "
        f"{count_of(report.frames, 'frame')}. Read "
        f"{size_of(report.bytes_read)}; proved by earlier runs {size_of(report.bytes_proved_earlier)}. "
        f"Start-up {report.startup_s:.1f} s, work {report.work_s:.1f} s.</p>",
        *(f"<p>{escape(note)}</p>" for note in report.notes),
        "</div>",
        "<h2>Coverage</h2>",
        _map(report),
        "<h2>Copies</h2>",
        _copies(report),
        "<h2>Differences</h2>",
        _differences(report),
        "<h2>Topics</h2>",
        _partitions(report),
        "</html>",
    ]
    return "\n".join(parts) + "\n"


def _map(report: Report) -> str:
    """Copies × positions. Whatever differs is drawn last and never thinner than it can be seen."""
    names = max((len(c.name) for c in report.copies), default=4)
    left = min(220, 16 + 8 * names)
    width = MAP_WIDTH - left
    low = report.start
    high = max([report.end, *(c.end for c in report.covers)], default=low + 1)
    scale = width / max(1, high - low)
    height = len(report.copies) * (ROW + GAP) + 26
    out = [
        f"<svg viewBox='0 0 {MAP_WIDTH} {height}' role='img' aria-label='coverage by copy and position'>"
        "<defs><pattern id='none' width='6' height='6' patternTransform='rotate(45)' patternUnits='userSpaceOnUse'>"
        "<rect width='6' height='6' style='fill:var(--card)'/>"
        "<rect width='2' height='6' style='fill:var(--none)'/></pattern></defs>"
    ]
    for row, copy in enumerate(report.copies):
        y = row * (ROW + GAP)
        out.append(f"<text x='0' y='{y + 17}'>{escape(copy.name)}</text>")
        for cover in [c for c in report.covers if c.copy == copy.name][:CELLS_MAX]:
            out.append(
                _cell(
                    left + (cover.start - low) * scale,
                    y,
                    (cover.end - cover.start) * scale,
                    CLASS[cover.status],
                    _says(cover),
                )
            )
        for d in [d for d in report.differences if d.copy in (copy.name, "all")][:CELLS_MAX]:
            wide = max(DIFFERENCE_WIDTH_MIN, (d.end - d.start) * scale)
            x = min(left + (d.start - low) * scale, MAP_WIDTH - wide)
            out.append(_cell(x, y, wide, "bad", f"{d.copy}: {d.kind} at {d.start:,} to {d.end:,} {where(d)}"))
    y = len(report.copies) * (ROW + GAP) + 12
    out.append(f"<text class='dim' x='{left}' y='{y}'>{low:,}</text>")
    out.append(f"<text class='dim' x='{MAP_WIDTH}' y='{y}' text-anchor='end'>{high:,}</text></svg>")
    keys = (
        ("same", "compared, the same"),
        ("proved", "the same, proved by an earlier run"),
        ("bad", "different"),
        ("behind", "behind: not there yet"),
        ("none", "not compared"),
    )
    out.append(
        "<div class='key'>"
        + "".join(f"<span><i style='background:var(--{k})'></i>{w}</span>" for k, w in keys)
        + "</div>"
    )
    return "".join(out)


def _cell(x: float, y: float, width: float, kind: str, title: str) -> str:
    place = f"x='{x:.2f}' y='{y}' width='{max(width, 0.5):.2f}' height='{ROW}'"
    return f"<rect class='{kind}' {place}><title>{escape(title)}</title></rect>"


def _says(cover: Cover) -> str:
    why = f": {cover.why}" if cover.why else ""
    return f"{cover.copy}: {cover.status}{why}, {cover.start:,} to {cover.end:,}"


def _table(heads: Iterable[tuple[str, str]], rows: Iterable[Iterable[tuple[str, str]]]) -> str:
    head = "".join(f"<th class='{c}'>{h}</th>" for c, h in heads)
    body = "".join("<tr>" + "".join(f"<td class='{c}'>{v}</td>" for c, v in row) + "</tr>" for row in rows)
    return f"<div class='scroll'><table><tr>{head}</tr>{body}</table></div>"


def _copies(report: Report) -> str:
    heads = (("", "copy"), ("", "verdict"), ("n", "from"), ("n", "to"), ("n", "durable to"), ("n", "lag"), ("", "path"))
    good = {"same": "good", "different": "bad"}
    return _table(
        heads,
        (
            (
                ("", escape(c.name)),
                (good.get(c.verdict, "warn"), escape(copy_says(c))),
                ("n", f"{c.start:,}"),
                ("n", f"{c.end:,}"),
                ("n", f"{c.durable_end:,}"),
                ("n", "unknown" if c.why else size_of(c.behind) if c.behind else "none"),
                ("", f"<code>{escape(c.path)}</code>"),
            )
            for c in report.copies
        ),
    )


def _differences(report: Report) -> str:
    if not report.differences:
        none = "none" if report.verdict == "same" else "none was found in what was compared"
        return f"<p class='dim'>{none}</p>"
    heads = (("", "copy"), ("", "what"), ("n", "from position"), ("n", "to"), ("", "records"), ("", "detail"))
    shown = report.differences[:DIFFERENCES_MAX]
    left = report.differences_all - len(shown)
    more = f"<p class='dim'>and {left:,} more</p>" if left else ""
    return more + _table(
        heads,
        (
            (
                ("", escape(d.copy)),
                ("bad", escape(d.kind)),
                ("n", f"{d.start:,}"),
                ("n", f"{d.end:,}"),
                ("", escape(where(d))),
                ("", escape(d.detail)),
            )
            for d in shown
        ),
    )


def _partitions(report: Report) -> str:
    heads = (
        ("", "topic"),
        ("n", "partition"),
        ("n", "first offset"),
        ("n", "next offset"),
        ("n", "records"),
        ("n", "not compared"),
        ("", ""),
    )
    rows = sorted(report.partitions, key=lambda p: (p.verdict != "different", p.topic, p.partition))
    good = {"same": "good", "different": "bad"}
    left = len(rows) - PARTITIONS_MAX
    more = f"<p class='dim'>and {left:,} more</p>" if left > 0 else ""
    return more + _table(
        heads,
        (
            (
                ("", escape(p.topic)),
                ("n", str(p.partition)),
                ("n", f"{p.first:,}"),
                ("n", f"{p.end:,}"),
                ("n", f"{p.records:,}"),
                ("n", f"{p.not_compared:,}"),
                (good.get(p.verdict, "warn"), p.verdict),
            )
            for p in rows[:PARTITIONS_MAX]
        ),
    )
