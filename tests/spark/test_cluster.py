"""The same check on a real Spark standalone cluster on loopback: a master, two workers, spark-submit."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from chronik_repl.spark.session import SparkMissing, require_spark
from tests.end_to_end.processes import until
from tests.ports import free_port
from tests.spark import plants
from tests.spark.logs import Writer, batch, copy_log

ROOT = Path(__file__).parent.parent.parent


class Standalone:
    def __init__(self, folder: Path) -> None:
        import pyspark

        self.home = Path(pyspark.__file__).parent
        self.folder = folder
        self.environment = {
            **os.environ,
            "SPARK_LOCAL_IP": "127.0.0.1",
            "SPARK_HOME": str(self.home),
            "PYSPARK_PYTHON": sys.executable,
            "SPARK_WORKER_DIR": str(folder / "work"),
        }
        self.processes: list[subprocess.Popen[bytes]] = []
        self.port = free_port()
        self.master = f"spark://127.0.0.1:{self.port}"

    def start(self, role: str, *words: str) -> Path:
        """pyspark brings spark-class, which Spark's own start-master.sh and start-worker.sh call."""
        log = self.folder / f"{role}-{len(self.processes)}.log"
        command = [str(self.home / "bin" / "spark-class"), f"org.apache.spark.deploy.{role.lower()}.{role}", *words]
        with open(log, "wb") as file:
            self.processes.append(
                subprocess.Popen(command, stdout=file, stderr=file, env=self.environment, start_new_session=True)
            )
        return log

    def up(self) -> None:
        log = self.start("Master", "--host", "127.0.0.1", "--port", str(self.port), "--webui-port", "0")
        until(lambda: "I have been elected leader" in log.read_text(), "the master leads", 90)
        for _ in range(2):
            self.start(
                "Worker", self.master, "--cores", "1", "--memory", "1g", "--host", "127.0.0.1", "--webui-port", "0"
            )
        until(lambda: len(re.findall("Registering worker", log.read_text())) == 2, "two workers are registered", 90)

    def down(self) -> None:
        for process in reversed(self.processes):
            os.killpg(process.pid, signal.SIGTERM)
        for process in self.processes:
            process.wait(30)


@pytest.fixture
def standalone(tmp_path: Path) -> Iterator[Standalone]:
    try:
        require_spark()
    except SparkMissing as error:
        pytest.skip(str(error))
    cluster = Standalone(tmp_path)
    try:
        cluster.up()
        yield cluster
    finally:
        cluster.down()


def test_spark_submit_on_a_standalone_cluster(standalone: Standalone, tmp_path: Path) -> None:
    writer = Writer(tmp_path / "a", segment_bytes=100_000, keep=True)
    raw = batch([(b"k", b"v" * 100, [])] * 20, "zstd")
    for number in range(4000):
        writer.data("orders", number % 4, raw, 20)
    writer.close()
    copy_log(tmp_path / "a", tmp_path / "b")
    copy_log(tmp_path / "a", tmp_path / "c")
    frame = writer.written[2000]
    plants.cut_out(tmp_path / "b", max(s for s in writer.starts if s <= frame.position), frame)
    environment = {k: v for k, v in standalone.environment.items() if k != "PYTHONPATH"}
    submit = [
        str(standalone.home / "bin" / "spark-submit"),
        "--master",
        standalone.master,
        "--conf",
        "spark.driver.host=127.0.0.1",
        "--conf",
        "spark.ui.enabled=false",
        "--executor-memory",
        "512m",
        str(ROOT / "chronik_repl" / "spark" / "submit.py"),
        *(f"{n}={tmp_path / n}" for n in "abc"),
        "--json",
        "--report",
        str(tmp_path / "report.html"),
    ]
    done = subprocess.run(
        submit, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 1, done.stderr[-3000:]
    report = json.loads(done.stdout)
    assert [(d["copy"], d["kind"], d["start"], d["end"]) for d in report["differences"]] == [
        ("b", "missing", frame.position, frame.end)
    ]
    assert report["records"] == 80_000
    assert (tmp_path / "report.html").exists()
    assert len(list((tmp_path / "work").glob("app-*/*"))) == 2  # an executor on each worker
