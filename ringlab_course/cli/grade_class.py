"""Grade a class into its gradebook, keep existing results, and write the result files."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from ringlab.cli.output import finish, people, print_json, progress_bar
from ringlab.errors import CourseError
from ringlab_course.cli.grading import (
    PoolOfFittingSize,
    Request,
    UnderWay,
    above,
    exit_status,
    stoppable,
    tell,
)

if TYPE_CHECKING:
    from ringlab_course.gradebook.entry import Entry, Ungraded
    from ringlab_course.gradebook.pool import Job
    from ringlab_course.gradebook.runner import Run
    from ringlab_course.gradebook.store import Gradebook


def grade_into_book(request: Request) -> None:
    """Grade the submissions without a result into the gradebook, write the requested files, and end.

    Without --book the gradebook is in memory.
    """
    from ringlab_course.gradebook.collect import collect, learner_called
    from ringlab_course.gradebook.store import Gradebook

    if request.regrade and request.book is None:
        raise CourseError("a gradebook for --regrade", "no --book", "name the gradebook with --book FILE")
    if request.html is not None:
        from ringlab_course.gradebook.pages import require_pages

        require_pages()  # if pages cannot be written, fail before anything is graded
    learner = None if request.learner is None else learner_called(request.learner)
    with Gradebook(request.book) as book:
        if request.seed is not None:
            book.use_class_seed(request.seed)
        collection = collect(request.paths, request.only, learner)
        _refuse_unknown(request, {each.exercise for each in collection.submissions})
        stop, run = _run(book, collection.submissions, request)
        run.notes[:0] = collection.notes
        keys = {each.key for each in collection.submissions}
        entries = [entry for entry in book.entries() if (entry.learner, entry.exercise) in keys]
        if not request.as_json:
            _tell_class(entries, run, request)
        write_files(book, request.csv, request.json_file, request.html)
        ok = bool(keys) and not run.ungraded and stop is None
        if not keys:
            run.notes.append("no notebooks found there")
        tell(run.notes)
        if request.as_json:
            _print_class(ok, entries, run, stopped=stop is not None)
    if stop is not None:
        raise typer.Exit(exit_status(stop))
    finish(ok)


def write_files(book: Gradebook, csv: Path | None, json_file: Path | None, html: Path | None) -> None:
    """Write the whole gradebook in each form (CSV, JSON, pages) whose path is given."""
    from ringlab_course.gradebook.export import csv_text, json_text, write

    entries, ungraded = book.entries(), book.ungraded()
    for path, text in ((csv, csv_text), (json_file, json_text)):
        if path is not None:
            write(path, text(entries, ungraded))
    if html is not None:
        from ringlab_course.gradebook.pages import write_pages

        title = book.path.stem if book.path else "Grades"
        write_pages(entries, html, title, ungraded=ungraded)


def _refuse_unknown(request: Request, exercises: set[str]) -> None:
    if strange := sorted(request.regrade - exercises):
        known = ", ".join(sorted(filter(None, exercises))) or "none"
        raise CourseError(
            "--regrade with exercises that were handed in", ", ".join(strange), f"there are: {known}"
        )


def _run(book: Gradebook, submissions: list[Any], request: Request) -> tuple[KeyboardInterrupt | None, Run]:
    from ringlab_course.gradebook.runner import Run, Watch, grade_class

    run = Run()
    with progress_bar() as bar, stoppable():
        task = bar.add_task("grade", total=None)
        under_way = UnderWay(bar, task)

        def planned(count: int) -> None:
            bar.update(task, total=count)

        def ended(job: Job, result: Entry | Ungraded) -> None:
            under_way.end(job)
            if not request.as_json and request.book is not None:
                above(bar).print(_line(result), highlight=False, soft_wrap=True)

        try:
            grade_class(
                book, submissions, PoolOfFittingSize(request), unsafe=request.unsafe, patience=request.patience,
                regrade=request.regrade, watch=Watch(planned, under_way.begin, ended), run=run,
            )  # fmt: skip
        except KeyboardInterrupt as stop:
            return stop, run
    return None, run


def _line(result: Entry | Ungraded) -> str:
    from ringlab_course.gradebook.entry import Ungraded
    from ringlab_course.gradebook.readable import headline

    if isinstance(result, Ungraded):
        return f"{result.learner}  {result.exercise or '?'}: not graded: {result.reason}"
    return headline(result)


def _tell_class(entries: list[Entry], run: Run, request: Request) -> None:
    from ringlab_course.gradebook.readable import headline

    # With a gradebook, each result was printed as soon as it was graded.
    for entry in entries if request.book is None else ():
        people.print(headline(entry), highlight=False, soft_wrap=True)
    summary = (
        f"{len(run.graded)} graded, {len(run.kept)} had their result, {len(run.ungraded)} could not be graded"
    )
    people.print(summary, highlight=False)


def _print_class(ok: bool, entries: list[Entry], run: Run, *, stopped: bool) -> None:
    from ringlab_course.gradebook.export import entry_data, ungraded_data

    print_json(
        {
            "ok": ok, "submissions": [entry_data(entry) for entry in entries],
            "not_graded": [ungraded_data(each) for each in run.ungraded],
            "graded": len(run.graded), "kept": len(run.kept), "notes": run.notes, "stopped": stopped,
        }
    )  # fmt: skip
