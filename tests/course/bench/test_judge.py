"""The benchmark of the judge measures real submissions, and refuses a judge that gives wrong points."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ringlab.errors import CourseError
from ringlab_course.bench.four_ranks import PHASES, Watched
from ringlab_course.bench.judge import bench_judge, measure
from tests.course.gradebook import stub

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


def test_a_judge_that_gives_everybody_everything_is_no_fast_judge() -> None:
    with pytest.raises(CourseError, match="another grade for 0001"):
        measure(written(4), "05", 1, judge=Generous)


class Counted(Exception):
    """Raised instead of running a ring, with the number of ranks that the check requested."""


class Counting:
    def run_ring(self, world_size: int, *args: Any, **kwargs: Any) -> Any:
        raise Counted(world_size)


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
