"""A node's answers as tables for a terminal."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from chronik_repl.errors import Refused
from chronik_repl.words import count_of, size_of

WATCH_INTERVAL_S = 1.0
STATE_STYLES = {
    "streaming": "green",
    "catch-up": "yellow",
    "connecting": "red",
    "refused": "red",
    "diverged": "bold red",
}
EVENT_STYLES = {"info": "", "warning": "yellow", "error": "red"}
EVENTS_SHOWN = 6
NUMBERS = {"records", "partition", "first", "high watermark", "next", "committed", "lag "}


def show_status(status: dict[str, Any]) -> None:
    Console().print(status_table(status))


def watch(ask: Callable[[], dict[str, Any]], *, as_json: bool) -> int:
    """Until Ctrl-C. A node that does not answer is shown as such; it may come back."""
    if as_json:
        while True:
            print(json.dumps(ask()), flush=True)
            time.sleep(WATCH_INTERVAL_S)
    before: tuple[float, dict[str, Any]] | None = None
    with Live(console=Console(), screen=sys.stdout.isatty(), auto_refresh=False) as live:
        while True:
            try:
                status = ask()
                rate = _rate(before, status)
                before = time.monotonic(), status
                live.update(status_table(status, rate), refresh=True)
            except Refused as error:
                live.update(Text(str(error), style="red"), refresh=True)
            time.sleep(WATCH_INTERVAL_S)


def _rate(before: tuple[float, dict[str, Any]] | None, status: dict[str, Any]) -> str:
    if before is None:
        return ""
    elapsed_s = max(time.monotonic() - before[0], 1e-3)
    records, size = (
        max(0, status["log"][name] - before[1]["log"][name]) / elapsed_s
        for name in ("appended_records", "appended_bytes")
    )
    return f"{records:,.0f} records/s, {size_of(size)}/s"


def status_table(status: dict[str, Any], rate: str = "") -> RenderableType:
    log, leader = status["log"], status["leader"]
    head = Table.grid(padding=(0, 2))
    ready = Text("ready", "green") if status["ready"] else Text("not ready", "red")
    head.add_row("node", Text.assemble(f"{status['node_id']}  {status['role']} in epoch {status['epoch']}  ", ready))
    head.add_row("cluster", f"{status['cluster_id'] or '—'}  (chronik-repl {status['version']})")
    if leader and leader["node_id"] != status["node_id"]:
        head.add_row(
            "leader", f"node {leader['node_id']} at {leader['kafka_address'] or leader['replication_address']}"
        )
    head.add_row("acks=all", status["acks_all_means"])
    behind = log["end"] - log["high_watermark"]
    head.add_row(
        "log", f"{log['start']:,} … {log['end']:,}, high watermark {log['high_watermark']:,} ({behind:,} behind)"
    )
    head.add_row(
        "",
        f"{size_of(log['bytes_on_disk'])} in {count_of(log['segments'], 'segment')}, "
        f"{count_of(log['topics'], 'topic')}; "
        f"{size_of(log['free_bytes'])} free",
    )
    if rate:
        head.add_row("now", rate)
    if status["diverged"]:
        head.add_row("[red]diverged", Text(status["diverged"], "red"))
    for finding in log["damage"]:
        head.add_row("[red]damage", Text(finding, "red"))
    parts: list[RenderableType] = [head]
    if status["followers"]:
        parts += ["", _followers(status["followers"])]
    elif status["members"]:
        parts += ["", members_table(status["members"])]
    if status["events"]:
        parts += ["", _events(status["events"])]
    return Group(*parts)


def _followers(followers: list[dict[str, Any]]) -> Table:
    table = _table("follower", "state", "lag", "ring", "parity", "")
    for one in followers:
        differs = one["parity_mismatches"] or one["state"] == "diverged"
        lag = f"{size_of(one['lag_positions'])}, {one['lag_records']:,} records, {one['lag_seconds']:.1f} s"
        drops = f", {one['ring_drops']} overflows" if one["ring_drops"] else ""
        table.add_row(
            f"{one['node_id'] or '?'} at {one['address']}" + ("" if one["member"] else ", no member"),
            Text(one["state"], STATE_STYLES[one["state"]]),
            lag if one["lag_positions"] else "none",
            f"{one['ring_frames']:,} frames{drops}",
            Text("DIFFERENT", "red") if differs else Text(f"same to {one['parity_position']:,}", "green"),
            one["detail"],
        )
    return table


def members_table(members: list[dict[str, Any]]) -> Table:
    table = _table("member", "replication", "kafka", "http", "rack", "")
    for one in members:
        live = Text("live", "green") if one["live"] else Text("silent", "yellow")
        table.add_row(
            str(one["node_id"]),
            one["replication_address"],
            one["kafka_address"],
            one["http_address"],
            one["rack"],
            live,
        )
    return table


def _events(events: list[dict[str, Any]]) -> Table:
    grid = Table.grid(padding=(0, 2))
    for event in events[-EVENTS_SHOWN:]:
        clock = time.strftime("%H:%M:%S", time.localtime(event["time_ms"] / 1000))
        grid.add_row(Text(clock, "dim"), Text(event["text"], EVENT_STYLES[event["level"]]))
    return grid


def show_members(members: list[dict[str, Any]]) -> None:
    Console().print(members_table(members))


def show_topics(topics: list[dict[str, Any]]) -> None:
    table = _table("topic", "partition", "first", "high watermark", "next", "records")
    for topic in topics:
        for one in topic["partitions"]:
            table.add_row(
                topic["topic"],
                str(one["partition"]),
                f"{one['start']:,}",
                f"{one['high_watermark']:,}",
                f"{one['end']:,}",
                f"{one['end'] - one['start']:,}",
            )
    Console().print(table if topics else "no topics yet")


def show_groups(groups: list[dict[str, Any]]) -> None:
    table = _table("group", "state", "generation", "members", "topic", "partition", "committed", "lag ")
    for group in groups:
        about = (group["group"], group["state"], str(group["generation"]), str(len(group["members"])))
        for one in group["offsets"] or [None]:
            rest = ("—", "", "", "")
            if one is not None:
                lag = "gone" if one["lag"] is None else f"{one['lag']:,}"
                rest = (one["topic"], str(one["partition"]), f"{one['committed']:,}", lag)
            table.add_row(*about, *rest)
    Console().print(table if groups else "no groups yet")


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in columns:
        table.add_column(name, justify="right" if name in NUMBERS else "left", overflow="fold")
    return table
