"""Grade a class into its gradebook: keep existing results, and grade all submissions without a result.

A result from older checks is kept until the user asks to grade its exercise again. The run reports such
results.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace

from ringlab.errors import RinglabError
from ringlab_course.gradebook.collect import HandedIn
from ringlab_course.gradebook.entry import Entry, Ungraded
from ringlab_course.gradebook.pool import Job, Outcome, Pool, one_line
from ringlab_course.gradebook.readable import shown_name
from ringlab_course.gradebook.store import Gradebook
from ringlab_course.gradebook.versions import contract_version, seed_of


@dataclass
class Run:
    """The outcome of a run: entries that it graded, entries that already had a result, and failures to grade.

    The entries come without their reports, which are in the gradebook, so that a run over a large class needs
    no more memory.
    """

    graded: list[Entry] = field(default_factory=list)
    kept: list[Entry] = field(default_factory=list)
    ungraded: list[Ungraded] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


@dataclass
class Watch:
    """The functions that a run calls to report its progress. Each does nothing by default."""

    planned: Callable[[int], None] = lambda count: None
    started: Callable[[Job], None] = lambda job: None
    ended: Callable[[Job, Entry | Ungraded], None] = lambda job, result: None


def grade_class(
    book: Gradebook,
    submissions: Sequence[HandedIn],
    pool: Pool,
    *,
    unsafe: bool = False,
    patience: float = 1.0,
    regrade: Collection[str] = (),
    watch: Watch | None = None,
    run: Run | None = None,
) -> Run:
    """Grade the submissions, store each result before waiting for the next one, and return the run.

    If the run is killed at any moment and repeated, the gradebook ends up as if it had not been killed.
    Submissions that we fail to grade are recorded and tried again in the next run.
    regrade: exercises that are graded again.
    patience: multiplies all time limits, for slow machines.
    run: filled as results arrive, for callers that interrupt.
    Raises: CourseError if another run is writing this gradebook.
    """
    watch, run = watch or Watch(), run or Run()
    with book.sole_writer():
        ask_again(book, submissions, regrade, run)
        todo = _todo(book, submissions, unsafe, run)
        jobs = [_job(book, number, each, unsafe, patience) for number, each in enumerate(todo)]
        watch.planned(len(jobs))
        with contextlib.closing(
            pool.run(jobs, watch.started)
        ) as outcomes:  # the pool is closed at once if the run is stopped
            for outcome in outcomes:
                result = _record(book, todo[outcome.number], outcome, unsafe)
                if isinstance(result, Entry):
                    run.graded.append(_without_report(result))
                else:
                    run.ungraded.append(result)
                watch.ended(jobs[outcome.number], result)
    return run


def ask_again(book: Gradebook, submissions: Sequence[HandedIn], regrade: Collection[str], run: Run) -> None:
    """Request new results for the exercises `regrade`, or continue an interrupted regrading."""
    outstanding = book.wanted()
    graded = {(entry.learner, entry.exercise) for entry in book.entries()}
    for exercise in regrade:
        keys = {each.key for each in submissions if each.exercise == exercise} & graded
        if left := keys & outstanding:
            run.notes.append(f"regrading {exercise} was interrupted and goes on: {len(left)} submissions")
        else:
            book.want(keys)


def _todo(book: Gradebook, submissions: Sequence[HandedIn], unsafe: bool, run: Run) -> list[HandedIn]:
    """Return the submissions that have no result yet, or are to get a new one."""
    entries = {(entry.learner, entry.exercise): entry for entry in book.entries()}
    todo = []
    for each in submissions:
        entry = entries.get(each.key)
        if entry and entry.digest == each.digest and entry.submitted_at and not each.stamped:
            # a copied file's time of change is not the time of submission
            each = replace(each, submitted_at=entry.submitted_at)
        contract = contract_version(each.exercise, unsafe=unsafe)
        if entry and book.is_graded(each.learner, each.exercise, each.digest, contract, each.submitted_at):
            run.kept.append(_without_report(entry))
        else:
            todo.append(each)
    run.notes += older_checks_notes(run.kept)
    return todo


def older_checks_notes(entries: Iterable[Entry]) -> list[str]:
    """Return a line that says how to grade results from older checks again, if there are any."""
    counts = sorted(Counter(entry.exercise for entry in entries if entry.older_checks).items())
    if not counts:
        return []
    counted = ", ".join(f"{count} of exercise {exercise}" for exercise, count in counts)
    options = " ".join(f"--regrade {exercise}" for exercise, _ in counts)
    return [f"graded by older checks, and kept as they are: {counted}; {options} grades them again"]


def _without_report(entry: Entry) -> Entry:
    return replace(entry, report={})


def _job(book: Gradebook, number: int, each: HandedIn, unsafe: bool, patience: float) -> Job:
    seed = seed_of(book.class_seed, each.learner, each.exercise, each.digest)
    name = f"{each.learner} {each.exercise}".strip()
    return Job(number, each.path, each.exercise, each.digest, seed, unsafe, name, patience)


def _record(book: Gradebook, each: HandedIn, outcome: Outcome, unsafe: bool) -> Entry | Ungraded:
    reason = outcome.reason
    if outcome.report is not None and outcome.contract != contract_version(each.exercise, unsafe=unsafe):
        reason = "it was graded with other checks than those of this machine: install the same ringlab there"
    if not reason and outcome.report is not None:
        try:
            return book.record(
                learner=each.learner, exercise=each.exercise, path=shown_name(each.path), digest=outcome.digest,
                contract=outcome.contract, report=outcome.report, submitted_at=each.submitted_at,
            )  # fmt: skip
        except (RinglabError, ValueError, OverflowError) as error:
            reason = one_line(error)
    failed = Ungraded(each.learner, each.exercise, shown_name(each.path), each.digest, reason, "")
    book.record_ungraded(failed)
    return next(e for e in book.ungraded() if (e.learner, e.exercise) == each.key)
