"""Each known failure of leadership, played step by step: nothing is lost, and without the rule that it is about it is
noticed."""

from __future__ import annotations

import pytest

from tests.simulation.judge import Judge
from tests.simulation.run import Outcome, simulate
from tests.simulation.scenes import ACTS, SHORT, Act, Scene


def play(act: Act, bug: str | None) -> Outcome:
    def tells(seed: int, judge: Judge) -> Scene:
        return Scene(seed, judge, act)

    return simulate(1, bug=bug, tells=tells, lines=100)


@pytest.mark.parametrize("name", ACTS)
def test_scene(name: str) -> None:
    act = ACTS[name]
    outcome = play(act, None)
    assert not outcome.verdicts, "\n".join((*outcome.verdicts, *outcome.transcript))
    assert play(act, act.bug).verdicts, f"nobody noticed {act.bug}"


@pytest.mark.parametrize("name", SHORT)
def test_found_once(name: str) -> None:
    """What the simulator found, and was repaired."""
    outcome = play(SHORT[name], None)
    assert not outcome.verdicts, "\n".join((*outcome.verdicts, *outcome.transcript))
