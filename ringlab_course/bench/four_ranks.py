"""Time the judge on exercise 05's forward ring with four ranks, one notebook after the other.

The checks are those of exercise 05 that need no more than four ranks. The run records how much wall time,
processor time and memory each phase of judging takes.
"""

from __future__ import annotations

import functools
import json
import os
import re
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from ringlab_course.checking.contract import Check, Exercise
from ringlab_course.checking.loading import load_exercise
from ringlab_course.checking.positions import compare_ranks, expect_bytes, expect_neighbours, narrow, shards

PHASES = ("start", "load", "calls", "checks", "rest")
"""Waiting for workers to start, loading the code, calls of the code, the checks themselves, and the rest."""


class Stopwatch:
    """The seconds spent in each phase. Time in a nested phase counts only for the nested phase."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._open: list[list[float]] = []

    def timed(self, phase: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return `function`, wrapped so that its time counts for `phase`."""

        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            begin, inside = time.perf_counter(), [0.0]
            self._open.append(inside)
            try:
                return function(*args, **kwargs)
            finally:
                self._open.pop()
                whole = time.perf_counter() - begin
                self.seconds[phase] += whole - inside[0]
                if self._open:
                    self._open[-1][0] += whole

        return timed


class Watched:
    """`ringlab_course.judge.grade` with measurements, written to a file in `folder`: one line per submission.

    Objects of this class can be pickled. Each process of a pool installs its stopwatch when it grades its
    first notebook.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(self, path: Path, exercise: Exercise | str | None, **options: Any) -> Any:
        watch = _watch()
        watch.begin()
        report = watch.grade(path, exercise, **options)
        self.note(watch.end())
        return report

    def note(self, counted: dict[str, Any]) -> None:
        """Append one submission's measurements, and this process's current memory, to this process's file."""
        with open(self.folder / f"{os.getpid()}.jsonl", "a", encoding="utf-8") as file:
            file.write(json.dumps({**counted, "rss_kib": rss_kib()}) + "\n")


class _Watch:
    def __init__(self) -> None:
        from ringlab_course.judge import judge
        from ringlab_course.judge.process import WorkerProcess
        from ringlab_course.judge.session import SandboxedSubject, Session

        self.stopwatch, self.workers, self.worker_cpu = Stopwatch(), 0, 0.0
        for phase, owner, names in (
            ("start", WorkerProcess, ("__init__", "ready", "kill")),
            ("load", Session, ("_load",)),
            ("calls", SandboxedSubject, ("measure", "record", "run_ring")),
            ("checks", judge, ("_graded",)),
        ):
            for name in names:
                setattr(owner, name, self.stopwatch.timed(phase, getattr(owner, name)))
        self._count_workers(WorkerProcess)
        self.grade = self.stopwatch.timed("rest", judge.grade)

    def _count_workers(self, process: Any) -> None:
        kill = process.kill

        def counted(worker: Any) -> None:
            if not worker.ended:
                self.workers += 1
                self.worker_cpu += cpu_seconds(worker.pid)
            kill(worker)

        process.kill = counted

    def begin(self) -> None:
        """Reset all measurements."""
        self.stopwatch.seconds.clear()
        self.workers, self.worker_cpu, self.own_cpu = 0, 0.0, time.process_time()

    def end(self) -> dict[str, Any]:
        """Return the measurements since `begin`."""
        seconds = {phase: round(self.stopwatch.seconds[phase], 4) for phase in PHASES}
        cpu = {"judge": time.process_time() - self.own_cpu, "workers": self.worker_cpu}
        return {
            "seconds": seconds,
            "cpu_s": {of: round(spent, 3) for of, spent in cpu.items()},
            "workers": self.workers,
        }


@functools.cache
def _watch() -> _Watch:
    return _Watch()


def cpu_seconds(pid: int) -> float:
    """Return the processor seconds that all threads of a process have used, or 0 if it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def rss_kib() -> int:
    """Return the resident memory of this process, in KiB."""
    found = re.search(r"^VmRSS:\s*(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    return int(found[1]) if found else 0


RANKS = 4
STAGE = "05.forward"
FOUND = tuple(f"{STAGE}:{check}" for check in ("values", "rounds", "bytes", "sloped"))
"""The checks of exercise 05 for which four ranks are enough to find wrong answers."""


class FourRanks(Watched):
    """A grader that always uses the four-rank contract, whatever exercise it is given."""

    def __call__(self, path: Path, exercise: Exercise | str | None, **options: Any) -> Any:
        return super().__call__(path, four_ranks(), **options)


def four_ranks() -> Exercise:
    """Return exercise 05's forward stage with four checks: values, traffic, large scores and bfloat16."""
    exercise = load_exercise("05")
    checks = (
        Check("values", 3, "visible", "out and lse equal full attention", _values),
        Check("traffic", 3, "visible", "3 exchanges, and the bytes of K and V", _traffic, kind="cost"),
        Check("sloped", 2, "stress", "large scores that grow along the sequence", _sloped),
        Check("bfloat16", 1, "held-out", "bfloat16 inputs, float32 in the state", _bfloat16),
    )
    return replace(exercise, stages=(replace(exercise.stage(STAGE), checks=checks),))


def _values(subject: Any, rng: np.random.Generator) -> None:
    for L, H, K in ((1, 1, 1), (4, 2, 1), (3, 4, 2)):
        case = shards(rng, [L] * RANKS, H, K, 8)
        compare_ranks(case, case.run(subject).results)


def _traffic(subject: Any, rng: np.random.Generator) -> None:
    for H, K in ((1, 1), (4, 2)):
        case = shards(rng, [4] * RANKS, H, K, 4)
        trace = case.run(subject).trace
        expect_neighbours(trace, case.text)
        expect_bytes(case, trace, H // K)


def _sloped(subject: Any, rng: np.random.Generator) -> None:
    case = shards(rng, [3] * RANKS, 1, 1, 4, size=30.0)
    for origin, k in enumerate(case.ks):
        k += 3.0 * origin
    compare_ranks(case, case.run(subject).results)


def _bfloat16(subject: Any, rng: np.random.Generator) -> None:
    case = narrow(shards(rng, [4] * RANKS, 1, 1, 16))
    compare_ranks(case, case.run(subject).results)
