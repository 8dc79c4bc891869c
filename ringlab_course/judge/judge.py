"""Grade one notebook (`grade`) or several (`grade_many`), and return a report of each."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ringlab_course.checking.contract import TIERS, Exercise, Stage
from ringlab_course.checking.failures import Crashed, Failure
from ringlab_course.checking.forbidden import OffLimits
from ringlab_course.checking.loading import exercise_ids, load_exercise
from ringlab_course.checking.reports import (
    CheckReport,
    StageReport,
    after_helpers,
    gated,
    not_written,
    run_stage,
)
from ringlab_course.checking.requirements import require_extra, require_triton
from ringlab_course.checking.subject import Subject
from ringlab_course.judge.allowance import READING_S, UnreadableAnswer, reading
from ringlab_course.judge.probe import require
from ringlab_course.judge.right_helpers import graded_again
from ringlab_course.judge.sandbox import MESH_TASKS, Bounds
from ringlab_course.judge.session import SandboxedSubject, Session, shown
from ringlab_course.judge.submission import (
    Submission,
    UnreadableError,
    exercise_of,
    is_notebook,
    read_submission,
)

*SHOWN, HIDDEN = TIERS
UNSAFE = "graded WITHOUT a sandbox (--unsafe): the code ran with all rights of this user"


@dataclass(frozen=True)
class GradeReport:
    """The result of one submission.

    reason: why the submission could not be graded, or why nothing in it counts; otherwise empty.
    label: a warning if the sandbox was off.
    seed: the seed that draws the same probes again.
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
        """The points earned, or 0 if `reason` is not empty."""
        return 0 if self.reason else sum(stage.earned for stage in self.stages)

    @property
    def earned_with_reference(self) -> int:
        """The points earned if each stage is graded with the reference's functions in place of wrong helpers."""
        return 0 if self.reason else sum(stage.earned_with_reference for stage in self.stages)

    @property
    def ok(self) -> bool:
        """Whether every check of every stage holds and `reason` is empty."""
        return not self.reason and bool(self.stages) and all(stage.ok for stage in self.stages)

    def as_dict(self) -> dict[str, Any]:
        """Return the report as data for JSON, with its properties."""
        more = {"earned": self.earned, "earned_with_reference": self.earned_with_reference, "ok": self.ok}
        return {**asdict(self), **more}


def grade(
    path: str | os.PathLike[str],
    exercise: str | Exercise | None = None,
    *,
    unsafe: bool = False,
    seed: int | None = None,
    timeout: float = 20.0,
    total_timeout: float = 300.0,
    bounds: Bounds | None = None,
    patience: float = 1.0,
) -> GradeReport:
    """Return the report of the notebook at `path`, with the checks of all tiers, run in sandboxed workers.

    exercise: the exercise's id ("05") or contract; by default that of the notebook's metadata, or of its
    name.
    seed: the seed of the probes; by default a fresh one.
    timeout: the seconds for each call. total_timeout: the seconds for the whole submission.
    patience: multiplies both times, and the seconds that the checks of a tier may compute; above 1 for slow
    machines.
    A notebook that cannot be read raises no exception. Its report has no points and gives the reason.

    Raises: SandboxError if no sandbox can be set up, unless `unsafe`; CourseError if `exercise` is unknown,
    or if it needs Triton kernels or JAX and the package is not installed.
    """
    if not unsafe:
        require()
    begin, seed = time.monotonic(), secrets.randbits(64) if seed is None else seed
    empty = GradeReport(str(path), "", (), 0, label=UNSAFE if unsafe else "", seed=seed)
    if exercise is not None:
        contract = load_exercise(exercise) if isinstance(exercise, str) else exercise
        empty = replace(empty, exercise=contract.id, points=contract.points)
    try:
        submission = read_submission(path)
        if exercise is None:
            contract = _contract_of(submission, Path(path))
            empty = replace(empty, exercise=contract.id, points=contract.points)
    except UnreadableError as error:
        return replace(empty, reason=": ".join(filter(None, (error.got, error.remedy))))
    functions: dict[str, Sequence[str]] = {name: () for stage in contract.stages for name in stage.helpers}
    functions |= {stage.function: stage.may_change for stage in contract.stages}
    kinds = {stage.kind for stage in contract.stages}
    ring, kernels, mesh = (kind in kinds for kind in ("ring", "kernel", "mesh"))
    if kernels:
        require_triton()
    if mesh:
        require_extra("jax")
        bounds = bounds or Bounds(tasks=MESH_TASKS)
    torch = ring or (submission.mentions_torch and "torch" not in contract.without)
    last: Session | None = None

    def opened(*more: str) -> Session:
        """Return a session that may take as long as the submission's earlier sessions have left."""
        nonlocal last
        left = total_timeout if last is None else last.deadline.left() / patience
        last = Session(
            [*submission.code, *more], functions, torch=torch, kernels=kernels, mesh=mesh, unsafe=unsafe,
            bounds=bounds, limits=OffLimits.of(contract),
            seconds=timeout, total_seconds=left, patience=patience,
        )  # fmt: skip
        last.prestart(2 if ring else 1)
        return last

    with opened() as session:
        stages = _graded(contract, session, submission, seed)
        reason, notes = session.condemned, tuple(session.notes)
    if not reason:
        stages, reason = graded_again(
            contract, stages, opened, lambda stage, session: _whole(stage, session, submission, seed)
        )
    return replace(empty, stages=stages, reason=reason, notes=notes, seconds=time.monotonic() - begin)


