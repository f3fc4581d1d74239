"""Tests of the search on a simulated GPU: shares of time, the choice of the best tile, and the budget."""

from __future__ import annotations

from collections import Counter

import pytest

from ringattn.autotune.search import (
    COOL_DOWN,
    FINAL_TURNS,
    FIRST_TURNS,
    MIN_TURNS,
    RETRIES,
    Budget,
    SearchResult,
    TimedRun,
    fastest_candidate,
    median_clocks,
    median_with_transfer,
    planned_runs,
    samples,
    search,
)
from ringattn.kernels import Tile

from ..support.tune_cases import BASELINE, TILES, SimulatedGpu

PLENTY = 1e9


def steady(tile: Tile) -> float:
    """Return a time that grows with the index in TILES; the baseline is the slowest."""
    return 1.0 + (TILES.index(tile) if tile in TILES else 99) / 100


def searched(gpu: SimulatedGpu, budget: float = PLENTY, tiles: list[Tile] = TILES) -> SearchResult[Tile]:
    return search(tiles, BASELINE, gpu.find_error, gpu.run, Budget(budget, gpu.clock).left, pause=gpu.pause)


@pytest.mark.parametrize("best", [0, len(TILES) - 1])
def test_the_fastest_is_chosen_and_slow_candidates_get_few_runs(best: int) -> None:
    gpu = SimulatedGpu(lambda tile: 0.5 if tile == TILES[best] else steady(tile))
    outcome = searched(gpu)
    assert outcome.best == TILES[best] and outcome.is_complete
    assert gpu.timed[: 3 * (1 + len(TILES))] == [BASELINE, *TILES] * FIRST_TURNS, "candidates take turns"
    runs = Counter(gpu.timed)
    assert runs[TILES[best]] == runs[BASELINE] == FINAL_TURNS
    turns = Counter(count for tile, count in runs.items() if tile != BASELINE)
    assert turns == {FIRST_TURNS: 9, 2 * FIRST_TURNS: 5, 4 * FIRST_TURNS: 1, FINAL_TURNS: 3}, "halves of 18, 9 and 4"


@pytest.mark.parametrize("count", [0, 4, 18])
def test_the_search_takes_the_planned_number_of_readings(count: int) -> None:
    gpu, readings_done = SimulatedGpu(steady, seconds_with_transfer=lambda tile: 1.0), []
    search(TILES[:count], BASELINE, gpu.find_error, gpu.run, lambda: 1.0, on_run=lambda: readings_done.append(1))
    assert len(readings_done) == len(gpu.timed) == planned_runs(count)


def test_a_wrong_candidate_is_never_timed() -> None:
    gpu = SimulatedGpu(steady, errors={TILES[0]: "out errs by 1, PyTorch's by 0.1", BASELINE: "nan"})
    outcome = searched(gpu)
    assert outcome.best == TILES[1] and outcome.errors == gpu.errors
    assert not {TILES[0], BASELINE} & {*gpu.timed}
    assert searched(SimulatedGpu(steady, errors=dict.fromkeys([BASELINE, *TILES], "wrong"))).best is None
    left = iter([1.0, 1.0, 0.0])  # the time ends after two checks
    ended = search(TILES, BASELINE, gpu.find_error, gpu.run, lambda: next(left))
    assert ended == SearchResult(None, {}, gpu.errors, False)


@pytest.mark.parametrize(("besides", "best"), [
    ({TILES[0]: 9.0, TILES[1]: 1.2}, TILES[1]),
    ({TILES[-1]: 0.5}, TILES[-1]),  # slowest alone, fastest beside a transfer
])  # fmt: skip
def test_time_alone_and_beside_a_transfer_decides(besides: dict[Tile, float], best: Tile) -> None:
    outcome = searched(SimulatedGpu(steady, seconds_with_transfer=lambda tile: besides.get(tile, 1.3)))
    assert outcome.best == best
    assert median_with_transfer(outcome.readings[best]) == besides[best] and len(outcome.readings[best]) == FINAL_TURNS


def readings(*seconds: float) -> list[TimedRun]:
    return [TimedRun(second) for second in seconds]


