"""A notebook in, a report out: `grade` and `grade_many`."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ringlab.course.contract import Crashed, Exercise, Stage
from ringlab.course.contracts import load_exercise
from ringlab.course.judge.probe import require
from ringlab.course.judge.sandbox import Bounds
from ringlab.course.judge.session import SandboxedSubject, Session
from ringlab.course.judge.submission import Submission, UnreadableError, read_submission
from ringlab.course.kernels import require_triton
from ringlab.course.reports import CheckReport, StageReport, not_written, run_stage
from ringlab.errors import CourseError

UNSAFE = "graded WITHOUT a sandbox (--unsafe): the code ran with all rights of this user"


@dataclass(frozen=True)
class GradeReport:
    """What one submission earned.

    reason: why nothing could be graded, or nothing counts; empty otherwise. label: says so when
    the sandbox was off. seed: draws the same probes again.
    """

    path: str
    exercise: str
    stages: tuple[StageReport, ...]
    points: int
    reason: str = ""
    notes: tuple[str, ...] = ()
    label: str = ""
    seed: int = 0
    seconds: float = 0.0

    @property
    def earned(self) -> int:
        """The points earned; none where there is a reason."""
        return 0 if self.reason else sum(stage.earned for stage in self.stages)

    @property
    def ok(self) -> bool:
        """Whether everything holds."""
        return not self.reason and bool(self.stages) and all(stage.ok for stage in self.stages)

    def as_dict(self) -> dict[str, Any]:
        """Return the report as JSON-able data, with `ok` and `earned`."""
        return {**asdict(self), "earned": self.earned, "ok": self.ok}


def grade(
    path: str | os.PathLike[str],
    exercise: str | Exercise | None = None,
    *,
    unsafe: bool = False,
    seed: int | None = None,
    timeout: float = 20.0,
    total_timeout: float = 300.0,
    bounds: Bounds | None = None,
) -> GradeReport:
    """Return the report of the notebook at `path`, all tiers, in sandboxed workers.

    exercise: its id ("05") or contract; by default what the notebook's metadata say. seed: of the
    probes, fresh ones by default. timeout: seconds per call; total_timeout: per submission.
    A notebook that cannot be read earns nothing, with a reason; it raises nothing.

    Raises: SandboxError where no sandbox can be set up, unless `unsafe`; CourseError if `exercise`
    is given and unknown, or if it asks for Triton kernels and Triton is not installed here.
    """
    if not unsafe:
        require()
    begin, seed = time.monotonic(), int.from_bytes(os.urandom(8), "big") if seed is None else seed
    empty = GradeReport(str(path), "", (), 0, label=UNSAFE if unsafe else "", seed=seed)
    if exercise is not None:
        contract = load_exercise(exercise) if isinstance(exercise, str) else exercise
        empty = replace(empty, exercise=contract.id, points=contract.points)
    try:
        submission = read_submission(path)
        if exercise is None:
            contract = _contract_of(submission)
            empty = replace(empty, exercise=contract.id, points=contract.points)
    except UnreadableError as error:
        return replace(empty, reason=": ".join(filter(None, (error.got, error.remedy))))
    functions = sorted({name for stage in contract.stages for name in (stage.function, *stage.helpers)})
    kinds = {stage.kind for stage in contract.stages}
    ring, kernels = "ring" in kinds, "kernel" in kinds
    if kernels:
        require_triton()
    with Session(
        submission.code, functions, torch=ring or submission.mentions_torch, kernels=kernels, unsafe=unsafe,
        bounds=bounds, seconds=timeout, total_seconds=total_timeout,
    ) as session:  # fmt: skip
        session.prestart(2 if ring else 1)
        stages = tuple(_graded(stage, session, submission, seed) for stage in contract.stages)
        return replace(
            empty, stages=stages, reason=session.condemned, notes=tuple(session.notes),
            seconds=time.monotonic() - begin,
        )  # fmt: skip


def grade_many(
    paths: Iterable[str | os.PathLike[str]], exercise: str | None = None, **options: Any
) -> Iterator[GradeReport]:
    """Yield the report of every notebook in `paths`, files or folders of them, one after the other.

    `options` as for `grade`. A submission that cannot be graded never stops the others.
    """
    for path in paths:
        folder = Path(path)
        if folder.is_dir() and not folder.is_symlink():
            files = sorted(p for p in folder.rglob("*.ipynb") if ".ipynb_checkpoints" not in p.parts)
        else:
            files = [folder]
        for file in files:
            yield grade(file, exercise, **options)


def _contract_of(submission: Submission) -> Exercise:
    if submission.exercise is None:
        raise UnreadableError("an exercise notebook", "no cell that is marked as graded", "name the exercise")
    try:
        return load_exercise(submission.exercise)
    except CourseError:
        raise UnreadableError("an exercise notebook", "an exercise that does not exist here") from None


def _graded(stage: Stage, session: Session, submission: Submission, seed: int) -> StageReport:
    if any(cell.grade == stage.id and not cell.code for cell in submission.cells) and not any(
        cell.grade == stage.id and cell.code for cell in submission.cells
    ):
        return not_written(
            stage, Crashed(f"The cell of {stage.id} is no code cell any more: change it back to code.")
        )
    report = run_stage(stage, SandboxedSubject(session, stage.function), "all", seed)
    return replace(report, checks=tuple(_without_probe(check) for check in report.checks))


def _without_probe(check: CheckReport) -> CheckReport:
    """A hidden check says what is wrong, never on which input."""
    return replace(check, counterexample="") if check.tier == "held-out" else check
