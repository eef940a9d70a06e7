"""What config/ offers can be used as it stands: environments, service units, Prometheus rules, the dashboard."""

from __future__ import annotations

import configparser
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from chronik_repl.cli import main
from chronik_repl.config import VARIABLES
from chronik_repl.http import metrics
from chronik_repl.meters import METERS
from tests.promtool import promtool

ROOT = Path(__file__).parent.parent
CONFIG = ROOT / "config"
UNITS = sorted((CONFIG / "systemd").glob("*.service"))


@pytest.mark.parametrize("program", ["leader", "follower"])
def test_an_example_environment_is_right(program: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", str(CONFIG / f"{program}.env"), "--as", program, "--json"]) == 0, capsys.readouterr()


@pytest.mark.parametrize("program", ["leader", "follower"])
def test_what_is_commented_out_is_the_default(program: str) -> None:
    known = {variable.name: variable for variable in VARIABLES}
    found = re.findall(r"^#(CHRONIK_\w+)=(.*)$", (CONFIG / f"{program}.env").read_text(), re.MULTILINE)
    assert found
    for name, value in found:
        default = known[name].default
        assert value == ("" if default is None else known[name].show(default)), name


def sections(unit: Path) -> dict[str, dict[str, str]]:
    parser = configparser.ConfigParser(interpolation=None, strict=True)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read_string(unit.read_text())
    return {name: dict(parser[name]) for name in parser.sections()}


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
def test_a_unit_waits_for_readiness_and_restarts(unit: Path) -> None:
    service = sections(unit)["Service"]
    assert service["Type"] == "notify"
    assert service["Restart"] == "on-failure"
    assert service["NoNewPrivileges"] == "true"
    assert service["ProtectSystem"] == "strict"
    assert (CONFIG / Path(service["EnvironmentFile"]).name).exists()
    assert Path(service["ExecStart"]).name == unit.stem


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
def test_systemd_itself_accepts_a_unit(unit: Path, tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("no systemd-analyze on this machine")
    text = unit.read_text().replace("/opt/chronik/bin", str(Path(sys.executable).parent))
    text = re.sub(r"^(User|Group|EnvironmentFile)=.*\n", "", text, flags=re.MULTILINE)
    (tmp_path / unit.name).write_text(text)
    command = ["systemd-analyze", "verify", "--man=no", str(tmp_path / unit.name)]
    checked = subprocess.run(command, capture_output=True, text=True)
    complaints = [line for line in checked.stderr.splitlines() if unit.name in line]
    assert checked.returncode == 0, checked.stderr
    assert not complaints


def known_metrics() -> set[str]:
    counters = set(metrics.NODE_COUNTERS) | {f"replication_{name}" for name in metrics.FOLLOWER_COUNTERS}
    counters |= {name for name, _ in metrics.LOG_STATS.values()}
    counters |= {name for name, meter in METERS.items() if meter.kind == "counter"}
    gauges = set(metrics.NODE_GAUGES) | {f"replication_{name}" for name in metrics.FOLLOWER_GAUGES}
    gauges |= {name for name, _ in metrics.LOG_STATS_GAUGES.values()} | {"info", "role", "replication_state"}
    gauges |= {name for name, meter in METERS.items() if meter.kind == "gauge"}
    parts = {f"{name}_{part}" for name, _ in metrics.LOG_HISTOGRAMS.values() for part in ("bucket", "sum", "count")}
    gauges |= parts | {name for name, _ in metrics.LOG_HISTOGRAMS.values()}
    return {f"chronik_{name}_total" for name in counters} | {f"chronik_{name}" for name in gauges}


def alerts() -> list[dict[str, Any]]:
    rules = yaml.safe_load((CONFIG / "prometheus" / "alerts.yml").read_text())
    return [rule for group in rules["groups"] for rule in group["rules"]]


def test_alerts_speak_of_metrics_that_are_there() -> None:
    for rule in alerts():
        used = set(re.findall(r"\bchronik_\w+", rule["expr"]))
        assert used - known_metrics() == set(), rule["alert"]
        assert rule["annotations"]["summary"]
        assert rule["labels"]["severity"] in ("page", "ticket")


def test_every_alert_is_explained_and_no_other() -> None:
    page = (ROOT / "docs" / "operations.md").read_text()
    section = page.partition("\n## Alerts\n")[2].partition("\n## ")[0]
    assert re.findall(r"(?m)^### (\w+)$", section) == [rule["alert"] for rule in alerts()], "in the same order"
    assert set(re.findall(r"Chronik[A-Z]\w+", page)) == {rule["alert"] for rule in alerts()}


@pytest.mark.parametrize("page", sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]), ids=lambda page: page.stem)
def test_the_documents_speak_of_metrics_that_are_there(page: Path) -> None:
    named = set(re.findall(r"\bchronik_[a-z0-9_]+\b", page.read_text())) - {"chronik_repl"}
    assert {name for name in named if name not in known_metrics()} == set()


def test_promtool_accepts_rules_and_scrape_config() -> None:
    folder = CONFIG / "prometheus"
    loaded = yaml.safe_load((folder / "prometheus.yml").read_text())
    assert loaded["rule_files"] == ["alerts.yml"]
    command = [promtool(), "check", "config", str(folder / "prometheus.yml")]
    checked = subprocess.run(command, capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_the_dashboard_draws_metrics_that_are_there() -> None:
    dashboard = json.loads((CONFIG / "grafana" / "dashboard.json").read_text())
    expressions = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    assert len(expressions) > 10
    for expression in expressions:
        assert set(re.findall(r"\bchronik_\w+", expression)) - known_metrics() == set(), expression
