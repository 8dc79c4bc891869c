"""Measure the judge: submissions per minute, the time of each phase, and whether its memory use grows."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ringlab.bench.device import machine
from ringlab.errors import CourseError
from ringlab.temporary import TemporaryFolder
from ringlab_course.bench.four_ranks import FOUND, PHASES, FourRanks, Watched, rss_kib
from ringlab_course.checking.wrong_answers import wrong_answers
from ringlab_course.gradebook.collect import handed_in
from ringlab_course.gradebook.pool import LocalPool
from ringlab_course.gradebook.runner import Run, Watch, grade_class
from ringlab_course.gradebook.store import Gradebook
from ringlab_course.judge.process import WorkerProcess

SOLUTIONS = Path("solutions")
EXERCISES = {"numpy": "01", "ring": "05", "eight": "05", "flat": "01"}
"""The exercise of each kind of measurement.

numpy is attention in NumPy, with one worker. ring is the ring program on four ranks. eight is the ring
program and its other functions as the course grades them, on one to eight ranks. Each rank is a worker with
torch.
"""
WARM = 0.2
"""The share of a process's submissions that its memory slope leaves out, because caches still fill then."""
Tick = Callable[[], None]


def bench_judge(
    counts: dict[str, int], processes: int = 2, checkout: Path | None = None, tick: Tick = lambda: None
) -> dict[str, Any]:
    """Return rates, times and memory as JSON data, for each kind in `counts` (numpy, ring, eight, flat).

    Submissions are copies of the solution; every other copy contains one of the course's own wrong answers.
    They pass through the runner, a pool and a gradebook, just as `ringlab grade` sends them.
    Raises: CourseError outside of a checkout, and if a submission gets the wrong grade.
    """
    checkout = checkout or Path.cwd()
    parts = {
        kind: measure(
            notebooks(checkout, EXERCISES[kind], count, FOUND if kind == "ring" else ()),
            EXERCISES[kind],
            processes,
            tick,
            FourRanks if kind == "ring" else Watched,
        )
        for kind, count in counts.items()
        if count
    }
    return {
        "bench": "judge",
        "processes": processes,
        "handed_out_s": {arrays: handed_out_s(arrays) for arrays in ("numpy", "torch")},
        **parts,
        "machine": machine(),
    }


def handed_out_s(arrays: str, times: int = 21) -> float:
    """Return the median seconds from asking for a worker until it can take calls.

    The first worker is not counted, because its server has to start first.
    """
    seconds = []
    for _ in range(1 + times):
        begin = time.perf_counter()
        with WorkerProcess(arrays=arrays) as worker:
            worker.ready()
            seconds.append(time.perf_counter() - begin)
    return round(statistics.median(seconds[1:]), 4)