def test_a_gain_within_the_spread_of_the_baseline_is_not_chosen() -> None:
    noisy, steadily = readings(0.8, 0.9, 1.0, 1.1, 1.2), readings(*[1.0] * 5)
    assert fastest_candidate({"default": noisy, "other": readings(*[0.95] * 5)}, "default") == "default"
    assert fastest_candidate({"default": noisy, "other": readings(*[0.7] * 5)}, "default") == "other"
    assert fastest_candidate({"default": steadily, "other": readings(*[0.95] * 5)}, "default") == "other"
    assert fastest_candidate({"default": steadily, "other": readings(0.1, 0.1, 0.1)}, "default") == "default", (
        "not a finalist"
    )
    assert fastest_candidate({"default": readings(1.0)}, "default") is None, "one run is not enough"
    unequal = {"default": readings(*[1.0] * 14), "other": readings(*[0.3] * 5)}
    assert fastest_candidate(unequal, "default") == "default", "only the finalists of a complete search count"
    assert fastest_candidate(unequal, "default", complete=False) == "other"
    late = {"default": readings(*[1.0] * 5, *[0.88] * 6), "other": readings(*[0.9] * 5)}
    assert fastest_candidate(late, "default", complete=False) == "other", "compared by the first five runs"
    wide = {"default": steadily, "other": readings(0.5, 0.7, 0.9, 1.3, 1.5)}
    assert fastest_candidate(wide, "default") == "default", "the spread of the candidate counts, too"


def test_throttled_runs_are_repeated() -> None:
    gpu = SimulatedGpu(steady, throttles=lambda run: ("power cap",) if run % 3 == 0 else ())
    outcome = searched(gpu)
    assert outcome.best == TILES[0]
    assert not any(reading.throttled for runs in outcome.readings.values() for reading in runs)
    assert {*gpu.pauses} == {COOL_DOWN} and len(gpu.pauses) > FINAL_TURNS
    always = SimulatedGpu(steady, throttles=lambda run: ("software thermal slowdown",))
    outcome = searched(always, tiles=TILES[:2])
    assert outcome.best == TILES[0] and len(always.timed) == 3 * FINAL_TURNS * (1 + RETRIES)
    assert median_clocks(outcome.readings[TILES[0]]) == {"sm_mhz": 1580.0, "throttled": "software thermal slowdown"}


def test_repeats_end_at_the_budget() -> None:
    gpu = SimulatedGpu(steady, throttles=lambda run: ("power cap",))
    searched(gpu, 7.0)
    assert 7.0 < gpu.now < 7.0 + COOL_DOWN + 2.0 and gpu.timed == [BASELINE] * 2


@pytest.mark.parametrize("seconds", [0.0, 3.0, 30.0, 85.0])
def test_search_ends_at_its_budget(seconds: float) -> None:
    gpu = SimulatedGpu(steady)
    outcome = searched(gpu, seconds)
    assert gpu.now <= seconds + 1.99 * bool(seconds)  # the last reading may end late
    assert outcome.is_complete == (gpu.now < seconds) and (outcome.best is not None) == (seconds >= 85)
    assert outcome.best is None or len(outcome.readings[outcome.best]) >= MIN_TURNS
    assert bool(gpu.timed) == (len(gpu.checked) == 1 + len(TILES)) == (seconds > 0.25 * 19)


def test_a_reading_keeps_only_throttling_reasons() -> None:
    clocks = {"sm_mhz": 1200, "throttled": ("idle", "power cap", "clocks set by the user")}
    assert TimedRun.from_nvml(0.25, clocks) == TimedRun(0.25, ("power cap",), {"sm_mhz": 1200.0})
    assert samples(readings(1.0, 2.0, 3.0)).median == 2.0
    runs = [TimedRun(1.0, (), clocks) for clocks in ({"sm_mhz": 9.0}, {"sm_mhz": 1.0, "watts": 5.0}, {"sm_mhz": 2.0})]
    assert median_clocks(runs) == {"sm_mhz": 2.0, "watts": 5.0, "throttled": ""}


def test_unused_budget_is_shared_among_the_rest() -> None:
    gpu = SimulatedGpu(steady)
    whole = Budget(100.0, gpu.clock)
    first = whole.share(4)
    gpu.now += 10
    assert (first.left(), whole.share(3).left()) == (15, 30), "the others get what the first leaves"
