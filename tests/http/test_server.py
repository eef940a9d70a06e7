"""The HTTP door in front of a real log: health, status, metrics, history and the page."""

from __future__ import annotations

import json
import math
import re
import urllib.error
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from email.message import Message
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
import trio
from prometheus_client.parser import text_string_to_metric_families

from chronik_repl.config import Settings
from chronik_repl.errors import ConfigError
from chronik_repl.http.conversation import Limits
from chronik_repl.http.server import serve
from chronik_repl.standing import FollowerStatus, House, Status
from chronik_repl.wal.changes import CommittedOffset, GroupChanged, GroupMember, OffsetsCommitted, TopicMade
from tests.kafka.house import OneHouse, open_door

FOLLOWERS = (
    FollowerStatus(
        2,
        "127.0.0.1:9292",
        "streaming",
        member=True,
        durable_end=900,
        lag_positions=100,
        lag_records=3,
        lag_seconds=0.25,
    ),
    FollowerStatus(0, "127.0.0.1:9293", "connecting", detail="connection refused", ring_drops=4, parity_mismatches=1),
)


class Watched:
    """The house of the Kafka tests, with followers as a leader would see them."""

    def __init__(self, house: OneHouse) -> None:
        self._house = house

    def __getattr__(self, name: str) -> Any:
        return getattr(self._house, name)

    def status(self) -> Status:
        status = self._house.status()
        log = msgspec.structs.replace(status.log, damage=("segment 0: a bit has rotted",))
        return msgspec.structs.replace(status, followers=FOLLOWERS, log=log, ready=self._house.ready)


class Door:
    def __init__(self, house: OneHouse, address: str) -> None:
        self.house = house
        self.address = address

    async def get(self, path: str, method: str = "GET") -> tuple[int, str, dict[str, str]]:
        def ask() -> tuple[int, str, dict[str, str]]:
            request = urllib.request.Request(f"http://{self.address}{path}", method=method)
            try:
                with urllib.request.urlopen(request, timeout=10) as answer:
                    return answer.status, answer.read().decode(), lower(answer.headers)
            except urllib.error.HTTPError as error:
                return error.code, error.read().decode(), lower(error.headers)

        return await trio.to_thread.run_sync(ask)

    async def json(self, path: str) -> Any:
        code, text, _ = await self.get(path)
        assert code == 200, text
        return json.loads(text)


def lower(headers: Message) -> dict[str, str]:
    return {name.lower(): value for name, value in headers.items()}


@asynccontextmanager
async def opened(folder: Path, limits: Limits | None = None) -> AsyncIterator[Door]:
    settings = Settings(node_id=1, data_dir=folder, http_bind_addr="127.0.0.1:0")
    async with open_door(folder) as (house, _), trio.open_nursery() as nursery:

        async def door(*, task_status: trio.TaskStatus[str]) -> None:
            await serve(cast(House, Watched(house)), settings, limits=limits, task_status=task_status)

        yield Door(house, await nursery.start(door))
        nursery.cancel_scope.cancel()


async def test_healthy_is_not_the_same_as_ready(tmp_path: Path) -> None:
    async with opened(tmp_path) as door:
        assert (await door.get("/healthz"))[:2] == (200, "ok\n")
        assert (await door.get("/readyz"))[:2] == (200, "ready: leader in epoch 1\n")
        door.house.ready = False
        door.house.role = "starting"
        assert (await door.get("/readyz"))[:2] == (503, "not ready: starting\n")
        assert (await door.get("/healthz"))[0] == 200


async def test_status_is_the_standing(tmp_path: Path) -> None:
    async with opened(tmp_path) as door:
        code, text, headers = await door.get("/status")
        assert code == 200
        assert headers["content-type"] == "application/json"
        assert headers["access-control-allow-origin"] == "*", "a follower's page reads the leader's status"
        assert msgspec.json.decode(text, type=Status) == Watched(door.house).status()


async def test_metrics_follow_the_conventions(tmp_path: Path) -> None:
    async with opened(tmp_path) as door:
        door.house.meters.add("kafka_requests", 3, "Produce")
        _, text, headers = await door.get("/metrics")
        assert headers["content-type"].startswith("text/plain; version=0.0.4")
        families = {family.name: family for family in text_string_to_metric_families(text)}
        assert len(families) > 40
        for family in families.values():
            assert family.name.startswith("chronik_")
            assert family.documentation.endswith("."), family.name
            assert family.type in ("counter", "gauge", "histogram")
            for sample in family.samples:
                assert sample.name.endswith("_total") == (family.type == "counter"), sample.name
                assert not re.search(r"_(ms|kb|mb|millis|percent)(_|$)", sample.name), "base units"
        lag = {
            sample.labels["follower"]: sample.value for sample in families["chronik_replication_lag_positions"].samples
        }
        assert lag == {"2": 100, "127.0.0.1:9293": 0}
        states = families["chronik_replication_state"].samples
        assert [(s.labels["follower"], s.labels["state"]) for s in states if s.value] == [
            ("2", "streaming"),
            ("127.0.0.1:9293", "connecting"),
        ]
        assert families["chronik_log_damaged_ranges"].samples[0].value == 1
        assert families["chronik_kafka_requests"].samples[0].value == 3
        assert families["chronik_log_high_watermark_position"].samples[0].value == door.house.log.committed.value
        assert families["chronik_replication_parity_mismatches"].samples[1].value == 1


