"""The clock by which things grow old: the wall clock, but for a leap that nobody has believed yet.

What a clock that goes a week ahead would undo (records, idle groups and producers expire at once) no later correction
brings back. So it is held against the time that has really passed. While it is ahead of that by more than LEAP_S, ages
go by the time that has passed, and nothing expires by the leap; once it has been there for PATIENCE_S it is believed.
A clock that goes back only makes things younger. One that was wrong when the process began looks like a long outage:
that nobody can tell apart here.

Frames are stamped by the wall clock all the same: a stamp in the future only makes a record stay longer.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

LEAP_S = 60.0  # a correction by less is nothing to speak of
PATIENCE_S = 24 * 3600.0  # for an operator to mend the clock


class AgeClock:
    def __init__(self, wall_ms: Callable[[], int], passed_s: Callable[[], float]) -> None:
        """`passed_s`: a clock that nobody sets."""
        self._wall_ms, self._passed_s = wall_ms, passed_s
        self._due_ms, self._at_s = wall_ms(), passed_s()  # where the wall clock should be, and when it was looked at
        self._leapt_at_s: float | None = None
        self._told = False
        self.ahead_s = 0.0  # of the time that has passed, by a leap that is not believed

    def now_ms(self) -> int:
        """Ask now and then: a leap is noticed by asking."""
        wall_ms, at_s = self._wall_ms(), self._passed_s()
        due_ms = self._due_ms + int((at_s - self._at_s) * 1000)
        ahead_s = (wall_ms - due_ms) / 1000
        if ahead_s <= LEAP_S:
            self._leapt_at_s = None
        elif self._leapt_at_s is None:
            self._leapt_at_s = at_s
        waits = self._leapt_at_s is not None and at_s - self._leapt_at_s < PATIENCE_S
        self.ahead_s = ahead_s if waits else 0.0
        self._due_ms, self._at_s = due_ms if waits else max(due_ms, wall_ms), at_s
        return due_ms if waits else wall_ms

    def news(self) -> str:
        """What to say of a leap that has just been noticed; "" if there is nothing new."""
        told, self._told = self._told, self.ahead_s > 0
        if told or not self._told:
            return ""
        return (
            f"this node's clock is {timedelta(seconds=int(self.ahead_s))} ahead of the time that has passed: nothing "
            f"expires by that for {PATIENCE_S / 3600:.0f} hours. Mend the clock; if it is right, there is nothing to do"
        )