def notebooks(
    checkout: Path, exercise: str, count: int, found_by: Sequence[str] = ()
) -> list[tuple[str, bool]]:
    """Return `count` different notebooks as pairs (text, is_right), alternately right and wrong.

    found_by: checks such as "05.forward:values". Only wrong answers that one of these checks must find are
    used; all wrong answers if empty.
    """
    solutions = sorted((checkout / SOLUTIONS).glob(f"{exercise}_*.ipynb"))
    if not solutions:
        raise CourseError("a checkout with solutions", str(checkout), "change into the checkout")
    wrong = [
        (answer.stage, answer.source)
        for answer in sorted(wrong_answers(exercise), key=lambda each: each.name)
        if not found_by or answer.finder in found_by
    ]
    text = solutions[0].read_text(encoding="utf-8")
    return [
        (
            _changed(json.loads(text), number, wrong[number // 2 % len(wrong)] if number % 2 else None),
            not number % 2,
        )
        for number in range(count)
    ]


def _changed(document: dict[str, Any], number: int, wrong: tuple[str, str] | None) -> str:
    if wrong is not None:
        stage, source = wrong
        for cell in document["cells"]:
            if cell["metadata"].get("grade") == stage:
                cell["source"] = source
    document["metadata"]["copy"] = number
    return json.dumps(document)


def measure(
    submissions: Sequence[tuple[str, bool]], exercise: str, processes: int, tick: Tick = lambda: None,
    judge: Callable[[Path], Any] = Watched,
) -> dict[str, Any]:  # fmt: skip
    """Grade these notebooks and return rates, times and memory; `judge(folder)` returns the grader."""
    with TemporaryFolder(prefix="ringlab-bench-") as folder:
        notes = Path(folder, "notes")
        notes.mkdir()
        for number, (text, _) in enumerate(submissions):
            learner = Path(folder, "submitted", f"{number:04}")
            learner.mkdir(parents=True)
            (learner / f"{exercise}.ipynb").write_text(text, encoding="utf-8")
        root = Path(folder, "submitted")
        handed = [handed_in(path, root, exercise) for path in sorted(root.glob("*/*.ipynb"))]
        own: list[int] = []

        def ended(job: Any, result: Any) -> None:
            own.append(rss_kib())
            tick()

        with Gradebook(Path(folder, "book.db")) as book:
            begin = time.monotonic()
            run = grade_class(book, handed, LocalPool(processes, judge(notes)), watch=Watch(ended=ended))
            wall_s = time.monotonic() - begin
        _refuse_wrong_grades(run, [right for _, right in submissions])
        series = [_lines(path) for path in sorted(notes.glob("*.jsonl"))]
    return {"exercise": exercise, "submissions": len(submissions), **_summary(wall_s, own, series)}


def _refuse_wrong_grades(run: Run, right: Sequence[bool]) -> None:
    """Raise CourseError unless exactly the right answers got full marks.

    Otherwise a judge that refuses everything would seem fast.
    """
    odd = [
        f"another grade for {e.learner}"
        for e in run.graded
        if (e.earned == e.maximum) != right[int(e.learner)]
    ]
    odd += [f"{each.learner} not graded: {each.reason}" for each in run.ungraded]
    if odd:
        raise CourseError(f"{len(right)} grades, with full marks for right answers only", "; ".join(odd[:5]))


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def _summary(wall_s: float, own: list[int], series: list[list[dict[str, Any]]]) -> dict[str, Any]:
    lines = [line for each in series for line in each]
    memory = {"runner": own} | {
        f"judge {number + 1}": [line["rss_kib"] for line in each] for number, each in enumerate(series)
    }
    return {
        "wall_s": round(wall_s, 2),
        "per_minute": round(60 * len(lines) / wall_s, 1),
        "seconds_each": {phase: _mean(line["seconds"][phase] for line in lines) for phase in PHASES},
        "cpu_s_each": {of: _mean(line["cpu_s"][of] for line in lines) for of in ("judge", "workers")},
        "workers_each": _mean(line["workers"] for line in lines),
        "memory": {of: memory_of(sizes) for of, sizes in memory.items()},
    }


def _mean(values: Any) -> float:
    return round(statistics.fmean(values), 3)


def memory_of(sizes_kib: Sequence[int]) -> dict[str, Any]:
    """Return the memory that a process uses, in MiB, and its growth with each submission, in KiB.

    The growth is the slope of a least-squares line without the first fifth of the values. It is None if
    fewer than ten values are left.
    """
    steady = sizes_kib[int(WARM * len(sizes_kib)) :]
    slope = np.polyfit(range(len(steady)), steady, 1)[0] if len(steady) >= 10 else None
    return {
        "submissions": len(sizes_kib),
        "first_mib": round(sizes_kib[0] / 1024, 1),
        "last_mib": round(sizes_kib[-1] / 1024, 1),
        "most_mib": round(max(sizes_kib) / 1024, 1),
        "kib_per_submission": None if slope is None else round(float(slope), 2),
        "every_tenth_mib": [round(size / 1024, 1) for size in sizes_kib[::10]],
    }
