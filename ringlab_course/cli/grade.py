"""`ringlab grade`: grade one notebook and print its full report, or grade a class into its gradebook."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ringlab.cli.output import Json, reporting_errors
from ringlab_course.cli.grade_class import grade_into_book
from ringlab_course.cli.grade_notebooks import grade_plainly
from ringlab_course.cli.grading import Request

BOOK = typer.Option("--book", help="Keep results in this file; the next run continues a stopped one.")
SCHEDULER = typer.Option("--scheduler", help="Grade on the Dask cluster with this scheduler.")
UNSAFE = typer.Option("--unsafe", help="Run submissions without the sandbox; written into every result.")


def grade(
    paths: Annotated[list[Path], typer.Argument(help="Notebooks, or folders of them.", exists=True)],
    only: Annotated[
        str | None, typer.Option("--exercise", help="The exercise that the notebooks belong to, such as 05.")
    ] = None,
    book: Annotated[Path | None, BOOK] = None,
    jobs: Annotated[
        int | None,
        typer.Option("--jobs", min=1, help="Notebooks graded at a time; one on each core by default."),
    ] = None,
    regrade: Annotated[
        list[str] | None, typer.Option("--regrade", help="Grade this exercise again; the history stays.")
    ] = None,
    learner: Annotated[
        str | None, typer.Option("--learner", help="The learner who handed in all notebooks.")
    ] = None,
    csv: Annotated[Path | None, typer.Option("--csv", help="Write scores as CSV.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json-file", help="Write results as JSON.")] = None,
    html: Annotated[Path | None, typer.Option("--html", help="Write pages into this folder.")] = None,
    seed: Annotated[
        int | None, typer.Option("--seed", min=0, help="Seed of the probes; fresh ones by default.")
    ] = None,
    unsafe: Annotated[bool, UNSAFE] = False,
    patience: Annotated[
        float,
        typer.Option(
            "--patience", min=0.1, max=100, help="Multiply all time limits by this; 2 for a slow machine."
        ),
    ] = 1.0,
    scheduler: Annotated[str | None, SCHEDULER] = None,
    as_json: Json = False,
) -> None:
    """Grade exercises in a sandbox, with inputs that nobody has seen. Exits 1 if points are missing.

    With --book or an output file, the paths hold the submissions of a whole class. Then one submission counts
    per learner and exercise, and the exit status is 1 only if one could not be graded or none was found.
    """
    request = Request(
        paths, only, book, jobs, frozenset(regrade or ()), learner, csv, json_file, html,
        seed, unsafe, patience, scheduler, as_json,
    )  # fmt: skip
    with reporting_errors(as_json):
        if request.of_a_class:
            grade_into_book(request)
        else:
            grade_plainly(request)
