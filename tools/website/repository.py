"""Links to edit each page at its source, which need the repository's address."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from pathlib import Path

from ringlab_course.builder.sources import targets

BRANCH = "main"
FOLDERS = {"lesson": "notebooks", "exercise": "exercises"}
TEXTS = "tools/website/text"
"""The folder with the texts of pages that are assembled."""
GENERATED = "writes this page"
"""The words by which a page of docs/ says that a program writes it."""
_FOOT = '<div class="left-details">'


def check(repository: str) -> None:
    """Raise SystemExit unless the address is whole."""
    if not repository.startswith("https://"):
        raise SystemExit(
            f"needed: the address of a repository, such as https://github.com/ringlab/ringlab\n   got: {repository}"
        )


def write(site: Path, repository: str, root: Path) -> None:
    """Write a link to edit its source into every page that is written by hand.

    Raises: ValueError for a page without a footer.
    """
    for page, source in sources(root):
        path = site / page
        text = path.read_text(encoding="utf-8")
        if _FOOT not in text:
            raise ValueError(f"needed: a page with {_FOOT}\n   got: {page}")
        address = f"{repository.removesuffix('.git').rstrip('/')}/edit/{BRANCH}/{source}"
        link = f'<div><a class="edit" href="{escape(address)}">Edit this page</a></div>'
        path.write_text(text.replace(_FOOT, _FOOT + link, 1), encoding="utf-8")


def sources(root: Path) -> Iterator[tuple[str, str]]:
    """Yield (page, source) for the pages of the checkout at `root` that are not generated from code."""
    for target in targets(root):
        if target.kind in FOLDERS:
            yield f"{FOLDERS[target.kind]}/{target.slug}.html", target.source.relative_to(root).as_posix()
    for document in sorted((root / "docs").rglob("*.md")):
        if GENERATED not in document.read_text(encoding="utf-8"):
            name = document.relative_to(root)
            yield name.with_suffix(".html").as_posix(), name.as_posix()
    for page, text in (("index", "front"), ("play", "play"), ("exercises/index", "exercises")):
        yield f"{page}.html", f"{TEXTS}/{text}.md"
