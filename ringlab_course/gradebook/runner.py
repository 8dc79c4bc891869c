"""Grading a class into its gradebook: existing results are left alone, and all else that can be graded is graded.

A result that older checks gave stands until its exercise is graded anew on request, and the run says so.
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
    """The outcome of a run: entries that it graded, entries that had a result already, and those it could not grade.

    The entries come without their reports, which are in the book: a run over hundreds holds no more than one over a few.
    """

    graded: list[Entry] = field(default_factory=list)
    kept: list[Entry] = field(default_factory=list)
    ungraded: list[Ungraded] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


@dataclass
class Watch:
    """Whom a run tells what happens; each does nothing by default."""

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
    """Return what was graded; each result is in the book before the next is waited for.

    Killed at any moment and called again, it ends with the book of an undisturbed run. What we fail
    to grade is kept as such and tried again the next time. regrade: exercises that are graded anew.
    patience: multiplies all limits of time, for slow machines.
    `run` is filled as results come, for callers that interrupt. Raises: CourseError where another
    run writes this book.
    """
    watch, run = watch or Watch(), run or Run()
    with book.sole_writer():
        ask_again(book, submissions, regrade, run)
        todo = _todo(book, submissions, unsafe, run)
        jobs = [_job(book, number, each, unsafe, patience) for number, each in enumerate(todo)]
        watch.planned(len(jobs))
        with contextlib.closing(
            pool.run(jobs, watch.started)
        ) as outcomes:  # closed at once where it is stopped
            for outcome in outcomes:
                result = _record(book, todo[outcome.number], outcome, unsafe)
                if isinstance(result, Entry):
                    run.graded.append(_without_report(result))
                else:
                    run.ungraded.append(result)
                watch.ended(jobs[outcome.number], result)
    return run


def ask_again(book: Gradebook, submissions: Sequence[HandedIn], regrade: Collection[str], run: Run) -> None:
    """Ask for the results of the exercises `regrade` anew, or go on where that was interrupted."""
    outstanding = book.wanted()
    graded = {(entry.learner, entry.exercise) for entry in book.entries()}
    for exercise in regrade:
        keys = {each.key for each in submissions if each.exercise == exercise} & graded
        if left := keys & outstanding:
            run.notes.append(f"regrading {exercise} was interrupted and goes on: {len(left)} submissions")
        else:
            book.want(keys)


def _todo(book: Gradebook, submissions: Sequence[HandedIn], unsafe: bool, run: Run) -> list[HandedIn]:
    """Return what has no result yet, or is to have a new one."""
    entries = {(entry.learner, entry.exercise): entry for entry in book.entries()}
    todo = []
    for each in submissions:
        entry = entries.get(each.key)
        if entry and entry.digest == each.digest and entry.submitted_at and not each.stamped:
            each = replace(each, submitted_at=entry.submitted_at)  # a copied file has a new time
        contract = contract_version(each.exercise, unsafe=unsafe)
        if entry and book.is_graded(each.learner, each.exercise, each.digest, contract, each.submitted_at):
            run.kept.append(_without_report(entry))
        else:
            todo.append(each)
    run.notes += older_checks_notes(run.kept)
    return todo


def older_checks_notes(entries: Iterable[Entry]) -> list[str]:
    """Return a line about results of older checks and how to grade them again; an empty list without such results."""
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
