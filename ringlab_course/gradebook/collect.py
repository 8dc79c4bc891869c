"""Find the submissions below paths. Each notebook becomes a submission or a note, and none stops a run.

The learner and the exercise are read from the notebook's path where possible. Learners may have put anything
into the folder.
"""

from __future__ import annotations

import itertools
import os
import stat
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from ringlab.errors import CourseError
from ringlab_course.checking.loading import exercise_ids
from ringlab_course.gradebook.policy import parse_due, utc
from ringlab_course.gradebook.readable import shown_name
from ringlab_course.gradebook.versions import digest_of
from ringlab_course.judge.submission import (
    COPY,
    SEPARATORS,
    UnreadableError,
    exercise_named,
    exercise_of,
    is_notebook,
    read_submission,
    slugs,
)


def learner_of(path: Path, root: Path, exercise: str) -> str:
    """Return the learner who wrote the notebook `path`; `root` is the path given on the command line.

    In nbgrader's folders, the learner is the folder below submitted/. Otherwise it is the first folder below
    `root` that is not named after an exercise. Without such a folder, the notebook's own name gives the
    learner, as in alice_05.ipynb. If the notebook is named after the exercise, the folder that contains it
    gives the learner.
    """
    return learner_called(_named(path, root, exercise))


def learner_called(name: str) -> str:
    """Return the learner called `name`, in the composed form of Unicode.

    macOS decomposes é in file names, but both forms mean the same learner.
    """
    return shown_name(unicodedata.normalize("NFC", name))


def _named(path: Path, root: Path, exercise: str) -> str:
    path, root = _absolute(path), _absolute(root)
    if nbgrader_folder(path, root) is not None:
        return path.parts[-3]
    below = path.relative_to(root).parts[:-1] if root != path else ()
    for folder in below:
        if not exercise_named(folder):
            return folder
    rest = _without_exercise(path.name[: -len(".ipynb")] if is_notebook(path.name) else path.name, exercise)
    return rest or (root.name if root != path else root.parent.name) or "/"


def nbgrader_folder(path: Path, root: Path) -> Path | None:
    """Return the folder of one learner's assignment in nbgrader's submitted/, or None.

    submitted/ has to be `root`, above `root`, or directly in `root`. Folders further down belong to
    learners, who may give them any name.
    """
    folder, root = _absolute(path).parent, _absolute(root)
    tree = folder.parent.parent
    if tree.name != "submitted" or not (root.is_relative_to(tree) or tree.parent == root):
        return None
    stamped = (folder / "timestamp.txt").is_file()
    return folder if stamped or exercise_named(folder.name) else None


def _without_exercise(stem: str, exercise: str) -> str:
    """Return a file name without the exercise's name: alice_05 → alice; 05_emulated_ring (1) → "".

    A name with another exercise, or without an exercise, is returned unchanged.
    """
    short = COPY.sub("", stem)
    for name in filter(None, (slugs().get(exercise, ""), exercise)):
        if short == name and name != exercise:
            return ""
        for rest in (short.removeprefix(name), short.removesuffix(name)):
            if rest != short and rest.strip(SEPARATORS) != rest:
                return rest.strip(SEPARATORS)
    return stem


def _absolute(path: Path) -> Path:
    return Path(os.path.abspath(path))


DEPTH = 12
ENTRIES = 200_000
"""The limits of a search below one folder of a class: its depth, and the number of entries."""
SKIPPED = {".ipynb_checkpoints", ".git", "__MACOSX"}


def notebooks_below(root: Path, notes: list[str]) -> Iterator[Path]:
    """Yield every path called *.ipynb, in any case, below `root`, in the order of the names.

    The path need not be a regular file. Links to folders are not followed, so there are no loops. Checkpoints
    and the files that macOS archivers add are skipped. If a folder is too deep or too full, a note is added
    to `notes`.
    """
    for entry in _listed(root, ENTRIES, notes):
        yield from _below(entry, [ENTRIES], 1, notes)