def grade_many(
    paths: Iterable[str | os.PathLike[str]], exercise: str | None = None, **options: Any
) -> Iterator[GradeReport]:
    """Yield the report of every notebook in `paths`, which are files or folders of notebooks.

    The options are those of `grade`. A submission that cannot be graded does not stop the others.
    """
    for path in paths:
        folder = Path(path)
        if folder.is_dir() and not folder.is_symlink():
            found = (p for p in folder.rglob("*") if is_notebook(p.name))
            files = sorted(p for p in found if ".ipynb_checkpoints" not in p.parts)
        else:
            files = [folder]
        for file in files:
            yield grade(file, exercise, **options)


def _contract_of(submission: Submission, path: Path) -> Exercise:
    """Return the contract of the exercise that the notebook's metadata name or, failing that, its path."""
    known = exercise_ids()
    named = submission.exercise if submission.exercise in known else exercise_of(path)
    if named:
        return load_exercise(named)
    if submission.exercise is None:
        raise UnreadableError("an exercise notebook", "no cell that is marked as graded", "name the exercise")
    raise UnreadableError("an exercise notebook", "an exercise that does not exist here")


def _graded(
    exercise: Exercise, session: Session, submission: Submission, seed: int
) -> tuple[StageReport, ...]:
    """Return the reports of all stages.

    A report contains no text that a worker wrote after it had seen a hidden probe. So the hidden checks of
    all stages run after all other checks, and the report of a hidden check keeps only the check's own
    message.
    """
    parts = {
        stage.id: [_run(stage, session, submission, tier, seed) for tier in SHOWN]
        for stage in exercise.stages
    }
    session.conceal()
    for stage in exercise.stages:
        if all(part.status != "not written" for part in parts[stage.id]):
            hidden = _run(stage, session, submission, HIDDEN, seed)
            checks = tuple(replace(check, counterexample="") for check in hidden.checks)
            parts[stage.id].append(replace(hidden, checks=checks))
    whole = {stage.function: joined(stage, parts[stage.id]) for stage in exercise.stages}
    return tuple(after_helpers(stage, whole[stage.function], whole) for stage in exercise.stages)


def _whole(stage: Stage, session: Session, submission: Submission, seed: int) -> StageReport:
    """Return the report of a stage's checks of all tiers."""
    parts = [_run(stage, session, submission, tier, seed) for tier in SHOWN]
    if all(part.status != "not written" for part in parts):
        parts.append(_run(stage, session, submission, HIDDEN, seed))
    return joined(stage, parts)


def _run(stage: Stage, session: Session, submission: Submission, tier: str, seed: int) -> StageReport:
    of_stage = [cell for cell in submission.cells if cell.grade == stage.id]
    if of_stage and not any(cell.code for cell in of_stage):
        failure = Crashed(f"The cell of {stage.id} is no longer a code cell: change its type back to code.")
        return not_written(stage, failure, tier)
    session.turn_to(stage.function)
    session.allowance.begin(tier)
    checks = tuple(replace(check, run=_bounded(check.run, session)) for check in stage.checks)
    report = run_stage(replace(stage, checks=checks), SandboxedSubject(session, stage.function), tier, seed)
    return replace(report, checks=tuple(map(_shortened, report.checks)))


def _bounded(run: Callable[..., None], session: Session) -> Callable[..., None]:
    """Return the function of a check, with a limit on the judge's own time and memory."""

    def bounded(subject: Subject, rng: Any) -> None:
        try:
            with reading(READING_S * session.allowance.patience):
                run(subject, rng)
        except UnreadableAnswer:  # a worker may still run its call, so all workers are ended
            session.discard_all()
            raise

    return bounded


def _shortened(report: CheckReport) -> CheckReport:
    """Return the report with texts of limited length, because they quote answers and are stored."""
    return replace(report, message=shown(report.message), counterexample=shown(report.counterexample))


def joined(stage: Stage, parts: Sequence[StageReport]) -> StageReport:
    """Return one report made from `parts`, with checks in the contract's order.

    A function that is unwritten in one part counts as unwritten.
    """
    for part in parts:
        if part.status == "not written" and part.checks:
            return not_written(stage, Failure(part.checks[0].message, part.checks[0].counterexample))
    found = {report.id: report for part in parts for report in part.checks}
    reports = [found[check.id] for check in stage.checks if check.id in found]
    return StageReport(stage.id, "ok" if all(report.ok for report in reports) else "wrong", gated(reports))
