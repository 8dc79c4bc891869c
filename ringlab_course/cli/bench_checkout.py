"""`ringlab bench all`, `bench lessons` and `bench tests`, which need a checkout and an idle machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ringlab.cli.bench import Output
from ringlab.cli.output import (
    Json,
    check_writable,
    finish,
    for_people,
    people,
    print_json,
    progress_bar,
    reporting_errors,
    stderr,
)


def everything(
    output: Annotated[Path, typer.Option("--output", help="The folder of the files.")],
    only: Annotated[
        list[str] | None,
        typer.Option(
            "--only", metavar="FILE", help="Only this file, or this folder of files; may be repeated."
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Measure all times that need no GPU, and write files like those in benchmarks/results.

    Takes an hour or two. Exits 1 if a bench failed.
    """
    from ringlab_course.bench.everything import BENCHES, bench_all

    for name in only or ():
        if not any(file.startswith(name) for file in BENCHES):
            raise typer.BadParameter(
                f"{name!r} is not the beginning of any of {', '.join(BENCHES)}", param_hint="--only"
            )

    with reporting_errors(as_json):
        check_writable("--output", output / "new.json", make_folder=True)

    def began(file: str, command: str) -> None:
        stderr.print(f"{file}: {command}", highlight=False, soft_wrap=True)

    failed = bench_all(output, only or (), began)
    if as_json:
        print_json({"ok": not failed, "failed": failed})
    for file, why in {} if as_json else failed.items():
        people.print(f"{file} was not written: {why}", highlight=False, soft_wrap=True)
    finish(not failed)


def lessons(
    only: Annotated[
        list[str] | None, typer.Option("--only", metavar="NN", help="Only this lesson; may be repeated.")
    ] = None,
    output: Output = None,
    as_json: Json = False,
) -> None:
    """Measure how long each lesson and its first cell take in a fresh kernel. Needs a checkout.

    With --only, the output file keeps its figures of the other lessons.
    """
    with reporting_errors(as_json), progress_bar() as bar:
        from ringlab_course.bench.waiting import bench_lessons, kept

        task = bar.add_task("bench lessons", total=None)
        measured = bench_lessons(only or (), tick=lambda: bar.advance(task))
        if only and output is not None and output.exists():
            measured = kept(measured, output)
    if not for_people(measured, output, as_json):
        return
    for name, seconds in measured["seconds"].items():
        people.print(
            f"{name}: {seconds:.1f} s, the first cell {measured['first_cell'][name]:.2f} s", highlight=False
        )


def tests(output: Output = None, as_json: Json = False) -> None:
    """Measure `make test` in a fresh clone of the last commit, set-up included. Needs a checkout."""
    with reporting_errors(as_json):
        from ringlab_course.bench.waiting import bench_tests

        measured = bench_tests()
    if not for_people(measured, output, as_json):
        return
    people.print(
        f"{measured['seconds']} s, {measured['passed']} passed, {measured['peak_gb']} GB in one process"
    )
