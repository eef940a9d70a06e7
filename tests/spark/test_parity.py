"""What the check says of copies that are behind, gone, foreign, unreadable, or proved before. It never says "same"
unseen.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import threading
from array import array
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from chronik_repl.errors import ChronikError, ConfigError
from chronik_repl.positions import Position
from chronik_repl.spark import commands, parity, storage, tasks
from chronik_repl.spark.page import as_page
from chronik_repl.spark.parity import CannotTell, Options, run
from chronik_repl.spark.report import as_json
from chronik_repl.spark.verdict import Report
from chronik_repl.wal import segment
from tests.spark import plants
from tests.spark.logs import Writer, batch, copy_log, write_mark
from tests.spark.test_planted import index_of

RAW = batch([(b"k", b"v" * 50, [])] * 10)


def make_log(folder: Path, frames: int = 300, **options: Any) -> Writer:
    writer = Writer(folder, segment_bytes=20_000, keep=True, **options)
    for number in range(frames):
        writer.data(f"t{number % 2}", number % 3, RAW, 10)
    return writer


@pytest.fixture
def copies(tmp_path: Path) -> tuple[Writer, dict[str, Path]]:
    writer = make_log(tmp_path / "a")
    writer.close(spare_bytes=10_000)
    copy_log(tmp_path / "a", tmp_path / "b")
    copy_log(tmp_path / "a", tmp_path / "c")
    return writer, {n: tmp_path / n for n in "abc"}


def of(paths: dict[str, Path], **more: Any) -> Options:
    return Options(tuple((n, str(p)) for n, p in paths.items()), **more)


def file_of(folder: Path, start: int) -> Path:
    return folder / "wal" / segment.segment_name(Position(start))


def set_mark(folder: Path, start: int, durable_end: int) -> None:
    with open(file_of(folder, start), "rb+") as file:
        write_mark(file, 20, durable_end, 0)
        write_mark(file, 21, durable_end, 0)


class Leader:
    """A node's /status, as far as the check reads it."""

    def __init__(self) -> None:
        self.log = {"start": 0, "high_watermark": 0}
        self.role, self.cluster_id = "leader", "the-cluster"
        self.later: dict[str, int] = {}  # what it says from the second question on
        leader = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                body = json.dumps(
                    {"cluster_id": leader.cluster_id, "role": leader.role, "log": leader.log, "more": 1}
                ).encode()
                self.send_response(200)
                self.end_headers()
                self.wfile.write(body)
                leader.log = {**leader.log, **leader.later}

            def log_message(self, *_: object) -> None:
                pass

        self.server = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


@pytest.fixture
def leader() -> Iterator[Leader]:
    leader = Leader()
    yield leader
    leader.server.shutdown()
    leader.server.server_close()


def says(report: Report, copy: str) -> list[tuple[str, int, int]]:
    return [(c.status, c.start, c.end) for c in report.covers if c.copy == copy]


def cut_behind(writer: Writer, folder: Path, frames_from_end: int) -> int:
    """The copy has not got the last frames yet, and its mark knows it."""
    last = writer.written[-frames_from_end]
    start = max(s for s in writer.starts if s <= last.position)
    for later in [s for s in writer.starts if s > start]:
        file_of(folder, later).unlink()
    plants.edit(folder, start, lambda stream: stream[: last.position - start] + bytearray(9000))
    set_mark(folder, start, last.position)
    return last.position


def test_behind_is_not_different(spark: Any, copies: tuple[Writer, dict[str, Path]], leader: Leader) -> None:
    writer, paths = copies
    end_b = cut_behind(writer, paths["b"], 40)
    leader.log["high_watermark"] = writer.position
    report = run(spark, of(paths, leader=leader.url))
    assert (report.verdict, report.exit_code, report.differences) == ("same", 0, ())
    b = report.copies[1]
    assert (b.behind, b.end, b.verdict) == (writer.position - end_b, end_b, "same")
    assert says(report, "b")[-1] == ("behind", end_b, writer.position)
    assert says(report, "a") == [("same", 0, writer.position)]
    # With only a and b nobody else has a's last frames: they are not called the same.
    report = run(spark, of({n: paths[n] for n in "ab"}, leader=leader.url))
    assert report.verdict == "same"
    alone = sum(f.count for f in writer.written if f.position >= end_b)
    assert alone > 300
    assert sum(p.not_compared for p in report.partitions) == alone
    assert sum(p.records for p in report.partitions) == 3000 - alone


