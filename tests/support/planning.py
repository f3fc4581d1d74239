"""How long a schedule takes to be made: of its own, without what other tests left in caches and on the heap."""

from __future__ import annotations

from collections.abc import Callable
from time import process_time
from timeit import timeit

from ringattn.ring.schedule.active import sent_keys, unions
from ringattn.ring.schedule.schedule import Schedule, _schedule


def forget() -> None:
    """What is made of a call's layout and mask once, and kept: as before the first call."""
    for cached in (_schedule, sent_keys, unions):
        cached.cache_clear()


def planned(seconds: float, make: Callable[[], Schedule], use: Callable[[Schedule], object]) -> Schedule:
    """A schedule that was made and used within a bound, once in three times: what others do on a machine only adds."""
    made: list[Schedule] = []

    def run() -> None:
        made.append(make())
        use(made[-1])

    taken: list[float] = []
    while len(taken) < 3 and not (taken and taken[-1] < seconds):
        taken.append(timeit(run, forget, process_time, 1))  # collects no garbage meanwhile
    assert min(taken) < seconds, f"took {taken}, all longer than {seconds} s"
    return made[-1]
