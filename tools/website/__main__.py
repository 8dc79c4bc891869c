"""Build the pages: `python -m tools.website [FOLDER]`, into build/site unless a folder is named."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from ringlab.course.builder import find_root

from . import links, stage

SETTINGS = Path(__file__).parent


def build(folder: Path, root: Path | None = None) -> list[str]:
    """Build the pages into `folder`, which is emptied first; return what is wrong with their links.

    Raises: SystemExit where Sphinx fails or warns, or `folder` holds something else.
    """
    from sphinx.cmd.build import build_main

    folder = folder.resolve()
    if folder.exists() and any(folder.iterdir()) and not (folder / ".buildinfo").exists():
        raise SystemExit(
            f"needed: a folder to empty and fill with pages\n   got: {folder}, which holds something else"
        )
    sources, cache = folder.with_name(f"{folder.name}-sources"), folder.with_name(f"{folder.name}-cache")
    for old in (folder, cache):
        shutil.rmtree(old, ignore_errors=True)
    stage.write(sources, root)
    options = ["--fail-on-warning", "--keep-going", "--quiet", "--jobs", "2"]
    status = build_main([*options, "-c", str(SETTINGS), "-d", str(cache), str(sources), str(folder)])
    if status:
        raise SystemExit(status)
    (folder / ".nojekyll").touch()  # hosts that hide folders with an underscore would hide styles and scripts
    return links.problems(folder)


def main() -> None:
    """Build, look at every link, and say where the pages are; the exit status is 1 where one is wrong."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else find_root() / "build" / "site"
    found = build(folder)
    for line in found:
        print(line, file=sys.stderr)
    if found:
        raise SystemExit(1)
    print(f"{len([*folder.rglob('*.html')])} pages: open {folder / 'index.html'}")


if __name__ == "__main__":
    main()
