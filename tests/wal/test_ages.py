"""A wall clock that leaps makes nothing old, until it has been there for a day."""

from __future__ import annotations

import pytest

from chronik_repl.wal.ages import LEAP_S, PATIENCE_S, AgeClock

NOON, DAY, WEEK = 1_700_000_000.0, 86_400.0, 604_800.0


class Clocks:
    """A wall clock that can be set, and the time that has really passed."""

    def __init__(self) -> None:
        self.wrong_s = self.passed_s = 0.0
        self.ages = AgeClock(lambda: int((NOON + self.passed_s + self.wrong_s) * 1000), lambda: self.passed_s)

    def after(self, seconds: float) -> float:
        """What the ages go by then, counted from noon."""
        self.passed_s += seconds
        return self.ages.now_ms() / 1000 - NOON


def test_it_is_the_wall_clock_and_follows_small_corrections() -> None:
    clocks = Clocks()
    assert clocks.after(3600) == 3600
    clocks.wrong_s = LEAP_S - 1
    assert clocks.after(10) == 3610 + LEAP_S - 1
    clocks.wrong_s = -30
    assert clocks.after(10) == 3590
    assert clocks.ages.ahead_s == 0
    assert not clocks.ages.news()


def test_a_week_ahead_is_not_believed_and_said_once() -> None:
    clocks = Clocks()
    clocks.wrong_s = WEEK
    assert clocks.after(60) == 60
    assert clocks.ages.ahead_s == pytest.approx(WEEK)
    assert "7 days, 0:00:00 ahead" in clocks.ages.news()
    assert clocks.after(3600) == 3660
    assert not clocks.ages.news()
    clocks.wrong_s = 0
    assert clocks.after(60) == 3720
    assert clocks.ages.ahead_s == 0
    assert not clocks.ages.news()
    clocks.wrong_s = WEEK  # again
    clocks.after(10)
    assert clocks.ages.news()


def test_after_a_day_it_is_believed() -> None:
    clocks = Clocks()
    clocks.wrong_s = WEEK
    clocks.after(60)
    assert clocks.after(PATIENCE_S - 1) == 60 + PATIENCE_S - 1
    assert clocks.after(1) == 60 + PATIENCE_S + WEEK
    assert clocks.ages.ahead_s == 0


def test_a_clock_that_was_behind_and_comes_back_has_not_leapt() -> None:
    clocks = Clocks()
    clocks.wrong_s = -WEEK
    assert clocks.after(60) == 60 - WEEK
    clocks.wrong_s = 0
    assert clocks.after(60) == 120
    assert not clocks.ages.news()
