"""Pages of the package's source, to which the reference links if the repository's address is not known."""

from __future__ import annotations

from html import escape
from pathlib import Path

from sphinx.highlighting import PygmentsBridge

from .repository import BRANCH

FOLDER = "source"
_PAGE = """\
<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{name}, source</title><meta name="color-scheme" content="light dark">
<link rel="stylesheet" href="../_static/pygments.css"><link rel="stylesheet" href="../_static/source.css"></head>
<body><main><h1>{name}</h1>
{text}</main></body></html>
"""


def link(module: str, line: int, file: str, repository: str) -> str:
    """Return the address of a line of a module: in the repository if its address is known, else on these pages."""
    if repository:
        return f"{repository.removesuffix('.git').rstrip('/')}/blob/{BRANCH}/{file}#L{line}"
    return f"../{FOLDER}/{module}.html#L-{line}"


def write(folder: Path, modules: dict[str, Path]) -> None:
    """Write a page for each module, unless it has one that is newer than module and program; remove other pages."""
    folder.mkdir(exist_ok=True)
    for old in {path.stem for path in folder.glob("*.html")} - {*modules}:
        (folder / f"{old}.html").unlink()
    colours = PygmentsBridge()
    for name, file in modules.items():
        page = folder / f"{name}.html"
        newest = max(each.stat().st_mtime for each in (file, Path(__file__)))
        if not page.exists() or page.stat().st_mtime < newest:
            text = colours.highlight_block(file.read_text(encoding="utf-8"), "python", linespans="L")
            page.write_text(_PAGE.format(name=escape(name), text=text), encoding="utf-8")
