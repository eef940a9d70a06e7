"""Each alert of config/ fires for what its text says, and none does in a healthy cluster: what real nodes tell on
/metrics, judged by Prometheus's own promtool."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import yaml
from confluent_kafka import Producer
from prometheus_client.parser import text_string_to_metric_families

from tests.end_to_end.processes import Processes, running_processes, until
from tests.promtool import promtool

RULES = Path(__file__).parents[2] / "config" / "prometheus" / "alerts.yml"
MINUTES = 40
GIB = 2**30

Series = dict[str, str]  # a series → its values, a minute apart, as promtool writes them

# What processes are not asked to show here: series of the healthy cluster that are told otherwise. Of one node, but
# where a follower is named.
TOLD: list[tuple[str, dict[str, str]]] = [
    ("ChronikNotReady", {'chronik_ready{instance="2"': "0x40"}),
    ("ChronikTwoLeaders", {'chronik_role{instance="2",job="chronik",role="leader"': "1x40"}),
    ("ChronikFollowerBehind", {'chronik_replication_lag_seconds{follower="2"': "61x40"}),
    ("ChronikRingOverflows", {'chronik_replication_ring_drops_total{follower="2"': "0+1x40"}),
    ("ChronikParity", {'chronik_replication_parity_mismatches_total{follower="2"': "0x10 1x30"}),
    ("ChronikParity", {'chronik_diverged{instance="2"': "1x40"}),
    ("ChronikParity", {'chronik_replication_state{follower="2",instance="1",job="chronik",state="diverged"': "1x40"}),
    ("ChronikDamage", {'chronik_log_damaged_ranges{instance="2"': "1x40"}),
    ("ChronikDiskFilling", {'chronik_disk_free_bytes{instance="2"': f"{100 * GIB}-{GIB}x40"}),
    (
        "ChronikCommitSlow",
        {
            'chronik_log_commit_seconds_total{instance="1"': "0+60x40",
            'chronik_log_groups_committed_total{instance="1"': "0+300x40",
        },
    ),
    ("ChronikClockLeapt", {'chronik_clock_ahead_seconds{instance="2"': "90x40"}),
]


def scraped(cluster: Processes) -> Series:
    """What Prometheus would have by now, if it had been so all the time."""
    series: Series = {}
    for node_id, node in cluster.nodes.items():
        text = node.get("/metrics") if node.alive else ""
        labels = {"instance": str(node_id), "job": "chronik"}
        series[named("up", labels)] = f"{int(bool(text))}x{MINUTES}"
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                # Whatever this machine's disk has, it is not what is looked at.
                value = 100.0 * GIB if sample.name == "chronik_disk_free_bytes" else sample.value
                series[named(sample.name, sample.labels | labels)] = f"{value!r}x{MINUTES}"
    return series


def named(name: str, labels: dict[str, str]) -> str:
    inside = ",".join(f"{key}={json.dumps(value)}" for key, value in sorted(labels.items()))
    return f"{name}{{{inside}}}"


def told(series: Series, changes: dict[str, str]) -> Series:
    changed = dict(series)
    for start, values in changes.items():
        (name,) = (name for name in series if name.startswith(start))
        changed[name] = values
    return changed


class Promtool:
    def __init__(self, program: str, folder: Path) -> None:
        self.program = program
        self.folder = folder
        self.tests: list[dict[str, Any]] = []

    def expect(self, alerts: set[str], series: Series) -> None:
        self.tests.append(
            {
                "name": ", ".join(sorted(alerts)) or "healthy",
                "interval": "1m",
                "input_series": [{"series": name, "values": values} for name, values in series.items()],
                "promql_expr_test": [
                    {
                        "expr": 'group by (alertname) (ALERTS{alertstate="firing"})',
                        "eval_time": f"{MINUTES - 5}m",
                        "exp_samples": [{"labels": f'{{alertname="{alert}"}}', "value": 1} for alert in sorted(alerts)],
                    }
                ],
            }
        )

    def judge(self) -> None:
        file = self.folder / "rules-test.yml"
        file.write_text(yaml.safe_dump({"rule_files": [str(RULES)], "tests": self.tests}))
        done = subprocess.run([self.program, "test", "rules", str(file)], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr


def test_each_alert_fires_for_what_it_says_and_none_in_a_healthy_cluster(tmp_path: Path) -> None:
    prometheus = Promtool(promtool(), tmp_path)
    with running_processes(tmp_path) as cluster:
        leader = cluster.leader_and(2, replication_mode="sync")
        producer = Producer({"bootstrap.servers": leader.kafka, "acks": 1})
        producer.produce("orders", b"one")
        assert producer.flush(30) == 0
        cluster.same_logs()
        healthy = scraped(cluster)
        prometheus.expect(set(), healthy)
        for alert, changes in TOLD:
            prometheus.expect({alert}, told(healthy, changes))

        cluster.nodes[2].kill()
        until(lambda: states(leader.status()) == ["connecting", "streaming"], "the leader misses it")
        prometheus.expect({"ChronikNodeDown", "ChronikFollowerGone"}, scraped(cluster))

        cluster.nodes[3].kill()
        until(lambda: states(leader.status()) == ["connecting", "connecting"], "the leader is alone")
        alone = {"ChronikNodeDown", "ChronikFollowerGone", "ChronikTooFewFollowers"}
        prometheus.expect(alone, scraped(cluster))
        producer.produce("orders", b"two")
        assert producer.flush(30) == 0
        prometheus.expect({*alone, "ChronikHighWatermarkStuck"}, scraped(cluster))

        leader.kill()
        cluster.nodes[2].start()
        cluster.nodes[2].wait_ready()
        prometheus.expect({"ChronikNodeDown", "ChronikNoLeader"}, scraped(cluster))
        cluster.nodes[2].kill()
        prometheus.expect({"ChronikNodeDown", "ChronikNoLeader"}, scraped(cluster))
    seen = {name for test in prometheus.tests for name in test["name"].split(", ")} - {"healthy"}
    assert seen == {rule["alert"] for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]}
    prometheus.judge()


def states(status: dict[str, Any]) -> list[str]:
    return sorted(follower["state"] for follower in status["followers"])
