"""The second reader of the format agrees with the log that wrote it: frames, chain, offsets, marks, indexes."""

from __future__ import annotations

import shutil
from itertools import pairwise
from pathlib import Path

from chronik_repl.spark.digest import ScanTask, block_bounds, scan_local
from chronik_repl.spark.index import IndexFile, landmarks_in, read_index
from chronik_repl.spark.plan import make_plan
from chronik_repl.spark.storage import Local
from chronik_repl.spark.survey import high_watermark_of, survey
from chronik_repl.spark.tasks import scan_tasks
from tests.wal.workbench import RealPlace, lead, opened, write_segments


async def test_what_the_log_wrote_is_read_alike(tmp_path: Path) -> None:
    async with opened(RealPlace(tmp_path / "a")) as log:
        lead(log, topics={"t": 2, "other.topic": 1})
        await write_segments(log, 5)
        end, chain, start = log.durable.value, log.durable_checksum, log.start
        offsets = {p: log.end_offset("t", p) for p in range(2)}
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    copies = [survey(name, str(tmp_path / name), Local(), None) for name in "ab"]
    copy = copies[0]
    assert (copy.start, copy.durable_end, copy.end) == (start, end, end)
    assert high_watermark_of(copy, Local()) == end
    plan = make_plan(copies, 0, end)
    assert len(plan.spans) == 5
    scans = []
    for span in plan.spans:
        ours, theirs = [next(scan_local(t) for t in scan_tasks(span, p, True, ())) for p in span.parts]
        assert ours.blocks == theirs.blocks
        assert (ours.wrong, ours.index_lie, ours.excess) == ("", "", False)
        scans.append(ours)
    assert all(s.index_digest for s in scans[:-1])  # every sealed segment has an index, and it told the truth
    assert scans[-1].runs[-1].last_checksum == chain
    next_offsets = {t.partition: t.next for s in scans for r in s.runs for t in r.tallies if t.topic == "t"}
    assert next_offsets == offsets
    for before, after in pairwise(scans):
        assert before.runs[-1].last_checksum == after.runs[0].first_previous


async def test_an_index_of_the_log_is_read_and_a_changed_one_is_found(tmp_path: Path) -> None:
    async with opened(RealPlace(tmp_path / "a")) as log:
        lead(log)
        await write_segments(log, 3)
    look_at_indexes(tmp_path)


def look_at_indexes(tmp_path: Path) -> None:
    copy = survey("a", str(tmp_path / "a"), Local(), None)
    first, second = copy.segments[:2]
    raw = Path(first.index_path).read_bytes()
    index = read_index(raw, first.start)
    assert isinstance(index, IndexFile)
    assert (index.end, index.end_chain) == (second.start, second.chain)
    hints = landmarks_in(lambda at, size: raw[at : at + size], first.start)
    assert hints == index.landmarks
    for at in range(0, len(raw), 7):
        changed = bytearray(raw)
        changed[at] ^= 1
        assert isinstance(read_index(bytes(changed), first.start), str)
    bounds = block_bounds(first.start, second.start, ())
    task = ScanTask("a", first.path, first.start, bounds, True, None, second.start, index_path=first.index_path)
    assert scan_local(task).index_lie == ""
    other = Path(second.index_path).read_bytes()
    Path(first.index_path).chmod(0o644)
    Path(first.index_path).write_bytes(other)
    assert "the index is of the segment at" in scan_local(task).index_lie
