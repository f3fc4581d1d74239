"""Fuzz the public API: draw calls, run them on real ranks, compare with float64, shrink each failure to one line.

python -m tests.properties.fuzz --minutes 20 --seed 0      # draw; exit code 1 if anything failed
python -m tests.properties.fuzz --only intervals,halo    # only calls with one of these fields or kinds
python -m tests.properties.fuzz --call LINE                # repeat a printed failure
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import count
from random import Random

import torch

from ..conftest import profile  # noqa: F401  the interpreter, before Triton is imported
from ..support.mask_cases import combine_ranks, compare_with_expected, expected_results
from .fuzz_draw import BASE, WRONG, Literals, draw_line, features
from .fuzz_ranks import Outcome, Processes, Threads, case_of, told

ALSO = {
    "q": "k|v|layout|batch",
    "k": "q|v|layout",
    "v": "k|layout",
    "dropout_p": "dropout_seed",
    "causal": "prefix_length|islands",
}
"""Other arguments that an error may name, because the conflict is between two arguments."""
REMEMBERED = 20  # earlier calls that may have caused a failure
SHRINK_SECONDS = 90.0


class Fuzz:
    """Ranks that live from line to line, and their last calls."""

    def __init__(self) -> None:
        self._pools: dict[tuple[str, int], Threads | Processes] = {}
        self._before: dict[tuple[str, int], list[Literals]] = {}

    def failure(self, line: Literals, *, fresh: bool = False) -> str:
        """Return what is wrong with a line, or "". ``fresh`` starts new ranks first."""
        key = run, world = line["run"], line["world"]
        if fresh:
            self._drop(key)
        try:
            if key not in self._pools:
                self._pools[key] = (Processes if run == "processes" else Threads)(run, world)
                self._before[key] = []
            ranks = self._pools[key].play(line["calls"], world)
            of_calls = zip(line["calls"], zip(*ranks, strict=True), strict=True)
            message = next(filter(None, (verdict(BASE | call, world, made) for call, made in of_calls)), "")
            assert message or not any(None in made for made in ranks), "a call has no outcome"
        except Exception as error:
            message = told(error)
        if message:
            self._drop(key)
        else:
            self._before[key] = [*self._before[key], *line["calls"]][-REMEMBERED:]
        return message

    def shrunk(self, line: Literals, failure: str) -> tuple[Literals, str]:
        """Return the smallest line that fails in the same way, with earlier calls if the line does not fail alone."""
        longer = line | {"calls": [*self._before[line["run"], line["world"]], *line["calls"]]}
        start = next((start_line for start_line in (line, longer) if self._alike(start_line, failure)), None)
        if start is None:
            return longer, f"{failure} (once: neither alone nor after the calls before it)"
        end = time.monotonic() + SHRINK_SECONDS
        smaller: Literals | None = start
        while smaller is not None:
            start = smaller
            smaller = next(
                (text for text in less(start) if time.monotonic() < end and self._alike(text, failure)), None
            )
        return start, self.failure(start, fresh=True) or failure

    def _alike(self, line: Literals, failure: str) -> bool:
        return kind(self.failure(line, fresh=True)) == kind(failure)

    def _drop(self, key: tuple[str, int]) -> None:
        if key in self._pools:
            self._pools.pop(key).close()

    def close(self) -> None:
        for key in [*self._pools]:
            self._drop(key)


def verdict(call: Literals, world: int, made: Sequence[Outcome]) -> str:
    """Return what is wrong with the ranks' outcomes of one call, or ""."""
    if None in made and not any(isinstance(outcome, str) for outcome in made):
        return ""  # because of an error in another call, which has its own verdict
    if call["spoil"]:
        name, value, where = call["spoil"]
        nonsense = repr(value) in map(repr, WRONG.get(name, ()))
        nonsense &= not (value == "other tokens" and name == "q" and world == 1 and call["named"] and call["kv_layout"])
        if where >= world or not (nonsense or (where >= 0 and world > 1 and value != call.get(name))):
            return ""  # valid after all
        promised = rf"(?s)(ValueError|NotImplementedError|TypeError): .*\b({name}|{ALSO.get(name, name)})\b"
        wrong = [f"rank {rank}: {outcome}" for rank, outcome in enumerate(made) if not re.match(promised, str(outcome))]
        return f"{name}: no error that names it: {'; '.join(wrong)}" if wrong else ""
    wrong = [f"rank {rank}: {outcome}" for rank, outcome in enumerate(made) if isinstance(outcome, str)]
    if wrong or call["unshard"] or call["move"]:
        return "; ".join(wrong)
    case = case_of(call, world)
    try:
        compare_with_expected(
            expected_results(case), *combine_ranks(case, [outcome for outcome in made if isinstance(outcome, list)])
        )
    except AssertionError as error:
        return str(error)
    return ""


