"""Build the pages: `python -m tools.website [FOLDER]`, into build/site unless a folder is named.

A hidden folder next to FOLDER keeps intermediate results of Sphinx, so that the next build is faster.
"""

from __future__ import annotations

import argparse
import hashlib
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import ringlab
from ringlab_course.builder.build import find_root

from . import accessible, address, api, links, pictures, preview, repository, search, stage
from . import source as code

SETTINGS = Path(__file__).parent
OURS = ".nojekyll"
"""A file that tells hosts to show folders with an underscore, and that marks folders that we may replace."""


def build(folder: Path, root: Path | None = None, at: str = "", source: str = "") -> list[str]:
    """Build the pages and replace `folder` by them; return the problems of their links.

    at: the address that the pages will have on the web, if known, because search engines and previews need
    whole addresses.
    source: the address of the repository, if known, for instructions to clone it and links to edit pages.
    Raises: SystemExit if Sphinx fails or warns, `folder` contains something else, or `at` or `source` is not
    a whole address.
    """
    if at:
        address.check(at)
    if source:
        repository.check(source)
    folder = folder.resolve()
    if folder.exists() and any(folder.iterdir()) and not (folder / OURS).exists():
        raise SystemExit(
            f"needed: a folder to empty and fill with pages\n   got: {folder}, which holds something else"
        )
    pages = made(kept(folder), root or find_root(), source)
    with tempfile.TemporaryDirectory() as scratch:
        built = Path(scratch) / "site"
        shutil.copytree(pages, built)
        accessible.mend(built)
        pictures.move(built)
        search.write(built, root or find_root())
        preview.write(built)
        if not source:
            folder_of_code = kept(folder) / code.FOLDER
            code.write(folder_of_code, api.described(root or find_root()))
            shutil.copytree(folder_of_code, built / code.FOLDER)
        if at:
            address.write(built, at)
        if source:
            repository.write(built, source, root or find_root())
        (built / OURS).touch()
        shutil.rmtree(folder, ignore_errors=True)
        folder.parent.mkdir(parents=True, exist_ok=True)
        shutil.move(built, folder)
    return links.problems(folder)


def kept(folder: Path) -> Path:
    """Return the folder that keeps the sources of the pages, and Sphinx's results, for the next build."""
    return folder.with_name(f".{folder.name}-kept")


def made(work: Path, root: Path, source: str = "") -> Path:
    """Return the folder of the pages as Sphinx builds them, below `work`.

    Sources that have not changed since the last call are not read again, and pages are written again only if
    their own source, or something that all pages show, has changed. Raises: SystemExit if Sphinx fails or
    warns.
    """
    sources, doctrees, pages, stamp = (work / name for name in ("sources", "doctrees", "pages", "stamp"))
    settings, static = _settings(root), _digest(sorted((SETTINGS / "static").rglob("*")))
    known = stamp.read_text(encoding="utf-8").split() if stamp.exists() else []
    if settings not in known:
        shutil.rmtree(work, ignore_errors=True)
    before = {*sources.rglob("*")}
    if not stage.write(sources, root, source) and known == [settings, static]:
        return pages
    stamp.unlink(missing_ok=True)  # Sphinx does not repeat warnings about sources that it does not read again
    if before - {*sources.rglob("*")}:
        shutil.rmtree(pages, ignore_errors=True)  # because Sphinx does not remove a page without a source
    # Sphinx gets its own process, because it forks, and the ring on the first page has started threads in
    # this one.
    command = [sys.executable, "-m", "sphinx", "--fail-on-warning", "--keep-going", "--quiet", "--jobs", "2"]
    command += ["-D", f"static_digest={static}"]
    command += ["-c", str(SETTINGS), "-d", str(doctrees), str(sources), str(pages)]
    if status := subprocess.run(command).returncode:
        raise SystemExit(status)
    stamp.write_text(f"{settings} {static}", encoding="utf-8")
    return pages


def _settings(root: Path) -> str:
    """Return a digest of everything on which Sphinx's results depend, except sources and static files."""
    files = [*sorted(SETTINGS.glob("*.js")), SETTINGS / "conf.py", root / "requirements.lock"]
    return _digest(files, sys.version, ringlab.__version__)


def _digest(files: list[Path], *more: str) -> str:
    parts = [f"{path.name}\0".encode() + path.read_bytes() for path in files if path.is_file()]
    return hashlib.sha256(b"\0".join([*map(str.encode, more), *parts])).hexdigest()


def main() -> None:
    """Build the pages, check all links, and print where the pages are.

    Exit with status 1 for a wrong link.
    """
    parser = argparse.ArgumentParser(prog="python -m tools.website", description="Build the pages.")
    parser.add_argument("folder", nargs="?", type=Path, help="build/site unless named")
    parser.add_argument(
        "--address",
        default="",
        help="where the pages will be, https://…: adds a sitemap and the preview's picture",
    )
    parser.add_argument(
        "--repository",
        default="",
        help="where the repository is, https://…: adds how to clone it, and links to edit in the form of GitHub",
    )
    chosen = parser.parse_args()
    folder = chosen.folder or find_root() / "build" / "site"
    found = build(folder, at=chosen.address, source=chosen.repository)
    for line in found:
        print(line, file=sys.stderr)
    if found:
        raise SystemExit(1)
    print(f"{len([*folder.rglob('*.html')])} pages: open {folder / 'index.html'}")


if __name__ == "__main__":
    main()
