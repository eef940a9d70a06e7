"""The parity job: are all copies of the log the same? One pass over every copy's bytes, a second one where they differ.

    survey        listing, headers, marks: what each copy holds, where it ends                       (driver)
    plan          which segments, up to where: the high watermark, or the lowest durable end          (pure)
    scan          a task a segment and copy: digests of its blocks; one copy's frames are walked      (tasks)
    judge         equal digests are the same; the rest gets a closer look                             (pure)
    look closer   a task a segment that differs: frame by frame                                       (tasks)
    settle        again the listing and the log start: what retention removed meanwhile               (driver, pure)

Segments go through in waves, so that the driver holds a few hundred answers at a time, whatever the log's size.
"""

from __future__ import annotations

import time
import urllib.error
import urllib.request
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import UTC, datetime
from typing import Any, TypeVar

import msgspec

from chronik_repl.errors import ChronikError
from chronik_repl.spark.closer import Closer, CloserTask, look_closer, look_closer_local
from chronik_repl.spark.digest import Scan, ScanTask, scan, scan_local
from chronik_repl.spark.index import landmarks_in
from chronik_repl.spark.plan import Plan, Span, compared_end, make_plan
from chronik_repl.spark.proved import Proved, State
from chronik_repl.spark.storage import Content, Local, is_local, open_local
from chronik_repl.spark.survey import Copy, storage_for, survey
from chronik_repl.spark.tasks import PIECE_BYTES, Landmark, joined_scans, scan_tasks, split_points
from chronik_repl.spark.verdict import Judged, Ledger, Report, index_lie, judge, take_closer

WAVE_TASKS = 240
TASK_BYTES_MIN = 256 * 1024 * 1024  # a task costs Spark some 40 ms, in which SHA-256 reads 40 MB
STATUS_TIMEOUT_S = 10
_PROVED = "\0proved"  # stands for a content that an earlier run knew

Item = TypeVar("Item")
Answer = TypeVar("Answer")
Progress = Callable[[str, int, int], None]  # what is being done, bytes done, bytes in all


class CannotTell(ChronikError):
    """The check could not be made at all: exit code 2."""


class LogPlace(msgspec.Struct, frozen=True):
    start: int
    high_watermark: int


class LeaderStatus(msgspec.Struct, frozen=True):
    """The part of `/status` that matters here."""

    cluster_id: str
    role: str
    log: LogPlace


def ask_leader(url: str) -> LeaderStatus:
    address = f"{url if '://' in url else f'http://{url}'}".rstrip("/") + "/status"
    try:
        with urllib.request.urlopen(address, timeout=STATUS_TIMEOUT_S) as answer:
            return msgspec.json.decode(answer.read(), type=LeaderStatus)
    except (urllib.error.URLError, OSError, ValueError) as error:
        raise CannotTell(
            f"{address}: {error}. Is that a node's HTTP address? Without --leader the copies are compared "
            "up to the lowest durable end"
        ) from error
    except msgspec.DecodeError as error:
        raise CannotTell(
            f"{address}: not the status of a node ({error}). Give what CHRONIK_HTTP_BIND_ADDR of the leader names"
        ) from error


class Options(msgspec.Struct, frozen=True):
    copies: tuple[tuple[str, str], ...]
    leader: str | None = None
    state: str | None = None
    full: bool = False


def run(spark: Any, options: Options, progress: Progress | None = None, startup_s: float = 0.0) -> Report:
    return _Run(spark, options, progress or (lambda *_: None)).report(startup_s)