def folders_without(root: Path, found: Iterable[Path], notes: list[str]) -> Iterator[str]:
    """Yield the names of the folders in `root` that contain none of the `found` notebooks.

    Nothing is yielded if all notebooks are directly in `root`, because then its folders are not learners.
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
    if is_notebook(entry.name):
        yield Path(entry.path)
    elif _is_folder(entry):
        if depth >= DEPTH:
            notes.append(f"{shown_name(entry.path)}: skipped, because it is {DEPTH} folders deep")
            return
        for child in _listed(entry.path, left[0], notes):
            if left[0] <= 0:
                return
            yield from _below(child, left, depth + 1, notes)
    elif entry.is_symlink() and os.path.isdir(entry.path):
        notes.append(f"{shown_name(entry.path)}: a link to a folder, which is not followed")


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
        notes.append(f"{shown_name(folder)}: more than {ENTRIES} files, and the others were skipped")
        entries = entries[:-1]
    return sorted(entries, key=lambda entry: entry.name)


MARGIN_S = 60.0  # tolerance for the difference between two clocks
MOST_OF_ONE = 200  # at most this many notebooks of one learner are opened


@dataclass(frozen=True)
class HandedIn:
    """One notebook that was handed in.

    exercise: "" if neither the notebook nor its path names an exercise.
    digest: "" if the notebook could not be read when it was collected.
    submitted_at: UTC, ISO 8601, or None if unknown.
    stamped: whether nbgrader recorded `submitted_at`.
    says: the exercise that the notebook itself names, or "".
    """

    path: Path
    root: Path
    learner: str
    exercise: str
    digest: str
    submitted_at: str | None = None
    stamped: bool = False
    says: str = ""

    @property
    def key(self) -> tuple[str, str]:
        """The learner and the exercise."""
        return self.learner, self.exercise


@dataclass
class Collection:
    """The submissions, one for each learner and exercise, and notes about everything that is not one."""

    submissions: list[HandedIn]
    notes: list[str] = field(default_factory=list)


def collect(
    paths: Iterable[str | os.PathLike[str]], exercise: str | None = None, learner: str | None = None
) -> Collection:
    """Return one submission per learner and exercise: the one that was handed in last.

    exercise: count every notebook as this exercise, unless it names another one.
    learner: count every notebook as this learner's.
    Raises: CourseError for an exercise that does not exist, and if one learner is found under several of
    `paths`.
    """
    if exercise is not None and exercise not in exercise_ids():
        raise CourseError(f"one of the exercises {', '.join(exercise_ids())}", repr(exercise))
    notes: list[str] = []
    found = [handed_in(path, root, exercise, learner) for path, root in _looked_at(paths, learner, notes)]
    if exercise is not None:
        others = [each for each in found if each.says not in ("", exercise)]
        if others:
            notes.append(f"{len(others)} notebooks name an exercise other than {exercise} and are left alone")
        found = [each for each in found if each not in others]
    if learner is None:
        _refuse_mixed(found)
    if doubtful := [each for each in found if each.stamped and _changed_after(each)]:
        names = ", ".join(f"{each.learner} {each.exercise or '?'}" for each in doubtful[:5])
        more = f" and {len(doubtful) - 5} more" if len(doubtful) > 5 else ""
        notes.append(
            f"changed after the time in their timestamp.txt, a file that a learner can write: {names}{more}"
        )
    return Collection(_newest(found, notes), notes)


def notebooks(paths: Iterable[str | os.PathLike[str]], notes: list[str]) -> list[tuple[Path, Path]]:
    """Return pairs of a notebook and the given path under which it was found, in the order of `paths`."""
    found: dict[str, tuple[Path, Path]] = {}
    for given in map(Path, paths):
        files = [*notebooks_below(given, notes)] if given.is_dir() else [given]
        if given.is_dir():
            empty = map(shown_name, folders_without(given, files, notes))
            notes += [f"{name}: no notebook below this folder" for name in empty]
        for path in files:
            found.setdefault(os.path.abspath(path), (path, given))
    return list(found.values())


def handed_in(path: Path, root: Path, exercise: str | None = None, learner: str | None = None) -> HandedIn:
    """Return the notebook at `path`, found under `root`, as a submission. This raises nothing."""
    says = _named_inside(path)
    taken_for = exercise or says or exercise_of(path)
    try:
        digest = digest_of(path)
    except OSError:
        digest = ""  # the runner tries to read the file again
    submitted_at, stamped = _submitted_at(path, root)
    whose = learner_called(learner) if learner else learner_of(path, root, taken_for)
    return HandedIn(path, root, whose, taken_for, digest, submitted_at, stamped, says)


def _looked_at(
    paths: Iterable[str | os.PathLike[str]], learner: str | None, notes: list[str]
) -> list[tuple[Path, Path]]:
    """Return the notebooks to open: at most MOST_OF_ONE for each learner, the newest ones."""
    by_learner: dict[str, list[tuple[Path, Path]]] = {}
    for path, root in notebooks(paths, notes):
        flat = path == root or path.parent == root  # these notebooks are likely by different learners
        whose = learner or (str(path) if flat else learner_of(path, root, exercise_of(path)))
        by_learner.setdefault(whose, []).append((path, root))
    kept = []
    for whose, theirs in by_learner.items():
        if len(theirs) > MOST_OF_ONE:
            notes.append(
                f"{whose}: {len(theirs)} notebooks, of which only the newest {MOST_OF_ONE} are opened"
            )
            theirs = sorted(theirs, key=lambda each: -_changed_ns(each[0]))[:MOST_OF_ONE]
        kept += theirs
    return kept


def _named_inside(path: Path) -> str:
    """Return the exercise that the notebook itself names, or "" if there is no such exercise."""
    try:
        says = read_submission(path).exercise
    except (UnreadableError, OSError):
        return ""
    return says if says in exercise_ids() else ""


def _newest(found: list[HandedIn], notes: list[str]) -> list[HandedIn]:
    """Return one submission for each learner and exercise.

    Submissions that name their exercise themselves are preferred. Among equals the newest one is chosen.
    """
    chosen: dict[tuple[str, str], HandedIn] = {}
    for each in sorted(
        found, key=lambda each: (bool(each.says), each.submitted_at or "", os.fspath(each.path))
    ):
        chosen[each.key] = each
    for (whose, exercise), count in sorted(Counter(each.key for each in found).items()):
        if count > 1:
            path = shown_name(chosen[whose, exercise].path)
            notes.append(
                f"{whose}, exercise {exercise or '?'}: {count} notebooks, of which {path} counts, the last"
            )
    return [chosen[key] for key in sorted(chosen)]


def _refuse_mixed(found: list[HandedIn]) -> None:
    """Raise CourseError if a learner is found under two given folders.

    Folders of the same name in two places may belong to two people.
    """
    roots: dict[tuple[str, str], HandedIn] = {}
    for each in found:
        other = roots.setdefault(each.key, each)
        if other.root != each.root and other.root.is_dir() and each.root.is_dir():
            raise CourseError(
                "each learner below only one of the given paths",
                f"{each.learner} under {shown_name(other.root)} and under {shown_name(each.root)}",
                "give the folder that contains both, grade them in two runs, or name the learner with --learner if both belong to one person",
            )


def _submitted_at(path: Path, root: Path) -> tuple[str | None, bool]:
    """Return the time of submission, and whether it comes from nbgrader's timestamp.txt.

    The timestamp is used only in an nbgrader course folder, because elsewhere anybody may have written it.
    Otherwise the time is the file's modification time.
    """
    folder = nbgrader_folder(path, root)
    course = folder is not None and (folder.parents[2] / "nbgrader_config.py").is_file()
    if folder is not None and course and (stamp := _timestamp(folder / "timestamp.txt")):
        return stamp, True
    try:
        changed = os.stat(path, follow_symlinks=False).st_mtime
        return utc(datetime.fromtimestamp(changed, UTC)), False
    except (OSError, ValueError, OverflowError):
        return None, False


def _timestamp(path: Path) -> str | None:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(descriptor, "rb") as file:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                return None
            text = file.read(200).decode("ascii").strip()
    except (OSError, ValueError):
        return None
    for candidate in (text, f"{text} UTC"):  # nbgrader means UTC if the zone is missing
        try:
            return utc(parse_due(candidate))
        except CourseError:
            continue
    return None


def _changed_after(each: HandedIn) -> bool:
    """Return whether the file is newer than the time at which it was handed in."""
    handed_in_at = datetime.fromisoformat(each.submitted_at or "").timestamp()
    return _changed_ns(each.path) > (handed_in_at + MARGIN_S) * 1e9


def _changed_ns(path: Path) -> int:
    try:
        return os.stat(path, follow_symlinks=False).st_mtime_ns
    except OSError:
        return 0