def test_frames_beyond_the_mark_are_held_and_a_torn_tail_is_behind(
    spark: Any, copies: tuple[Writer, dict[str, Path]], leader: Leader
) -> None:
    writer, paths = copies
    last = writer.starts[-1]
    marked = next(f for f in writer.written if f.position > last + 2000)
    set_mark(paths["b"], last, marked.position)  # good frames follow the mark
    set_mark(paths["c"], last, marked.position)
    plants.edit(paths["c"], last, lambda s: s[: marked.end - last] + bytearray(b"\x57torn") + bytearray(3000))
    leader.log["high_watermark"] = writer.position
    report = run(spark, of(paths, leader=leader.url))
    assert (report.verdict, report.differences) == ("same", ())
    assert [c.behind for c in report.copies] == [0, 0, writer.position - marked.end]


def test_bytes_missing_below_the_own_mark_are_damage(spark: Any, copies: tuple[Writer, dict[str, Path]]) -> None:
    writer, paths = copies
    start = writer.starts[-1]
    lost = [f for f in writer.written if f.position >= start][3:]
    plants.edit(
        paths["c"], start, lambda s: s[: lost[0].position - start] + bytearray(len(s))
    )  # zeros, but the mark is high
    report = run(spark, of(paths))
    assert [(d.copy, d.kind, d.start, d.end) for d in report.differences] == [
        ("c", "damaged", lost[0].position, writer.position)
    ]
    assert report.exit_code == 1


