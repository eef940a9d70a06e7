"""The log as a stream: positions as offsets, limits, and into Parquet with kill -9 in the middle, as the
documentation shows it.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from chronik_repl.errors import ConfigError, OutOfRange
from tests.end_to_end.processes import until
from tests.spark.logs import Writer, batch

ROOT = Path(__file__).parent.parent.parent
RAW = batch([(b"k", b"v" * 200, [])] * 25, "lz4")


def make_log(folder: Path, frames: int) -> Writer:
    writer = Writer(folder, segment_bytes=60_000, keep=True)
    for number in range(frames):
        writer.data("orders", number % 3, RAW, 25)
    writer.close(spare_bytes=10_000)
    return writer


def reader(folder: Path, **options: str) -> Any:
    from chronik_repl.spark.source import ChronikSource

    source = ChronikSource({"path": str(folder), **options})
    return source.streamReader(source.schema())


def rows(stream: Any, start: dict[str, int], end: dict[str, int]) -> int:
    return sum(b.num_rows for task in stream.partitions(start, end) for b in stream.read(task))


def test_batches_are_ranges_of_positions(tmp_path: Path) -> None:
    writer = make_log(tmp_path / "node", 1500)
    stream = reader(tmp_path / "node", maxBytesPerTrigger="20000")
    limit = stream.getDefaultReadLimit()
    position, seen, batches = stream.initialOffset(), 0, 0
    ends = {f.end for f in writer.written}
    while (end := stream.latestOffset(position, limit)) != position:
        assert end["position"] in ends
        assert end["position"] - position["position"] <= 20_000
        seen += rows(stream, position, end)
        position, batches = end, batches + 1
    assert position == {"position": writer.position}
    assert seen == 1500 * 25
    assert batches >= writer.position // 20_000
    assert stream.partitions(position, position) == []


def test_a_limit_by_records_and_a_frame_that_is_larger_than_the_limit(tmp_path: Path) -> None:
    make_log(tmp_path / "node", 100)
    stream = reader(tmp_path / "node", maxRecordsPerTrigger="60")
    limit = stream.getDefaultReadLimit()
    start = stream.initialOffset()
    assert rows(stream, start, stream.latestOffset(start, limit)) == 50
    tiny = reader(tmp_path / "node", maxBytesPerTrigger="1")
    assert tiny.latestOffset(start, tiny.getDefaultReadLimit())["position"] > 0


def test_where_it_starts(tmp_path: Path) -> None:
    writer = make_log(tmp_path / "node", 50)
    assert reader(tmp_path / "node").initialOffset() == {"position": 0}
    assert reader(tmp_path / "node", startingPosition="latest").initialOffset() == {"position": writer.position}
    middle = writer.written[20].position
    assert reader(tmp_path / "node", startingPosition=str(middle)).initialOffset() == {"position": middle}
    with pytest.raises(ConfigError, match="startingPosition"):
        reader(tmp_path / "node", startingPosition="yesterday").initialOffset()


def test_what_retention_removed_unread_is_an_error_unless_told_otherwise(tmp_path: Path) -> None:
    writer = make_log(tmp_path / "node", 1000)
    (tmp_path / "node" / "wal" / f"{0:020d}.wal").unlink()
    stream = reader(tmp_path / "node")
    with pytest.raises(OutOfRange, match="retention"):
        stream.latestOffset({"position": 0}, stream.getDefaultReadLimit())
    stream = reader(tmp_path / "node", failOnDataLoss="false")
    end = stream.latestOffset({"position": 0}, stream.getDefaultReadLimit())
    assert rows(stream, {"position": 0}, end) == sum(f.count for f in writer.written if f.position >= writer.starts[1])


def documented_pipeline(folder: Path, log: Path) -> Path:
    """The code that docs/parity.md shows, with this test's directories, a smaller limit, and nothing else changed."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "parity.md").read_text(), re.DOTALL)
    code = next(b for b in blocks if "readStream" in b)
    for old, new in (
        ("/var/lib/chronik", str(log)),
        ("/lake/log.checkpoint", str(folder / "checkpoint")),
        ("/lake/log", str(folder / "table")),
        ("64 * 1024 * 1024", "40000"),
    ):
        assert old in code
        code = code.replace(old, new)
    script = folder / "pipeline.py"
    script.write_text(code)
    return script


def test_into_parquet_with_kill_9_every_record_once(spark: Any, tmp_path: Path) -> None:
    writer = make_log(tmp_path / "node", 600)
    script = documented_pipeline(tmp_path, tmp_path / "node")
    environment = {
        **os.environ,
        "PYSPARK_PYTHON": sys.executable,
        "PYTHONPATH": str(ROOT),
        "SPARK_LOCAL_IP": "127.0.0.1",
        "PYSPARK_SUBMIT_ARGS": "--master local[2] --conf spark.ui.enabled=false "
        "--conf spark.sql.python.filterPushdown.enabled=true "
        "--conf spark.driver.host=127.0.0.1 pyspark-shell",
    }

    def committed() -> int:
        """The position up to which batches are committed."""
        done = {p.name for p in (tmp_path / "checkpoint" / "commits").glob("[0-9]*")}
        ends = [
            json.loads((tmp_path / "checkpoint" / "offsets" / name).read_text().splitlines()[-1])["position"]
            for name in done
        ]
        return max(ends, default=0)

    with open(tmp_path / "pipeline.log", "ab") as log:
        running = subprocess.Popen(
            [sys.executable, str(script)], env=environment, stdout=log, stderr=log, start_new_session=True
        )
    try:
        until(lambda: running.poll() is not None or committed() > 0, "something is in Parquet", 240)
    finally:
        os.killpg(running.pid, signal.SIGKILL)
        running.wait(20)
    assert 0 < committed() < writer.position, (tmp_path / "pipeline.log").read_text()[-3000:]
    # Another process goes on from there: this one.
    code = script.read_text()
    assert "query.awaitTermination()" in code
    exec(code.replace("query.awaitTermination()", "query.processAllAvailable(); query.stop()"), {})
    assert committed() == writer.position
    table = spark.read.parquet(str(tmp_path / "table"))
    counted = table.selectExpr("count(*) as n", "count(distinct partition, offset) as d").collect()[0]
    assert (counted.n, counted.d) == (15_000, 15_000), (tmp_path / "pipeline.log").read_text()[-3000:]
