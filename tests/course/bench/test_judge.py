from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ringlab.errors import CourseError
from ringlab_course.bench import judge
from ringlab_course.bench.four_ranks import FOUND, PHASES, Stopwatch, Watched, four_ranks
from ringlab_course.bench.judge import bench_judge, measure, memory_of, notebooks
from ringlab_course.checking.reports import run_in_process
from tests.course.gradebook import stub
from tests.course.submissions_of import namespace, solution_code, submissions

pytestmark = pytest.mark.thorough

CHECKOUT = Path(__file__).resolve().parents[3]
KEPT: list[bytes] = []
LEAK_KIB = 1024
"""The KiB that `Leaky` leaks per submission. An allocation of 2 MiB by the system may look like a leak of 64 KiB."""


class Quick(Watched):
    """A judge that grades a notebook by the notebook's own claim to be right, without a sandbox."""

    def __call__(self, path: Path, exercise: str | None, **options: Any) -> Any:
        right = json.loads(Path(path).read_text())["right"]
        self.note(
            {"seconds": dict.fromkeys(PHASES, 0.0), "cpu_s": {"judge": 0.0, "workers": 0.0}, "workers": 1}
        )
        return stub.report(str(path), "05", 10 if right else 5)


class Leaky(Quick):
    """A judge that leaks memory with every submission."""

    def __call__(self, *args: Any, **options: Any) -> Any:
        KEPT.append(bytes(bytearray(b"x" * (LEAK_KIB << 10))))
        return super().__call__(*args, **options)


class Generous(Quick):
    """A judge that gives all points to every submission."""

    def __call__(self, path: Path, exercise: str | None, **options: Any) -> Any:
        super().__call__(path, exercise, **options)
        return stub.report(str(path), "05", 10)


def written(count: int) -> list[tuple[str, bool]]:
    return [
        (json.dumps({"right": not number % 2, "number": number}), not number % 2) for number in range(count)
    ]


def test_a_judge_that_keeps_something_is_noticed() -> None:
    honest, leaky = (
        measure(written(60), "05", 1, judge=judge)["memory"]["judge 1"] for judge in (Quick, Leaky)
    )
    assert honest["submissions"] == leaky["submissions"] == 60
    assert abs(honest["kib_per_submission"]) < LEAK_KIB / 8
    assert leaky["kib_per_submission"] > LEAK_KIB / 2


def test_a_judge_that_gives_everybody_everything_is_no_fast_judge() -> None:
    with pytest.raises(CourseError, match="another grade for 0001"):
        measure(written(4), "05", 1, judge=Generous)


def test_a_second_counts_once(monkeypatch) -> None:
    now = [0.0]
    monkeypatch.setattr(judge.time, "perf_counter", lambda: now[0])
    watch = Stopwatch()

    def spend(seconds: float) -> None:
        now[0] += seconds

    inner = watch.timed("start", spend)

    @lambda work: watch.timed("calls", work)
    def outer() -> None:
        spend(1.0)
        inner(4.0)
        spend(2.0)

    outer()
    inner(8.0)
    assert dict(watch.seconds) == {"start": 12.0, "calls": 3.0}


def test_memory_is_a_line_through_what_comes_after_the_warming_up() -> None:
    held = memory_of([0, 50_000, *(60_000 + 3 * number for number in range(18))])
    assert held["kib_per_submission"] == pytest.approx(3.0, abs=0.01) and held["submissions"] == 20
    assert memory_of([1024] * 5)["kib_per_submission"] is None and memory_of([1024] * 5)["last_mib"] == 1.0


def test_copies_are_right_and_wrong_by_turns_and_all_different() -> None:
    copies = notebooks(CHECKOUT, "05", 6)
    assert [right for _, right in copies] == [True, False] * 3 and len({text for text, _ in copies}) == 6


class Counted(Exception):
    """Raised instead of running a ring, with the number of ranks that the check requested."""


class Counting:
    def run_ring(self, world_size: int, *args: Any, **kwargs: Any) -> Any:
        raise Counted(world_size)


def test_the_contract_of_four_ranks_tells_right_from_wrong() -> None:
    (stage,) = four_ranks().stages
    for check in stage.checks:
        with pytest.raises(Counted, match="^4$"):
            check.run(Counting(), np.random.default_rng(1))
    wrong = {each.expected.finder: each for each in submissions("05/wrong_*")}
    for each in map(wrong.__getitem__, FOUND):
        assert not run_in_process(stage, namespace(each), tier="all", seed=1).ok, each.name
    assert run_in_process(stage, solution_code("05"), tier="all", seed=1).ok


def test_outside_of_a_checkout_it_says_so(tmp_path) -> None:
    with pytest.raises(CourseError, match="a checkout"):
        bench_judge({"numpy": 2}, 1, tmp_path)


@pytest.mark.needs_bwrap
def test_real_submissions_are_watched_on_their_way() -> None:
    part = bench_judge({"numpy": 2, "ring": 0}, 1, CHECKOUT)["numpy"]
    assert part["submissions"] == 2 and part["workers_each"] >= 1
    assert set(part["seconds_each"]) == set(PHASES) and all(
        part["seconds_each"][phase] > 0 for phase in PHASES
    )
    rounding = 2 * len(PHASES) * 0.0005 + 0.005
    assert 0 < 2 * sum(part["seconds_each"].values()) <= part["wall_s"] + rounding
    assert part["cpu_s_each"]["workers"] > 0
    # Both numbers are rounded. If a busy machine makes the rate small, rounding is a large part of it.
    assert part["per_minute"] == pytest.approx(120 / part["wall_s"], rel=0.02, abs=0.06)