def test_retention_during_the_run_is_no_difference(
    spark: Any, copies: tuple[Writer, dict[str, Path]], leader: Leader, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer, paths = copies
    leader.log["high_watermark"] = writer.position
    survey = parity._Run._survey

    def survey_then_remove(self: Any, upto: int | None) -> Any:
        seen = survey(self, upto)
        for folder in paths.values():
            file_of(folder, writer.starts[0]).unlink(missing_ok=True)
        file_of(paths["b"], writer.starts[1]).unlink(missing_ok=True)
        return seen

    monkeypatch.setattr(parity._Run, "_survey", survey_then_remove)
    leader.later = {"start": writer.starts[2]}
    report = run(spark, of(paths, leader=leader.url))
    assert (report.verdict, report.differences) == ("same", ())
    assert says(report, "a") == [("not compared", 0, writer.starts[2]), ("same", writer.starts[2], writer.position)]
    assert "below the log start" in report.notes[0]
    # The same without a committed log start: a copy has lost a segment.
    leader.log["start"], leader.later = 0, {}
    report = run(spark, of(paths, leader=leader.url))
    assert [(d.copy, d.kind, d.start, d.end) for d in report.differences] == [
        ("b", "missing", writer.starts[1], writer.starts[2])
    ]


def test_offline_the_log_itself_tells_its_start(spark: Any, tmp_path: Path) -> None:
    writer = make_log(tmp_path / "a", 150)
    writer.move_log_start(writer.starts[2])
    for _ in range(50):
        writer.data("t0", 0, RAW, 10)
    writer.close()
    copy_log(tmp_path / "a", tmp_path / "b")
    for start in writer.starts[:2]:  # b is quicker than a
        file_of(tmp_path / "b", start).unlink()
    report = run(spark, of({n: tmp_path / n for n in "ab"}))
    assert (report.verdict, report.differences) == ("same", ())
    assert {s for s, _, end in says(report, "a") if end <= writer.starts[2]} == {"not compared"}
    file_of(tmp_path / "b", writer.starts[2]).unlink()  # this one it should have kept
    report = run(spark, of({n: tmp_path / n for n in "ab"}))
    assert [(d.copy, d.kind, d.start) for d in report.differences] == [("b", "missing", writer.starts[2])]


def test_what_was_proved_is_not_read_again(spark: Any, copies: tuple[Writer, dict[str, Path]], tmp_path: Path) -> None:
    writer, paths = copies
    state = str(tmp_path / "state")
    first = run(spark, of(paths, state=state))
    second = run(spark, of(paths, state=state))
    assert (first.verdict, second.verdict) == ("same", "same")
    assert second.bytes_read < first.bytes_read / 5
    assert second.bytes_read + second.bytes_proved_earlier == first.bytes_read
    assert second.partitions == first.partitions
    assert says(second, "b")[0] == ("proved earlier", 0, writer.starts[-1])
    # A file that changed is read again; so is everything with --full, which finds what kept its size and time.
    frame = writer.written[30]
    start = max(s for s in writer.starts if s <= frame.position)
    before = file_of(paths["b"], start).stat()
    plants.flip(paths["b"], start, frame.end - 4)
    third = run(spark, of(paths, state=state))
    assert [(d.copy, d.kind, d.start) for d in third.differences] == [("b", "damaged", frame.position)]
    os.utime(file_of(paths["b"], start), ns=(before.st_atime_ns, before.st_mtime_ns))
    assert run(spark, of(paths, state=state)).verdict == "same"
    assert run(spark, of(paths, state=state, full=True)).verdict == "different"
    plants.flip(paths["b"], start, frame.end - 4)
    # A copy that is new is compared with what the others were seen to hold, which are not read again.
    copy_log(paths["a"], tmp_path / "d")
    fourth = run(spark, of({**paths, "d": tmp_path / "d"}, state=state))
    assert fourth.verdict == "same"
    assert fourth.bytes_read < 2 * writer.position


def test_a_new_copy_that_differs_from_what_was_proved(
    spark: Any, copies: tuple[Writer, dict[str, Path]], tmp_path: Path
) -> None:
    writer, paths = copies
    state = str(tmp_path / "state")
    assert run(spark, of({n: paths[n] for n in "ab"}, state=state)).verdict == "same"
    frame = writer.written[100]
    plants.flip(paths["c"], max(s for s in writer.starts if s <= frame.position), frame.end - 4)
    report = run(spark, of(paths, state=state))
    assert [(d.copy, d.kind, d.start) for d in report.differences] == [("c", "damaged", frame.position)]


def test_damage_in_every_copy_is_seen(spark: Any, copies: tuple[Writer, dict[str, Path]]) -> None:
    writer, paths = copies
    frame = writer.written[50]
    start = max(s for s in writer.starts if s <= frame.position)
    for folder in paths.values():
        plants.flip(folder, start, frame.end - 4)
    report = run(spark, of(paths))
    assert {(d.copy, d.kind, d.start, d.end) for d in report.differences} == {
        (n, "damaged", frame.position, frame.end) for n in "abc"
    }


def test_a_log_that_is_wrong_everywhere_is_not_called_the_same(spark: Any, tmp_path: Path) -> None:
    writer = make_log(tmp_path / "a", 60)
    writer.offsets["t0", 0] += 5  # a leader with a bug: all copies have it
    for _ in range(6):
        writer.data("t0", 0, RAW, 10)
    writer.close()
    copy_log(tmp_path / "a", tmp_path / "b")
    report = run(spark, of({n: tmp_path / n for n in "ab"}))
    assert report.verdict == "different"
    assert {d.kind for d in report.differences} == {"wrong log"}
    assert "should follow" in report.differences[0].detail


def test_could_not_tell(spark: Any, copies: tuple[Writer, dict[str, Path]], tmp_path: Path) -> None:
    writer, paths = copies
    (tmp_path / "empty" / "wal").mkdir(parents=True)
    report = run(spark, of({"a": paths["a"], "empty": tmp_path / "empty"}))
    assert (report.verdict, report.exit_code) == ("could not tell", 2)
    assert not any(p.verdict == "same" for p in report.partitions)
    report = run(spark, of({**paths, "nowhere": tmp_path / "nowhere"}))
    assert (report.verdict, report.exit_code) == ("could not tell", 2)
    assert says(report, "nowhere") == [("not compared", 0, writer.position)]
    report = run(spark, of({"nowhere": tmp_path / "nowhere", "gone": tmp_path / "gone"}))
    assert (report.verdict, report.exit_code) == ("could not tell", 2)
    make_log(tmp_path / "other", 10, cluster="another").close()
    with pytest.raises(CannotTell, match="'another'"):
        run(spark, of({"a": paths["a"], "other": tmp_path / "other"}))
    with pytest.raises(CannotTell, match="status"):
        run(spark, of(paths, leader="http://127.0.0.1:9"))


def test_a_file_system_that_only_spark_reads(spark: Any, copies: tuple[Writer, dict[str, Path]]) -> None:
    """viewfs stands for hdfs, s3a and the others: Python cannot open it, Spark can."""
    writer, paths = copies
    conf = spark.sparkContext._jsc.hadoopConfiguration()
    conf.set("fs.viewfs.mounttable.test.link./copies", f"file://{paths['a'].parent}")
    assert not storage.is_local("viewfs://test/copies/b")
    options = Options((("a", str(paths["a"])), ("b", "viewfs://test/copies/b"), ("c", f"file://{paths['c']}")))
    report = run(spark, options)
    assert (report.verdict, report.differences) == ("same", ())
    assert {c.status for c in report.covers} == {"same"}
    frame = writer.written[77]
    plants.cut_out(paths["b"], max(s for s in writer.starts if s <= frame.position), frame)
    report = run(spark, options)
    assert [(d.copy, d.kind, d.start, d.end) for d in report.differences] == [
        ("b", "missing", frame.position, frame.end)
    ]


def test_the_report_as_json_and_as_a_page(spark: Any, copies: tuple[Writer, dict[str, Path]]) -> None:
    writer, paths = copies
    frame = writer.written[77]
    plants.cut_out(paths["b"], max(s for s in writer.starts if s <= frame.position), frame)
    cut_behind(writer, paths["c"], 30)
    report = run(spark, of(paths))
    again = json.loads(as_json(report))
    assert again["verdict"] == "different"
    assert again["differences"][0] | {"ranges": []} == again["differences"][0] | {
        "ranges": [],
        "copy": "b",
        "start": frame.position,
    }
    page = as_page(report)
    for outside in ("http:", "https:", "src=", "@import", "url(/"):
        assert outside not in page
    assert "prefers-color-scheme:dark" in page
    assert f"{frame.position:,}" in page
    assert "<rect class='bad'" in page


def test_the_command(
    spark: Any, copies: tuple[Writer, dict[str, Path]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """All but the start of Spark, which this session has already done."""
    writer, paths = copies
    monkeypatch.setattr("chronik_repl.spark.session.open_session", lambda *_: _Unstoppable(spark))
    parser = argparse.ArgumentParser()
    commands.register(parser.add_subparsers())
    words = ["parity", *(f"{n}={p}" for n, p in paths.items()), "--report", str(tmp_path / "out.html")]
    parsed = parser.parse_args(words)
    assert parsed.run(parsed) == 0
    said = capsys.readouterr()
    assert "The copies are the same" in said.out
    assert "comparing" in said.err
    assert (tmp_path / "out.html").read_text().startswith("<!doctype html>")
    plants.flip(paths["b"], 0, writer.written[5].end - 1)
    parsed = parser.parse_args([*words, "--json"])
    assert parsed.run(parsed) == 1
    assert json.loads(capsys.readouterr().out)["exit_code"] == 1


class _Unstoppable:
    def __init__(self, spark: Any) -> None:
        self.sparkContext = spark.sparkContext

    def stop(self) -> None:
        pass


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["a=/x"], "at least two"),
        (["a=/x", "b"], "NAME=PATH"),
        (["a=/x", "a=/y"], "taken"),
        (["all=/x", "b=/y"], "not allowed"),
    ],
)
def test_wrong_words(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        commands.parse_copies(words)


def test_a_master_that_is_none_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    from pyspark.errors import PySparkRuntimeError

    def fails(master: str | None) -> None:
        raise PySparkRuntimeError(f"no {master}\n\tat some.Java")

    monkeypatch.setattr("chronik_repl.spark.session.open_session", fails)
    parser = argparse.ArgumentParser()
    commands.register(parser.add_subparsers())
    parsed = parser.parse_args(["parity", "a=/x", "b=/y", "--master", "nonsense"])
    with pytest.raises(ChronikError, match=r"could not do it: no nonsense\. Is --master right"):
        parsed.run(parsed)


def test_without_java_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from chronik_repl.spark import session

    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(session.SparkMissing) as error:
        session.find_java()
    assert "\n" not in str(error.value)
    with pytest.raises(session.SparkMissing, match=r"pip install 'chronik-repl\[spark\]'"):
        session.require_spark()


def test_copies_on_disk_are_never_touched(spark: Any, copies: tuple[Writer, dict[str, Path]], tmp_path: Path) -> None:
    _, paths = copies
    shutil.copytree(paths["a"], tmp_path / "kept")
    run(spark, of(paths, state=str(tmp_path / "state")))
    for path in (tmp_path / "kept" / "wal").iterdir():
        assert path.read_bytes() == (paths["a"] / "wal" / path.name).read_bytes()


def test_a_large_segment_is_split_where_its_index_says(
    spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Digests and walks of the pieces give what one task gives; an index that leads to no frame costs only time."""
    writer = Writer(tmp_path / "a", segment_bytes=1 << 20, keep=True)
    while len(writer.starts) < 3:
        writer.data(f"t{writer.position % 2}", writer.position % 3, RAW, 10)
    writer.close()
    starts, chain = writer.starts, 0
    for start, end in pairwise(starts):
        frames = [f for f in writer.written if start <= f.position < end]
        (tmp_path / "a" / "wal" / f"{start:020d}.idx").write_bytes(index_of(frames, start, chain).encode())
        chain = plants.checksum_of(frames[-1])
    copy_log(tmp_path / "a", tmp_path / "b")
    paths = {n: tmp_path / n for n in "ab"}
    whole = run(spark, of(paths))
    monkeypatch.setattr(tasks, "PIECE_BYTES", 100_000)
    monkeypatch.setattr(parity, "PIECE_BYTES", 100_000)
    asked: list[int] = []
    scan = parity._Run._scan

    def count(self: Any, given: Any) -> Any:
        asked.append(len(given))
        return scan(self, given)

    monkeypatch.setattr(parity._Run, "_scan", count)
    split = run(spark, of(paths, state=str(tmp_path / "state")))
    assert asked[0] > 20
    assert (split.verdict, split.partitions, split.records) == ("same", whole.partitions, whole.records)
    assert run(spark, of(paths, state=str(tmp_path / "state"))).bytes_proved_earlier > 0
    frame = writer.written[900]
    plants.cut_out(paths["b"], 0, frame)
    found = run(spark, of(paths))
    assert [(d.copy, d.kind, d.start, d.end) for d in found.differences] == [
        ("b", "missing", frame.position, frame.end)
    ]
    shutil.copy(file_of(paths["a"], 0), file_of(paths["b"], 0))
    frames = [f for f in writer.written if f.position < starts[1]]
    index = index_of(frames, 0, 0)
    index.ends = array("Q", [end + 1 for end in index.ends[:-1]] + [index.ends[-1]])  # landmarks a byte too far
    for folder in paths.values():
        (folder / "wal" / f"{0:020d}.idx").write_bytes(index.encode())
    found = run(spark, of(paths))
    assert {(d.copy, d.kind) for d in found.differences} == {("a", "index"), ("b", "index")}
    assert found.records == whole.records
