"""What `chronik topics` and `chronik groups` show, and /topics and /groups answer: the log's state as plain values."""

from __future__ import annotations

from typing import Any

from chronik_repl.standing import House
from chronik_repl.wal.entities import GroupState


def topics(house: House) -> dict[str, Any]:
    """Every topic with its partitions' offsets: first, high watermark, next."""
    log = house.log
    found = []
    for name, topic in sorted(log.state.topics.items()):
        if topic.removed:
            continue
        partitions = [
            {
                "partition": number,
                "start": log.log_start_offset(name, number),
                "high_watermark": log.committed_offset(name, number),
                "end": log.end_offset(name, number),
            }
            for number in range(len(topic.partitions))
        ]
        found.append({"topic": name, "partitions": partitions, "configs": dict(topic.configs)})
    return {"topics": found}


def groups(house: House) -> dict[str, Any]:
    """Every consumer group with its members and, a partition, where it is and how far behind the high watermark."""
    return {"groups": [_group(house, name, group) for name, group in sorted(house.log.state.groups.items())]}


def _group(house: House, name: str, group: GroupState) -> dict[str, Any]:
    log = house.log
    offsets = []
    for (topic, partition), committed in sorted(group.offsets.items()):
        known = log.state.topics.get(topic)
        gone = known is None or known.removed or partition >= len(known.partitions)
        high_watermark = None if gone else log.committed_offset(topic, partition)
        lag = None if high_watermark is None else max(0, high_watermark - committed.offset)
        offsets.append(
            {
                "topic": topic,
                "partition": partition,
                "committed": committed.offset,
                "high_watermark": high_watermark,
                "lag": lag,
            }
        )
    members = [
        {"member_id": member.member_id, "client_id": member.client_id, "host": member.client_host}
        for member in group.members.values()
    ]
    return {
        "group": name,
        "state": "stable" if members else "empty",
        "generation": group.generation,
        "protocol": group.protocol,
        "members": members,
        "offsets": offsets,
    }