class _Run:
    def __init__(self, spark: Any, options: Options, progress: Progress) -> None:
        self.context, self.options, self.progress = spark.sparkContext, options, progress
        self.began = time.monotonic()
        self.when = datetime.now(UTC).isoformat(timespec="seconds")
        self.bytes_read = self.bytes_proved = 0
        self.total = self.done = 0
        self.state: State | None = None
        self.splits: dict[int, tuple[Landmark, ...]] = {}  # of the large segments of this wave

    def report(self, startup_s: float) -> Report:
        leader = ask_leader(self.options.leader) if self.options.leader else None
        high_watermark = leader.log.high_watermark if leader else None
        self.progress("looking at the copies", 0, 0)
        copies = self._survey(high_watermark)
        cluster_id = _one_cluster(copies, leader)
        end = compared_end(copies, high_watermark)
        plan = make_plan(copies, leader.log.start if leader else 0, end)
        self.state = State(self.options.state, cluster_id) if self.options.state else None
        end_is = "the high watermark at the start" if leader else "the lowest durable end of the copies"
        ledger = Ledger(copies, plan.start, end, end_is)
        if leader and leader.role != "leader":
            ledger.notes.append(f"{self.options.leader} is a {leader.role}: its high watermark may be an older one")
        for copy, file in plan.extra_files:
            ledger.notes.append(f"{copy}: {file.path} is no segment of the log that the other copies have")
        self.total = sum(p.upto - s.start for s in plan.spans for p in s.parts if p.file)
        for judged in self._judge_all(plan):
            ledger.add(judged)
        self._settle(ledger, plan, leader)
        report = ledger.report(cluster_id)
        return msgspec.structs.replace(
            report,
            bytes_read=self.bytes_read,
            bytes_proved_earlier=self.bytes_proved,
            started=self.when,
            startup_s=round(startup_s, 3),
            work_s=round(time.monotonic() - self.began, 3),
        )

    def _survey(self, high_watermark: int | None) -> list[Copy]:
        return [
            survey(name, path, storage_for(path, self.context), high_watermark) for name, path in self.options.copies
        ]

    # The two passes -----------------------------------------------------------------------------------------------

    def _judge_all(self, plan: Plan) -> Iterable[Judged]:
        wave: list[Span] = []
        for span in plan.spans:
            wave.append(span)
            if sum(len(s.parts) for s in wave) >= WAVE_TASKS:
                yield from self._wave(wave)
                wave = []
        if wave:
            yield from self._wave(wave)

    def _wave(self, spans: list[Span]) -> list[Judged]:
        known = {s.start: self._known(s) for s in spans}
        references = {s.start: _PROVED if known[s.start] else _reference(s, i) for i, s in enumerate(spans)}
        self.splits = {s.start: points for s in spans if (points := self._split_points(s, references[s.start]))}
        judged = self._pass(spans, references, known)
        # An index that named no frame at a split has spoilt the walk: once more in one piece.
        spoilt = {j.span.start: j.reference for j in judged if j.span.start in self.splits and _wrong(j)}
        for start in spoilt:
            del self.splits[start]
        judged = self._repeat(judged, spoilt)
        # A reference that was removed, or that is the bad one, has told nothing of the rest: take another.
        again: dict[int, str] = {}
        for j in judged:
            entry = known[j.span.start]
            if entry is not None and (j.closer or j.gone):
                again[j.span.start] = _reference(j.span, 0)
            elif j.reference in j.gone and len(j.gone) < len(j.span.parts):
                left = [p.copy for p in j.span.parts if p.file and p.copy not in j.gone]
                if left:
                    again[j.span.start] = left[0]
        judged = self._repeat(judged, again)
        closers = {c.start: c for c in self._closer([j.closer for j in judged if j.closer])}
        again = {}
        for j in judged:
            closer = closers.get(j.span.start)
            if closer and not closer.gone and _wrong(j) and j.reference not in closer.reference:
                again[j.span.start] = closer.reference[0]
        judged = self._repeat(judged, again)
        for j in judged:
            if j.span.start in closers:
                take_closer(j, closers[j.span.start])
        self._indexes(judged)
        return judged

    def _split_points(self, span: Span, reference: str) -> tuple[Landmark, ...]:
        part = span.part(reference)
        large = span.closed and span.end - span.start > 2 * PIECE_BYTES
        if not large or part is None or part.file is None or not part.file.index_path or not is_local(part.file.path):
            return ()
        path = part.file.index_path
        landmarks = landmarks_in(lambda at, size: Local().read(path, at, size) or b"", span.start)
        return split_points(span.start, span.end, landmarks)

    def _known(self, span: Span) -> Proved | None:
        if self.state is None or self.options.full or span.cuts or not span.parts:
            return None
        entry = self.state.find(span)
        return entry if entry and any(entry.covers(p) for p in span.parts) else None

    def _repeat(self, judged: list[Judged], references: dict[int, str]) -> list[Judged]:
        if not references:
            return judged
        spans = [j.span for j in judged if j.span.start in references]
        fresh = {j.span.start: j for j in self._pass(spans, references, {})}
        return [fresh.get(j.span.start, j) for j in judged]

    def _pass(self, spans: list[Span], references: dict[int, str], known: dict[int, Proved | None]) -> list[Judged]:
        tasks = []
        for span in spans:
            entry = known.get(span.start)
            for part in span.parts:
                if part.file is None:
                    continue
                if entry is not None and entry.covers(part):
                    self.bytes_proved += part.upto - span.start
                    self.done += part.upto - span.start
                    continue
                walk = part.copy == references[span.start]
                tasks += scan_tasks(span, part, walk, self.splits.get(span.start, ()))
        pieces: dict[int, dict[str, list[Scan]]] = {s.start: defaultdict(list) for s in spans}
        for answer in self._scan(tasks):
            pieces[answer.start][answer.copy].append(answer)
            self.bytes_read += answer.bytes_read
        scans = {s.start: {c: joined_scans(found, s.cuts) for c, found in pieces[s.start].items()} for s in spans}
        out = []
        for span in spans:
            seen, entry = scans[span.start], known.get(span.start)
            proved: list[str] = []
            if entry is not None:
                seen[_PROVED] = Scan(_PROVED, span.start, blocks=entry.blocks, runs=[entry.run])
                proved = [p.copy for p in span.parts if entry.covers(p)]
            j = judge(span, seen, references[span.start], proved)
            self._keep(j, seen)
            out.append(j)
        return out

    def _keep(self, judged: Judged, scans: dict[str, Scan]) -> None:
        """Write down what is proved: a whole sealed segment, walked and good, that at least two copies share."""
        span, main = judged.span, scans.get(judged.reference)
        fresh = [c for c, s in judged.status.items() if s == "same"]
        if self.state is None or main is None or judged.closer or not fresh or span.cuts or len(main.runs) != 1:
            return
        sealed = all(p.sealed and p.upto == span.end for p in span.parts if p.copy in fresh)
        if sealed and main.runs[0].end == span.end and not main.index_lie and not judged.differences:
            self.state.keep(span, list(main.blocks), main.runs[0], fresh, self.when)

    def _indexes(self, judged: list[Judged]) -> None:
        """Indexes that are not the one that was checked: walk those copies too."""
        for copy in {c for j in judged for c in j.recheck_index}:
            spans = [
                j.span for j in judged if copy in j.recheck_index and j.status.get(copy) in ("same", "proved earlier")
            ]
            tasks = [t for s in spans for p in s.parts if p.copy == copy for t in scan_tasks(s, p, True, ())]
            for answer in self._scan(tasks):
                if answer.index_lie:
                    j = next(j for j in judged if j.span.start == answer.start)
                    j.differences.append(index_lie(j.span, copy, answer.index_lie))

    # Spark --------------------------------------------------------------------------------------------------------

    def _scan(self, tasks: list[ScanTask]) -> list[Scan]:
        local = [t for t in tasks if is_local(t.path)]
        answers = self._map(local, scan_local, sum(t.bounds[-1] - t.bounds[0] for t in local), "comparing")
        remote: dict[str, list[ScanTask]] = defaultdict(list)
        for task in tasks:
            if not is_local(task.path):
                remote[task.path].append(task)
        if remote:
            given = self.context.broadcast(dict(remote))
            files = self.context.binaryFiles(",".join(remote), len(remote)).filter(lambda f: f[0] in given.value)
            found = self._collect(files.flatMap(lambda f: _scan_content(given.value[f[0]], f[1])), "comparing")
            there = {(a.copy, a.start) for a in found}
            answers += found
            gone = {(t.copy, t.start) for ts in remote.values() for t in ts} - there
            answers += [Scan(copy, start, missing=True) for copy, start in sorted(gone)]
        self.done += sum(a.bytes_read for a in answers)
        return answers

    def _closer(self, tasks: list[CloserTask]) -> list[Closer]:
        local = [t for t in tasks if all(is_local(g.path) for g in t.groups)]
        size = sum((t.end - t.start) * len(t.groups) for t in local)
        answers = self._map(local, look_closer_local, size, "looking closer at what differs")
        remote = {t.start: t for t in tasks if not all(is_local(g.path) for g in t.groups)}
        if remote:
            where = {g.path: t.start for t in remote.values() for g in t.groups if not is_local(g.path)}
            given = self.context.broadcast((remote, where))
            files = self.context.binaryFiles(",".join(where), len(where)).filter(lambda f: f[0] in given.value[1])
            together = files.map(lambda f: (given.value[1][f[0]], f)).groupByKey(len(remote))
            looked = together.map(lambda item: _look_closer_remote(given.value[0][item[0]], dict(item[1])))
            answers += self._collect(looked, "looking closer at what differs")
        return answers

    def _map(self, items: Sequence[Item], work: Callable[[Item], Answer], size: int, what: str) -> list[Answer]:
        """A task an item; where segments are small, one for several: that halves the time of a log of many."""
        if not items:
            return []
        tasks = max(size // TASK_BYTES_MIN, 4 * self.context.defaultParallelism)
        return self._collect(self.context.parallelize(items, min(tasks, len(items))).map(work), what)

    def _collect(self, rdd: Any, what: str) -> list[Any]:
        """Run it, and tell how far it is while it runs."""
        read = self.context.accumulator(0)

        def counted(answer: Any) -> Any:
            read.add(getattr(answer, "bytes_read", 0))
            return answer

        with ThreadPoolExecutor(1) as pool:
            running: Future[list[Any]] = pool.submit(rdd.map(counted).collect)
            while not running.done():
                self.progress(what, min(self.total, self.done + read.value), self.total)
                try:
                    running.result(timeout=0.25)
                except TimeoutError:
                    continue
        self.progress(what, min(self.total, self.done + read.value), self.total)
        return running.result()

    # The end ------------------------------------------------------------------------------------------------------

    def _settle(self, ledger: Ledger, plan: Plan, leader: LeaderStatus | None) -> None:
        """What was missing may be gone by retention: ask again where the log starts now."""
        log_start = leader.log.start if leader else 0
        if ledger.needs_log_start():
            self.progress("asking again where the log starts", self.total, self.total)
            if self.options.leader:
                log_start = max(log_start, ask_leader(self.options.leader).log.start)
            else:
                # Offline nothing tells the log start but the log: what no copy holds any more is no difference.
                log_start = min((c.start for c in self._survey(0) if c.segments), default=0)
        ledger.settle(log_start)
        if self.state is not None:
            self.state.forget_below(min((c.start for c in ledger.copies if c.segments), default=0))


def _wrong(judged: Judged) -> bool:
    return bool(judged.runs and judged.runs[-1].wrong)


def _reference(span: Span, turn: int) -> str:
    """Whose frames are walked: the copy that reaches furthest, taking turns so that no disk does all the work."""
    held = [p for p in span.parts if p.file is not None and p.upto == max(q.upto for q in span.parts if q.file)]
    return held[turn % len(held)].copy if held else ""


def _scan_content(tasks: list[ScanTask], data: bytes) -> list[Scan]:
    return [scan(task, Content(data)) for task in tasks]


def _look_closer_remote(task: CloserTask, contents: dict[str, bytes]) -> Closer:
    files = [Content(contents[g.path]) if g.path in contents else open_local(g.path) for g in task.groups]
    if any(f is None for f in files):
        return Closer(task.start, gone=True)
    return look_closer(task, [f for f in files if f is not None])


def _one_cluster(copies: Sequence[Copy], leader: LeaderStatus | None) -> str:
    """All copies are of one cluster, or there is nothing to compare."""
    names = {c.name: c.cluster_id for c in copies if c.cluster_id}
    if leader:
        names["the leader"] = leader.cluster_id
    if len(set(names.values())) > 1:
        raise CannotTell(
            f"these are not copies of one log: {', '.join(f'{n} is of cluster {c!r}' for n, c in names.items())}. Give "
            "the data directories of one cluster's nodes, and its leader"
        )
    return next(iter(names.values()), "")
