"""Grading one notebook, as a worker does it: a report, or why there is none. Nothing is raised."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from ringlab.errors import RinglabError
from ringlab_course.gradebook.digest import digest_of
from ringlab_course.gradebook.versions import contract_version

Judge = Callable[..., Any]


@dataclass(frozen=True)
class Job:
    """One notebook to grade. digest: that it must have, "" for any. seed: None for a fresh one. patience: see `grade`."""

    number: int
    path: Path
    exercise: str
    digest: str
    seed: int | None
    unsafe: bool = False
    name: str = ""
    patience: float = 1.0


@dataclass(frozen=True)
class Outcome:
    """What came of a job: `report` (`GradeReport.as_dict()`), or the `reason` why we could not grade."""

    number: int
    report: dict[str, Any] | None
    digest: str = ""
    contract: str = ""
    reason: str = ""
    error: RinglabError | None = None


class Pool(Protocol):
    """What grades jobs side by side."""

    def run(self, jobs: Sequence[Job], started: Callable[[Job], None]) -> Generator[Outcome, None, None]:
        """Yield an outcome for every job, as they come; `started` hears of each that begins."""
        ...


def carry_out(job: Job, judge: Judge | None = None) -> Outcome:
    """Return what `judge`, by default ours, makes of the job. A failure of ours is no zero: it has a reason."""
    try:
        if judge is None:
            from ringlab_course.judge import grade

            judge = grade
        digest = digest_of(job.path)
        if job.digest and digest != job.digest:
            return Outcome(job.number, None, reason="the file changed after the run began")
        contract = contract_version(job.exercise, unsafe=job.unsafe)
        how: dict[str, Any] = {"unsafe": job.unsafe, "seed": job.seed, "patience": job.patience}
        report = judge(job.path, job.exercise or None, **how).as_dict()
        if digest_of(job.path) != digest:
            return Outcome(job.number, None, reason="the file changed while it was graded")
        return Outcome(job.number, report, digest, contract)
    except RinglabError as error:
        return Outcome(job.number, None, reason=one_line(error), error=error)
    except Exception as error:
        return Outcome(job.number, None, reason=one_line(error))


def carry_out_elsewhere(job: Job, data: bytes, judge: Judge | None = None) -> Outcome:
    """Return the outcome of a job whose notebook came as bytes, to a machine that has no such file."""
    try:
        with tempfile.TemporaryDirectory(prefix="ringlab-") as folder:
            path = Path(folder) / "notebook.ipynb"
            path.write_bytes(data)
            return carry_out(replace(job, path=path), judge)
    except OSError as error:
        return Outcome(job.number, None, reason=one_line(error))


class Here:
    """Grades in this process, one after the other."""

    def __init__(self, judge: Judge | None = None) -> None:
        self.judge = judge

    def run(self, jobs: Sequence[Job], started: Callable[[Job], None]) -> Generator[Outcome, None, None]:
        """Yield an outcome for every job, in their order."""
        for job in jobs:
            started(job)
            yield carry_out(job, self.judge)


def one_line(error: BaseException) -> str:
    """Return an error as a line of bounded length."""
    told = ": ".join(filter(None, (type(error).__name__, " ".join(str(error).split()))))
    return "".join(c if c.isprintable() else "�" for c in told[:1000])


def cores() -> int:
    """Return how many processors this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1
