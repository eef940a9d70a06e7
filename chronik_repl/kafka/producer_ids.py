"""Producer ids: each given out once, by whichever node a producer asks.

The leader writes an id into the log and tells it when that stands below the high watermark: no later leader can give it
out again. A follower asks its leader for some, under a word of its own; they come to it in the log, and it gives them
out once they stand below the high watermark too.
"""

from __future__ import annotations

from collections import deque
from uuid import uuid4

import trio

from chronik_repl.standing import House
from chronik_repl.wal.changes import ProducerIdGiven

TIMEOUT_S = 5.0  # for the high watermark


class Ids:
    """The ids that this node may give out. One a door."""

    def __init__(self, house: House) -> None:
        self._house = house
        self._stock: deque[int] = deque()  # of a follower: given to it, below the high watermark, not used
        self._asking = trio.Lock()

    async def take(self) -> int | None:
        """An id that nobody was ever told, and nobody ever will be. None: not now. Raises ChronikError."""
        with trio.move_on_after(TIMEOUT_S):
            if self._house.role == "leader":
                return await self._give()
            async with self._asking:
                if not self._stock:
                    await self._ask()
                return self._stock.popleft()
        return None

    async def _give(self) -> int | None:
        log, epoch = self._house.log, self._house.epoch
        if not self._house.accepting or not self._house.sync_in_force:
            return None
        producer_id = log.state.next_producer_id
        await log.committed.wait(log.append_change(ProducerIdGiven(producer_id)).end)
        # After a change of leader the frame that was waited for may not be ours.
        return producer_id if self._house.epoch == epoch and self._house.role == "leader" else None

    async def _ask(self) -> None:
        """The leader writes some into the log under a word of ours. It is a new one each time: ids of an earlier one,
        or of this node's life before, are never taken for these."""
        word, log = str(uuid4()), self._house.log
        self._house.ask_for_producer_ids(word)
        while True:
            committed = log.committed.value
            given = log.state.ids_given.get(word)
            if given is not None and given[1] <= committed:
                self._stock.extend(range(given[0].producer_id - given[0].count + 1, given[0].producer_id + 1))
                return
            await log.committed.wait_beyond(committed)
