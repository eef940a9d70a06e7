"""`chronik wal verify` and `chronik wal dump` on real logs, whole, damaged, and while they are written."""

from __future__ import annotations

import json
import os
import random
import shutil
from pathlib import Path

import pytest
import trio

from chronik_repl.cli import main
from chronik_repl.positions import Epoch, Position
from chronik_repl.wal.changes import EpochStart, LogStartMoved, TopicMade
from chronik_repl.wal.disk import RealDisk
from chronik_repl.wal.log import Log
from chronik_repl.wal.records import COMPRESSIONS
from chronik_repl.wal.segment import FRAMES_AT
from chronik_repl.wal.values import LogSettings
from chronik_repl.wal.verify import verify
from tests.wal.test_records import EXPECTED, make_batch

SETTINGS = LogSettings(segment_bytes=4096, min_free_bytes=0, scrub_mb_per_s=0)


async def write_log(directory: Path, batches: int = 40, *, settings: LogSettings = SETTINGS) -> None:
    disk = RealDisk(directory, fill_pace=0)
    log = await Log.open(disk, settings, "c", clock_ms=lambda: 1_700_000_000_000)
    async with trio.open_nursery() as nursery:
        await nursery.start(log.run)
        log.found("c")
        log.begin_epoch(Epoch(1), EpochStart(1, "directory"))
        log.append_change(TopicMade("orders", 2))
        for n in range(batches):
            log.append_batch("orders", n % 2, bytearray(make_batch(COMPRESSIONS[n % 5])), record_count=3)
            if n % 8 == 0:
                await log.durable.wait(log.end)
        await log.durable.wait(log.end)
        log.commit_to(log.end)
        if batches > 100:
            start, _, _ = await log.segment_bounds(Position(log.end // 2))
            log.append_change(LogStartMoved(start))
            await log.durable.wait(log.end)
            log.commit_to(log.end)
            with trio.fail_after(20):
                while any(int(path.stem) < start for path in (directory / "wal").iterdir() if path.stem.isdigit()):
                    await trio.sleep(0.01)
        with trio.fail_after(20):
            while len(list((directory / "wal").glob("*.idx"))) < len(list((directory / "wal").glob("*.wal"))) - 1:
                await trio.sleep(0.01)
        await log.close()
        nursery.cancel_scope.cancel()
    disk.close()


async def test_a_whole_log_is_well(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    await write_log(tmp_path, 120)
    assert main(["wal", "verify", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert said.startswith("ok: ")
    assert main(["wal", "verify", "--json", str(tmp_path)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["ok"]
    assert found["damage"] == found["notes"] == []
    assert found["start"] > 0, "retention removed the first segments"
    assert found["durable_end"] == found["high_watermark"] == found["end"]
    assert found["segments"] > 2
    assert found["indexes"] == found["segments"] - 1


async def test_damage_is_named_by_file_position_topic_partition_and_offset(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    await write_log(tmp_path)
    assert main(["wal", "dump", "--json", str(tmp_path)]) == 0
    frames = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    victim = next(f for f in frames if f["kind"] == "data" and f["partition"] == 1 and f["base_offset"] == 9)
    segment = max(p for p in (tmp_path / "wal").glob("*.wal") if int(p.stem) <= victim["position"])
    at = FRAMES_AT + victim["position"] - int(segment.stem) + victim["size"] - 3
    flip(segment, at)
    assert main(["wal", "verify", "--json", str(tmp_path)]) == 1
    found = json.loads(capsys.readouterr().out)
    assert not found["ok"]
    (damage,) = found["damage"]
    end = victim["position"] + victim["size"]
    assert (damage["file"], damage["start"], damage["end"]) == (segment.name, victim["position"], end)
    assert (damage["topic"], damage["partition"], damage["offset"]) == ("orders", 1, 9)
    assert main(["wal", "verify", str(tmp_path)]) == 1
    assert (
        f"DAMAGE {segment.name}: position {victim['position']} to {end}, orders/1 offset 9:" in capsys.readouterr().out
    )
    # The dump shows all the rest, and says on stderr what is missing.
    assert main(["wal", "dump", "--json", str(tmp_path)]) == 1
    shown = capsys.readouterr()
    assert [json.loads(line) for line in shown.out.splitlines()] == [f for f in frames if f is not victim]
    assert f"damage from position {victim['position']} to {end}" in shown.err
    # Without the index it says the same: the frame's own header can still be read.
    segment.with_suffix(".idx").unlink(missing_ok=True)
    (damage,) = verify(tmp_path).damage
    assert (damage.topic, damage.partition, damage.offset) == ("orders", 1, 9)


async def test_an_unreadable_frame_head_is_named_by_the_index_or_by_what_follows(tmp_path: Path) -> None:
    await write_log(tmp_path)
    segment = sorted((tmp_path / "wal").glob("*.wal"))[1]
    data = segment.read_bytes()
    victim = data.index(b"\0\6orders", FRAMES_AT) - 8
    flip(segment, victim + 12)  # in the topic's name
    (damage,) = verify(tmp_path).damage
    assert damage.topic == "orders"
    assert damage.start == int(segment.stem) + victim - FRAMES_AT
    segment.with_suffix(".idx").unlink()
    flip(segment, victim + 1)  # and in the magic
    first, second = verify(tmp_path).damage
    assert first.start == damage.start
    assert (second.topic, second.partition, second.offset) == (damage.topic, damage.partition, damage.offset)
    assert "stood in the damaged range" in second.what


async def test_missing_extra_and_foreign_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    await write_log(tmp_path / "a")
    segments = sorted((tmp_path / "a" / "wal").glob("*.wal"))
    assert len(segments) >= 3
    shutil.copytree(tmp_path / "a", tmp_path / "gap")
    (tmp_path / "gap" / "wal" / segments[1].name).unlink()
    assert any("nothing holds the positions" in d.what for d in verify(tmp_path / "gap").damage)
    shutil.copytree(tmp_path / "a", tmp_path / "headless")
    (tmp_path / "headless" / "wal" / segments[0].name).unlink()
    assert any("are missing" in d.what for d in verify(tmp_path / "headless").damage)
    shutil.copytree(tmp_path / "a", tmp_path / "renamed")
    copied = tmp_path / "renamed" / "wal" / f"{int(segments[-1].stem) + 10_000_000:020d}.wal"
    shutil.copy(segments[1], copied)
    assert any("the header is of the segment" in d.what for d in verify(tmp_path / "renamed").damage)
    for wrong in (tmp_path / "nowhere", tmp_path):
        assert main(["wal", "verify", str(wrong)]) == 2
        assert main(["wal", "dump", str(wrong)]) == 2
    assert "data directory" in capsys.readouterr().err


async def test_a_wrong_index_is_told_and_a_missing_one_noted(tmp_path: Path) -> None:
    await write_log(tmp_path)
    first, second, *_ = sorted((tmp_path / "wal").glob("*.idx"))
    good = first.read_bytes()
    flip(first, len(good) // 2)
    (damage,) = verify(tmp_path).damage
    assert damage.file == first.name
    first.write_bytes(second.read_bytes())
    (damage,) = verify(tmp_path).damage
    assert "not this segment's index" in damage.what
    first.unlink()
    found = verify(tmp_path)
    assert found.ok
    assert any(first.name in note for note in found.notes)


async def test_a_torn_tail_is_a_note_and_below_the_mark_it_is_damage(tmp_path: Path) -> None:
    await write_log(tmp_path)
    last = max((tmp_path / "wal").glob("*.wal"))
    found = verify(tmp_path)
    end_at = FRAMES_AT + found.end - int(last.stem)
    write_at(last, end_at, b"WA\0\2half a frame")
    torn = verify(tmp_path)
    assert torn.ok
    assert torn.end == found.end
    assert any("no frame" in note for note in torn.notes)
    os.truncate(last, end_at - 1)
    assert not verify(tmp_path).ok
    os.truncate(last, FRAMES_AT)
    (damage,) = verify(tmp_path).damage
    assert "before its durable mark" in damage.what


async def test_equal_logs_give_equal_dumps_with_records_of_every_compression(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    await write_log(tmp_path / "one")
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    dumps = []
    for node in ("one", "two"):
        for options in ([], ["--records"], ["--json"], ["--json", "--records"]):
            assert main(["wal", "dump", *options, str(tmp_path / node)]) == 0
            dumps.append(capsys.readouterr().out)
    assert dumps[:4] == dumps[4:]
    table, with_records, _, objects = dumps[:4]
    assert table.splitlines()[0].split()[0] == "position"
    assert with_records.count("key: valuevalue") == 40
    for line in map(json.loads, objects.splitlines()):
        if line["kind"] == "data":
            values = [(r["key"], r["value"], r["headers"]) for r in line["records"]]
            assert values[0] == ("key", "value" * 50, [["a", "1"], ["b", None]]), line["compression"]
            assert len(values) == len(EXPECTED)
    assert {json.loads(line).get("compression") for line in objects.splitlines()} == {None, *COMPRESSIONS}


async def test_a_dump_can_be_narrowed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    await write_log(tmp_path)
    assert main(["wal", "dump", "--json", "--topic", "orders", "--partition", "1", str(tmp_path)]) == 0
    frames = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len(frames) == 20
    middle = frames[10]["position"]
    assert main(["wal", "dump", "--json", "--from", str(middle), "--to", str(middle + 1), str(tmp_path)]) == 0
    assert [json.loads(line) for line in capsys.readouterr().out.splitlines()] == [frames[10]]


async def test_both_work_while_the_log_is_written(tmp_path: Path) -> None:
    """Rolls, seals and retention go on meanwhile; nothing that is well is called damaged."""
    disk = RealDisk(tmp_path, fill_pace=0)
    log = await Log.open(disk, SETTINGS, "c")
    rng = random.Random(1)
    rounds = 0
    round_begun = trio.Event()

    async def write() -> None:
        while True:
            # Not so far ahead that retention takes what stood last when the round began: its end is asked for below.
            while log.end > durable + 40_000:
                await round_begun.wait()
            for _ in range(rng.randrange(1, 5)):
                log.append_batch("orders", 0, bytearray(make_batch("none")), record_count=3)
            await log.durable.wait(log.end)
            log.commit_to(log.durable.value)
            if rng.random() < 0.02:
                start, _, _ = await log.segment_bounds(Position(max(log.start, log.end - 60_000)))
                log.append_change(LogStartMoved(start))

    async with trio.open_nursery() as nursery:
        await nursery.start(log.run)
        log.found("c")
        log.begin_epoch(Epoch(1), EpochStart(1, "directory"))
        log.append_change(TopicMade("orders", 1))
        await log.durable.wait(log.end)
        durable = log.durable.value
        nursery.start_soon(write)
        with trio.fail_after(60):
            while rounds < 30 or log.start == 0:
                durable = log.durable.value
                round_begun.set()
                round_begun = trio.Event()
                found = await trio.to_thread.run_sync(verify, tmp_path)
                assert found.damage == []
                assert found.end >= durable
                code = await trio.to_thread.run_sync(main, ["wal", "dump", "--json", str(tmp_path)])
                assert code == 0
                rounds += 1
        nursery.cancel_scope.cancel()
    disk.close()


def flip(path: Path, at: int) -> None:
    write_at(path, at, bytes([path.read_bytes()[at] ^ 0x10]))


def write_at(path: Path, at: int, data: bytes) -> None:
    path.chmod(0o644)  # a sealed one is read-only, and only root would not notice
    with open(path, "r+b") as file:
        file.seek(at)
        file.write(data)