def kind(message: str) -> str:
    """Return the kind of a failure: the first rank's message without numbers."""
    return re.sub(r"[-+]?\d[\w.+-]*", "#", message.partition("; rank")[0])[:50]


def less(line: Literals) -> Iterator[Literals]:
    """Yield simpler lines, with fewer processes, ranks, calls or arguments."""
    if line["run"] == "processes":
        yield line | {"run": "threads"}
    yield from (line | {"world": world} for world in range(1, line["world"]))
    calls = line["calls"]
    for place, call in enumerate(calls):
        yield line | {"calls": [*calls[:place], *calls[place + 1 :]]}
        for name in call:
            rest = {other: value for other, value in call.items() if other != name}
            yield line | {"calls": [*calls[:place], rest, *calls[place + 1 :]]}


def search(seed: int, numbers: Iterable[int], minutes: float = 60.0, only: frozenset[str] = frozenset()) -> list[str]:
    """Run lines drawn from seed and number, and return one report per kind of failure.

    With ``only``, run the calls that have one of these features.
    """
    fuzz, counts, reports = Fuzz(), Counter[str](), dict[str, str]()
    end, shown = time.monotonic() + 60 * minutes, time.monotonic()
    try:
        for number in numbers:
            if time.monotonic() > end:
                break
            line = draw_line(Random(f"{seed}/{number}"))
            line |= {"calls": [call for call in line["calls"] if not only or only & features(call)]}
            if not line["calls"]:
                continue
            for call in line["calls"]:
                counts.update(["calls", line["run"], f"world {line['world']}", *features(call)])
            message = fuzz.failure(line)
            if message and kind(message) not in reports:
                smallest, told_then = fuzz.shrunk(line, message)
                report = f"{told_then}\n  python -m tests.properties.fuzz --call {str(smallest)!r}"
                reports |= {kind(message): report, kind(told_then): report}
                print(f"FAILED, line {number} of seed {seed}: {report}", flush=True)
            if time.monotonic() > shown + 60:
                shown = time.monotonic()
                print(f"{number + 1} lines, {counts['calls']} calls, {len(reports)} kinds of failure", flush=True)
    finally:
        fuzz.close()
    print(f"seed {seed}: {len(reports)} kinds of failure; {dict(counts.most_common())}")
    return [*reports.values()]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        "tests.properties.fuzz", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", metavar="NAME,…", default="")
    parser.add_argument("--call", metavar="LINE")
    options = parser.parse_args(arguments)
    torch.use_deterministic_algorithms(True)  # fills torch.empty with NaN
    torch.set_num_threads(1)
    if options.call is None:
        only = frozenset(filter(None, options.only.split(",")))
        return bool(search(options.seed, count(), options.minutes, only))
    fuzz = Fuzz()
    try:
        message = fuzz.failure(ast.literal_eval(options.call))
    finally:
        fuzz.close()
    print(message or "passed")
    return bool(message)


if __name__ == "__main__":
    sys.exit(main())
