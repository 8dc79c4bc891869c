"""`ringlab nbgrader`: set up an nbgrader course folder in which ringlab's judge computes the scores."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ringlab.cli.output import Json, people, print_json, reporting_errors

app = typer.Typer(
    help="Grade with nbgrader: its gradebook, feedback and formgrader, our judge's scores.",
    no_args_is_help=True,
)
Course = Annotated[Path, typer.Option("--course", help="The nbgrader course folder.")]
HERE = Path()


@app.command("config")
def config(
    course: Course = HERE,
    show: Annotated[bool, typer.Option("--show", help="Print the settings; write nothing.")] = False,
    as_json: Json = False,
) -> None:
    """Write nbgrader_config.py, which makes nbgrader read and grade submissions with ringlab's judge."""
    from ringlab_course.nbgrader import require_nbgrader

    with reporting_errors(as_json):
        require_nbgrader()
        from ringlab_course.nbgrader.course import CONFIG, write_config

        if show:
            print(CONFIG, end="")
            return
        path = write_config(course)
    if as_json:
        print_json({"ok": True, "path": str(path)})
    else:
        people.print(f"{path}: scores come from ringlab's judge", soft_wrap=True)


@app.command("release")
def release(
    exercises: Annotated[list[str], typer.Argument(help="The exercises' numbers, as in 05.")],
    course: Course = HERE,
    as_json: Json = False,
) -> None:
    """Write exercises into the course's source/, ready for nbgrader generate_assignment."""
    from ringlab_course.nbgrader import require_nbgrader

    with reporting_errors(as_json):
        require_nbgrader()
        from ringlab_course.nbgrader.course import release as write

        paths = write(tuple(exercises), course)
    if as_json:
        print_json({"ok": True, "paths": [str(path) for path in paths]})
        return
    for path in paths:
        people.print(f"{path}; now: nbgrader generate_assignment {path.stem}", soft_wrap=True)