async def test_commits_are_histograms(tmp_path: Path) -> None:
    async with opened(tmp_path) as door:
        stats = door.house.log.stats
        _, text, _ = await door.get("/metrics")
        families = {family.name: family for family in text_string_to_metric_families(text)}
        groups = stats.groups_committed
        assert groups > 0
        for name, total in (("wal_commit_seconds", stats.commit_s), ("wal_group_bytes", stats.appended_bytes)):
            family = families[f"chronik_{name}"]
            assert family.type == "histogram"
            counts = [(float(s.labels["le"]), s.value) for s in family.samples if s.name.endswith("_bucket")]
            assert counts == sorted(counts), "cumulative, and so are the bounds"
            assert counts[-1] == (math.inf, groups)
            assert len(counts) >= 8
            (count,) = (s.value for s in family.samples if s.name.endswith("_count"))
            (summed,) = (s.value for s in family.samples if s.name.endswith("_sum"))
            assert count == groups
            assert summed == pytest.approx(total)
        assert 'chronik_wal_group_bytes_bucket{le="1.048576e+06"}' in text


async def test_history_grows_and_can_be_asked_from_a_time_on(tmp_path: Path) -> None:
    async with opened(tmp_path) as door:
        with trio.fail_after(10):
            while len(samples := await door.json("/history")) < 2:
                await trio.sleep(0.1)
        assert [one["follower"] for one in samples[0]["followers"]] == ["2", "127.0.0.1:9293"]
        later = await door.json(f"/history?since={samples[0]['time_ms']}")
        assert samples[0] not in later
        assert samples[1] in later
        for nonsense in ("yesterday", "-1", "9" * 5000, "%ff"):
            assert (await door.get(f"/history?since={nonsense}"))[0] == 400


async def test_topics_and_groups(tmp_path: Path) -> None:
    async with opened(tmp_path) as door:
        log = door.house.log
        log.append_change(TopicMade("orders", 2))
        log.append_change(GroupChanged("billing", 3, members=(GroupMember("m-1", "app", "10.0.0.9"),)))
        log.append_change(OffsetsCommitted("billing", (CommittedOffset("orders", 1, 0), CommittedOffset("gone", 0, 7))))
        await log.committed.wait(log.end)
        topics = (await door.json("/topics"))["topics"]
        assert [(topic["topic"], len(topic["partitions"])) for topic in topics] == [("orders", 2)]
        assert topics[0]["partitions"][0] == {"partition": 0, "start": 0, "high_watermark": 0, "end": 0}
        (group,) = (await door.json("/groups"))["groups"]
        assert (group["group"], group["generation"], group["state"]) == ("billing", 3, "stable")
        assert group["members"] == [{"member_id": "m-1", "client_id": "app", "host": "10.0.0.9"}]
        assert [(one["topic"], one["lag"]) for one in group["offsets"]] == [("gone", None), ("orders", 0)]


async def test_nothing_can_be_changed_from_here(tmp_path: Path) -> None:
    async with opened(tmp_path) as door:
        for path in ("/", "/status", "/metrics"):
            assert (await door.get(path, "POST"))[0] == 405
            assert (await door.get(path, "DELETE"))[0] == 405
        assert (await door.get("/promote"))[0] == 404


async def test_the_page_brings_everything_with_it(tmp_path: Path) -> None:
    async with opened(tmp_path) as door:
        code, text, headers = await door.get("/")
        assert code == 200
        assert "default-src 'none'" in headers["content-security-policy"]
        outside = re.sub(r"http://www\.w3\.org/2000/svg", "", text)
        assert not re.search(r"(src|href)=\"(?!data:|/[a-z]+\")|https?://|@import|url\(", outside)


async def test_a_port_that_is_taken_is_said_and_how_to_go_on(tmp_path: Path) -> None:
    async with opened(tmp_path) as door:
        settings = Settings(node_id=1, data_dir=tmp_path, http_bind_addr=door.address)
        with pytest.raises(ConfigError, match=r"CHRONIK_HTTP_BIND_ADDR=.*in use.*another port"):
            await serve(cast(House, Watched(door.house)), settings)
