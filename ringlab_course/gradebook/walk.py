"""Finding the notebooks below a folder that learners may have filled with anything."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from ringlab_course.gradebook.printable import shown_name

DEPTH = 12
ENTRIES = 200_000
"""What is looked at below one folder of a class."""
SKIPPED = {".ipynb_checkpoints", ".git", "__MACOSX"}


def notebooks_below(root: Path, notes: list[str]) -> Iterator[Path]:
    """Yield what is called *.ipynb below `root`, whatever it is, in the order of the names.

    Links to folders are not entered, so there are no loops. Checkpoints and what archivers of
    macOS add are no submissions. Where a folder is too deep or too full, `notes` say so.
    """
    for entry in _listed(root, ENTRIES, notes):
        yield from _below(entry, [ENTRIES], 1, notes)


def folders_without(root: Path, found: Iterable[Path], notes: list[str]) -> Iterator[str]:
    """Yield the names of the folders in `root` below which none of the `found` notebooks lies.

    Nothing where all notebooks lie in `root` itself: then its folders are no learners.
    """
    filled = {path.relative_to(root).parts[0] for path in found if path.parent != root}
    for entry in _listed(root, ENTRIES, notes) if filled else ():
        ours = entry.name in SKIPPED or entry.name.startswith((".", "_"))
        if entry.name not in filled and not ours and _is_folder(entry):
            yield entry.name


def _below(entry: os.DirEntry[str], left: list[int], depth: int, notes: list[str]) -> Iterator[Path]:
    left[0] -= 1
    if entry.name in SKIPPED or entry.name.startswith("._"):
        return
    if entry.name.endswith(".ipynb"):
        yield Path(entry.path)
    elif _is_folder(entry):
        if depth >= DEPTH:
            notes.append(f"{shown_name(entry.path)}: not looked into, {DEPTH} folders deep")
            return
        for child in _listed(entry.path, left[0], notes):
            if left[0] <= 0:
                return
            yield from _below(child, left, depth + 1, notes)
    elif entry.is_symlink() and os.path.isdir(entry.path):
        notes.append(f"{shown_name(entry.path)}: a link to a folder, not followed")


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir(follow_symlinks=False)
    except OSError:
        return False


def _listed(folder: str | Path, most: int, notes: list[str]) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as found:
            entries = list(itertools.islice(found, max(0, most) + 1))
    except OSError as error:
        notes.append(f"{shown_name(folder)}: cannot be read ({error.strerror})")
        return []
    if len(entries) > most:
        notes.append(f"{shown_name(folder)}: more than {ENTRIES} files; the rest was not looked at")
        entries = entries[:-1]
    return sorted(entries, key=lambda entry: entry.name)
