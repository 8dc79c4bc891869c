"""Grades as web pages: one for each learner and one for the class. Pages load nothing and run no script.

Learners' text is escaped, control characters are made visible, and long text is cut. As a second protection,
each page has a security policy that forbids all scripts, all addresses, and all styles except the page's own.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import os
import re
import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from ringlab.errors import CourseError, require_package
from ringlab_course.gradebook import readable
from ringlab_course.gradebook.class_view import class_view
from ringlab_course.gradebook.entry import Entry, Ungraded
from ringlab_course.gradebook.export import UNFINISHED, write
from ringlab_course.gradebook.learner_view import entry_view

if TYPE_CHECKING:
    from jinja2 import Environment

GENERATOR = "ringlab gradebook"
"""Marks our pages. Only marked files are ever replaced or removed."""
LEARNERS = "learners"

TEMPLATES = Path(__file__).parent / "templates"
_MARK = f'<meta name="generator" content="{GENERATOR}">'.encode()


def write_pages(
    entries: Iterable[Entry], folder: str | os.PathLike[str], title: str, *, ungraded: Iterable[Ungraded] = ()
) -> list[Path]:
    """Write index.html for the class and learners/….html for each learner into `folder`; return the paths.

    A page that would not change is not written, and the page of a learner without entries is removed.
    index.html shows everybody. A learner's page shows nobody else, no seed and no hidden probe.

    Raises: CourseError if a file that is not ours would be overwritten; MissingExtraError without Jinja2 or
    matplotlib.
    """
    require_pages()
    entries, ungraded = list(entries), list(ungraded)
    folder, title = Path(folder), readable.name(title)
    by_learner: dict[str, list[Entry]] = {}
    for entry in sorted(entries, key=lambda each: (each.learner, each.exercise)):
        by_learner.setdefault(entry.learner, []).append(entry)
    hrefs = {learner: f"{LEARNERS}/{page_name(learner)}" for learner in by_learner}
    pages = {href: learner_page(learner, by_learner[learner], title) for learner, href in hrefs.items()}
    pages["index.html"] = _class_page(entries, ungraded, hrefs, title)
    _refuse_foreign(folder, pages)
    (folder / LEARNERS).mkdir(parents=True, exist_ok=True)
    for name, text in pages.items():
        path = folder / name
        if not (path.is_file() and path.read_text(encoding="utf-8", errors="replace") == text):
            write(path, text)
    _sweep(folder / LEARNERS, {Path(name).name for name in pages})
    return [folder / name for name in sorted(pages)]


def page_name(learner: str) -> str:
    """Return the file name of a learner's page, which is safe on every system and unique to the name."""
    ascii_only = unicodedata.normalize("NFKD", learner[:80]).encode("ascii", "ignore").decode().lower()
    readable_part = re.sub(r"[^a-z0-9]+", "-", ascii_only).strip("-")[:40].strip("-")
    digest = hashlib.sha256(learner.encode("utf-8", "surrogatepass")).hexdigest()[:16]
    return f"{readable_part or 'learner'}-{digest}.html"


def learner_page(learner: str, entries: Sequence[Entry], title: str) -> str:
    """Return the page of one learner. Raises: CourseError if an entry belongs to another learner."""
    others = {entry.learner for entry in entries} - {learner}
    if others:
        raise CourseError("entries of one learner", f"also entries of {len(others)} other learners")
    views = [entry_view(entry) for entry in entries]
    return rendered(
        "learner.html",
        learner=learner,
        views=views,
        title=title,
        score=sum(entry.score for entry in entries),
        maximum=sum(entry.maximum for entry in entries),
    )


