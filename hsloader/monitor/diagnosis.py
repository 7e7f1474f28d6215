"""From what was seen of a process tree to one verdict in words."""

from __future__ import annotations

from hsloader.monitor.activity import ACTIVITIES
from hsloader.monitor.faults import FAULTS
from hsloader.monitor.situation import Kind, Situation, Verdict

__all__ = ["judge"]


def judge(situation: Situation) -> Verdict:
    """The verdict on one trainer and its workers: the worst thing that the samples show."""
    for check in (*FAULTS, *ACTIVITIES):
        verdict = check(situation)
        if verdict is not None:
            return verdict
    return Verdict(Kind.UNKNOWN, "nothing stands out in what could be seen")
