"""The search on a GPU that is not there: who gets time, what interrupts it, and that it goes on as if nothing had."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import pytest

from ringattn.autotune.search import (
    COOL_DOWN,
    FINAL_TURNS,
    FIRST_TURNS,
    LEAST_TURNS,
    RETRIES,
    Budget,
    Measured,
    Reading,
    clocks_of,
    median,
    median_beside,
    planned,
    search,
    spread,
)
from ringattn.autotune.store import Journal
from ringattn.kernels import Tile

from ..support.tune_cases import BASELINE, POINT, TILES, StandIn

PLENTY = 1e9


def steady(tile: Tile, run: int) -> float:
    """The later in TILES, the slower; the baseline is the slowest."""
    return 1.0 + (TILES.index(tile) if tile in TILES else 99) / 100


def noisy(tile: Tile, run: int) -> float:
    """So much that the order of medians changes with every few runs, and the same in every process."""
    return steady(tile, run) * (1 + random.Random(f"{tile} {run}").random())


def searched(gpu: StandIn, path: Path, budget: float = PLENTY, tiles: list[Tile] = TILES) -> Measured | None:
    left = Budget(budget, gpu.clock).left
    return search(POINT, BASELINE, tiles, gpu, Journal(path, "digest"), left, pause=gpu.pause)


def timed(gpu: StandIn) -> list[Tile]:
    return [tile for kind, tile in gpu.calls if kind == "run"]


@pytest.mark.parametrize("best", [0, 5, len(TILES) - 1])
def test_the_fastest_wins_and_the_slow_get_little_time(best: int, tmp_path: Path) -> None:
    gpu = StandIn(lambda tile, run: 0.5 if tile == TILES[best] else steady(tile, run))
    found = searched(gpu, tmp_path / "journal")
    assert found is not None and found.tile == TILES[best] and found.complete
    assert median(found.best) == 0.5 and found.baseline_seconds == 1.99
    order = timed(gpu)
    assert order[: 3 * (1 + len(TILES))] == [BASELINE, *TILES] * FIRST_TURNS, "candidates take turns"
    runs = Counter(order)
    assert runs[TILES[best]] == runs[BASELINE] == FINAL_TURNS
    turns = Counter(count for tile, count in runs.items() if tile != BASELINE)
    assert turns == {FIRST_TURNS: 9, 2 * FIRST_TURNS: 5, 4 * FIRST_TURNS: 1, FINAL_TURNS: 3}, "halves of 18, 9 and 4"


@pytest.mark.parametrize("count", [0, 3, 4, 18])
def test_planned_readings_are_those_taken(count: int, tmp_path: Path) -> None:
    gpu, taken = StandIn(steady, besides=lambda tile: 1.0), []
    journal = Journal(tmp_path / "journal", "")
    search(POINT, BASELINE, TILES[:count], gpu, journal, lambda: 1.0, done=lambda: taken.append(1))
    assert len(taken) == len(timed(gpu)) == planned(count)


def test_a_wrong_tile_is_never_timed(tmp_path: Path) -> None:
    gpu = StandIn(steady, bad={TILES[0]: "out errs by 1, PyTorch's by 0.1", BASELINE: "nan"})
    found = searched(gpu, tmp_path / "journal")
    assert found is not None and found.tile == TILES[1] and found.baseline_seconds is None
    assert found.wrong == gpu.bad
    assert not {TILES[0], BASELINE} & {*timed(gpu)}
    everything = StandIn(steady, bad=dict.fromkeys([BASELINE, *TILES], "wrong"))
    assert searched(everything, tmp_path / "other") is None


def test_a_tile_whose_check_ends_the_process_is_not_checked_again(tmp_path: Path) -> None:
    class Dies(StandIn):
        def wrong(self, tile: Tile) -> str | None:
            if tile == TILES[0]:
                raise RuntimeError("an illegal memory access")
            return super().wrong(tile)

    with pytest.raises(RuntimeError):
        searched(Dies(steady), tmp_path / "journal")
    found = searched(Dies(steady), tmp_path / "journal")
    assert found is not None and found.tile == TILES[1]
    assert found.wrong == {TILES[0]: "RuntimeError: an illegal memory access"}


@pytest.mark.parametrize(
    ("besides", "best"),
    [
        ({TILES[0]: 9.0, TILES[1]: 1.2}, TILES[1]),
        ({TILES[-1]: 0.5}, TILES[-1]),  # the slowest alone is the best of all beside a transfer
    ],
)
def test_time_alone_and_beside_a_transfer_decides(besides: dict[Tile, float], best: Tile, tmp_path: Path) -> None:
    found = searched(StandIn(steady, besides=lambda tile: besides.get(tile, 1.3)), tmp_path / "journal")
    assert found is not None and found.tile == best
    assert median_beside(found.best) == besides[best] and len(found.best) == FINAL_TURNS


def test_throttled_runs_are_repeated(tmp_path: Path) -> None:
    gpu = StandIn(steady, throttles=lambda call: ("power cap",) if call % 3 == 0 else ())
    found = searched(gpu, tmp_path / "journal")
    assert found is not None and found.tile == TILES[0]
    assert not any(reading.throttled for readings in found.readings.values() for reading in readings)
    assert {*gpu.pauses} == {COOL_DOWN} and len(gpu.pauses) > FINAL_TURNS
    assert clocks_of(found.best) == {"sm_mhz": 1980.0, "throttled": ""}


def test_a_gpu_that_is_always_throttled_is_measured_as_it_is(tmp_path: Path) -> None:
    gpu = StandIn(steady, throttles=lambda call: ("software thermal slowdown",))
    found = searched(gpu, tmp_path / "journal", tiles=TILES[:2])
    assert found is not None and found.tile == TILES[0] and len(found.best) == FINAL_TURNS
    assert clocks_of(found.best) == {"sm_mhz": 1580.0, "throttled": "software thermal slowdown"}
    assert len(timed(gpu)) == 3 * FINAL_TURNS * (1 + RETRIES)


@pytest.mark.parametrize("at", [0, 19, 77, 150])
def test_an_interrupted_search_goes_on_as_if_it_had_not_been(at: int, tmp_path: Path) -> None:
    besides = {tile: 3.0 - steady(tile, 0) for tile in TILES}.get
    whole = StandIn(noisy, besides=besides)
    expected = searched(whole, tmp_path / "whole")
    cut = StandIn(noisy, besides=besides, dies_at=at)
    if at < len(whole.calls):
        with pytest.raises(KeyboardInterrupt):
            searched(cut, tmp_path / "cut")
    assert searched(cut, tmp_path / "cut") == expected
    assert cut.calls == whole.calls  # nothing twice, nothing left out


@pytest.mark.parametrize("seconds", [0.0, 30.0, 85.0, 150.0])
def test_a_budget_ends_it_and_more_of_it_goes_on(seconds: float, tmp_path: Path) -> None:
    gpu = StandIn(steady)
    found = searched(gpu, tmp_path / "journal", seconds)
    assert gpu.now <= seconds + 1.99 * bool(seconds)  # the reading that was under way
    assert found is None or (len(found.best) >= LEAST_TURNS and found.complete == (gpu.now < seconds))
    assert (found is not None) == (seconds >= 85)
    rest = searched(gpu, tmp_path / "journal")
    whole = StandIn(steady)
    assert rest == searched(whole, tmp_path / "whole")
    assert Counter(gpu.calls) == Counter(whole.calls)


def test_checks_are_paid_for_by_the_budget(tmp_path: Path) -> None:
    """What is not checked within it is not timed, and the next run begins there."""
    gpu = StandIn(steady, check=5.0)
    assert searched(gpu, tmp_path / "journal", 17.0) is None
    assert gpu.calls == [("wrong", tile) for tile in (BASELINE, *TILES[:3])]
    found = searched(gpu, tmp_path / "journal")
    assert found is not None and found.complete
    assert Counter(gpu.calls)["wrong", BASELINE] == 1


def test_shares_of_a_budget() -> None:
    gpu = StandIn(steady)
    whole = Budget(100.0, gpu.clock)
    first = whole.share(4)
    gpu.now += 10
    assert first.left() == 15
    assert whole.share(3).left() == 30  # what the first left, the others have
    gpu.now += 1000
    assert whole.left() == first.left() == 0


def test_medians_and_spread() -> None:
    readings = [Reading(seconds) for seconds in (1.0, 2.0, 3.0, 4.0, 100.0)]
    assert median(readings) == 3.0 and median_beside(readings) is None
    assert spread(readings) == pytest.approx((4.0 - 2.0) / 2 / 3.0)
    assert spread(readings[:1]) == 0.0