def _class_page(
    entries: Sequence[Entry], ungraded: Sequence[Ungraded], hrefs: Mapping[str, str], title: str
) -> str:
    maxima: dict[str, float] = dict.fromkeys((each.exercise for each in ungraded), 0.0)
    for entry in entries:
        maxima[entry.exercise] = max(entry.maximum, maxima.get(entry.exercise, 0.0))
    columns = sorted(maxima.items())
    found = {(entry.learner, entry.exercise): entry for entry in entries}
    waiting = {(each.learner, each.exercise) for each in ungraded}
    learners = sorted(
        {learner for learner, _ in [*found, *waiting]}, key=lambda name: (name.casefold(), name)
    )
    rows = [
        {
            "learner": learner,
            "total": sum(e.score for (who, _), e in found.items() if who == learner),
            "cells": [_cell(found.get((learner, x)), (learner, x) in waiting) for x, _ in columns],
        }
        for learner in learners
    ]
    views = [
        class_view(
            exercise,
            [entry for entry in entries if entry.exercise == exercise],
            [each for each in ungraded if each.exercise == exercise],
            learners,
        )
        for exercise, _ in columns
    ]
    return rendered(
        "index.html",
        title=title,
        rows=rows,
        columns=columns,
        total=sum(maxima.values()),
        newest=max((entry.graded_at for entry in entries), default=""),
        views=views,
        hrefs=hrefs,
    )


def _cell(entry: Entry | None, waiting: bool) -> dict[str, str]:
    """Return a cell of the table of scores: the score, and letters that mark what is special about it."""
    if entry is None:
        return {"text": "?" if waiting else "–", "marks": ""}
    report = entry.report
    broken = any(c.get("broken") for stage in report.get("stages") or () for c in stage["checks"])
    marks = {
        "L": entry.late_s > 0,
        "O": entry.override is not None,
        "H": entry.helped > 0,
        "R": bool(report.get("reason")),
        "B": broken,
        "U": bool(report.get("label")),
        "V": entry.older_checks,
        "?": waiting,
    }
    return {"text": readable.points(entry.score), "marks": " ".join(m for m, holds in marks.items() if holds)}


def rendered(template: str, *, among: Environment | None = None, **values: Any) -> str:
    """Return a page from a template, with the pages' style and a policy that allows nothing else.

    among: the environment whose templates are used, by default this package's.
    """
    style = _style()
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    return (
        (among or environment())
        .get_template(template)
        .render(generator=GENERATOR, style=Markup(style), style_hash=f"sha256-{digest}", **values)
    )


def require_pages() -> None:
    """Raise MissingExtraError unless the packages that write pages and draw pictures are installed."""
    for name in ("jinja2", "matplotlib"):
        require_package(name, "instructor", "pages of results")


@cache
def environment() -> Environment:
    """Return the environment of the templates, with escaping on for all.

    Raises: MissingExtraError without Jinja2 or matplotlib.
    """
    require_pages()
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    made = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    filters: dict[str, Callable[..., Any]] = {
        "name": readable.name,
        "points": readable.points,
        "duration": readable.duration,
        "moment": readable.moment,
        "share": _share,
    }
    made.filters.update(filters)
    return made


def _share(value: float, whole: float) -> float:
    """Return `value` in percent of `whole`, between 0 and 100."""
    return min(100.0, max(0.0, 100 * value / whole)) if whole else 0.0


@cache
def _style() -> str:
    return (TEMPLATES / "style.css").read_text(encoding="utf-8")


def _is_ours(path: Path) -> bool:
    with contextlib.suppress(OSError), open(path, "rb") as file:
        return _MARK in file.read(2000)
    return False


def _refuse_foreign(folder: Path, pages: Iterable[str]) -> None:
    for name in pages:
        path = folder / name
        if (path.is_symlink() or path.exists()) and not (path.is_file() and _is_ours(path)):
            raise CourseError(
                "a folder for these pages alone",
                f"{path}, not written by ringlab",
                "choose another folder",
            )


def _sweep(folder: Path, wanted: set[str]) -> None:
    """Remove the pages of learners without entries, and files that a killed run left half-written."""
    for path in folder.iterdir():
        if path.name in wanted or path.is_symlink() or not path.is_file():
            continue
        if path.name.startswith(UNFINISHED) or (path.suffix == ".html" and _is_ours(path)):
            path.unlink()
