"""`ringlab gradebook show|override|policy|export|report`: the instructor's commands for a gradebook."""

from __future__ import annotations

import getpass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from ringlab.cli.output import Json, people, print_json, reporting_errors
from ringlab.errors import CourseError

app = typer.Typer(help="Read a gradebook, override scores, write files and pages.", no_args_is_help=True)

Book = Annotated[Path, typer.Argument(help="The file that `ringlab grade --book` wrote.")]
Exercise = Annotated[str | None, typer.Option("--exercise", help="Only this one, as in 05.")]
Learner = Annotated[str | None, typer.Option("--learner", help="Only this one.")]


@app.command("show")
def show(
    book: Book,
    exercise: Exercise = None,
    learner: Learner = None,
    explain: Annotated[
        bool,
        typer.Option(
            "--explain", help="Show the message, the mistake, a hint and the time of each failed check."
        ),
    ] = False,
    history: Annotated[
        bool, typer.Option("--history", help="Show every result and override, in order, with their times.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Show the results that count, even while a run is writing to the gradebook."""
    from ringlab_course.gradebook.collect import learner_called
    from ringlab_course.gradebook.export import entry_data, ungraded_data
    from ringlab_course.gradebook.store import Gradebook

    learner = None if learner is None else learner_called(learner)
    with reporting_errors(as_json), Gradebook(book, create=False) as grades:
        entries, ungraded = grades.entries(exercise, learner), grades.ungraded()
        ungraded = [each for each in ungraded if learner in (None, each.learner)]
        if learner is not None and not entries and not ungraded:
            raise _nobody(learner, exercise, [entry.learner for entry in grades.entries(exercise)])
        if as_json:
            if history:
                entries = [
                    past for entry in entries for past in grades.history(entry.learner, entry.exercise)
                ]
            found = {"entries": [*map(entry_data, entries)], "not_graded": [*map(ungraded_data, ungraded)]}
            print_json(
                {"ok": True, **found, "overrides": [vars(o) for o in grades.overrides(learner, exercise)]}
            )
        elif explain:
            _explain(grades, entries)
        else:
            people.print(_history(grades, entries) if history else _table(entries))
            for each in ungraded:
                text = (
                    f"{each.learner}  {each.exercise or '?'}: not graded, {each.tries} times: {each.reason}"
                )
                people.print(text, highlight=False, soft_wrap=True)


def _nobody(learner: str, exercise: str | None, known: list[str]) -> CourseError:
    """Return the error for a learner without a result in the gradebook; its remedy lists similar names."""
    import difflib

    near = difflib.get_close_matches(learner, known, 3, 0.5)
    of = "" if exercise is None else f" in exercise {exercise}"
    remedy = f"near it: {', '.join(near)}" if near else "`ringlab gradebook show BOOK` lists all"
    return CourseError(f"a learner of whom the gradebook has a result{of}", repr(learner), remedy)


@app.command("override")
def override(
    book: Book,
    learner: Annotated[str, typer.Argument(help="The learner, as `show` prints the name.")],
    exercise: Annotated[str, typer.Argument(help="The exercise, as in 05.")],
    score: Annotated[float | None, typer.Argument(help="The score that counts from now on.")] = None,
    reason: Annotated[str, typer.Option("--reason", help="The reason; it is kept with the score.")] = "",
    by: Annotated[
        str | None, typer.Option("--by", help="Your name in the book; your login by default.")
    ] = None,
    clear: Annotated[bool, typer.Option("--clear", help="Remove an override.")] = False,
    as_json: Json = False,
) -> None:
    """Override a score. The earned score stays in the gradebook."""
    from ringlab_course.gradebook.collect import learner_called
    from ringlab_course.gradebook.export import entry_data
    from ringlab_course.gradebook.readable import headline
    from ringlab_course.gradebook.store import Gradebook

    with reporting_errors(as_json):
        if (score is None) != clear:
            raise CourseError("a score, or --clear", "both" if clear else "neither")
        with Gradebook(book, create=False) as grades:
            entry = grades.override(learner_called(learner), exercise, score, reason, by or getpass.getuser())
        if as_json:
            print_json({"ok": True, "entry": entry_data(entry)})
        else:
            people.print(headline(entry), highlight=False, soft_wrap=True)


@app.command("policy")
def policy(
    book: Book,
    exercise: Exercise = None,
    due: Annotated[
        str | None,
        typer.Option(
            "--due",
            help='The deadline with its zone: 2026-11-30T23:59Z, or … 23:59 Europe/Berlin; "" for none.',
        ),
    ] = None,
    late: Annotated[
        str | None, typer.Option("--late", help='The penalty, such as "10%/day, max 50%"; "" for none.')
    ] = None,
    helpers: Annotated[
        str | None,
        typer.Option("--helpers", help="Wrong helpers of later stages: reference, replaced by ours, or own."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Set and show deadlines, the penalty for lateness, and whose helpers count. Scores change at once."""
    from ringlab_course.gradebook.store import HELPERS, Gradebook

    with reporting_errors(as_json), Gradebook(book, create=False) as grades:
        if due is not None or late is not None:
            grades.set_policy(exercise, due=due, late=late)
        if helpers is not None:
            grades.set_helpers(helpers)
        counted = HELPERS[0] if grades.counts_reference else HELPERS[1]
        rows = [
            {"exercise": name, "due": when, "late": cost} for name, (when, cost) in grades.policies().items()
        ]
        if as_json:
            print_json({"ok": True, "policies": rows, "helpers": counted})
            return
        table = Table("exercise", "due (UTC)", "late")
        for row in rows:
            table.add_row(row["exercise"] or "all others", row["due"] or "–", row["late"] or "–")
        people.print(table)
        people.print(f"helpers: {counted}", highlight=False)


@app.command("export")
def export(
    book: Book,
    csv: Annotated[Path | None, typer.Option("--csv", help="Write scores as CSV.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json-file", help="Write results as JSON.")] = None,
    as_json: Json = False,
) -> None:
    """Write the gradebook as CSV or JSON for other programs. Without a file, print CSV."""
    from ringlab_course.cli.grade_class import write_files
    from ringlab_course.gradebook.export import csv_text
    from ringlab_course.gradebook.store import Gradebook

    with reporting_errors(as_json), Gradebook(book, create=False) as grades:
        write_files(grades, csv, json_file, None)
        if as_json:
            print_json({"ok": True, "files": [str(path) for path in (csv, json_file) if path is not None]})
        elif csv is None and json_file is None:
            typer.echo(csv_text(grades.entries(), grades.ungraded()), nl=False)


@app.command("report")
def report(
    book: Book,
    folder: Annotated[Path, typer.Argument(help="The folder of the pages; begin with index.html.")],
    title: Annotated[str | None, typer.Option("--title", help="The name of the class.")] = None,
    as_json: Json = False,
) -> None:
    """Write a page for each learner and one for the class."""
    from ringlab_course.gradebook.pages import write_pages
    from ringlab_course.gradebook.store import Gradebook

    with reporting_errors(as_json), Gradebook(book, create=False) as grades:
        pages = write_pages(grades.entries(), folder, title or book.stem, ungraded=grades.ungraded())
        if as_json:
            print_json({"ok": True, "pages": [str(page) for page in pages]})
        else:
            people.print(f"{len(pages)} pages in {folder}", highlight=False, soft_wrap=True)


def _explain(grades: Any, entries: list[Any]) -> None:
    from ringlab_course.gradebook.readable import explained

    for entry in entries:
        for line in explained(entry, grades.history(entry.learner, entry.exercise)):
            people.print(line, highlight=False, soft_wrap=True)


def _table(entries: list[Any]) -> Table:
    table = Table("learner", "exercise", "score", "of", "failed checks", "notes")
    for entry in entries:
        overridden = f"overridden: {entry.override_reason}" if entry.override is not None else ""
        table.add_row(
            entry.learner, entry.exercise or "?", f"{entry.score:g}", f"{entry.maximum:g}",
            str(len(entry.failed)), "; ".join(filter(None, [overridden, *_notes(entry)])),
        )  # fmt: skip
    return table


def _notes(entry: Any) -> list[str]:
    from ringlab_course.gradebook.readable import helped

    notes = [entry.report.get("reason", ""), *helped(entry)]
    notes.append(f"{entry.penalty:g} off for lateness" if entry.penalty else "")
    notes.append("graded by older checks" if entry.older_checks else "")
    return [*filter(None, notes)]


def _history(grades: Any, entries: list[Any]) -> Table:
    """Return a table of all results and overrides, the oldest first. The row that counts is marked."""
    table = Table("learner", "exercise", "when (UTC)", "event", "score", "of", "notes")
    for entry in entries:
        who = entry.learner, entry.exercise or "?"
        events = []
        for past in grades.history(entry.learner, entry.exercise):
            counts = entry.override is None and past.id == entry.id
            handed_in = f"handed in {_utc(past.submitted_at)}" if past.submitted_at else ""
            notes = ["counts"] * counts + [*filter(None, [handed_in])] + _notes(past)
            events.append((past.graded_at, "graded", f"{past.score:g}", f"{past.maximum:g}", notes))
        words = grades.overrides(entry.learner, entry.exercise)
        for word in words:
            counts = entry.override is not None and word is words[-1]
            score = "" if word.score is None else f"{word.score:g}"
            event = "override cleared" if word.score is None else "overridden"
            notes = ["counts"] * counts + [f"{word.reason} ({word.by})"]
            events.append((word.at, event, score, f"{entry.maximum:g}", notes))
        for at, event, score, maximum, notes in sorted(events, key=lambda each: each[0]):
            table.add_row(*who, _utc(at), event, score, maximum, "; ".join(notes))
    return table


def _utc(iso: str) -> str:
    return f"{datetime.fromisoformat(iso).astimezone(UTC):%Y-%m-%d %H:%M:%S}"
