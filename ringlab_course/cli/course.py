"""`ringlab build`, `exercise` and `progress`: the course's own commands."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.table import Table

from ringlab.cli.output import Json, finish, people, print_json, reporting_errors

exercise = typer.Typer(help="Get a fresh copy of an exercise.", no_args_is_help=True)

Names = Annotated[list[str] | None, typer.Argument(help="05, 05_emulated_ring, exercises/05 …; all if none.")]


def build(
    names: Names = None,
    check: Annotated[bool, typer.Option("--check", help="Fail if a notebook has drifted.")] = False,
    rerun: Annotated[
        bool, typer.Option("--rerun", help="With --check: run all cells and compare bytes.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Make notebooks/, exercises/ and solutions/ from their sources in ringlab_course.

    Edited exercises are never changed.
    """

    def show(result: Any) -> None:
        if not as_json:
            where = f"{result.path.parent.name}/{result.path.name}"
            line = f"{result.action:9} {where}  {result.message}".rstrip()
            people.print(line, highlight=False, soft_wrap=True)

    with reporting_errors(as_json):
        from ringlab_course.builder import build as builder

        if check:
            results = builder.check(names or (), rerun=rerun, report=show)
        else:
            results = builder.build(names or (), report=show)
    ok = all(result.ok for result in results)
    if as_json:
        each = [{"path": str(r.path), "action": r.action, "message": r.message} for r in results]
        print_json({"ok": ok, "notebooks": each})
    finish(ok)


@exercise.command("fresh")
def fresh(
    name: Annotated[str, typer.Argument(help="The exercise's number, as in 05.")], as_json: Json = False
) -> None:
    """Write a fresh copy of an exercise. An edited copy is kept beside it under another name."""
    with reporting_errors(as_json):
        from ringlab_course.builder import build as builder

        path, aside = builder.fresh(name)
    if as_json:
        print_json({"ok": True, "path": str(path), "kept": str(aside) if aside else None})
    else:
        people.print(f"{path} is fresh" + (f"; yours is now {aside}" if aside else ""), soft_wrap=True)


@exercise.command("list")
def list_exercises(as_json: Json = False) -> None:
    """List the lessons and exercises of the course, in the order in which one reads them."""
    from ringlab_course.catalogue import COURSE

    rows = [{"id": each.id, "title": each.title, "minutes": each.minutes} for each in COURSE]
    if as_json:
        print_json({"ok": True, "lessons": rows})
        return
    table = Table("", "lesson", "minutes")
    for each in COURSE:
        table.add_row(each.id, each.title, str(each.minutes))
    people.print(table)


def progress(as_json: Json = False) -> None:
    """Show what you have predicted, checked and solved so far."""
    from ringlab_course.notebook.checks import progress as show
    from ringlab_course.notebook.progressfile import SECTIONS, ProgressFile

    with reporting_errors(as_json):
        if as_json:
            file = ProgressFile()
            print_json({"ok": True, **{name: file.section(name) for name in SECTIONS}})
        else:
            show()
