"""A node's answers as tables for a terminal."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from rich.live import Live
from rich.text import Text

from chronik_repl.columns import Cell, pairs, table, terminal
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
NUMBERS = frozenset({"records", "partition", "first", "high watermark", "next", "committed", "lag"})


def show_status(status: dict[str, Any]) -> None:
    console = terminal()
    console.print(status_table(status, console.width))


def watch(ask: Callable[[], dict[str, Any]], *, as_json: bool) -> int:
    """Until Ctrl-C. A node that does not answer is shown as such; it may come back."""
    if as_json:
        while True:
            print(json.dumps(ask()), flush=True)
            time.sleep(WATCH_INTERVAL_S)
    before: tuple[float, dict[str, Any]] | None = None
    console = terminal()
    with Live(console=console, screen=sys.stdout.isatty(), auto_refresh=False) as live:
        while True:
            try:
                status = ask()
                rate = _rate(before, status)
                before = time.monotonic(), status
                live.update(status_table(status, console.width, rate), refresh=True)
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


def status_table(status: dict[str, Any], width: int, rate: str = "") -> Text:
    log, leader = status["log"], status["leader"]
    ready = Text("ready", "green") if status["ready"] else Text("not ready", "red")
    behind = log["end"] - log["high_watermark"]
    head: list[tuple[str, Cell]] = [
        ("node", Text.assemble(f"{status['node_id']}  {status['role']} in epoch {status['epoch']}  ", ready)),
        ("cluster", f"{status['cluster_id'] or '—'}  (chronik-repl {status['version']})"),
    ]
    if status["no_leader"]:
        head.append(("leader", Text(status["no_leader"], "red")))
    elif leader and leader["node_id"] != status["node_id"]:
        head.append(
            ("leader", f"node {leader['node_id']} at {leader['kafka_address'] or leader['replication_address']}")
        )
    head += [
        ("acks=all", _acks_all(status)),
        ("log", f"{log['start']:,} … {log['end']:,}, high watermark {log['high_watermark']:,} ({behind:,} behind)"),
        (
            "",
            f"{size_of(log['bytes_on_disk'])} in {count_of(log['segments'], 'segment')}, "
            f"{count_of(log['topics'], 'topic')}; {size_of(log['free_bytes'])} free",
        ),
    ]
    if rate:
        head.append(("now", rate))
    if status["diverged"]:
        head.append(("diverged", Text(status["diverged"], "red")))
    head += [("damage", Text(finding, "red")) for finding in log["damage"]]
    parts = [pairs(head, width)]
    if status["followers"]:
        parts += [_followers(status["followers"], width), *_troubles(status["followers"], width)]
    elif status["members"]:
        parts.append(members_table(status["members"], width))
    if status["events"]:
        parts.append(_events(status["events"], width))
    return Text("\n\n").join(parts)


def _acks_all(status: dict[str, Any]) -> Cell:
    if status["enough_replicas"] or not status["sync_in_force"]:
        return str(status["acks_all_means"])
    return Text(f"{status['acks_all_means']}; refused now, for too few followers are connected", "red")


def _followers(followers: list[dict[str, Any]], width: int) -> Text:
    rows: list[tuple[Cell, ...]] = []
    for one in followers:
        differs = one["parity_mismatches"] or one["state"] == "diverged"
        lag = f"{size_of(one['lag_positions'])}, {count_of(one['lag_records'], 'record')}, {one['lag_seconds']:.1f} s"
        drops = f", {count_of(one['ring_drops'], 'overflow')}" if one["ring_drops"] else ""
        rows.append(
            (
                _name(one) + ("" if one["member"] else ", no member"),
                Text(one["state"], STATE_STYLES[one["state"]]),
                lag if one["lag_positions"] else "none",
                f"{count_of(one['ring_frames'], 'frame')}{drops}",
                Text("DIFFERENT", "red") if differs else Text(f"same to {one['parity_position']:,}", "green"),
            )
        )
    return table(("follower", "state", "lag", "ring", "parity"), rows, width)


def _troubles(followers: list[dict[str, Any]], width: int) -> list[Text]:
    """What a follower's state alone does not say."""
    found = [(_name(one), one["detail"]) for one in followers if one["detail"]]
    return [pairs(found, width)] if found else []


def _name(follower: dict[str, Any]) -> str:
    return f"{follower['node_id'] or '?'} at {follower['address']}"


def members_table(members: list[dict[str, Any]], width: int) -> Text:
    rows = [
        (
            str(one["node_id"]),
            Text("live", "green") if one["live"] else Text("silent", "yellow"),
            one["replication_address"],
            one["kafka_address"],
            one["http_address"],
            one["rack"],
        )
        for one in members
    ]
    return table(("member", "state", "replication", "kafka", "http", "rack"), rows, width)


def _events(events: list[dict[str, Any]], width: int) -> Text:
    return pairs(
        (
            (
                time.strftime("%H:%M:%S", time.localtime(event["time_ms"] / 1000)),
                Text(event["text"], EVENT_STYLES[event["level"]]),
            )
            for event in events[-EVENTS_SHOWN:]
        ),
        width,
    )


def show_members(members: list[dict[str, Any]]) -> None:
    console = terminal()
    console.print(members_table(members, console.width))


def show_topics(topics: list[dict[str, Any]]) -> None:
    rows = [
        (
            topic["topic"],
            str(one["partition"]),
            f"{one['start']:,}",
            f"{one['high_watermark']:,}",
            f"{one['end']:,}",
            f"{one['end'] - one['start']:,}",
        )
        for topic in topics
        for one in topic["partitions"]
    ]
    _show(("topic", "partition", "first", "high watermark", "next", "records"), rows, "no topics yet")


def show_groups(groups: list[dict[str, Any]]) -> None:
    rows = []
    for group in groups:
        about = (group["state"], str(group["generation"]), str(len(group["members"])))
        for one in group["offsets"] or [None]:
            rest = ("—", "", "", "")
            if one is not None:
                lag = "gone" if one["lag"] is None else f"{one['lag']:,}"
                rest = (one["topic"], str(one["partition"]), f"{one['committed']:,}", lag)
            rows.append((group["group"], *about, *rest))
    names = ("group", "state", "generation", "members", "topic", "partition", "committed", "lag")
    _show(names, rows, "no groups yet")


def _show(names: tuple[str, ...], rows: Sequence[tuple[str, ...]], nothing: str) -> None:
    console = terminal()
    console.print(table(names, rows, console.width, numbers=NUMBERS) if rows else nothing)
