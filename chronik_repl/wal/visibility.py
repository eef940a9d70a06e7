"""How far the log is durable, and how far readers may see: two positions and, for each partition, an offset.

The role says what is committed; what is shown never exceeds what is durable here and never goes back. A batch above
the high watermark waits in a queue, in order, until that passes it; then the partition's committed offset moves.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from chronik_repl.positions import CHAIN_SEED, ORIGIN, Checksum, Position
from chronik_repl.wal.entities import Pending
from chronik_repl.wal.replay import coarsen
from chronik_repl.wal.watermark import Watermark

PENDING_MAX = 200_000


class Visibility:
    def __init__(self, high_watermark_moved: Callable[[], None], log_start_moved: Callable[[Position], None]) -> None:
        self.durable = Watermark(ORIGIN)
        self.durable_checksum = CHAIN_SEED
        self.committed = Watermark(ORIGIN)
        self._high_watermark_moved = high_watermark_moved
        self._log_start_moved = log_start_moved
        self._goal = ORIGIN  # what the role said is committed; may be ahead of what is durable here
        self._pending: deque[Pending] = deque()  # batches above the high watermark
        self.batch_appended = self._pending.append  # on the hot path: so the queue stays the same object
        self._coarse_to = ORIGIN  # up to here they are one a partition, not one a batch
        self._starts: deque[tuple[Position, Position]] = deque()  # log starts above it: end of the frame, start

    def reset(
        self,
        end: Position,
        chain: Checksum,
        high_watermark: Position,
        pending: Sequence[Pending] = (),
        log_start: Position = ORIGIN,
    ) -> None:
        """After opening, truncating or starting anew: all up to `end` is durable."""
        self.durable.reset(end)
        self.durable_checksum = chain
        self.committed.reset(high_watermark)
        self._goal = high_watermark
        self._pending.clear()
        self._pending.extend(pending)
        self._coarse_to = ORIGIN
        self._starts = deque([(end, log_start)])

    def start_appended(self, end: Position, start: Position) -> None:
        """A frame that ends at `end` says that the log starts at `start`."""
        self._starts.append((end, start))

    def segment_ended(self, end: Position) -> None:
        """Keep what waits for the high watermark from growing with the records, if it does not move for long."""
        if len(self._pending) > PENDING_MAX:
            coarse = [entry for entry in self._pending if entry[0] <= self._coarse_to]
            fine = [entry for entry in self._pending if entry[0] > self._coarse_to]
            self._pending.clear()
            self._pending.extend(coarse + coarsen(fine, end))
            self._coarse_to = end

    def became_durable(self, end: Position, chain: Checksum) -> None:
        if end > self.durable.value:
            self.durable_checksum = chain
            self.durable.advance(end)
            if self._goal > self.committed.value:
                self.commit_to(self._goal)

    def commit_to(self, position: Position) -> None:
        if position > self._goal:
            self._goal = position
        target = min(self._goal, self.durable.value)
        if target <= self.committed.value:
            return
        pending = self._pending
        while pending and pending[0][0] <= target:
            _, partition, next_offset = pending.popleft()
            partition.committed_offset = next_offset
        self.committed.advance(target)
        self._high_watermark_moved()
        while self._starts and self._starts[0][0] <= target:
            self._log_start_moved(self._starts.popleft()[1])

    def fail(self, error: BaseException) -> None:
        """Those who wait now get it."""
        self.durable.fail(error)
        self.committed.fail(error)

    def fail_forever(self, error: BaseException) -> None:
        self.durable.fail_forever(error)
        self.committed.fail_forever(error)
