"""At every width: nothing is lost, and no address, path or id is broken."""

from __future__ import annotations

import io

import pytest
from rich.console import Console
from rich.text import Text

from chronik_repl.columns import fits, pairs, table
from chronik_repl.status_view import members_table, status_table

ADDRESSES = ("node-two.rack-7.example:9291", "[2001:db8::aaaa:bbbb]:9092", "192.168.100.200:9644")
MEMBER = dict(
    zip(("replication_address", "kafka_address", "http_address"), ADDRESSES, strict=True),
    node_id=2,
    rack="rack-7",
    live=True,
)
WHERE = "/var/lib/chronik/data/wal/00000000000000000000.wal"
TROUBLE = f"cannot connect to {ADDRESSES[0]}: No route to host"
STATUS = {
    "node_id": 1,
    "role": "leader",
    "epoch": 1,
    "ready": True,
    "cluster_id": "0123456789abcdef",
    "version": "0.1.0",
    "leader": None,
    "no_leader": "",
    "acks_all_means": "durable on the leader and 2 followers",
    "enough_replicas": False,
    "sync_in_force": True,
    "diverged": "",
    "log": {
        "start": 0,
        "end": 123_456_789,
        "high_watermark": 123_456_000,
        "bytes_on_disk": 123_456_789,
        "segments": 1,
        "topics": 1,
        "free_bytes": 1 << 40,
        "damage": [f"{WHERE} 4096..8192: bad checksum"],
    },
    "members": [MEMBER],
    "followers": [
        {
            "node_id": 2,
            "address": ADDRESSES[0],
            "state": "connecting",
            "detail": TROUBLE,
            "member": True,
            "lag_positions": 1,
            "lag_records": 1,
            "lag_seconds": 0.5,
            "ring_frames": 1,
            "ring_drops": 1,
            "parity_mismatches": 0,
            "parity_position": 123_456_789,
        }
    ],
    "events": [{"time_ms": 0, "level": "warning", "text": f"lost {ADDRESSES[1]}: no answer"}],
}
WIDTHS = (200, 120, 100, 80, 60, 40, 20, 5, 1)


def shown(text: Text, width: int) -> str:
    """As a terminal of that width gets it."""
    out = io.StringIO()
    Console(file=out, width=width, soft_wrap=True, highlight=False).print(text)
    return out.getvalue()


@pytest.mark.parametrize("width", WIDTHS)
def test_members_and_status_keep_their_addresses_whole(width: int) -> None:
    members = shown(members_table([MEMBER, {**MEMBER, "node_id": 3}], width), width)
    for address in ADDRESSES:
        assert members.count(address) == 2
    status = shown(status_table(STATUS, width), width)
    for whole in (*ADDRESSES[:2], WHERE, "0123456789abcdef", "123,456,789"):
        assert whole in status
    assert " ".join(TROUBLE.split()) in " ".join(status.split())
    assert "2 followers; refused now" in " ".join(status.split())


@pytest.mark.parametrize("width", [width for width in WIDTHS if width >= 40])
def test_no_line_is_longer_than_the_terminal_but_for_a_word_that_is(width: int) -> None:
    for text in (members_table([MEMBER], width), status_table(STATUS, width)):
        for line in text.plain.splitlines():
            assert len(line) <= width or " " not in line.strip(), line


def test_a_table_that_is_too_wide_takes_its_first_column_as_headings() -> None:
    names, rows = ("topic", "partition", "next"), [("orders", "0", "17"), ("orders", "1", "4"), ("a", "0", "9")]
    right = frozenset({"partition", "next"})
    assert table(names, rows, 80, numbers=right).plain.splitlines() == [
        "topic   partition  next",
        "orders          0    17",
        "orders          1     4",
        "a               0     9",
    ]
    assert table(names, rows, 20, numbers=right).plain.splitlines() == [
        "  partition  next",
        "orders",
        "          0    17",
        "          1     4",
        "a",
        "          0     9",
    ]
    assert table(names, [*rows[:2], ("a", "0", "node1:9291,node2:9291")], 22).plain.splitlines() == [
        "  partition  next",
        "orders",
        "  0          17",
        "  1          4",
        "a",
        "  partition",
        "    0",
        "  next",
        "    node1:9291,",
        "    node2:9291",
    ]
    assert fits(names, rows, 23)
    assert not fits(names, rows, 22)
    assert table(names, rows[:2], 10).plain.splitlines() == [
        *("topic", "  orders", "partition", "  0", "next", "  17"),
        *("", "topic", "  orders", "partition", "  1", "next", "  4"),
    ]


def test_a_list_may_end_a_line_after_a_comma() -> None:
    listed = "node1:9291,node2:9291,node3:9291"
    assert pairs([("value", listed)], 32).plain.splitlines() == [
        "value  node1:9291,node2:9291,",
        "       node3:9291",
    ]
    assert pairs([("log", "0 … 1,234,567 of it")], 32).plain == "log  0 … 1,234,567 of it"
