"""The counters in the ring's header; they are described where everybody may read them, in ``monitor``."""

from __future__ import annotations

from hsloader.monitor.counters import OWN_COUNTERS, FeederCounter, Stage, ThreadCounter, TrainerCounter

__all__ = ["OWN_COUNTERS", "FeederCounter", "Stage", "ThreadCounter", "TrainerCounter"]
