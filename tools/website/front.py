"""The first page and the list of exercises, made from the catalogue and the contracts.

So a new lesson appears automatically.
"""

from __future__ import annotations

import re
from pathlib import Path

import nbformat

from ringlab_course.builder.build import find_root
from ringlab_course.builder.sources import Target
from ringlab_course.catalogue import LESSONS, PARTS, Lesson
from ringlab_course.checking.contract import Exercise
from tools.conformance import matrix_page

from . import errors, misconceptions, moving_ring, playground
from .links import escape, table, toctree
from .notebooks import stage_anchor

_STILL = "<figcaption>Without JavaScript: four ranks, drawn from a run. Queries stay; keys and values move on a place a step.</figcaption>"
TEXTS = Path(__file__).parent / "text"
ROOMS = ("exercises", "misconceptions", "api")
"""Folders of pages whose first page is a list of the others."""
FIRST = ("tour", "guide/index", "guide/install")
"""The first pages of the guide. Every page of docs/ that has no other place belongs to the guide."""
DATA = (
    "conformance-matrix",
    "kill-matrix",
    "peers",
    "field-reports",
    "benchmarks",
    "architecture",
    "cli",
    "api",
)
"""Pages of tables, to look something up."""
TEACHING = ("instructors", "nbgrader", "labs")


def shown(lessons: list[Target]) -> list[Lesson]:
    """Return the lessons of the catalogue, in its order.

    Raises: ValueError for a notebook that is not in the catalogue, or a lesson without a notebook.
    """
    there = {target.slug for target in lessons}
    listed = {lesson.slug for lesson in LESSONS}
    if there != listed:
        raise ValueError(
            f"needed: lessons as in the catalogue\n   got: {sorted(there ^ listed)} in one of them only"
        )
    return list(LESSONS)


def front(lessons: list[Target], exercises: list[Target], documents: list[str], repository: str = "") -> str:
    """Return the first page, with the navigation of all pages.

    repository: its address; if given, the page says how to clone the repository.
    """
    here = shown(lessons)
    text = (TEXTS / "front.md").read_text(encoding="utf-8")
    known = (
        len(stage.misconceptions) for exercise in misconceptions.exercises() for stage in exercise.stages
    )
    rows = matrix_page.read((find_root() / "docs" / "conformance-matrix.md").read_text(encoding="utf-8"))
    filled = text.format(
        wrong=len(rows),
        passing=sum(row.loose == matrix_page.LOOSE_TESTS for row in rows.values()),
        playground=playground.embedded(f"<figure>{moving_ring.picture()}{_STILL}</figure>", brief=True),
        first=here[0].slug,
        first_id=here[0].id,
        first_minutes=here[0].minutes,
        mistakes=sum(known),
        code=f'\n<a class="door" href="{repository}">Get the code</a>' if repository else "",
        where="on your machine" if repository else "in a checkout of ringlab",
        clone=f"git clone {repository} ringlab && cd ringlab\n" if repository else "",
        lessons=_map(here, {target.slug: minutes(target.path) for target in exercises}),
    )
    return filled + "\n" + "\n\n".join(_navigation(here, documents)) + "\n"


def minutes(notebook: Path) -> int:
    """Return the minutes in the first cell of a notebook. Raises: ValueError if there are none."""
    first = nbformat.read(notebook, as_version=4).cells[0].source
    found = re.search(r"\*\*Minutes\*\* (\d+)", first)
    if found is None:
        raise ValueError(
            f"needed: **Minutes** and a number in the first cell of {notebook.name}\n   got: {first}"
        )
    return int(found[1])


def _map(lessons: list[Lesson], of_exercise: dict[str, int]) -> str:
    """Return the lessons by part, one line each, with the minutes of the lesson and of its exercise."""
    parts = []
    for part in PARTS:
        rows = [
            (
                f"[{lesson.id}](notebooks/{lesson.slug}.ipynb)",
                f"[**{escape(lesson.title)}**](notebooks/{lesson.slug}.ipynb): {escape(lesson.afterwards)}",
                f"{lesson.minutes} + {of_exercise[lesson.slug]} min".replace(" ", "\N{NO-BREAK SPACE}"),
            )
            for lesson in lessons
            if lesson.part == part
        ]
        if rows:
            parts.append(
                f"### {part}\n\n{table(('Lesson', 'Afterwards you can', 'Lesson + exercise'), rows)}"
            )
    return "\n\n".join(parts)


def _navigation(lessons: list[Lesson], documents: list[str]) -> list[str]:
    trees = [toctree([playground.FIVE_NAME, playground.NAME], "Play")]
    trees += [
        toctree([f"notebooks/{lesson.slug}" for lesson in lessons if lesson.part == part], part)
        for part in PARTS
        if any(lesson.part == part for lesson in lessons)
    ]
    others = [name for name in documents if name not in (*FIRST, *DATA, *TEACHING)]
    guide, data, teaching = (
        [f"docs/{name}" for name in names if name in documents]
        for names in ((*FIRST, *others), DATA, TEACHING)
    )
    trees.append(toctree(["exercises/index", "misconceptions/index"], "Practice"))
    trees.append(toctree(guide, "Guide"))
    trees.append(toctree(["api/index", errors.NAME], "Reference"))
    trees.append(toctree(teaching, "For instructors"))
    return [*trees, toctree(data, "Reference data")]


def exercise_list(exercises: list[Target], titles: dict[str, str]) -> str:
    """Return the page of all exercises."""
    contracts = {contract.slug: contract for contract in misconceptions.exercises()}
    rows = [_of_exercise(target, titles[target.slug], contracts.get(target.slug)) for target in exercises]
    text = (TEXTS / "exercises.md").read_text(encoding="utf-8")
    pages = toctree([f"/exercises/{target.slug}" for target in exercises])
    return (
        text.format(table=table(("Exercise", "You write", "Points", "Minutes"), rows)) + "\n" + pages + "\n"
    )


def _of_exercise(target: Target, title: str, contract: Exercise | None) -> tuple[str, ...]:
    link = f"[{escape(title.removeprefix('Exercise '))}]({target.slug}.ipynb)"
    if contract is None:
        return link, "", "", ""
    stages = ", ".join(f"[`{stage.function}`](#{stage_anchor(stage.id)})" for stage in contract.stages)
    return link, stages, str(contract.points), str(minutes(target.path))
