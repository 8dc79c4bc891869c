"""The sources of all pages, written into one folder for Sphinx and never committed."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import nbformat

from ringlab_course.builder.build import find_root
from ringlab_course.builder.sources import prepare, targets
from tools.docs import drawings

from . import api, errors, front, kill_matrix, misconceptions, notebooks, playground

_LINK = re.compile(r"(?<!!)\[([^\]]+)\]\((?!\w+:|#)([^)#\s]+)(#[^)\s]*)?\)")

_SCHEDULES = "guide/schedules"


def write(folder: Path, root: Path | None = None, repository: str = "") -> bool:
    """Write the sources of the pages of the checkout at `root` into `folder`; return whether any has changed.

    Files that already have the right text are left unchanged, because Sphinx reads newer files again. Files
    that belong to no page are removed.
    repository: the repository's address on the web, if known.
    """
    old = {path for path in folder.rglob("*") if path.is_file()}
    changed = False
    for name, text in _texts(root or find_root(), repository):
        path = folder / name
        if path not in old or path.read_text(encoding="utf-8") != text:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
            changed = True
        old.discard(path)
    for path in old:
        path.unlink()
    return changed or bool(old)


def _texts(root: Path, repository: str) -> Iterator[tuple[str, str]]:
    """Yield (file, text) for every page. Solutions have no page."""
    every = targets(root)
    lessons = [target for target in every if target.kind == "lesson"]
    exercises = [target for target in every if target.kind == "exercise"]
    documents = {
        path.relative_to(root / "docs").with_suffix("").as_posix(): path.read_text(encoding="utf-8")
        for path in sorted((root / "docs").rglob("*.md"))
    }
    documents[kill_matrix.NAME] = kill_matrix.page()
    documents[_SCHEDULES] = with_links_to_rows(documents[_SCHEDULES])
    known = {f"docs/{name}.md" for name in documents} | {f"{room}/index.md" for room in front.ROOMS}
    known |= {f"notebooks/{target.path.name}" for target in lessons}
    known |= {f"exercises/{target.path.name}" for target in exercises}
    known |= {f"{playground.NAME}.md", f"{playground.FIVE_NAME}.md", f"{errors.NAME}.md"}
    yield (
        "index.md",
        only_known_links(front.front(lessons, exercises, in_reading_order(documents), repository), "", known),
    )
    yield f"{playground.NAME}.md", playground.page()
    yield f"{playground.FIVE_NAME}.md", only_known_links(playground.five_minutes(), "", known)
    yield f"{errors.NAME}.md", errors.page(root)
    practice = {target.slug[:2]: target.slug for target in exercises}
    for target in lessons:
        lesson = notebooks.lesson_page(target, practice.get(target.slug[:2]))
        yield f"notebooks/{target.slug}.ipynb", _written(lesson, "notebooks", known)
        yield f"{notebooks.DOWNLOADS}/{notebooks.path(target)}", target.path.read_text(encoding="utf-8")
    titles = {}
    for target in exercises:
        skeleton = notebooks.exercise_page(target, root)
        titles[target.slug] = notebooks.title(skeleton)
        yield f"exercises/{target.slug}.ipynb", _written(skeleton, "exercises", known)
        yield f"{notebooks.DOWNLOADS}/{notebooks.path(target)}", nbformat.writes(prepare(target, root)) + "\n"
    yield "exercises/index.md", front.exercise_list(exercises, titles)
    for name, text in documents.items():
        file = f"docs/{name}.md"
        yield file, only_known_links(text, file.rpartition("/")[0], known)
    for picture in sorted((root / "docs").rglob("*.svg")):
        yield picture.relative_to(root).as_posix(), picture.read_text(encoding="utf-8")
    for pages in (misconceptions.pages({*titles}), api.pages(root, repository)):
        for name, text in pages:
            yield f"{name}.md", text


def in_reading_order(documents: dict[str, str]) -> list[str]:
    """Return the documents' names: first the guide's pages as its index lists them, then the others."""
    listed = [f"guide/{name}" for name in re.findall(r"\]\((\w+)\.md\)", documents["guide/index"])]
    return [*listed, *(name for name in documents if name not in listed)]


def _written(page: nbformat.NotebookNode, folder: str, known: set[str]) -> str:
    for cell in page.cells:
        if cell.cell_type == "markdown":
            cell.source = only_known_links(cell.source, folder, known)
    return nbformat.writes(page)


def only_known_links(text: str, folder: str, known: set[str]) -> str:
    """Return the text of a page in `folder`, with links to files without a page replaced by names."""

    def replaced(found: re.Match[str]) -> str:
        path = _normal(f"{folder}/{found[2]}")
        if path in known:
            return found[0]
        return found[1] if found[1].strip("`") == path else f"{found[1]} (`{path}`)"

    return _LINK.sub(replaced, text)


def with_links_to_rows(text: str) -> str:
    """Return the page of schedules with its picture as HTML, in which each ring leads to its row of the table."""
    picture, count = re.subn(
        r"!\[[^\]]*\]\(schedules\.svg\)",
        lambda _: f"```{{raw}} html\n{drawings.linked_schedules()}\n```",
        text,
    )
    if not count:
        raise ValueError("needed: schedules.svg on the page of schedules\n   got: none")

    def marked(row: re.Match[str]) -> str:
        return f'| <span id="{drawings.anchor(row[1])}"></span>`{row[1]}` |'

    return re.sub(
        r"^\| `((?!schedule=)[^`]+)` \|",
        marked,
        picture,
        count=len(drawings.SCHEDULES) + 1,
        flags=re.MULTILINE,
    )


def _normal(path: str) -> str:
    parts: list[str] = []
    for part in path.split("/"):
        if part == "..":
            parts = parts[:-1]
        elif part not in ("", "."):
            parts.append(part)
    return "/".join(parts)
